"""Models: checkpoints as they are published, without remote code. One model type per file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from dlm_decode.registry import Registry

if TYPE_CHECKING:
    from dlm_decode.models.base import DiffusionModel
    from dlm_decode.models.loading import load_model, load_processor

__all__ = ["class_for", "get", "load_model", "load_processor", "names", "register_model"]

_registry: Registry[DiffusionModel] = Registry(
    "model type", "dlm_decode.models", "dlm_decode.models"
)
M = TypeVar("M", bound="type[DiffusionModel]")


def register_model(model_type: str):
    """Class decorator: checkpoints of `model_type` load here and by transformers' Auto classes.

    The class needs `config_class`, whose `model_type` equals the argument.
    """

    def decorate(cls: M) -> M:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

        AutoConfig.register(model_type, cls.config_class, exist_ok=True)
        AutoModel.register(cls.config_class, cls, exist_ok=True)
        AutoModelForCausalLM.register(cls.config_class, cls, exist_ok=True)
        return _registry.register(model_type)(cls)

    return decorate


def names() -> list[str]:
    """Model types that can be loaded."""
    return _registry.names()


def get(model_type: str) -> type[DiffusionModel]:
    """The class for a model type; raises `UnknownNameError`."""
    return _registry.get(model_type)


def class_for(raw: Mapping[str, Any], path: str = "") -> type[DiffusionModel]:
    """The class that reads a `config.json`: one that claims it, else by its `model_type`.

    Args:
        raw: the file's content.
        path: the checkpoint's folder or hub id.

    Raises:
        UnknownNameError: nothing is registered for the model type.
    """
    parts = [part for part in path.split("/") if part]
    num_named = 2 if parts and parts[-1].startswith("checkpoint-") else 1
    folder = "/".join(parts[-num_named:])
    for name in names():
        if get(name).claims(raw, folder):
            return get(name)
    return get(raw["model_type"])


def __getattr__(name: str):
    """The loading functions, imported on first use because they import transformers."""
    if name in ("load_model", "load_processor"):
        from dlm_decode.models import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
