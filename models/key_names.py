"""Key names of the text-only LLaDA checkpoints, which keep OLMo's; the tensors are the same."""

from __future__ import annotations

import re

from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

__all__ = ["register_renames", "renamed"]

_BLOCK = r"^model\.transformer\.blocks\.(\d+)\."
_RENAMES = {
    r"^model\.transformer\.wte\.weight$": r"model.embed_tokens.weight",
    r"^model\.transformer\.ln_f\.weight$": r"model.norm.weight",
    r"^model\.transformer\.ff_out\.weight$": r"lm_head.weight",
    _BLOCK + r"(q_proj|k_proj|v_proj)\.weight$": r"model.layers.\1.self_attn.\2.weight",
    _BLOCK + r"attn_out\.weight$": r"model.layers.\1.self_attn.o_proj.weight",
    _BLOCK + r"ff_proj\.weight$": r"model.layers.\1.mlp.gate_proj.weight",
    _BLOCK + r"up_proj\.weight$": r"model.layers.\1.mlp.up_proj.weight",
    _BLOCK + r"ff_out\.weight$": r"model.layers.\1.mlp.down_proj.weight",
    _BLOCK + r"attn_norm\.weight$": r"model.layers.\1.input_layernorm.weight",
    _BLOCK + r"ff_norm\.weight$": r"model.layers.\1.post_attention_layernorm.weight",
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
