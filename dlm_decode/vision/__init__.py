"""Vision stages: which visual tokens stay, merge or go. One method per file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from dlm_decode.registry import Registry
from dlm_decode.vision.base import Stage

if TYPE_CHECKING:
    from dlm_decode.vision.attachment import Attachment

__all__ = [
    "Stage",
    "aliases",
    "attach",
    "get",
    "make",
    "names",
    "register_alias",
    "register_stage",
]

_registry: Registry[Stage] = Registry("vision stage", "dlm_decode.vision", "dlm_decode.stages")
register_alias = _registry.register_alias
C = TypeVar("C", bound=type)


def register_stage(name: str) -> Callable[[C], C]:
    """Class decorator that makes a stage known as `name` and gives it a method `attach`.

    `with stage.attach(model):` is `with attach(model, stage):`.
    """

    def decorate(cls: C) -> C:
        cls = _registry.register(name)(cls)
        cls.attach = _attach_one  # type: ignore[attr-defined]
        return cls

    return decorate


def attach(model: Any, stages: Any) -> AbstractContextManager[Attachment]:
    """Lets stages act on a stock model of transformers; see `dlm_decode.vision.attachment`."""
    from dlm_decode.vision.attachment import attach as attach_stages

    return attach_stages(model, stages)


def _attach_one(stage: Stage, model: Any) -> AbstractContextManager[Attachment]:
    """The stage on a stock model of transformers; see `dlm_decode.vision.attachment.attach`."""
    return attach(model, stage)


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
