"""Values of stage knobs: read, spread over layers and checked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_args

from dlm_decode.errors import InvalidInputError, UnknownNameError

__all__ = ["check_choice", "check_count", "check_layers", "read_layers", "spread"]


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raises `InvalidInputError` unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInputError(
            f"{name} must be a whole number of at least {least}, got {value!r}."
        )


def check_choice(name: str, value: Any, allowed: Any) -> None:
    """Raises `UnknownNameError` unless `value` is one of a `Literal`."""
    if value not in get_args(allowed):
        raise UnknownNameError(name, str(value), get_args(allowed))


def check_layers(name: str, layers: Sequence[int], num_layers: int) -> None:
    """Raises `InvalidInputError` for layers (counted from 0) that a model does not have."""
    wrong = [layer for layer in layers if layer >= num_layers]
    if wrong:
        raise InvalidInputError(
            f"{name} acts behind layers {wrong}, and the model has {num_layers}, counted from 0; "
            "choose earlier ones."
        )


def read_layers(given: Any, name: str = "at_layers", least: int = 0) -> tuple[int, ...]:
    """Layers from a number, a sequence, or a string such as `"12-18-24"`.

    Raises:
        InvalidInputError: anything else, or layers that do not ascend from `least` on.
    """
    layers = _numbers(name, given, int)
    if not layers or layers[0] < least or any(b <= a for a, b in pairwise(layers)):
        raise InvalidInputError(
            f"{name} must ascend, counted from {least}, got {given!r}; write '12-18-24' or "
            "(12, 18, 24)."
        )
    return layers


def spread(name: str, given: Any, kind: type, count: int) -> tuple[Any, ...]:
    """One entry for each of `count` layers, from one for all, a sequence, or a string `"4-2-1"`.

    Raises:
        InvalidInputError: another number of entries, or entries that are not of `kind`.
    """
    values = _numbers(name, given, kind)
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise InvalidInputError(
            f"{name} has {len(values)} entries for {count} layers; give one for each, or one for "
            "all."
        )
    return values


def _numbers(name: str, given: Any, kind: type) -> tuple[Any, ...]:
    parts = given.split("-") if isinstance(given, str) else given
    parts = parts if isinstance(parts, (list, tuple)) else (parts,)
    try:
        values = tuple(kind(part) for part in parts)
    except (TypeError, ValueError):
        values = None
    if values is None or any(
        isinstance(part, bool) or (not isinstance(part, str) and part != value)
        for part, value in zip(parts, values, strict=True)
    ):
        word = "whole numbers" if kind is int else "numbers"
        raise InvalidInputError(
            f"{name} must be {word}, as one, a sequence, or a string such as '4-2-1', "
            f"got {given!r}."
        )
    return values
