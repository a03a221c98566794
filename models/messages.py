"""Messages of a conversation, and the tags in them that stand for images and videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dlm_decode.errors import InvalidInputError

__all__ = ["IMAGE_TAG", "Message", "add_notes", "messages_of", "place_tags"]

IMAGE_TAG = "<image>"
Message = Mapping[str, Any]


def messages_of(prompt: str | Sequence[Message]) -> list[dict[str, str]]:
    """Messages whose content is text, with a tag per image or video.

    Raises:
        InvalidInputError: malformed messages.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    plain = []
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise InvalidInputError(
                f"a message must be a mapping with 'role' and 'content', got {message!r}."
            )
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(_part_text(part) for part in content)
        plain.append({"role": message["role"], "content": content})
    if not plain:
        raise InvalidInputError("messages is empty; pass at least one with role 'user'.")
    return plain


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("image", "video"):
        return IMAGE_TAG
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise InvalidInputError(
        f"a content part must have type 'text', 'image' or 'video', got {part!r}."
    )


def place_tags(messages: list[dict[str, str]], num_images: int, num_videos: int) -> None:
    """Puts a tag per image and video in front of the first question where there are none.

    Raises:
        InvalidInputError: a number of tags that is not the number of images and videos.
    """
    num_media = num_images + num_videos
    num_tags = sum(message["content"].count(IMAGE_TAG) for message in messages)
    if num_media and not num_tags:
        tags = " ".join([IMAGE_TAG] * num_media) + "\n"
        first = next((message for message in messages if message["role"] == "user"), None)
        if first is None:
            raise InvalidInputError(
                "the messages hold no user message that images could belong to."
            )
        first["content"] = tags + first["content"]
        num_tags = num_media
    if num_tags != num_media:
        raise InvalidInputError(
            f"the prompt has {num_tags} {IMAGE_TAG} tags, and {num_images} images and "
            f"{num_videos} videos were "
            "given; give one for each tag, or leave the tags out."
        )


def add_notes(
    messages: list[dict[str, str]], num_images: int, notes: Sequence[str], num_videos: int
) -> None:
    """Puts each note on a line of its own behind its video's tag; videos follow images."""
    if len(notes) != num_videos:
        raise InvalidInputError(
            f"video_notes has {len(notes)} entries for {num_videos} videos; give one for each."
        )
    by_tag = dict(enumerate(notes, start=num_images))
    number = 0
    for message in messages:
        first, *rest = message["content"].split(IMAGE_TAG)
        for text in rest:
            first += IMAGE_TAG
            if number in by_tag:
                first += f"\n{by_tag[number]}\n"
                text = text.removeprefix("\n").removeprefix(" ")
            first += text
            number += 1
        message["content"] = first
