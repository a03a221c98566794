"""Special token ids: the one place where they stand as numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dlm_decode.errors import CheckpointError

__all__ = ["OFFICIAL", "SpecialIds", "special_ids_of"]


@dataclass(frozen=True)
class SpecialIds:
    """Ids that decoding treats specially.

    Attributes:
        mask: stands at positions that are still to be decoded.
        bos: begins a prompt.
        eos: end of sequence.
        pad: fills rows behind their end.
        stop: ids that end a response unless the caller says otherwise.
        suppress: ids that are never proposed.
        fill: decoded where an infilling model leaves a place empty; not part of the text.
        infill: follows each gap of an infilling template; not part of the text.
        infill_end: ends an infilling template.
    """

    mask: int
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    stop: tuple[int, ...] = ()
    suppress: tuple[int, ...] = ()
    fill: int | None = None
    infill: int | None = None
    infill_end: int | None = None

    @property
    def padding(self) -> tuple[int, ...]:
        """Ids that fill the canvas behind an answer: end of sequence, padding and stop ids."""
        ids = {self.eos, self.pad, *self.stop}
        return tuple(sorted(token for token in ids if token is not None))

    @property
    def unwritten(self) -> tuple[int, ...]:
        """Ids of infilling, which are not part of a response's text."""
        return tuple(token for token in (self.fill, self.infill) if token is not None)


_LLADA = SpecialIds(mask=126336, bos=126080, eos=126081, pad=126081, stop=(126081, 126348))

# The official programs of LLaDA-V and VidLaDA forbid end-of-sequence, begin and both header ids;
# answers end with <|eot_id|>.
_LLADA_V = replace(_LLADA, stop=(126348,), suppress=(126081, 126080, 126346, 126347))

_DREAM = SpecialIds(mask=151666, eos=151643, pad=151643, stop=(151643, 151645))

OFFICIAL: dict[str, SpecialIds] = {
    "llada": _LLADA,
    # LaViDa's official program forbids nothing and stops nowhere.
    "lavida_llada": replace(_LLADA, fill=126086, infill=126085, infill_end=126348),
    "llava_dream": _DREAM,
    "llava_llada": _LLADA_V,
    "llava_llada_video": _LLADA_V,
}
"""By model type, as the published checkpoints use them; their configs name few of these ids."""

_FIELDS = {
    "mask": "mask_token_id",
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "pad": "pad_token_id",
    "stop": "stop_token_ids",
    "suppress": "suppress_token_ids",
    "fill": "fill_token_id",
    "infill": "infill_token_id",
    "infill_end": "infill_end_token_id",
}


def special_ids_of(config: Any) -> SpecialIds:
    """A model's special ids: those of its config, else the official ones of its model type.

    A config that names its own mask id describes a vocabulary of its own, so nothing official is
    mixed into it. The language-model config inside the published LLaDA-V names a `bos_token_id`
    that no prompt uses; without a mask id beside it, it is not read.

    Raises:
        CheckpointError: no mask id in the config, and none known for the model type.
    """
    official = OFFICIAL.get(config.model_type)
    mask = getattr(config, "mask_token_id", None)
    is_own = official is None or mask not in (None, official.mask)
    if mask is not None and is_own:
        ids = SpecialIds(mask=mask)
    elif official is not None:
        ids = official
    else:
        raise CheckpointError(
            f"config of type {config.model_type!r} names no mask_token_id, and none is known for "
            "this type; add it."
        )
    changes: dict[str, Any] = {}
    for field, name in _FIELDS.items():
        value = getattr(config, name, None)
        if value is None or (not is_own and field == "bos"):
            continue
        changes[field] = tuple(value) if isinstance(value, (list, tuple)) else value
    return replace(ids, **changes)
