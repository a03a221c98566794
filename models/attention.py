"""One call for every attention backend; all of them attend in both directions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from dlm_decode.errors import InvalidInputError

if TYPE_CHECKING:
    from dlm_decode.models.llada import LLaDAAttention

__all__ = [
    "BACKENDS",
    "Observe",
    "RowProbe",
    "attend",
    "attention_rows",
    "check_backend",
    "mask_for",
]

Observe = Callable[[Tensor, Tensor], None]
"""Is shown the queries `(B, H, Q, d)` and keys `(B, H_kv, K, d)` of a layer, beside `attend`."""

_SCORES_AT_ONCE = 2**24  # float32 numbers

BACKENDS = ("sdpa", "eager", "flash_attention_2", "flex_attention")


def check_backend(name: str) -> None:
    """Refuses an unknown or missing attention backend before weights are loaded.

    Raises:
        InvalidInputError: not one of `BACKENDS`, or its package is not installed.
    """
    if name not in BACKENDS:
        raise InvalidInputError(
            f"attn_implementation {name!r} is unknown; use one of {', '.join(BACKENDS)}."
        )
    if name == "flash_attention_2":
        from transformers.utils.import_utils import is_flash_attn_2_available

        if not is_flash_attn_2_available():
            raise InvalidInputError(
                "attn_implementation 'flash_attention_2' needs the flash-attn package and a CUDA "
                "device; use 'sdpa'."
            )


def mask_for(
    backend: str, key_mask: Tensor | None, num_queries: int, *, is_cached: bool = False
) -> Any:
    """What `attend` takes as `mask`, made once for all layers.

    Args:
        backend: one of `BACKENDS`.
        key_mask: `(B, K)` bool, `True` at real keys; `None` for no padding, and then no mask is
            built.
        num_queries: Q.
        is_cached: queries may be a part of the sequence. Padded batches then go through sdpa,
            whatever the backend.

    Returns:
        A bool tensor that broadcasts over heads and queries, a block mask for flex attention, or
        `None`. No `(Q, K)` tensor.
    """
    if key_mask is None:
        return None
    if is_cached:
        return key_mask[:, None, None, :]
    if backend == "flash_attention_2":
        return key_mask
    if backend != "flex_attention":
        return key_mask[:, None, None, :]
    from torch.nn.attention.flex_attention import create_block_mask

    def is_real(batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return key_mask[batch, k_index]

    num_rows, num_keys = key_mask.shape
    return create_block_mask(
        is_real, num_rows, None, num_queries, num_keys, device=str(key_mask.device)
    )


def attend(module: LLaDAAttention, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """Attention with the backend that the model was loaded with.

    Args:
        module: says the backend (through its config) and the grouping of heads.
        query: `(B, H, Q, d)`.
        key: `(B, H_kv, K, d)`.
        value: `(B, H_kv, K, d)`.
        mask: from `mask_for`.

    Returns:
        `(B, H, Q, d)`.
    """
    backend = module.config._attn_implementation or "sdpa"
    if backend == "eager":
        return _eager(query, key, value, mask)
    is_grouped = query.shape[1] != key.shape[1]
    is_dense = isinstance(mask, Tensor) and mask.dim() == 4
    if backend == "flex_attention" and not is_dense:
        return _flex(query.device.type)(query, key, value, block_mask=mask, enable_gqa=is_grouped)
    if backend == "flash_attention_2" and not is_dense:
        return _flash(module, query, key, value, mask)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=is_grouped
    )


def attention_rows(query: Tensor, key: Tensor, key_mask: Tensor | None) -> Tensor:
    """Softmax attention of a few queries, mean over heads, in float32 whatever the dtype.

    It is computed from queries and keys alone, so every backend gives the same rows, and none has
    to hold the attention of the whole sequence.

    Args:
        query: `(B, H, Q, d)`, the asked rows only.
        key: `(B, H_kv, K, d)`.
        key_mask: `(B, K)` bool, `True` at real keys; `None` for no padding.

    Returns:
        `(B, Q, K)`; each row sums to 1.
    """
    num_kv_heads = key.shape[1]
    per_query = query.shape[0] * query.shape[1] * key.shape[2]
    key = key.float().transpose(-1, -2)
    parts = []
    for part in query.split(max(1, _SCORES_AT_ONCE // per_query), dim=2):
        grouped = part.float().unflatten(1, (num_kv_heads, -1)).flatten(2, 3)  # (B, H_kv, G Q, d)
        scores = grouped @ key * part.shape[-1] ** -0.5
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask[:, None, None], float("-inf"))
        parts.append(scores.softmax(dim=-1).unflatten(2, (-1, part.shape[2])).mean(dim=(1, 2)))
    return torch.cat(parts, dim=1)


@dataclass
class RowProbe:
    """Attention rows on request: what chosen queries of one forward attend to.

    The layer loop shows it the queries and keys of each layer; it computes the asked rows beside
    the layer's own attention, which stays with its backend. Results are means over heads and over
    the asked layers.

    Attributes:
        rows: `(R,)` rows of the forward that are asked about.
        columns: `(R, Q)` places of the queries among the fed positions.
        num_keys: leading keys whose attention is kept; the softmax is over all keys.
        key_mask: `(B, K)` bool of the forward, `True` at real keys; `None` for no padding.
        layers: layers that are asked; `None` for all.
    """

    rows: Tensor
    columns: Tensor
    num_keys: int
    key_mask: Tensor | None = None
    layers: Collection[int] | None = None

    def __post_init__(self) -> None:
        self._total: Tensor | None = None
        self._num_layers = 0

    def at(self, layer: int) -> Observe | None:
        """What observes layer `layer`; `None` where nothing is asked."""
        return self._observe if self.layers is None or layer in self.layers else None

    @property
    def mean(self) -> Tensor:
        """`(R, Q, num_keys)` float32, once the forward has run."""
        if self._total is None:
            raise AssertionError("no asked layer has run")
        return self._total / self._num_layers

    def _observe(self, query: Tensor, key: Tensor) -> None:
        asked = query[self.rows[:, None], :, self.columns].transpose(1, 2)
        key_mask = None if self.key_mask is None else self.key_mask[self.rows]
        seen = attention_rows(asked, key[self.rows], key_mask)[..., : self.num_keys]
        self._total = seen if self._total is None else self._total + seen
        self._num_layers += 1


def _eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.float().softmax(dim=-1).to(query.dtype) @ value


@cache
def _flex(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Without compilation flex attention is correct and holds all scores; it is fused on CUDA only.
    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention


def _flash(
    module: LLaDAAttention, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None
) -> Tensor:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    run = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    mixed, _ = run(
        module, query, key, value, key_mask, scaling=query.shape[-1] ** -0.5, is_causal=False
    )
    return mixed.transpose(1, 2)
