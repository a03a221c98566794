"""Key names of the text-only LLaDA checkpoints, which keep OLMo's; the tensors are the same."""

from __future__ import annotations

import re

from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

__all__ = ["register_renames", "renamed"]

_BLOCK = r"^model\.transformer\.blocks\.(\d+)\."
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
# One group per pattern: transformers allows no more.
_RENAMES = {
    r"^model\.transformer\.wte\.": "model.embed_tokens.",
    r"^model\.transformer\.ln_f\.": "model.norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",
    **{rf"{_BLOCK}{old}\.": rf"model.layers.\1.{new}." for old, new in _IN_BLOCK.items()},
}


def renamed(key: str) -> str:
    """The name that our modules use for a checkpoint's key."""
    for source, target in _RENAMES.items():
        key, count = re.subn(source, target, key)
        if count:
            break
    return key


def register_renames(model_type: str) -> None:
    """Lets transformers translate these keys as it reads shards of `model_type` checkpoints."""
    renames: list[WeightConverter | WeightRenaming] = [
        WeightRenaming(source, target) for source, target in _RENAMES.items()
    ]
    register_checkpoint_conversion_mapping(model_type, renames, overwrite=True)
