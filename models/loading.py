"""From a checkpoint folder or hub id to a model and a processor; contradictions are errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from dlm_decode import models
from dlm_decode.errors import CheckpointError, InvalidInputError
from dlm_decode.models.attention import check_backend
from dlm_decode.models.base import DiffusionModel
from dlm_decode.models.key_names import renamed
from dlm_decode.models.processing import VlmProcessor
from dlm_decode.models.special_ids import special_ids_of

__all__ = ["load_model", "load_processor", "read_config", "resolve_dtype"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_NUM_LISTED = 6


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    device_map: Any = None,
    attn_implementation: str = "sdpa",
    mask_token_id: int | None = None,
    eos_token_id: int | None = None,
    stop_token_ids: Sequence[int] | None = None,
    suppress_token_ids: Sequence[int] | None = None,
    model_type: str | None = None,
) -> DiffusionModel:
    """Loads the weights of a checkpoint; arguments as in `dlm_decode.load`.

    Raises:
        CheckpointError: no config, weights that are missing, unexpected or of another shape than
            the config says.
        UnknownNameError: a model type that nothing is registered for.
        InvalidInputError: no such folder or hub id, an unknown dtype or attention backend.
    """
    check_backend(attn_implementation)
    chosen_dtype = resolve_dtype(dtype)
    name = str(path)
    raw = read_config(name)
    cls = _model_class(raw, name, model_type)
    config = _config(cls, raw)
    overrides = {
        "mask_token_id": mask_token_id,
        "eos_token_id": eos_token_id,
        "stop_token_ids": None if stop_token_ids is None else list(stop_token_ids),
        "suppress_token_ids": None if suppress_token_ids is None else list(suppress_token_ids),
    }
    for key, value in overrides.items():
        if value is not None:
            setattr(config, key, value)
    _check_special_ids(config, name)
    folder = Path(name)
    if folder.is_dir():
        _check_weights(folder, cls, config)
    loaded: Any = cls.from_pretrained(
        name,
        config=config,
        dtype=chosen_dtype,
        device_map=device_map,
        attn_implementation=attn_implementation,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    model, report = loaded
    problems = [
        f"{kind}: {_listed(map(str, report[f'{kind}_keys']))}"
        for kind in ("missing", "unexpected", "mismatched")
        if report.get(f"{kind}_keys")
    ]
    if problems:
        raise CheckpointError(
            f"the weights of {name!r} do not fit its config: {'; '.join(problems)}."
        )
    if device is not None:
        model = model.to(device)
    return model.eval()


def resolve_dtype(dtype: torch.dtype | str | None) -> torch.dtype | str:
    """The dtype by its name; "auto", for the checkpoint's own, where none is given.

    Raises:
        InvalidInputError: no floating dtype of torch.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return "auto" if dtype is None else dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if dtype == "auto":
        return dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidInputError(
            f"dtype {dtype!r} is unknown; use 'float32', 'bfloat16', 'float16' or 'auto'."
        )
    return found


def read_config(name: str) -> dict[str, Any]:
    """The content of `config.json` of a folder or hub id.

    Raises:
        CheckpointError: no such file, or no JSON.
        InvalidInputError: no such folder or hub id.
    """
    folder = Path(name)
    if folder.is_dir():
        path = folder / "config.json"
        if not path.exists():
            raise CheckpointError(f"{name!r} holds no config.json; is it a checkpoint folder?")
    else:
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
            from dlm_decode.loading import shipped_models

            raise InvalidInputError(
                f"no folder {name!r}; pass a checkpoint folder, a hub id such as "
                "'GSAI-ML/LLaDA-V', or a shipped model "
                f"({', '.join(shipped_models()) or 'none'})."
            )
        try:
            path = Path(str(cached_file(name, "config.json")))
        except OSError as error:
            raise InvalidInputError(f"cannot get {name!r} from the hub: {error}") from error
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"config.json of {name!r} is not JSON: {error}.") from None


def _model_class(raw: dict[str, Any], name: str, model_type: str | None) -> Any:
    if model_type is not None:
        return models.get(model_type)
    if raw.get("model_type") is None:
        raise CheckpointError(
            f"config.json of {name!r} has no model_type; pass model_type=, one of "
            f"{', '.join(models.names())}."
        )
    return models.class_for(raw, name)


def _config(cls: Any, raw: dict[str, Any]) -> Any:
    """The config object of a class, whatever model type the file gives."""
    return cls.config_class.from_dict({**raw, "model_type": cls.config_class.model_type})


def _check_special_ids(config: Any, name: str) -> None:
    ids, size = special_ids_of(config), config.vocab_size
    for field, value in vars(ids).items():
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        wrong = [number for number in numbers if size is not None and not 0 <= number < size]
        if wrong:
            raise CheckpointError(
                f"the {field} id {wrong[0]} of {name!r} is outside its vocabulary of {size}; add "
                "the checkpoint's own ids to "
                "config.json (mask_token_id, eos_token_id, stop_token_ids, ...)."
            )


def _check_weights(folder: Path, cls: type[DiffusionModel], config: Any) -> None:
    """Compares names and shapes in the files with the config's, before any weight is read."""
    found = {renamed(key): shape for key, shape in _shapes_in(folder).items()}
    with torch.device("meta"):
        expected = {key: tuple(value.shape) for key, value in cls(config).state_dict().items()}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
        found.pop("lm_head.weight", None)
    wrong = [
        f"{key} is {found[key]} and the config makes it {shape}"
        for key, shape in expected.items()
        if key in found and found[key] != shape
    ]
    missing = [key for key in expected if key not in found]
    unexpected = [key for key in found if key not in expected]
    lists = (("wrong shapes", wrong), ("missing", missing), ("unexpected", unexpected))
    problems = [f"{title}: {_listed(keys)}" for title, keys in lists if keys]
    if problems:
        raise CheckpointError(
            f"the weights in {str(folder)!r} do not fit its config.json: {'; '.join(problems)}."
        )


def _listed(keys: Iterable[str]) -> str:
    keys = list(keys)
    rest = f" and {len(keys) - _NUM_LISTED} more" if len(keys) > _NUM_LISTED else ""
    return ", ".join(keys[:_NUM_LISTED]) + rest


def _shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    shapes: dict[str, tuple[int, ...]] = {}
    for name in files:
        if not (folder / name).exists():
            raise CheckpointError(
                f"{str(folder)!r} lacks {name}; download it again, or convert the weights to "
                "safetensors."
            )
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    shapes[key] = tuple(file.get_slice(key).get_shape())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"cannot read {str(folder / name)!r}: {error}. It may be cut off."
            ) from error
    return shapes


def load_processor(path: str | Path, model_type: str | None = None) -> VlmProcessor | None:
    """Tokenizer and image processing of a checkpoint; `None` where it has no tokenizer.

    Arguments as in `dlm_decode.load`.

    Raises:
        CheckpointError: tokenizer files that cannot be read.
        InvalidInputError: no such folder or hub id.
    """
    name = str(path)
    raw = read_config(name)
    folder = Path(name)
    if folder.is_dir():
        if not any((folder / file).exists() for file in _TOKENIZER_FILES):
            return None
    elif cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False) is None:
        return None
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(name)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise CheckpointError(f"cannot read the tokenizer of {name!r}: {error}") from error
    return VlmProcessor(tokenizer, _config(_model_class(raw, name, model_type), raw))
