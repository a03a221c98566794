"""Text, images and video frames to what a stock model's forward takes, without torchvision."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dlm_decode.errors import InvalidInputError
from dlm_decode.models.autoregressive.base import Architecture, Prepared
from dlm_decode.models.messages import IMAGE_TAG, add_notes, messages_of, place_tags
from dlm_decode.models.text import TextCodec
from dlm_decode.video import Clip

__all__ = ["AutoregressiveProcessor", "RowTensors", "read_chat_template"]


@dataclass(frozen=True)
class RowTensors:
    """One prompt, ready for the model.

    Attributes:
        input_ids: `(P,)` with a placeholder per visual token.
        tensors: what goes with its pictures, by argument of the model's forward.
    """

    input_ids: Tensor
    tensors: dict[str, Any] = field(default_factory=dict)


class AutoregressiveProcessor(TextCodec):
    """Tokenizer, chat template and image processing of one checkpoint.

    Transformers' own processors of videos need torchvision; here the frames of a video go through
    the image processor, on PIL.

    Args:
        tokenizer: a fast tokenizer of transformers.
        image_processor: an image processor of transformers with the PIL backend; `None` where the
            folder has none, which leaves text.
        architecture: of the model.
        chat_template: replaces the tokenizer's, as `chat_template.json` holds it.
    """

    def __init__(
        self,
        tokenizer: Any,
        image_processor: Any,
        architecture: Architecture,
        chat_template: str | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self.image_processor = image_processor
        self.architecture = architecture
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)

    def __call__(
        self,
        prompt: str,
        images: Sequence[Image.Image] = (),
        clips: Sequence[Clip] = (),
        *,
        video_notes: Sequence[str] = (),
    ) -> RowTensors:
        """Prepares one question.

        Images come before videos. A question without `<image>` gets one tag per image and video in
        front.

        Args:
            prompt: the question.
            images: RGB.
            clips: frames of each video.
            video_notes: what the model is told about each video, on a line behind it.

        Raises:
            InvalidInputError: a number of tags that is not the number of images and videos, or
                media that the model does not read.
        """
        self._check_media(images, clips)
        if IMAGE_TAG not in prompt:
            prompt = IMAGE_TAG * (len(images) + len(clips)) + prompt
        messages = messages_of(prompt)
        place_tags(messages, len(images), len(clips))
        if video_notes:
            add_notes(messages, len(images), video_notes, len(clips))
        kinds = ["image"] * len(images) + ["video"] * len(clips)
        token_of = {
            name: self.tokenizer.convert_ids_to_tokens(token)
            for name, token in self.architecture.placeholder_ids.items()
        }
        prepared = Prepared([])
        if kinds:
            prepared = self.architecture.prepare(self.image_processor, token_of, images, clips)
        markers = {
            name: self.architecture.marker(name, token_of.get(name, ""))
            for name in self.architecture.modalities
        }
        text = self._render(messages[0]["content"], kinds, markers)
        text = self._fill(text, kinds, markers, prepared.texts)
        return RowTensors(torch.tensor(self._prompt_ids(text)), prepared.tensors)

    def _check_media(self, images: Sequence[Any], clips: Sequence[Any]) -> None:
        for name, given in (("image", images), ("video", clips)):
            if not given:
                continue
            if name not in self.architecture.modalities:
                raise InvalidInputError(
                    f"this model reads {' and '.join(self.architecture.modalities)} only; pass the "
                    f"frames of a {name} as images=."
                )
            if self.image_processor is None:
                raise InvalidInputError(
                    f"{name}s need an image processor, and the checkpoint has none; put its "
                    "preprocessor_config.json into the folder."
                )

    def _parts(self, content: str, kinds: Sequence[str]) -> Iterator[dict[str, str]]:
        first, *rest = content.split(IMAGE_TAG)
        if first:
            yield {"type": "text", "text": first}
        for kind, text in zip(kinds, rest, strict=True):
            yield {"type": kind}
            if text:
                yield {"type": "text", "text": text}

    def _render(self, content: str, kinds: Sequence[str], markers: dict[str, str]) -> str:
        """The prompt as text, with a marker per image and video."""
        parts = list(self._parts(content, kinds))
        if self.chat_template is not None and "type" in self.chat_template:
            return self._apply([{"role": "user", "content": parts}])
        flat = "".join(
            part.get("text") or self.architecture.bare_marker(part["type"], markers[part["type"]])
            for part in parts
        )
        if self.chat_template is not None:
            return self._apply([{"role": "user", "content": flat}])
        return self.architecture.turn.format(content=flat) + self.architecture.answer

    def _apply(self, messages: list[dict[str, Any]]) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            chat_template=self.chat_template,
        )

    def _fill(
        self, text: str, kinds: Sequence[str], markers: dict[str, str], texts: Sequence[str]
    ) -> str:
        """Puts what stands for each picture where its marker is."""
        any_marker = "|".join(map(re.escape, markers.values()))
        pieces, found = re.split(any_marker, text), re.findall(any_marker, text)
        if found != [markers[kind] for kind in kinds]:
            raise InvalidInputError(
                f"the chat template made {found} of {list(kinds)}; check chat_template.jinja, or "
                "write no placeholders into the question."
            )
        filled = pieces[0]
        for replacement, piece in zip(texts, pieces[1:], strict=True):
            filled += replacement + piece
        return filled

    def _prompt_ids(self, text: str) -> list[int]:
        """Ids of a whole prompt; what begins a text is added unless it is there."""
        begin = self.tokenizer.bos_token
        is_begun = begin is not None and text.startswith(begin)
        return list(self.tokenizer(text, add_special_tokens=not is_begun)["input_ids"])


def read_chat_template(path: Path | None) -> str | None:
    """The template in a `chat_template.json`, as older processors keep it."""
    if path is None:
        return None
    return json.loads(path.read_text(encoding="utf-8")).get("chat_template")
