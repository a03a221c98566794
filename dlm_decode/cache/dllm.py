"""dLLM-Cache: features of prompt and response are kept, each refreshed at its own interval."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from dlm_decode.cache import register_cache
from dlm_decode.cache.base import FULL_FEED, Cache, Clock, Fed, Feed, Memory, RowShape
from dlm_decode.cache.prefix import check_interval
from dlm_decode.cost import Work
from dlm_decode.errors import InvalidInputError, UnknownNameError

if TYPE_CHECKING:
    from dlm_decode.models.attention import Observe
    from dlm_decode.models.llada import LLaDALayer

__all__ = ["Dllm"]

_LIKENESS_STEPS = 2**14  # similarities are told apart in steps of 6e-5


@register_cache("dllm")
@dataclass(frozen=True)
class Dllm:
    """Keeps keys, values, attention and MLP outputs of every layer; recomputes parts of them.

    Everything is fed, and each layer adds kept outputs to a fresh residual stream. Between
    refreshes of the response, each layer recomputes the response positions whose values changed
    most (lowest cosine similarity to the kept value).

    Args:
        prompt_interval: forwards between refreshes of the prompt.
        gen_interval: forwards between refreshes of the response (and a suffix).
        transfer_ratio: share of the response that is recomputed between its refreshes, rounded
            down.
        ties: positions whose input did not change are equally similar. `"position"` takes the lower
            ones first; `"rounding"` leaves it to the last bits, as the reference does, so that
            results depend on the CPU and on the batch.

    Raises:
        InvalidInputError: an interval below 1, or a share outside [0, 1].
        UnknownNameError: another value of `ties`.

    Source: dLLM-Cache (arXiv 2506.06295); as LLaDA-V's hook does it: intervals count the forwards
    of a response, not those of a block.
    """

    prompt_interval: int = 25
    gen_interval: int = 7
    transfer_ratio: float = 0.25
    ties: Literal["position", "rounding"] = "position"

    def __post_init__(self) -> None:
        check_interval("prompt_interval", self.prompt_interval)
        check_interval("gen_interval", self.gen_interval)
        ratio = self.transfer_ratio
        is_number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
        if not (is_number and 0 <= ratio <= 1):
            raise InvalidInputError(
                f"transfer_ratio must be from 0 to 1, got {self.transfer_ratio!r}."
            )
        if self.ties not in ("position", "rounding"):
            raise UnknownNameError("ties", str(self.ties), ("position", "rounding"))

    def plan(self, clock: Clock) -> Feed:
        """What is refreshed."""
        prompt = clock.forwards % self.prompt_interval == 0
        response = clock.forwards % self.gen_interval == 0
        if prompt and response:
            return FULL_FEED
        return _PartialFeed(
            "partial",
            refreshes_prompt=prompt,
            refreshes_response=response,
            ratio=self.transfer_ratio,
            rounds=self.ties == "position",
        )

    def start(self) -> Cache:
        """An empty cache."""
        return _DllmCache()


@dataclass(frozen=True)
class _PartialFeed(Feed):
    refreshes_prompt: bool = False
    refreshes_response: bool = False
    ratio: float = 0.0
    rounds: bool = True

    def num_selected(self, num_response: int) -> int:
        return num_response if self.refreshes_response else int(self.ratio * num_response)

    def work(self, row: RowShape) -> tuple[Work, ...]:
        num_response = row.length - row.num_prompt
        selected = self.num_selected(num_response)
        probed = 0 if self.refreshes_response or self.ratio == 0 else num_response - selected
        queries = (row.num_prompt if self.refreshes_prompt else 0) + selected
        return (Work(queries, queries * row.length, probed),) * row.num_layers


@dataclass
class _DllmCache:
    """By layer: keys and values `(rows, H_kv, S, d)`, attention and MLP outputs `(rows, S, D)`."""

    layers: list[list[Tensor]] = field(default_factory=list)

    def memory(self, fed: Fed) -> Memory:
        return _DllmMemory(self, fed)

    def crop(self, count: int) -> None:
        self.layers = [
            [part[..., count:, :].contiguous() for part in layer] for layer in self.layers
        ]

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for layer in self.layers for part in layer)


@dataclass(frozen=True)
class _DllmMemory:
    cache: _DllmCache
    fed: Fed

    def run_layer(
        self,
        index: int,
        layer: LLaDALayer,
        hidden: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        mask: Any,
        observe: Observe | None = None,
    ) -> Tensor:
        feed = self.fed.feed
        if not isinstance(feed, _PartialFeed):
            query, key, value = layer.self_attn.project(layer.input_layernorm(hidden), cos_sin)
            if observe is not None:
                observe(query, key)
            attention = layer.self_attn.mix(query, key, value, mask)
            middle = hidden + attention
            change = layer.mlp(layer.post_attention_layernorm(middle))
            self._store(index, [key, value, attention, change])
            return middle + change

        if observe is not None:
            raise AssertionError("attention rows need a forward that computes every position")
        key, value, attention, change = self._load(index)
        normed = layer.input_layernorm(hidden)
        columns = self._fresh_columns(layer, normed, value, feed)
        if columns.shape[1] == 0:
            return hidden + attention + change
        cos, sin = (part.take_along_dim(columns[:, None, :, None], dim=2) for part in cos_sin)
        query, fresh_key, fresh_value = layer.self_attn.project(_take(normed, columns), (cos, sin))
        at = columns[:, None, :, None].expand_as(fresh_key)
        key = key.scatter(2, at, fresh_key)
        value = value.scatter(2, at, fresh_value)
        attention = _put(attention, columns, layer.self_attn.mix(query, key, value, mask))
        middle = hidden + attention
        fresh_change = layer.mlp(layer.post_attention_layernorm(_take(middle, columns)))
        change = _put(change, columns, fresh_change)
        self._store(index, [key, value, attention, change])
        return middle + change

    def _fresh_columns(
        self, layer: LLaDALayer, normed: Tensor, kept: Tensor, feed: _PartialFeed
    ) -> Tensor:
        """`(R, n)` sequence columns that this layer recomputes."""
        first, total = self.fed.num_prompt, normed.shape[1]
        rows, device = normed.shape[0], normed.device
        parts = []
        if feed.refreshes_prompt:
            parts.append(torch.arange(first, device=device).expand(rows, -1))
        if feed.refreshes_response:
            parts.append(torch.arange(first, total, device=device).expand(rows, -1))
        elif count := feed.num_selected(total - first):
            fresh = layer.self_attn.v_proj(normed[:, first:])
            old = kept[:, :, first:].transpose(1, 2).flatten(2)
            likeness = functional.cosine_similarity(fresh, old, dim=-1)
            if feed.rounds:
                likeness = (likeness * _LIKENESS_STEPS).round()
                least = likeness.argsort(dim=1, stable=True)[:, :count]
            else:
                least = likeness.topk(count, dim=1, largest=False).indices
            parts.append(least + first)
        if not parts:
            return torch.empty(rows, 0, dtype=torch.long, device=device)
        return torch.cat(parts, dim=1)

    def _load(self, index: int) -> list[Tensor]:
        stored = self.cache.layers[index]
        if len(self.fed.rows) == self.fed.num_rows:
            return stored
        return [part[self.fed.rows] for part in stored]

    def _store(self, index: int, parts: list[Tensor]) -> None:
        layers, fed = self.cache.layers, self.fed
        is_all = len(fed.rows) == fed.num_rows
        if index == len(layers):
            layers.append([part.new_zeros(fed.num_rows, *part.shape[1:]) for part in parts])
        if is_all:
            layers[index] = parts
            return
        for stored, part in zip(layers[index], parts, strict=True):
            stored[fed.rows] = part


def _take(states: Tensor, columns: Tensor) -> Tensor:
    return states.take_along_dim(columns[:, :, None], dim=1)


def _put(states: Tensor, columns: Tensor, fresh: Tensor) -> Tensor:
    return states.scatter(1, columns[:, :, None].expand_as(fresh), fresh)
