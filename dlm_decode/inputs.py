"""From what a caller passes to `generate` to one prepared row per prompt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from dlm_decode.canvas import Prompt
from dlm_decode.errors import InvalidInputError
from dlm_decode.media import open_image
from dlm_decode.settings import Settings
from dlm_decode.video import open_video
from dlm_decode.vision.base import TowerNeed

if TYPE_CHECKING:
    from PIL import Image

    from dlm_decode.models.base import DiffusionModel
    from dlm_decode.models.processing import VlmProcessor
    from dlm_decode.video import Clip

__all__ = [
    "RowInput",
    "encode_row",
    "media_of_row",
    "rows_from_embeds",
    "rows_from_ids",
    "rows_from_text",
]


@dataclass(frozen=True)
class RowInput:
    """One row before the model has seen it.

    Attributes:
        question: the user's text, for records.
        input_ids: `(P0,)` ids with the placeholder id per image; `None` with `embeds`.
        pixel_values: what `DiffusionModel.encode_prompt` takes.
        image_sizes: `(width, height)` of each image before preprocessing.
        modalities: `"image"` or `"video"` per entry.
        embeds: `(P, D)` ready embeddings.
        videos: which frames were taken of each video, for records.
    """

    question: str | None = None
    input_ids: Tensor | None = None
    pixel_values: Any = None
    image_sizes: Sequence[tuple[int, int]] | None = None
    modalities: Sequence[str] | None = None
    embeds: Tensor | None = None
    videos: Sequence[dict[str, Any]] = ()

    @property
    def num_tiles(self) -> int:
        """Image tiles and video frames that the vision tower encodes."""
        pixels = self.pixel_values
        if pixels is None:
            return 0
        parts = [pixels] if isinstance(pixels, Tensor) else list(pixels)
        return sum(1 if part.dim() == 3 else part.shape[:-3].numel() for part in parts)


def rows_from_text(
    processor: VlmProcessor,
    prompts: Sequence[str],
    images: Any,
    videos: Any,
    is_batch: bool,
    settings: Settings,
    is_timed: bool = False,
) -> list[RowInput]:
    """Prepares text prompts with their images and videos.

    Args:
        processor: tokenizer and image processing.
        prompts: one question per row.
        images: for a single prompt, one image or a list; for a batch, such a value per row, or
            `None`.
        videos: likewise.
        is_batch: whether `prompts` came as a list.
        settings: which frames of videos are taken, and what the prompt says beside the question.
            With the official presets a token after each image is lost and padded images are
            stacked, as in the official evaluation.
        is_timed: see `open_video`.

    Raises:
        InvalidInputError: an empty prompt, or as many media entries as rows are not there.
        MediaError: an image or video that cannot be read.
    """
    rows = []
    drops_token = settings.quirks.drops_token_after_image
    for index, prompt in enumerate(prompts):
        check_question(prompt, index)
        row_images, clips, notes = open_media_of_row(
            images, videos, index, len(prompts), is_batch, settings, is_timed
        )
        inputs = processor(
            prompt,
            images=row_images,
            videos=[clip.frames for clip in clips],
            video_notes=notes,
            think_mode=settings.think_mode,
            official_token_drop=drops_token,
            stack_images=drops_token,
        )
        rows.append(
            RowInput(
                question=prompt,
                input_ids=inputs.input_ids,
                pixel_values=inputs.pixel_values,
                image_sizes=inputs.image_sizes,
                modalities=inputs.modalities,
                videos=[clip.to_dict() for clip in clips],
            )
        )
    return rows


def check_question(prompt: Any, index: int) -> None:
    """Raises `InvalidInputError` unless row `index` has a question."""
    if not isinstance(prompt, str) or not prompt.strip():
        raise InvalidInputError(
            f"prompt {index} is {'empty' if prompt == '' else repr(prompt)}; "
            "pass the question as non-empty text."
        )


def open_media_of_row(
    images: Any,
    videos: Any,
    index: int,
    num_rows: int,
    is_batch: bool,
    settings: Settings,
    is_timed: bool,
) -> tuple[list[Image.Image], list[Clip], list[str]]:
    """A row's images, its videos, and what the prompt says about the times of their frames.

    Arguments are those of `rows_from_text` and `media_of_row`.

    Raises:
        InvalidInputError: as many media entries as rows are not there.
        MediaError: an image or video that cannot be read.
    """
    row_images = media_of_row(images, index, num_rows, is_batch, "images")
    row_videos = media_of_row(videos, index, num_rows, is_batch, "videos")
    clips = [open_video(video, settings.frame_sampling, is_timed=is_timed) for video in row_videos]
    notes = [clip.time_instruction() for clip in clips] if settings.time_instruction else []
    return [open_image(image) for image in row_images], clips, notes


def media_of_row(media: Any, row: int, num_rows: int, is_batch: bool, name: str) -> list[Any]:
    """The images or videos of one row, from what the caller passed for all.

    Raises:
        InvalidInputError: a batch without one entry per row.
    """
    if media is None:
        return []
    if is_batch:
        if not isinstance(media, (list, tuple)) or len(media) != num_rows:
            got = len(media) if isinstance(media, (list, tuple)) else type(media).__name__
            raise InvalidInputError(
                f"{name} for {num_rows} prompts must be a list with one entry per prompt "
                f"(an item, a list or None), got {got}."
            )
        media = media[row]
    if media is None:
        return []
    return list(media) if isinstance(media, (list, tuple)) else [media]


def rows_from_ids(
    input_ids: Any, pixel_values: Any, image_sizes: Any, modalities: Any
) -> list[RowInput]:
    """Prepares the low-level entry.

    Args:
        input_ids: `(P0,)` or `(1, P0)` ids for one row; a list of `(P0,)` tensors for a batch,
            whose other arguments are then lists with one entry per row.
        pixel_values: preprocessed pixels as `DiffusionModel.encode_prompt` takes them.
        image_sizes: `(width, height)` per image.
        modalities: `"image"` or `"video"` per image.

    Raises:
        InvalidInputError: no ids, a wrong shape, or lists of different lengths.
    """
    is_batch = (
        isinstance(input_ids, (list, tuple))
        and len(input_ids) > 0
        and not isinstance(input_ids[0], int)
    )
    rows = list(input_ids) if is_batch else [input_ids]
    extras: list[tuple[Any, Any, Any]] = [(pixel_values, image_sizes, modalities)]
    if is_batch:
        lists = []
        for name, value in (
            ("pixel_values", pixel_values),
            ("image_sizes", image_sizes),
            ("modalities", modalities),
        ):
            if value is not None and len(value) != len(rows):
                raise InvalidInputError(
                    f"{name} has {len(value)} entries for {len(rows)} rows of input_ids; "
                    "give one per row."
                )
            lists.append([None] * len(rows) if value is None else list(value))
        extras = list(zip(*lists, strict=True))
    prepared = []
    for ids, (pixels, sizes, kinds) in zip(rows, extras, strict=True):
        row = torch.as_tensor(ids, dtype=torch.long)
        if row.dim() == 2 and row.shape[0] == 1:
            row = row[0]
        if row.dim() != 1 or row.numel() == 0:
            raise InvalidInputError(
                f"input_ids of a row must have shape (P,) with P >= 1, got {tuple(row.shape)}; "
                "for a batch pass a list of such tensors."
            )
        prepared.append(
            RowInput(input_ids=row, pixel_values=pixels, image_sizes=sizes, modalities=kinds)
        )
    return prepared


def rows_from_embeds(inputs_embeds: Any) -> list[RowInput]:
    """Prepares ready embeddings.

    One row is `(P, D)` or `(1, P, D)`, a batch is a list of `(P, D)`.

    Raises:
        InvalidInputError: another shape.
    """
    rows = list(inputs_embeds) if isinstance(inputs_embeds, (list, tuple)) else [inputs_embeds]
    prepared = []
    for row in rows:
        row = row[0] if row.dim() == 3 and row.shape[0] == 1 else row
        if row.dim() != 2 or row.shape[0] == 0:
            raise InvalidInputError(
                "inputs_embeds of a row must have shape (P, D) with P >= 1, "
                f"got {tuple(row.shape)}."
            )
        prepared.append(RowInput(embeds=row))
    return prepared


def encode_row(
    model: DiffusionModel,
    row: RowInput,
    device: torch.device,
    needs: Collection[TowerNeed] = (),
) -> Prompt:
    """The row's prompt as the language model reads it.

    Args:
        model: encodes it.
        row: what to encode.
        device: where the prompt goes.
        needs: what stages read of the vision tower; see `tower_needs`.

    Raises:
        InvalidInputError: embeddings of another width, or what the model cannot read.
    """
    if row.embeds is not None:
        table = cast(nn.Embedding, model.get_input_embeddings()).weight
        if row.embeds.shape[-1] != table.shape[-1]:
            raise InvalidInputError(
                f"inputs_embeds have width {row.embeds.shape[-1]}, and the model's is "
                f"{table.shape[-1]}."
            )
        embeds = row.embeds.to(device, table.dtype)
        length = embeds.shape[0]
        unknown = torch.zeros(length, dtype=torch.long, device=device)
        return Prompt(
            embeds=embeds,
            ids=unknown,
            is_visual=torch.zeros(length, dtype=torch.bool, device=device),
        )
    if row.input_ids is None:
        raise AssertionError("a row needs ids or embeddings")
    return model.encode_prompt(
        row.input_ids.to(device),
        pixel_values=row.pixel_values,
        image_sizes=row.image_sizes,
        modalities=row.modalities,
        needs=needs,
    )
