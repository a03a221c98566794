"""`load`: a model with its tokenizer and image processing, by name, folder or hub id."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dlm_decode import models
from dlm_decode.autoregressive import AutoregressiveVlm
from dlm_decode.errors import InvalidInputError
from dlm_decode.models import autoregressive
from dlm_decode.vlm import DiffusionVlm

__all__ = ["is_autoregressive", "load", "shipped_models"]

_DATA = Path(__file__).parent / "data"


def shipped_models() -> list[str]:
    """Names of the models that come with the package."""
    return sorted(folder.parent.name for folder in _DATA.glob("*/model.safetensors"))


def load(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    device_map: str | dict[str, Any] | None = None,
    attn_implementation: str = "sdpa",
    mask_token_id: int | None = None,
    eos_token_id: int | None = None,
    stop_token_ids: Sequence[int] | None = None,
    suppress_token_ids: Sequence[int] | None = None,
    model_type: str | None = None,
) -> DiffusionVlm | AutoregressiveVlm:
    """Loads a model with its tokenizer and image processing.

    Args:
        name_or_path: a shipped model (`shipped_models()`), a checkpoint folder, or a hub id.
        dtype: of the weights; what the checkpoint says by default.
        device: where to put the model; the current default by default. Not together with
            `device_map`.
        device_map: as in transformers, for models over several devices.
        attn_implementation: `"sdpa"`, `"eager"`, `"flash_attention_2"` or `"flex_attention"`.
        mask_token_id: replaces the checkpoint's; likewise the others.
        eos_token_id: end of sequence.
        stop_token_ids: ids that end a response.
        suppress_token_ids: ids that are never proposed.
        model_type: reads the folder as this kind of diffusion model (`dlm_decode.models.names()`),
            whatever its config says.

    Returns:
        An `AutoregressiveVlm` where the config names one of
        `dlm_decode.models.autoregressive.names()`, else a `DiffusionVlm`.

    Raises:
        CheckpointError: an incomplete or contradictory folder.
        UnknownNameError: a model type that no registered model has.
        InvalidInputError: no such folder, or arguments that exclude each other.
    """
    if device is not None and device_map is not None:
        raise InvalidInputError("device and device_map exclude each other; pass one of them.")
    name = str(name_or_path)
    path = _path(name)
    if is_autoregressive(name, model_type):
        if mask_token_id is not None:
            raise InvalidInputError(
                f"{name!r} is autoregressive and has no mask id; leave mask_token_id out."
            )
        return _load_autoregressive(
            name,
            {
                "dtype": dtype,
                "device": device,
                "device_map": device_map,
                "attn_implementation": attn_implementation,
            },
            {
                "eos_token_id": eos_token_id,
                "stop_token_ids": stop_token_ids,
                "suppress_token_ids": suppress_token_ids,
            },
        )
    processor = models.load_processor(path, model_type)
    model = models.load_model(
        path,
        dtype=dtype,
        device=device,
        device_map=device_map,
        attn_implementation=attn_implementation,
        mask_token_id=mask_token_id,
        eos_token_id=eos_token_id,
        stop_token_ids=stop_token_ids,
        suppress_token_ids=suppress_token_ids,
        model_type=model_type,
    )
    if processor is not None and processor.num_tokens > model.special_ids.mask:
        model.num_valid_tokens = processor.num_tokens
    return DiffusionVlm(model, processor, name=name, generation_defaults=_generation_defaults(path))


def is_autoregressive(name_or_path: str | Path, model_type: str | None = None) -> bool:
    """Whether `load` would give an `AutoregressiveVlm`; reads the config alone.

    Raises:
        CheckpointError: no config, or an unreadable one.
        InvalidInputError: no such folder or hub id.
    """
    from dlm_decode.models.loading import read_config

    raw = {"model_type": model_type} if model_type else read_config(_path(str(name_or_path)))
    return autoregressive.is_autoregressive(raw)


def _path(name: str) -> str:
    return str(_DATA / name) if name in shipped_models() else name


def _load_autoregressive(
    name: str, weights: dict[str, Any], ids: dict[str, Any]
) -> AutoregressiveVlm:
    from dlm_decode.models.autoregressive import loading
    from dlm_decode.models.loading import resolve_dtype

    path = _path(name)
    weights = {**weights, "dtype": resolve_dtype(weights["dtype"])}
    model = loading.load_stock_model(path, **weights)
    return AutoregressiveVlm(
        model,
        loading.load_processor(path, model.config),
        name=name,
        special_ids=loading.special_ids_of_stock(model, **ids),
        generation_defaults=_generation_defaults(path),
    )


def _generation_defaults(path: str) -> dict[str, Any]:
    from transformers.utils.hub import cached_file

    found = cached_file(
        path,
        "generation_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return json.loads(Path(found).read_text(encoding="utf-8")) if found else {}
