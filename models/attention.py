"""One call for every attention backend; all of them attend in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from dlm_decode.errors import InvalidInputError

if TYPE_CHECKING:
    from dlm_decode.models.llada import LLaDAAttention

__all__ = ["BACKENDS", "attend", "check_backend"]

BACKENDS = ("sdpa", "eager", "flash_attention_2", "flex_attention")


def check_backend(name: str) -> None:
    """Refuses an unknown or missing attention backend before weights are loaded.

    Raises:
        InvalidInputError: not one of `BACKENDS`, or its package is not installed.
    """
    if name not in BACKENDS:
        raise InvalidInputError(f"attn_implementation {name!r} is unknown; use one of {', '.join(BACKENDS)}.")
    if name == "flash_attention_2":
        from transformers.utils import is_flash_attn_2_available

        if not is_flash_attn_2_available():
            raise InvalidInputError(
                "attn_implementation 'flash_attention_2' needs the flash-attn package and a CUDA device; use 'sdpa'."
            )


def attend(module: LLaDAAttention, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
    """Attention with the backend that the model was loaded with.

    Args:
        module: says the backend (through its config) and the grouping of heads.
        query: `(B, H, Q, d)`.
        key: `(B, H_kv, K, d)`.
        value: `(B, H_kv, K, d)`.
        key_mask: `(B, K)` bool, `True` at real keys; `None` for no padding, and then no mask is built.

    Returns:
        `(B, H, Q, d)`.
    """
    backend = module.config._attn_implementation or "sdpa"
    if backend == "eager":
        return _eager(query, key, value, key_mask)
    if backend == "flex_attention":
        return _flex(query, key, value, key_mask)
    if backend == "flash_attention_2":
        return _flash(module, query, key, value, key_mask)
    mask = None if key_mask is None else key_mask[:, None, None, :]
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1]
    )


def _eager(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None, :], torch.finfo(scores.dtype).min)
    return scores.float().softmax(dim=-1).to(query.dtype) @ value


def _flex(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block_mask = None
    if key_mask is not None:

        def is_real(batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
            return key_mask[batch, k_index]

        sizes = (query.shape[0], None, query.shape[2], key.shape[2])
        block_mask = create_block_mask(is_real, *sizes, device=str(query.device))
    run: Any = torch.compile(flex_attention) if query.device.type == "cuda" else flex_attention
    return run(query, key, value, block_mask=block_mask, enable_gqa=query.shape[1] != key.shape[1])


def _flash(module: LLaDAAttention, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    run = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    mixed, _ = run(module, query, key, value, key_mask, scaling=query.shape[-1] ** -0.5, is_causal=False)
    return mixed.transpose(1, 2)
