"""What questions about generated pictures and clips have in common."""

from __future__ import annotations

from collections.abc import Sequence

from dlm_decode.errors import InvalidInputError, UnknownNameError

__all__ = ["LETTERS", "check_kinds"]

LETTERS = "abcd"
"""Letters of the options of a choice, in order."""


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
