"""Autoregressive vision-language models: stock classes of transformers, one architecture per file.

Nothing of a model is written anew here. An `Architecture` says where a stock class keeps its parts:
which ids stand for visual tokens and how they are laid out, which module of its vision tower can be
asked for attention, how positions are counted, and how text and pictures become its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dlm_decode.errors import UnknownNameError

if TYPE_CHECKING:
    from dlm_decode.models.autoregressive.base import Architecture

__all__ = ["architecture_of", "is_autoregressive", "names"]

_CLASSES = {
    "internvl": "InternVl",
    "llava": "Llava",
    "llava_next": "LlavaNext",
    "qwen2_5_vl": "Qwen25Vl",
    "video_llava": "VideoLlava",
}


def names() -> list[str]:
    """Model types that are decoded left to right."""
    return sorted(_CLASSES)


def is_autoregressive(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` belongs to one of these models."""
    return raw.get("model_type") in _CLASSES


def architecture_of(config: Any) -> Architecture:
    """What is known about a model's architecture, by its config.

    Raises:
        UnknownNameError: a model type that is not among `names()`.
    """
    model_type = str(getattr(config, "model_type", None))
    if model_type not in _CLASSES:
        raise UnknownNameError("autoregressive model type", model_type, _CLASSES)
    module = import_module(f"dlm_decode.models.autoregressive.{model_type}")
    return getattr(module, _CLASSES[model_type])(config)
