"""What questions about generated pictures and clips have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count as count_from
from itertools import islice
from typing import Protocol, TypeVar

from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.eval.scenes import Split

__all__ = ["LETTERS", "check_kinds", "first_of"]

LETTERS = "abcd"
"""Letters of the options of a choice, in order."""

_FIRST_CALIBRATION_SEED = 1_000_000


class _Kind(Protocol):
    @property
    def kind(self) -> str: ...


S = TypeVar("S", bound=_Kind)


def check_kinds(kinds: Sequence[str] | None, known: Sequence[str]) -> tuple[str, ...] | None:
    """The kinds that are named, each once and in the order of `known`; `None` for no choice.

    Raises:
        UnknownNameError: one that is not among `known`.
        InvalidInputError: none is named.
    """
    if kinds is None:
        return None
    for kind in kinds:
        if kind not in known:
            raise UnknownNameError("kind of question", str(kind), known)
    if not kinds:
        raise InvalidInputError(
            f"kinds is empty; name at least one of {', '.join(known)}, or leave it out."
        )
    return tuple(kind for kind in known if kind in kinds)


def first_of(
    samples_of: Callable[[int], Sequence[S]],
    count: int,
    kinds: Sequence[str] | None,
    known: Sequence[str],
    split: Split,
) -> Iterator[S]:
    """The first `count` questions of a split, one picture or clip after the other.

    Those of training are counted from number 1,000,000 on, far behind what training draws by
    default, so that the model has not learned them by heart.

    Args:
        samples_of: all questions about the picture or clip of a number.
        count: how many.
        kinds: only these; every kind by default.
        known: kinds that there are.
        split: of the pictures or clips.

    Raises:
        UnknownNameError: a kind that is not among `known`.
        InvalidInputError: no kind at all.
    """
    check_kinds(kinds, known)
    first = 0 if split == "heldout" else _FIRST_CALIBRATION_SEED
    samples = (sample for seed in count_from(first) for sample in samples_of(seed))
    return islice((s for s in samples if kinds is None or s.kind in kinds), max(0, count))
