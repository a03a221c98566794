"""From a checkpoint folder or hub id to a stock model of transformers and its processor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import AutoImageProcessor, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from dlm_decode.errors import CheckpointError, InvalidInputError
from dlm_decode.models.attention import check_backend
from dlm_decode.models.autoregressive import architecture_of
from dlm_decode.models.autoregressive.processing import (
    AutoregressiveProcessor,
    read_chat_template,
)
from dlm_decode.models.special_ids import NO_ID, SpecialIds

__all__ = ["load_processor", "load_stock_model", "special_ids_of_stock"]

_LEAST_TRANSFORMERS = "5.24"  # names the cache of a forward `cache`, and returns it so


def load_stock_model(
    path: str,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str | None,
    device_map: Any,
    attn_implementation: str,
) -> Any:
    """The weights in transformers' own class; arguments as in `dlm_decode.load`.

    Raises:
        CheckpointError: weights that are missing, unexpected or of another shape than the config
            says.
        InvalidInputError: an unknown attention backend, weights that are not there, or too old a
            version of transformers.
    """
    if Version(transformers.__version__) < Version(_LEAST_TRANSFORMERS):
        raise InvalidInputError(
            f"autoregressive models need transformers {_LEAST_TRANSFORMERS} or newer, and "
            f"{transformers.__version__} is installed; upgrade it (its newer releases need Python "
            "3.11)."
        )
    check_backend(attn_implementation)
    try:
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            path,
            dtype=dtype,
            device_map=device_map,
            attn_implementation=attn_implementation,
            output_loading_info=True,
        )
    except OSError as error:
        raise InvalidInputError(f"cannot load {path!r}: {error}") from error
    except RuntimeError as error:
        raise CheckpointError(f"the weights of {path!r} do not fit its config: {error}") from error
    model, report = loaded
    problems = [
        f"{kind}: {', '.join(sorted(map(str, report[f'{kind}_keys']))[:6])}"
        for kind in ("missing", "unexpected", "mismatched")
        if report.get(f"{kind}_keys")
    ]
    if problems:
        raise CheckpointError(
            f"the weights of {path!r} do not fit its config: {'; '.join(problems)}."
        )
    return (model if device is None else model.to(device)).eval()


def special_ids_of_stock(
    model: Any,
    *,
    eos_token_id: int | None = None,
    stop_token_ids: Sequence[int] | None = None,
    suppress_token_ids: Sequence[int] | None = None,
) -> SpecialIds:
    """Special ids of a stock model: what its generation config and its text config name."""
    text = model.config.text_config

    def named(name: str) -> Any:
        found = getattr(model.generation_config, name, None)
        return getattr(text, name, None) if found is None else found

    ends = named("eos_token_id") if eos_token_id is None else eos_token_id
    stops = tuple(ends) if isinstance(ends, (list, tuple)) else () if ends is None else (ends,)
    first = stops[0] if stops else None
    pad = named("pad_token_id")
    return SpecialIds(
        mask=NO_ID,
        bos=named("bos_token_id"),
        eos=first,
        pad=first if pad is None or pad < 0 else pad,
        stop=stops if stop_token_ids is None else tuple(stop_token_ids),
        suppress=tuple(suppress_token_ids or ()),
    )


def load_processor(path: str, config: Any) -> AutoregressiveProcessor | None:
    """Tokenizer and image processing; `None` where there is no tokenizer.

    Raises:
        CheckpointError: tokenizer or image processor files that cannot be read.
    """
    if _file(path, "tokenizer.json") is None:
        return None
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise CheckpointError(f"cannot read the tokenizer of {path!r}: {error}") from error
    image_processor = None
    if _file(path, "preprocessor_config.json") or _file(path, "processor_config.json"):
        try:
            image_processor = AutoImageProcessor.from_pretrained(path, backend="pil")
        except (OSError, ValueError, ImportError) as error:
            raise CheckpointError(
                f"cannot read the image processor of {path!r}: {error}"
            ) from error
    return AutoregressiveProcessor(
        tokenizer,
        image_processor,
        architecture_of(config),
        read_chat_template(_file(path, "chat_template.json")),
    )


def _file(path: str, name: str) -> Path | None:
    found = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)
