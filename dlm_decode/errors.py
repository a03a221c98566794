"""Errors that a user can act on.

Each message says what was given, what is allowed, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "DlmError",
    "InvalidInputError",
    "MediaError",
    "NumericalError",
    "UnknownNameError",
]


class DlmError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidInputError(DlmError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class MediaError(InvalidInputError):
    """An image or a video that cannot be read."""


class CheckpointError(DlmError, ValueError):
    """A checkpoint folder that is incomplete or contradicts its own config."""


class NumericalError(DlmError, ArithmeticError):
    """The model returned numbers that no token can be chosen from (NaN)."""


class UnknownNameError(InvalidInputError):
    """A name that is in no registry.

    Args:
        kind: what was looked up, for example `"sampler"`.
        name: the name as given.
        available: the names that exist.
    """

    def __init__(self, kind: str, name: str, available: Iterable[str]) -> None:
        known = sorted(available)
        near = (
            [name.lower()] if name.lower() in known else difflib.get_close_matches(name, known, 1)
        )
        hint = f" Did you mean {near[0]!r}?" if near else ""
        listing = ", ".join(known) or "none is registered"
        super().__init__(f"unknown {kind} {name!r}.{hint} Available: {listing}.")
        self.kind = kind
        self.name = name
        self.available = tuple(known)
