"""From placeholder ids and what the encoders returned to prompts with spans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlm_decode.canvas import IMAGE_TOKEN_ID, Prompt, VisualSpan
from dlm_decode.errors import InvalidInputError
from dlm_decode.models.autoregressive.base import Media

__all__ = ["PromptRow", "prompts_of"]


@dataclass(frozen=True)
class PromptRow:
    """One row of a prefill, without its padding.

    Attributes:
        ids: `(P,)` with placeholder ids.
        embeds: `(P, D)` with visual tokens in place.
        position_ids: `(P,)` or `(3, P)`.
        end_position: rotary position of the first generated token.
    """

    ids: Tensor
    embeds: Tensor
    position_ids: Tensor
    end_position: int


@dataclass(frozen=True)
class _Placed:
    """A `Media` and the position of its first token."""

    start: int
    modality: str
    media: Media

    @property
    def end(self) -> int:
        return self.start + self.media.length


def prompts_of(
    rows: Sequence[PromptRow],
    media: Mapping[str, Sequence[Media]],
    placeholder_ids: Mapping[str, int],
    *,
    joins_tiles: bool = False,
) -> list[Prompt]:
    """One prompt per row.

    Rows may be repeated (beams, several answers to one prompt), each repetition right behind its
    original; what the encoders returned is not repeated then.

    Args:
        rows: as the text model gets them.
        media: what the encoders returned, by modality, through all rows.
        placeholder_ids: by modality.
        joins_tiles: neighbours without text between them are one image.

    Raises:
        InvalidInputError: another number of placeholders than of visual tokens.
    """
    placed: list[list[_Placed]] = [[] for _ in rows]
    for modality, token in placeholder_ids.items():
        places = [(row.ids == token).nonzero()[:, 0].tolist() for row in rows]
        given = media.get(modality, ())
        times = _repeats(modality, sum(map(len, places)), sum(entry.length for entry in given))
        supply = iter(given)
        for first in range(0, len(rows), times):
            found = list(_place(places[first], modality, supply))
            for row in range(first, first + times):
                placed[row] += found
    return [
        _prompt(row, sorted(found, key=lambda entry: entry.start), joins_tiles)
        for row, found in zip(rows, placed, strict=True)
    ]


def _repeats(modality: str, num_places: int, num_tokens: int) -> int:
    """How often each row is there."""
    if not num_places:
        return 1
    if not num_tokens or num_places % num_tokens:
        raise InvalidInputError(
            f"the prompts have {num_places} {modality} placeholders, and the {modality} encoder "
            f"returned {num_tokens} visual tokens; encode the pictures while the stages are "
            "attached, and prefill prompts in one piece."
        )
    return num_places // num_tokens


def _place(places: list[int], modality: str, supply: Iterator[Media]) -> Iterator[_Placed]:
    """Gives the placeholders of a row to the next entries of `supply`."""
    at = 0
    while at < len(places):
        entry = next(supply, None)
        last = -1 if entry is None else at + entry.length - 1
        if entry is None or last >= len(places) or places[last] - places[at] != last - at:
            raise InvalidInputError(
                f"the {modality} placeholders of a prompt do not fit what the {modality} encoder "
                "returned; every picture needs as many placeholders as it has visual tokens, side "
                "by side."
            )
        yield _Placed(places[at], modality, entry)
        at = last + 1


def _prompt(row: PromptRow, placed: Sequence[_Placed], joins_tiles: bool) -> Prompt:
    is_visual = torch.zeros_like(row.ids, dtype=torch.bool)
    for entry in placed:
        is_visual[entry.start : entry.end] = True
    groups: list[list[_Placed]] = []
    for entry in placed:
        if joins_tiles and groups and groups[-1][-1].end == entry.start:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return Prompt(
        embeds=row.embeds,
        ids=torch.where(is_visual, IMAGE_TOKEN_ID, row.ids),
        is_visual=is_visual,
        spans=tuple(_span(group, index) for index, group in enumerate(groups)),
        position_ids=row.position_ids,
        end_position=row.end_position,
        salience=_spread(row, placed, "salience"),
        tower_keys=_spread(row, placed, "tower_keys"),
    )


def _span(group: Sequence[_Placed], index: int) -> VisualSpan:
    start = group[0].start
    return VisualSpan(
        start=start,
        length=group[-1].end - start,
        image_index=index,
        modality=group[0].modality,
        frames=max(entry.media.frames for entry in group),
        sections=tuple(
            (entry.start - start + offset, rows, columns, has_newline)
            for entry in group
            for offset, rows, columns, has_newline in entry.media.sections
        ),
    )


def _spread(row: PromptRow, placed: Sequence[_Placed], name: str) -> Tensor | None:
    """A value per visual token as one per position, 0 at text; `None` where nobody asked."""
    values = [getattr(entry.media, name) for entry in placed]
    given = [value for value in values if value is not None]
    if not given:
        return None
    # A model may lie on several devices, and its tower on another than the prompt.
    spread = given[0].new_zeros(len(row.ids), *given[0].shape[1:], device=row.ids.device)
    for entry, value in zip(placed, values, strict=True):
        spread[entry.start : entry.end] = value
    return spread
