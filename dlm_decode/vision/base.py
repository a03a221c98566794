"""What a vision stage is, and the one way to take visual tokens out of a prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, runtime_checkable

from torch import Tensor

from dlm_decode.canvas import Prompt
from dlm_decode.errors import InvalidInputError

__all__ = ["Stage", "check_keep_ratio", "keep_positions"]


@runtime_checkable
class Stage(Protocol):
    """A frozen dataclass of knobs; register it with `@register_stage("name")`.

    A stage shrinks the FULL view of one row before the language model reads it. The TEXT_ONLY view
    is not touched.
    """

    def before_lm(self, prompt: Prompt) -> Prompt:
        """The prompt with fewer visual tokens; text positions must stay as they are."""
        ...


def keep_positions(prompt: Prompt, keep: Tensor) -> Prompt:
    """The prompt with only the positions where `keep` holds.

    Text is always kept, and what is kept stays at its rotary position and with its frame.

    Args:
        prompt: one row's prompt.
        keep: `(P,)` bool; read at visual positions.
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
    return Prompt(
        embeds=prompt.embeds[keep],
        ids=prompt.ids[keep],
        is_visual=prompt.is_visual[keep],
        spans=tuple(spans),
        position_ids=prompt.positions()[keep],
        end_position=prompt.next_position,
        frame_ids=prompt.frames()[keep],
    )


def check_keep_ratio(value: float) -> None:
    """Raises `InvalidInputError` unless `value` lies in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise InvalidInputError(f"keep_ratio must be above 0 and at most 1, got {value!r}.")
