"""From what a caller passes to `AutoregressiveVlm.generate` to one left-padded batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlm_decode.errors import InvalidInputError
from dlm_decode.inputs import check_question, open_media_of_row
from dlm_decode.settings import Settings

if TYPE_CHECKING:
    from dlm_decode.models.autoregressive.base import Architecture
    from dlm_decode.models.autoregressive.processing import AutoregressiveProcessor

__all__ = ["Batch", "batch_from_ids", "batch_from_text"]


@dataclass(frozen=True)
class Batch:
    """Prompts, padded on the left.

    Attributes:
        inputs: `input_ids` and `attention_mask`, both `(B, S)` long, and what goes with the
            pictures, by argument of the model's forward.
        questions: each row's text and which frames were taken of its videos, for records.
        is_batch: whether the caller passed several rows, or a list.
    """

    inputs: dict[str, Any]
    questions: list[tuple[str | None, list[dict[str, Any]]]]
    is_batch: bool

    def to(self, device: torch.device) -> Batch:
        """The batch with its tensors on `device`."""
        moved = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self.inputs.items()
        }
        return Batch(moved, self.questions, self.is_batch)


def batch_from_text(
    processor: AutoregressiveProcessor,
    prompt: str | Sequence[str],
    images: Any,
    videos: Any,
    settings: Settings,
    *,
    pad_id: int,
    is_timed: bool,
) -> Batch:
    """Prepares text prompts with their images and videos.

    Args:
        processor: tokenizer and image processing.
        prompt: a question, or one per row.
        images: for a single prompt, one image or a list; for a batch, such a value per row, or
            `None`.
        videos: likewise.
        settings: which frames of videos are taken, and whether their times are told.
        pad_id: fills rows in front.
        is_timed: see `open_video`.

    Raises:
        InvalidInputError: an empty prompt, a number of media entries that is not that of rows, or
            pictures of rows that cannot be stacked.
        MediaError: an image or video that cannot be read.
    """
    is_batch = not isinstance(prompt, str)
    prompts = list(prompt) if is_batch else [prompt]
    if not prompts:
        raise InvalidInputError("prompt is an empty list; pass at least one question.")
    rows, questions = [], []
    for index, question in enumerate(prompts):
        check_question(question, index)
        row_images, clips, notes = open_media_of_row(
            images, videos, index, len(prompts), is_batch, settings, is_timed
        )
        rows.append(processor(question, row_images, clips, video_notes=notes))
        questions.append((question, [clip.to_dict() for clip in clips]))
    inputs: dict[str, Any] = _padded([row.input_ids for row in rows], pad_id)
    for name in dict.fromkeys(name for row in rows for name in row.tensors):
        parts = [row.tensors[name] for row in rows if name in row.tensors]
        inputs[name] = processor.architecture.collate(name, parts)
    return Batch(inputs, questions, is_batch)


def _check_shape(ids: Tensor, num_axes: int) -> None:
    if ids.dim() != num_axes or not ids.numel():
        raise InvalidInputError(
            f"input_ids must be (S,), (B, S) or a list of (S,) with S >= 1, got {tuple(ids.shape)}."
        )


def _padded(rows: Sequence[Tensor], pad_id: int) -> dict[str, Any]:
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, longest - len(row) :] = row
        mask[at, longest - len(row) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def batch_from_ids(
    input_ids: Any,
    attention_mask: Any,
    extras: Mapping[str, Any],
    architecture: Architecture,
    *,
    vocab_size: int,
    pad_id: int,
) -> Batch:
    """Prepares the low-level entry: what a processor of transformers returns.

    Args:
        input_ids: `(B, S)`, `(S,)`, or a list of `(S,)` for rows of unequal lengths.
        attention_mask: `(B, S)`, zeros in front of rows that are padded; `None` where nothing is.
        extras: what goes with the pictures, by argument of the model's forward; `None` entries are
            left out.
        architecture: of the model.
        vocab_size: ids lie below it.
        pad_id: fills rows in front.

    Raises:
        InvalidInputError: wrong shapes, padding on the right, ids outside the vocabulary, or
            arguments that the model does not take.
    """
    is_list = (
        isinstance(input_ids, (list, tuple))
        and len(input_ids) > 0
        and not isinstance(input_ids[0], int)
    )
    if is_list:
        if attention_mask is not None:
            raise InvalidInputError("attention_mask goes with input_ids (B, S), not with a list.")
        rows = [torch.as_tensor(row, dtype=torch.long) for row in input_ids]
        for row in rows:
            _check_shape(row, num_axes=1)
        inputs = _padded(rows, pad_id)
    else:
        ids = torch.as_tensor(input_ids, dtype=torch.long)
        ids = ids[None] if ids.dim() == 1 else ids
        _check_shape(ids, num_axes=2)
        mask = torch.ones_like(ids) if attention_mask is None else torch.as_tensor(attention_mask)
        mask = mask[None] if mask.dim() == 1 else mask
        if mask.shape != ids.shape:
            raise InvalidInputError(
                f"attention_mask has shape {tuple(mask.shape)}, and input_ids {tuple(ids.shape)}; "
                "both must be the same."
            )
        inputs = {"input_ids": ids, "attention_mask": mask.to(ids)}
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if not bool(mask[:, -1].all()) or bool((mask.diff(dim=1) < 0).any()):
        raise InvalidInputError(
            "attention_mask has zeros behind a prompt; pad on the left (padding_side='left')."
        )
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise InvalidInputError(
            f"input_ids has ids {wrong.unique().tolist()[:5]}, which are outside the vocabulary of "
            f"{vocab_size}; was another tokenizer used?"
        )
    given = {name: value for name, value in extras.items() if value is not None}
    known = ("pixel_values", *architecture.further_arguments)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise InvalidInputError(
            f"{', '.join(unknown)} cannot be read by a model of type "
            f"{architecture.config.model_type!r}; it takes {', '.join(known)}."
        )
    return Batch({**inputs, **given}, [(None, [])] * len(ids), is_list or len(ids) > 1)
