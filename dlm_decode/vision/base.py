"""What a vision stage is, and the one way to take visual tokens out of a prompt."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from dlm_decode.canvas import Prompt
from dlm_decode.errors import InvalidInputError

__all__ = [
    "AttentionRequest",
    "AttentionStage",
    "Positions",
    "Stage",
    "TowerNeed",
    "check_keep_ratio",
    "keep_positions",
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


def keep_positions(prompt: Prompt, keep: Tensor, positions: Positions = "original") -> Prompt:
    """The prompt with only the positions where `keep` holds; text is always kept.

    What is kept stays with its frame.

    Args:
        prompt: one row's prompt.
        keep: `(P,)` bool; read at visual positions.
        positions: see `AttentionStage`.
    """
    keep = keep | ~prompt.is_visual
    order = keep.cumsum(0).tolist()
    spans = []
    for span in prompt.spans:
        start = order[span.start - 1] if span.start else 0
        length = order[span.start + span.length - 1] - start
        spans.append(
            replace(
                span,
                start=start,
                length=length,
                sections=span.sections if length == span.length else (),
            )
        )
    is_renumbered = positions == "renumbered"
    return Prompt(
        embeds=prompt.embeds[keep],
        ids=prompt.ids[keep],
        is_visual=prompt.is_visual[keep],
        spans=tuple(spans),
        position_ids=None if is_renumbered else prompt.positions()[..., keep],
        end_position=None if is_renumbered else prompt.next_position,
        frame_ids=prompt.frames()[keep],
        salience=None if prompt.salience is None else prompt.salience[keep],
        tower_keys=None if prompt.tower_keys is None else prompt.tower_keys[keep],
    )


def tower_needs(stages: Iterable[Stage]) -> frozenset[TowerNeed]:
    """What of the vision tower's attention the stages read, see `TowerNeed`."""
    return frozenset(need for stage in stages for need in getattr(stage, "tower_needs", ()))


def check_keep_ratio(value: float) -> None:
    """Raises `InvalidInputError` unless `value` lies in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise InvalidInputError(f"keep_ratio must be above 0 and at most 1, got {value!r}.")
