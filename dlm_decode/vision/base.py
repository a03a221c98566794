"""What a vision stage is, and the one way to take visual tokens out of a prompt."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from dlm_decode.canvas import Prompt
from dlm_decode.errors import InvalidInputError

__all__ = [
    "AttentionRequest",
    "AttentionStage",
    "Positions",
    "SpanTokens",
    "Stage",
    "TowerNeed",
    "check_keep_ratio",
    "keep_positions",
    "num_kept",
    "replace_spans",
    "tower_needs",
]

Positions = Literal["original", "renumbered"]
TowerNeed = Literal["salience", "tower_keys"]
"""Fields of `Prompt` that a stage may ask for by an attribute `tower_needs`, a tuple of them."""


@runtime_checkable
class Stage(Protocol):
    """A frozen dataclass of knobs; register it with `@register_stage("name")`.

    A stage shrinks the FULL view of one row before the language model reads it. The TEXT_ONLY view
    is not touched.
    """

    def before_lm(self, prompt: Prompt) -> Prompt:
        """The prompt with fewer visual tokens; text positions must stay as they are."""
        ...


@dataclass(frozen=True)
class AttentionRequest:
    """Attention rows that a stage wants to see: those of the masked response positions.

    Attributes:
        layers: layers, counted from 0, over which rows are averaged; `None` for all.
    """

    layers: Collection[int] | None = None

    def num_layers(self, total: int) -> int:
        """Number of asked layers of a model that has `total`."""
        return total if self.layers is None else len(set(self.layers))


@runtime_checkable
class AttentionStage(Stage, Protocol):
    """A stage that prunes by what the response attends to in its first forward with the picture.

    Attributes:
        positions: rotary positions after pruning: `"renumbered"` counts 0, 1, ... anew,
            `"original"` leaves every token, the canvas included, at its number.
    """

    positions: Positions

    def request(self) -> AttentionRequest | None:
        """The rows that it needs; `None` when it will prune nothing, so that nothing is computed.

        They are computed beside that forward, for the response positions that are masked in it.
        """
        ...

    def keep(self, prompt: Prompt, attention: Tensor) -> Tensor:
        """`(P,)` bool, read at visual positions: what every later forward still reads.

        Args:
            prompt: one row's prompt, as the forward read it.
            attention: `(Q, P)` float32, mean over heads and asked layers, of the Q >= 1 response
                positions that are still masked after the step.
        """
        ...


@dataclass(frozen=True)
class SpanTokens:
    """What stands in a span from now on: tokens that were there, changed or not.

    Attributes:
        index: `(K,)` prompt positions inside the span, in the new order. Each token has its
            position's frame, salience, tower key and, with `"original"`, rotary position. A merged
            token names the position that stands for the group.
        embeds: `(K, D)` the tokens; `None` for those of `index`.
        position_ids: `(..., K)` rotary positions instead of those of `index`; read with
            `"original"`.
    """

    index: Tensor
    embeds: Tensor | None = None
    position_ids: Tensor | None = None


def replace_spans(
    prompt: Prompt, replaced: Sequence[SpanTokens | None], positions: Positions = "original"
) -> Prompt:
    """The prompt with other tokens in its spans; text stays as it is.

    A span that loses or changes tokens loses its sections: it is no rectangle any more.

    Args:
        prompt: one row's prompt.
        replaced: one entry for each span; `None` leaves it.
        positions: see `AttentionStage`.
    """
    everything = torch.arange(prompt.length, device=prompt.ids.device)
    pieces, spans, changed, done, length = [], [], [], 0, 0
    for span, tokens in zip(prompt.spans, replaced, strict=True):
        stop = span.start + span.length
        index = everything[span.start : stop] if tokens is None else tokens.index
        length += span.start - done
        pieces += [everything[done : span.start], index]
        is_whole = tokens is None or (tokens.embeds is None and len(index) == span.length)
        spans.append(
            replace(
                span,
                start=length,
                length=len(index),
                sections=span.sections if is_whole else (),
            )
        )
        if tokens is not None:
            changed.append((slice(length, length + len(index)), tokens))
        length += len(index)
        done = stop
    picked = torch.cat([*pieces, everything[done:]])
    embeds, position_ids = prompt.embeds[picked], prompt.positions()[..., picked]
    for place, tokens in changed:
        if tokens.embeds is not None:
            embeds[place] = tokens.embeds.to(embeds)
        if tokens.position_ids is not None:
            position_ids[..., place] = tokens.position_ids
    is_renumbered = positions == "renumbered"
    return Prompt(
        embeds=embeds,
        ids=prompt.ids[picked],
        is_visual=prompt.is_visual[picked],
        spans=tuple(spans),
        position_ids=None if is_renumbered else position_ids,
        end_position=None if is_renumbered else prompt.next_position,
        frame_ids=prompt.frames()[picked],
        salience=None if prompt.salience is None else prompt.salience[picked],
        tower_keys=None if prompt.tower_keys is None else prompt.tower_keys[picked],
    )


def keep_positions(prompt: Prompt, keep: Tensor, positions: Positions = "original") -> Prompt:
    """The prompt with only the positions where `keep` holds; text is always kept.

    What is kept stays with its frame.

    Args:
        prompt: one row's prompt.
        keep: `(P,)` bool; read at visual positions.
        positions: see `AttentionStage`.
    """
    kept = [
        SpanTokens(keep[span.start : span.start + span.length].nonzero()[:, 0] + span.start)
        for span in prompt.spans
    ]
    return replace_spans(prompt, kept, positions)


def tower_needs(stages: Iterable[Stage]) -> frozenset[TowerNeed]:
    """What of the vision tower's attention the stages read, see `TowerNeed`."""
    return frozenset(need for stage in stages for need in getattr(stage, "tower_needs", ()))


def check_keep_ratio(value: float) -> None:
    """Raises `InvalidInputError` unless `value` lies in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise InvalidInputError(f"keep_ratio must be above 0 and at most 1, got {value!r}.")


def num_kept(count: int, keep_ratio: float) -> int:
    """How many of an image's `count` tokens stay; halves go to the even number, at least one."""
    return min(count, max(1, round(count * keep_ratio)))
