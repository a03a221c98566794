"""LLaDA: a Llama-like transformer that attends in both directions, with the layer loop written out.

Source: LLaDA (arXiv 2502.09992) and its published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlm_decode.cache.base import Memory
from dlm_decode.cost import Geometry
from dlm_decode.models import register_model
from dlm_decode.models.attention import Observe, RowProbe, attend, mask_for
from dlm_decode.models.base import DiffusionModel
from dlm_decode.models.configuration import LLaDAConfig
from dlm_decode.models.key_names import register_renames

if TYPE_CHECKING:
    from dlm_decode.vision.inside_run import InsideForward

Keep = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

__all__ = ["LLaDABackbone", "LLaDALayer", "LLaDAModelLM", "RMSNorm", "rotary"]


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 and cast back before the weight is applied."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalises the last axis of `(..., D)`."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


def rotary(
    position_ids: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines `(B, 1, S, head_dim)` for half-split rotation, computed in float32.

    Args:
        position_ids: `(B, S)`.
        head_dim: even.
        theta: base of the frequencies.
        dtype: of the result.
    """
    exponent = (
        torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device) / head_dim
    )
    angles = position_ids[:, None, :, None].float() * (1.0 / theta**exponent)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


class LLaDAAttention(nn.Module):
    """Bidirectional attention with rotary positions and grouped keys and values."""

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        self.config = config
        self.head_dim = head_dim
        self.is_causal = False
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        kv_width = config.num_key_value_heads * head_dim
        has_bias = config.has_qkv_bias
        self.q_proj = nn.Linear(width, width, bias=has_bias)
        self.k_proj = nn.Linear(width, kv_width, bias=has_bias)
        self.v_proj = nn.Linear(width, kv_width, bias=has_bias)
        self.o_proj = nn.Linear(width, width, bias=False)

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def project(
        self, hidden: Tensor, cos_sin: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `(B, H, S, d)`, keys and values `(B, H_kv, S, d)` of `(B, S, D)`."""
        query = _rotate(self._heads(self.q_proj(hidden)), *cos_sin)
        key = _rotate(self._heads(self.k_proj(hidden)), *cos_sin)
        return query, key, self._heads(self.v_proj(hidden))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        """`(B, S, D)` from queries of S positions and keys and values of K."""
        mixed = attend(self, query, key, value, mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def forward(
        self,
        hidden: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        mask: Any,
        keep: Keep | None = None,
        observe: Observe | None = None,
    ) -> Tensor:
        """`(B, S, D)` to `(B, S, D)`; arguments as in `LLaDALayer`."""
        query, key, value = self.project(hidden, cos_sin)
        if keep is not None:
            key, value = keep(key, value)
        if observe is not None:
            observe(query, key)
        return self.mix(query, key, value, mask)


class LLaDAMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """`(..., D)` to `(..., D)`."""
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class LLaDALayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LLaDAAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LLaDAMLP(config)

    def forward(
        self,
        hidden: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        mask: Any,
        keep: Keep | None = None,
        observe: Observe | None = None,
    ) -> Tensor:
        """One layer.

        Args:
            hidden: `(B, S, D)`.
            cos_sin: from `rotary`.
            mask: from `mask_for`.
            keep: takes the keys and values of the S positions, and returns those to attend to.
            observe: shown the queries, and the keys that are attended to.
        """
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(normed, cos_sin, mask, keep, observe)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class LLaDABackbone(nn.Module):
    """Embeddings, layers and final norm, under the key names of the published checkpoints."""

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LLaDALayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        key_mask: Tensor | None = None,
        memory: Memory | None = None,
        probe: RowProbe | None = None,
        inside: InsideForward | None = None,
    ) -> Tensor:
        """See `DiffusionModel.hidden_states`."""
        hidden = inputs_embeds
        cos_sin, mask = self._where(hidden, position_ids, key_mask, memory)
        for index, layer in enumerate(self.layers):
            observe = None if probe is None else probe.at(index)
            if inside is not None:
                shortened = inside.before(index, hidden)
                if shortened is not None:
                    hidden = shortened.hidden
                    places = shortened.position_ids, shortened.key_mask
                    cos_sin, mask = self._where(hidden, *places, memory)
                observe = inside.observe if inside.wants(index) else observe
            hidden = (
                layer(hidden, cos_sin, mask, observe=observe)
                if memory is None
                else memory.run_layer(index, layer, hidden, cos_sin, mask, observe)
            )
        return self.norm(hidden)

    def _where(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        key_mask: Tensor | None,
        memory: Memory | None,
    ) -> tuple[tuple[Tensor, Tensor], Any]:
        """Cosines and sines, and the mask, of the positions that layers work on."""
        config = self.config
        cos_sin = rotary(position_ids, config.head_dim, config.rope_theta, hidden.dtype)
        backend = config._attn_implementation or "sdpa"
        is_cached = memory is not None
        return cos_sin, mask_for(backend, key_mask, hidden.shape[1], is_cached=is_cached)


register_renames("llada")


@register_model("llada")
class LLaDAModelLM(DiffusionModel):
    """LLaDA with its head; also the language part of LLaDA-V.

    Args:
        config: sizes; checked before anything is built.

    Raises:
        CheckpointError: a config that lacks sizes or contradicts itself.
    """

    config_class = LLaDAConfig
    config: LLaDAConfig
    base_model_prefix = "model"
    _no_split_modules = ["LLaDALayer"]  # noqa: RUF012 - the name and form that transformers reads
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: LLaDAConfig) -> None:
        config.check()
        super().__init__(config)
        self.model = self._backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _backbone(self, config: Any) -> LLaDABackbone:
        return LLaDABackbone(config)

    @property
    def geometry(self) -> Geometry:
        """Sizes for the cost model."""
        config = self.config
        return Geometry(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
        )

    def hidden_states(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        key_mask: Tensor | None = None,
        memory: Memory | None = None,
        probe: RowProbe | None = None,
        inside: InsideForward | None = None,
    ) -> Tensor:
        """See `DiffusionModel.hidden_states`."""
        return self.model(inputs_embeds, position_ids, key_mask, memory, probe, inside)

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits `(B, S, V)` of a whole sequence, to look at; decoding asks for single positions.

        Args:
            input_ids: `(B, S)`, or `inputs_embeds` instead.
            inputs_embeds: `(B, S, D)`.
            attention_mask: `(B, S)`, 0 at padding; positions then count real tokens only.
            position_ids: `(B, S)`.
        """
        embeds = (
            self.embed(input_ids)
            if inputs_embeds is None and input_ids is not None
            else inputs_embeds
        )
        if embeds is None:
            raise ValueError("pass input_ids or inputs_embeds.")
        key_mask = None if attention_mask is None else attention_mask.bool()
        if position_ids is None:
            real = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
            real = real if key_mask is None else key_mask.long()
            position_ids = (real.cumsum(dim=1) - 1).clamp_min(0)
        return self.lm_head(self.hidden_states(embeds, position_ids, key_mask))
