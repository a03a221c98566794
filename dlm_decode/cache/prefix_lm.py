"""Prefix language model: the prompt is read once, by itself; the response attends to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlm_decode.cache import register_cache
from dlm_decode.cache.base import Cache, Clock, Fed, Feed, Memory, RowShape
from dlm_decode.cache.window import KeyValues
from dlm_decode.cost import Work

if TYPE_CHECKING:
    from dlm_decode.models.attention import Observe
    from dlm_decode.models.llada import LLaDALayer

__all__ = ["PrefixLm"]


@register_cache("prefix_lm")
@dataclass(frozen=True)
class PrefixLm:
    """Prompt positions attend to the prompt only, so their keys and values never change.

    A response begins with one forward over its prompt; every other forward feeds the canvas, and a
    suffix, against what the prompt's left. It is another attention pattern and not an approximation
    that a refresh could undo: tokens differ from those without it. Where logits belong to the next
    token, the prompt's last state speaks for the first canvas position, whatever else is committed.

    Source: LaViDa (arXiv 2505.16839), prefix-DLM, at inference.
    """

    reads_prompt_alone = True

    def plan(self, clock: Clock) -> tuple[Feed, ...]:
        """The canvas; at first, the prompt before it."""
        return (_RESPONSE,) if clock.forwards else (_PREFILL, _RESPONSE)

    def start(self) -> Cache:
        """An empty cache."""
        return _PromptCache()


@dataclass(frozen=True)
class _Prefill(Feed):
    def work(self, row: RowShape) -> tuple[Work, ...]:
        return (Work(row.num_prompt, row.num_prompt**2),) * row.num_layers

    def num_keys(self, row: RowShape) -> int:
        return row.num_prompt


_PREFILL = _Prefill("prefill", None, 0)
_RESPONSE = Feed("suffix", 0, is_detached=True)


@dataclass
class _PromptCache(KeyValues):
    """Keys and values of the prompt."""

    def memory(self, fed: Fed) -> Memory:
        return _PromptMemory(self, fed)


@dataclass(frozen=True)
class _PromptMemory:
    cache: _PromptCache
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
        if not isinstance(self.fed.feed, _Prefill):
            return layer(hidden, cos_sin, mask, partial(self._keep, _behind, index), observe)
        mask = None if mask is None else mask[..., : self.fed.num_prompt]
        return layer(hidden, cos_sin, mask, partial(self._keep, _into, index), observe)

    def _keep(self, how: _How, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return (
            how(self.cache.keys, index, key, self.fed),
            how(self.cache.values, index, value, self.fed),
        )


_How = Callable[[list[Tensor], int, Tensor, Fed], Tensor]


def _into(store: list[Tensor], index: int, fresh: Tensor, fed: Fed) -> Tensor:
    """Stores what the prompt gave."""
    if index == len(store):
        store.append(fresh.new_zeros(fed.num_rows, *fresh.shape[1:]))
    store[index][fed.rows] = fresh
    return fresh


def _behind(store: list[Tensor], index: int, fresh: Tensor, fed: Fed) -> Tensor:
    """What the prompt gave, and the response behind it."""
    is_all = len(fed.rows) == fed.num_rows
    return torch.cat([store[index] if is_all else store[index][fed.rows], fresh], dim=2)
