"""Samplers: which masked positions are committed with which token. One method per file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dlm_decode.registry import Registry

if TYPE_CHECKING:
    from dlm_decode.samplers.base import Sampler
    from dlm_decode.samplers.baseline import Baseline

__all__ = ["Baseline", "aliases", "get", "make", "names", "register_alias", "register_sampler"]

_registry: Registry[Sampler] = Registry("sampler", "dlm_decode.samplers", "dlm_decode.samplers")
register_sampler = _registry.register
register_alias = _registry.register_alias


def names() -> list[str]:
    """Names of all samplers, built in, registered and installed."""
    return _registry.names()


def aliases() -> dict[str, str]:
    """Named settings of samplers, with the spec that each stands for."""
    return _registry.aliases()


def get(name: str) -> type[Sampler]:
    """The sampler class called `name`; raises `UnknownNameError`."""
    return _registry.get(name)


def make(spec: Sampler | str, options: Mapping[str, Any] | None = None) -> Sampler:
    """A sampler from a name, a spec such as `"baseline:remasking=margin"`, or an instance.

    `"autoregressive"` names no sampler of diffusion models but the way of all others.

    Raises:
        UnknownNameError: no such sampler or option; the message lists what exists.
        InvalidInputError: a malformed spec or a value that the sampler rejects.
    """
    from dlm_decode.samplers.autoregressive import Autoregressive

    if spec == Autoregressive.name and not options:
        return Autoregressive()
    return _registry.make(spec, options)


def __getattr__(name: str) -> Any:
    """Classes by their own name (`samplers.Baseline`), imported on first use."""
    for known in _registry.names():
        cls = _registry.get(known)
        if cls.__name__ == name:
            return cls
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; samplers: {', '.join(names())}"
    )
