"""Text, images and video frames to what a model's `encode_prompt` takes, and ids back to text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dlm_decode.canvas import IMAGE_TOKEN_ID
from dlm_decode.errors import CheckpointError, InvalidInputError, MediaError
from dlm_decode.models.anyres import grid_candidates, pad_to_square, pixels_of, tiles_of
from dlm_decode.models.messages import (
    IMAGE_TAG,
    Message,
    add_notes,
    messages_of,
    place_tags,
)
from dlm_decode.models.prompt_rules import PromptRules, rules_of
from dlm_decode.models.text import TextCodec

__all__ = ["IMAGE_TAG", "ModelInputs", "VlmProcessor", "join_chunks"]


@dataclass(frozen=True)
class ModelInputs:
    """Arguments of `DiffusionModel.encode_prompt`.

    Attributes:
        input_ids: `(P0,)` ids with one placeholder per image or video.
        pixel_values: pixels per image or video, as one tensor with `stack_images`; `None` without
            any.
        image_sizes: `(width, height)` of each original image.
        modalities: `"image"` or `"video"` each.
    """

    input_ids: Tensor
    pixel_values: Tensor | list[Tensor] | None
    image_sizes: list[tuple[int, int]] | None
    modalities: list[str] | None


def join_chunks(
    chunks: Sequence[Sequence[int]], bos_id: int | None, official_drop: bool
) -> list[int]:
    """Ids of a prompt whose text was split at the image tags, with a placeholder between chunks.

    Args:
        chunks: ids of each piece of text.
        bos_id: id that begins a prompt.
        official_drop: as the official helper does, if the first chunk begins with `bos_id`, keep
            that id once and drop the first id of every chunk. The rule is meant for tokenizers that
            begin every text with `bos_id`; LLaDA's does not, so the first real token after each
            image is lost.
    """
    drop = int(official_drop and bool(chunks[0]) and chunks[0][0] == bos_id)
    ids = [int(bos_id)] if drop and bos_id is not None else []
    for index, chunk in enumerate(chunks):
        if index:
            ids.append(IMAGE_TOKEN_ID)
        ids += list(chunk)[drop:]
    return ids


class VlmProcessor(TextCodec):
    """Tokenizer, chat template and image processing of one checkpoint.

    Args:
        tokenizer: a fast tokenizer of transformers.
        config: the model's config; what it says about prompts and pictures is asked for as
            `PromptRules`.
    """

    def __init__(self, tokenizer: Any, config: Any) -> None:
        super().__init__(tokenizer)
        self.config = config

    @property
    def rules(self) -> PromptRules:
        """What the model wants its prompts and pictures to look like."""
        return rules_of(self.config)

    def __call__(
        self,
        prompt: str | Sequence[Message],
        images: Sequence[Image.Image] = (),
        videos: Sequence[Sequence[Image.Image]] = (),
        *,
        video_notes: Sequence[str] = (),
        think_mode: str = "none",
        official_token_drop: bool = False,
        stack_images: bool = False,
    ) -> ModelInputs:
        """Prepares one prompt.

        Images come before videos in placeholder order. A question without `<image>` gets one tag
        per image and video in front, joined by spaces and followed by a line break, as LLaDA-V was
        trained.

        Args:
            prompt: the question, or messages with `role` and `content`; content is text, or a list
                of parts such as `{"type": "text", "text": ...}` and `{"type": "image"}`.
            images: RGB.
            videos: frames of each video, RGB.
            video_notes: what the model is told about each video, on a line behind its tag.
            think_mode: `"think"` or `"no_think"` ends the last question with that word, for models
                that know it.
            official_token_drop: see `join_chunks`.
            stack_images: several padded images become one tensor, as in the official evaluation.
                Their newline vectors are lost by that.

        Raises:
            InvalidInputError: a number of tags that is not the number of images and videos,
                malformed messages, media for a text-only model, a mode of thinking that the model
                does not know, or another number of notes than of videos.
            MediaError: an image that cannot be padded, or a video without frames.
        """
        num_media = len(images) + len(videos)
        messages = messages_of(prompt)
        self._end_question(messages, think_mode)
        place_tags(messages, len(images), len(videos))
        if num_media and not self.rules.reads_media:
            raise InvalidInputError("this is a text-only model and cannot read images or videos.")
        if video_notes:
            add_notes(messages, len(images), video_notes, len(videos))
        chunks = [self.encode(chunk) for chunk in self.render(messages).split(IMAGE_TAG)]
        ids = join_chunks(chunks, self.tokenizer.bos_token_id, official_token_drop)
        pixels = [self.image_pixels(image, num_images=len(images)) for image in images]
        pixels += [self.video_pixels(frames) for frames in videos]
        is_stack = (
            stack_images
            and len(pixels) > 1
            and not videos
            and all(part.dim() == 3 for part in pixels)
        )
        return ModelInputs(
            input_ids=torch.tensor(ids, dtype=torch.long),
            pixel_values=torch.stack(pixels) if is_stack else pixels or None,
            image_sizes=[image.size for image in images] + [frames[0].size for frames in videos]
            if num_media
            else None,
            modalities=["image"] * len(images) + ["video"] * len(videos) if num_media else None,
        )

    def _end_question(self, messages: list[dict[str, str]], think_mode: str) -> None:
        """Ends the last user message as the mode of thinking wants it."""
        if think_mode == "none":
            return
        known = self.rules.think_modes
        if think_mode not in known:
            allowed = " or ".join(map(repr, ("none", *known)))
            raise InvalidInputError(
                f"this model was not trained with think_mode {think_mode!r}; use {allowed}."
            )
        for message in reversed(messages):
            if message["role"] == "user":
                message["content"] += f"/{think_mode}"
                return
        raise InvalidInputError(
            f"the messages hold no user message that think_mode {think_mode!r} could end."
        )

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt as text, ready for the answer."""
        rules, messages = self.rules, list(messages)
        has_template = bool(getattr(self.tokenizer, "chat_template", None))
        is_bare = rules.system is not None and messages[0]["role"] != "system"
        if is_bare and not (has_template and rules.has_system_in_template):
            messages = [{"role": "system", "content": rules.system}, *messages]
        if has_template:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        turns = [
            rules.turn.format(role=message["role"], content=message["content"].strip())
            for message in messages
        ]
        return rules.begin + "".join(turns) + rules.answer

    def image_pixels(self, image: Image.Image, num_images: int = 1) -> Tensor:
        """Pixels of one image: `(1 + tiles, 3, h, w)` in tiled mode, else `(3, h, w)`.

        Args:
            image: RGB.
            num_images: images of the prompt; several may be prepared in another mode than one.

        Raises:
            CheckpointError: an unknown mode in the model's config.
            MediaError: an image that cannot be padded.
        """
        rules = self.rules
        tile, mode = rules.tile_size, rules.image_mode
        if num_images > 1:
            mode = rules.multi_image_mode or mode
        if mode == "pad":
            return pixels_of(pad_to_square(image), tile)
        if mode == "square":
            return pixels_of(image, tile)
        if mode.startswith("anyres"):
            candidates = grid_candidates(rules.grids, tile)
            return torch.stack(
                [pixels_of(part, tile) for part in tiles_of(image, candidates, tile)]
            )
        raise CheckpointError(
            f"image_aspect_ratio {mode!r} is unknown; use 'pad', 'square', 'anyres' or "
            "'anyres_max_N'."
        )

    def video_pixels(self, frames: Sequence[Image.Image]) -> Tensor:
        """`(F, 3, h, w)`; frames are squashed to the tile, as the official evaluation does."""
        if not frames:
            raise MediaError("a video has no frames.")
        tile = self.rules.tile_size
        return torch.stack([pixels_of(frame, tile) for frame in frames])
