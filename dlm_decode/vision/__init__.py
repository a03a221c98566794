"""Vision stages: which visual tokens stay, merge or go. One method per file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dlm_decode.errors import InvalidInputError
from dlm_decode.registry import Registry
from dlm_decode.vision.base import Stage

__all__ = [
    "Stage",
    "aliases",
    "get",
    "make",
    "make_all",
    "names",
    "register_alias",
    "register_stage",
]

_registry: Registry[Stage] = Registry("vision stage", "dlm_decode.vision", "dlm_decode.stages")
register_stage = _registry.register
register_alias = _registry.register_alias


def names() -> list[str]:
    """Names of all vision stages, built in, registered and installed."""
    return _registry.names()


def aliases() -> dict[str, str]:
    """Named settings of stages, with the spec that each stands for."""
    return _registry.aliases()


def get(name: str) -> type[Stage]:
    """The stage class called `name`; raises `UnknownNameError`."""
    return _registry.get(name)


def make(spec: Stage | str, options: Mapping[str, Any] | None = None) -> Stage:
    """A stage from a name, a spec such as `"stride:keep_ratio=0.25"`, or an instance.

    Raises:
        UnknownNameError: no such stage or option; the message lists what exists.
        InvalidInputError: a malformed spec or a value that the stage rejects.
    """
    return _registry.make(spec, options)


def make_all(specs: Sequence[Stage | str] | Stage | str | None) -> list[Stage]:
    """Stages in order; one that stands alone is a list of one, `None` is none.

    Raises:
        UnknownNameError: see `make`.
        InvalidInputError: see `make`, or nothing of what is allowed.
    """
    if specs is None:
        return []
    if isinstance(specs, (str, Stage)):
        return [make(specs)]
    if not isinstance(specs, Iterable):
        raise InvalidInputError(
            f"stages must be a stage, its name or spec, or a list of those, got {specs!r}."
        )
    return [make(spec) for spec in specs]
