"""Cache policies: which positions a forward feeds, and what it reuses. One method per file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlm_decode.cache.base import CachePolicy
from dlm_decode.registry import Registry

__all__ = ["CachePolicy", "check", "get", "make", "names", "register_cache"]

_registry: Registry[CachePolicy] = Registry("cache policy", "dlm_decode.cache", "dlm_decode.cache")
register_cache = _registry.register


def names() -> list[str]:
    """Names of all cache policies, built in, registered and installed."""
    return _registry.names()


def get(name: str) -> type[CachePolicy]:
    """The cache policy class called `name`; raises `UnknownNameError`."""
    return _registry.get(name)


def check(spec: str | None) -> None:
    """Raises what `make` does unless `spec` makes a policy; `None` and `"none"` are no cache."""
    if spec not in (None, "none"):
        make(spec)


def make(spec: CachePolicy | str, options: Mapping[str, Any] | None = None) -> CachePolicy:
    """A policy from a name, a spec such as `"prefix:refresh_interval=32"`, or an instance.

    Raises:
        UnknownNameError: no such policy or option; the message lists what exists.
        InvalidInputError: a malformed spec or a value that the policy rejects.
    """
    return _registry.make(spec, options)
