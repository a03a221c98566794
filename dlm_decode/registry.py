"""Names for samplers, stages, cache policies and models, and specs such as `"lown:guard=none"`.

A built-in or third-party class is found in one of three ways: it lies in the package that the
registry searches, it is registered by the decorator, or an installed distribution names it in the
registry's entry-point group.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from dlm_decode.errors import InvalidInputError, UnknownNameError

__all__ = ["Registry", "describe"]

T = TypeVar("T")
C = TypeVar("C", bound=type)


class Registry(Generic[T]):
    """A set of named frozen dataclasses of knobs.

    Args:
        kind: the word used in messages, for example `"sampler"`.
        package: import name of the package whose modules register the built-ins, or of the one
            module that does.
        group: entry-point group for third parties.
    """

    def __init__(self, kind: str, package: str, group: str) -> None:
        self.kind = kind
        self.package = package
        self.group = group
        self._classes: dict[str, type[Any]] = {}
        self._aliases: dict[str, str] = {}
        self._is_loaded = self._is_loading = False
        # Whoever asks while another thread loads waits for it; modules that load may ask again.
        self._lock = threading.RLock()

    def register(self, name: str) -> Callable[[C], C]:
        """Class decorator that makes `name` known.

        Raises:
            InvalidInputError: the name is taken by another class.
        """

        def decorate(cls: C) -> C:
            taken = self._classes.get(name)
            if taken is not None and _origin(taken) != _origin(cls):
                raise InvalidInputError(
                    f"{self.kind} name {name!r} is taken by "
                    f"{taken.__module__}.{taken.__qualname__}; choose another."
                )
            self._classes[name] = cls
            cls.name = name  # type: ignore[attr-defined]
            return cls

        return decorate

    def register_alias(self, name: str, spec: str) -> None:
        """Makes `name` stand for `spec`; options behind `name` win over those in `spec`.

        Raises:
            InvalidInputError: the name stands for something else.
        """
        if name in self._classes or self._aliases.get(name, spec) != spec:
            raise InvalidInputError(f"{self.kind} name {name!r} is taken; choose another.")
        self._aliases[name] = spec

    def _load(self) -> None:
        if self._is_loaded:
            return
        with self._lock:
            if self._is_loaded or self._is_loading:
                return
            self._is_loading = True
            try:
                self._load_all()
                self._is_loaded = True
            finally:
                self._is_loading = False

    def _load_all(self) -> None:
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(getattr(package, "__path__", ())):
            importlib.import_module(f"{self.package}.{module.name}")
        for entry in entry_points(group=self.group):
            if entry.name not in self._classes:
                self.register(entry.name)(entry.load())

    def names(self) -> list[str]:
        """Every known name, sorted."""
        self._load()
        return sorted(self._classes)

    def aliases(self) -> dict[str, str]:
        """Names that stand for a spec, sorted."""
        self._load()
        return dict(sorted(self._aliases.items()))

    def get(self, name: str) -> type[T]:
        """The class behind `name`.

        Raises:
            UnknownNameError: with the nearest name and the list of what exists.
        """
        self._load()
        if name not in self._classes:
            raise UnknownNameError(self.kind, name, [*self._classes, *self._aliases])
        return self._classes[name]

    def make(self, spec: T | str, options: Mapping[str, Any] | None = None) -> T:
        """An instance from a name or a spec `"name:key=value,key=value"`.

        An instance is returned as it is.

        Args:
            spec: what to make.
            options: further knobs, which win over those in the spec.

        Raises:
            UnknownNameError: unknown name or knob.
            InvalidInputError: a malformed spec, a value that the class rejects, or options beside
                an instance.
        """
        if not isinstance(spec, str):
            if isinstance(spec, type):
                raise InvalidInputError(
                    f"{self.kind} {spec.__name__} is a class; "
                    f"pass an instance, as in {spec.__name__}()."
                )
            if not dataclasses.is_dataclass(spec):
                raise InvalidInputError(
                    f"{self.kind} must be a name, a spec such as 'name:key=value' or an instance, "
                    f"got {spec!r}."
                )
            if options:
                raise InvalidInputError(
                    f"options {sorted(options)} were given beside a {self.kind} instance; "
                    "set them on the instance."
                )
            return spec
        name, _, rest = spec.partition(":")
        knobs = {**_parse_options(rest, spec), **(options or {})}
        self._load()
        if name.strip() in self._aliases:
            return self.make(self._aliases[name.strip()], knobs)
        cls = self.get(name.strip())
        allowed = {field.name: field.type for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
        for key, value in knobs.items():
            if key not in allowed:
                raise UnknownNameError(f"option of {self.kind} {name!r}", key, allowed)
            if allowed[key] in (bool, "bool") and not isinstance(value, bool):
                raise InvalidInputError(
                    f"{key} of {self.kind} {name!r} must be true or false, got {value!r}."
                )
        try:
            return cls(**knobs)
        except (TypeError, ValueError) as error:
            if isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(f"{self.kind} {spec!r}: {error}") from error


def _origin(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _parse_options(text: str, spec: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise InvalidInputError(
                f"cannot read {part!r} in {spec!r}; write name:key=value,key=value."
            )
        if key.strip() in options:
            raise InvalidInputError(f"{key.strip()!r} stands twice in {spec!r}; give it once.")
        try:
            options[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            words = {"true": True, "false": False, "none": None}
            options[key.strip()] = words.get(value.strip().lower(), value.strip())
    return options


def describe(instance: Any) -> dict[str, Any]:
    """Name and every knob of a registered instance, JSON-ready, for records."""
    options = {}
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        is_nested = dataclasses.is_dataclass(value) and not isinstance(value, type)
        options[field.name] = describe(value) if is_nested else value
    return {"name": getattr(instance, "name", type(instance).__name__), "options": options}
