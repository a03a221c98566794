"""Vision stages: which visual tokens stay, merge or go. One method per file.

Methods that are compared with elsewhere and left out, because neither their program nor a
sufficient description was at hand: ToFu, HiRED, FasterVLM and PruMerge.
`specflow:graph=none,allocation=topk,sinks=none` keeps the patches of highest tower attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlm_decode.registry import Registry
from dlm_decode.vision.base import Stage

__all__ = ["Stage", "get", "make", "names", "register_stage"]

_registry: Registry[Stage] = Registry("vision stage", "dlm_decode.vision", "dlm_decode.stages")
register_stage = _registry.register


def names() -> list[str]:
    """Names of all vision stages, built in, registered and installed."""
    return _registry.names()


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
