"""What stages share that choose among the patches of one picture before the language model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dlm_decode.canvas import Prompt, VisualSpan
from dlm_decode.errors import InvalidInputError
from dlm_decode.vision.base import (
    Positions,
    SpanTokens,
    TowerNeed,
    check_keep_ratio,
    num_kept,
    replace_spans,
)
from dlm_decode.vision.knobs import check_choice, check_count

__all__ = ["Choice", "Newlines", "Picture", "PictureStage"]

Newlines = Literal["drop", "keep"]

_DEFAULT_RATIO = 0.5


@dataclass(frozen=True)
class Picture:
    """The N patches of one image or video in prompt order, without newline vectors.

    Attributes:
        index: `(N,)` prompt positions.
        tokens: `(N, D)` as the language model would read them.
        position_ids: `(..., N)` rotary positions.
        grids: rows and columns of each rectangular part, which follow each other; empty where an
            earlier stage has taken tokens out.
        is_video: whether the parts are frames.
        salience: `(N,)`; `None` where the model did not say.
        tower_keys: `(N, d)`; likewise.
        text_ids: `(P,)` the prompt's ids.
    """

    index: Tensor
    tokens: Tensor
    position_ids: Tensor
    grids: tuple[tuple[int, int], ...]
    is_video: bool
    salience: Tensor | None
    tower_keys: Tensor | None
    text_ids: Tensor

    @classmethod
    def of(cls, prompt: Prompt, span: VisualSpan) -> Picture:
        """The patches of a span; all of it where it has no sections."""
        index = torch.tensor(_patches(span), dtype=torch.long, device=prompt.ids.device)
        index = index + span.start
        return cls(
            index=index,
            tokens=prompt.embeds[index],
            position_ids=prompt.positions()[..., index],
            grids=tuple((rows, columns) for _, rows, columns, _ in span.sections),
            is_video=span.modality == "video",
            salience=None if prompt.salience is None else prompt.salience[index],
            tower_keys=None if prompt.tower_keys is None else prompt.tower_keys[index],
            text_ids=prompt.ids,
        )

    @property
    def num_patches(self) -> int:
        """N."""
        return len(self.index)


@dataclass(frozen=True)
class Choice:
    """What stays of a picture.

    Attributes:
        kept: `(K,)` patches, counted from 0, ascending.
        tokens: `(K, D)` what stands there; `None` for the patches themselves.
        added: `(A,)` patches whose frame and place the tokens behind them take.
        added_tokens: `(A, D)` those tokens.
        added_positions: `(..., A)` rotary positions of theirs; `None` for those of `added`.
    """

    kept: Tensor
    tokens: Tensor | None = None
    added: Tensor | None = None
    added_tokens: Tensor | None = None
    added_positions: Tensor | None = None


@dataclass(frozen=True)
class PictureStage(ABC):
    """Chooses or merges in every image or video by itself, with one budget for each.

    Args:
        keep_ratio: share of each picture's patches that stays, in (0, 1], rounded to the nearest
            number; at least one stays. 0.5 where neither this nor `keep_tokens` is given. 1 changes
            nothing.
        keep_tokens: instead: how many stay of each picture. One that has no more is left whole.
        newlines: learned newline vectors are no patches and do not count. `"drop"` takes them out
            of a picture that loses patches, as the published programs of pre-LM methods do;
            `"keep"` leaves those that end a row (or frame) of which something stays.
        positions: `"renumbered"` gives the shortened prompt the rotary positions 0, 1, ..., as
            these programs do; `"original"` leaves every token at its number.

    Raises:
        InvalidInputError: a ratio outside (0, 1], fewer than one token, or both.
        UnknownNameError: another value of `newlines` or `positions`.
    """

    keep_ratio: float | None = None
    keep_tokens: int | None = None
    newlines: Newlines = "drop"
    positions: Positions = "renumbered"

    _needs: ClassVar[tuple[TowerNeed, ...]] = ()

    def __post_init__(self) -> None:
        if self.keep_tokens is None:
            ratio = _DEFAULT_RATIO if self.keep_ratio is None else self.keep_ratio
            check_keep_ratio(ratio)
            object.__setattr__(self, "keep_ratio", ratio)
        elif self.keep_ratio is not None:
            raise InvalidInputError("give keep_ratio or keep_tokens, not both.")
        else:
            check_count("keep_tokens", self.keep_tokens)
        check_choice("newlines", self.newlines, Newlines)
        check_choice("positions", self.positions, Positions)

    @property
    def tower_needs(self) -> tuple[TowerNeed, ...]:
        """What it reads of the vision tower; nothing where it changes nothing."""
        return () if self.keep_ratio == 1 else self._needs

    def budget(self, num_patches: int) -> int:
        """Tokens that stay of so many patches."""
        if self.keep_tokens is not None:
            return min(self.keep_tokens, num_patches)
        return num_kept(num_patches, self.keep_ratio or 1)

    def before_lm(self, prompt: Prompt) -> Prompt:
        """The prompt with the chosen tokens only; the prompt itself where nothing goes."""
        replaced = [self._replaced(prompt, span) for span in prompt.spans]
        if all(tokens is None for tokens in replaced):
            return prompt
        return replace_spans(prompt, replaced, self.positions)

    @abstractmethod
    def choose(self, picture: Picture, count: int) -> Choice:
        """What stays.

        Args:
            picture: at least two patches, with what `tower_needs` names.
            count: how many of them, at least 1 and fewer than there are.
        """

    def _replaced(self, prompt: Prompt, span: VisualSpan) -> SpanTokens | None:
        picture = Picture.of(prompt, span)
        count = self.budget(picture.num_patches)
        if count >= picture.num_patches:
            return None
        for need in self.tower_needs:
            if getattr(picture, need) is None:
                raise InvalidInputError(
                    f"stage {getattr(self, 'name', type(self).__name__)!r} reads {need} of the "
                    "vision tower, and this prompt does not carry it; pass needs= to "
                    "encode_prompt, or use a stage that does without."
                )
        return self._woven(prompt, span, picture, self.choose(picture, count))

    def _woven(
        self, prompt: Prompt, span: VisualSpan, picture: Picture, choice: Choice
    ) -> SpanTokens:
        """The chosen tokens with the newline vectors that stay among them."""
        index = picture.index[choice.kept]
        tokens = picture.tokens[choice.kept] if choice.tokens is None else choice.tokens
        if self.newlines == "keep":
            index, tokens = _with_newlines(prompt, span, index, tokens)
        position_ids = prompt.positions()[..., index]
        if choice.added is not None and choice.added_tokens is not None:
            added = picture.index[choice.added]
            added_positions = choice.added_positions
            if added_positions is None:
                added_positions = prompt.positions()[..., added]
            index = torch.cat([index, added])
            tokens = torch.cat([tokens.to(prompt.embeds), choice.added_tokens.to(prompt.embeds)])
            position_ids = torch.cat([position_ids, added_positions], dim=-1)
        return SpanTokens(index, tokens, position_ids)


def _patches(span: VisualSpan) -> list[int]:
    if not span.sections:
        return list(range(span.length))
    return [
        start + row * (columns + has_newline) + column
        for start, rows, columns, has_newline in span.sections
        for row in range(rows)
        for column in range(columns)
    ]


def _newlines(span: VisualSpan) -> Iterator[tuple[int, int]]:
    """Each newline vector of a span, and the first of the patches that it ends."""
    row_starts = {
        start + (row + 1) * (columns + 1) - 1: start + row * (columns + 1)
        for start, rows, columns, has_newline in span.sections
        if has_newline
        for row in range(rows)
    }
    begin = 0
    for place in sorted(set(range(span.length)) - set(_patches(span))):
        yield place, row_starts.get(place, begin)
        begin = place + 1


def _with_newlines(
    prompt: Prompt, span: VisualSpan, index: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    pairs = torch.tensor(list(_newlines(span)), dtype=torch.long, device=index.device)
    places, begins = (pairs.reshape(-1, 2) + span.start).T.contiguous()
    # Kept patches that lie before a newline, minus those before what it ends.
    inside = torch.searchsorted(index, places) - torch.searchsorted(index, begins)
    places = places[inside > 0]
    index, order = torch.cat([index, places]).sort()
    return index, torch.cat([tokens.to(prompt.embeds), prompt.embeds[places]])[order]
