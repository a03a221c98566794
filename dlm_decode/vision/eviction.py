"""Runs a `CacheStage`: watches the prefill, and shortens its cache.

B rows, S columns of the prefill, P positions of a row's prompt, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from dlm_decode.canvas import Prompt
from dlm_decode.errors import InvalidInputError
from dlm_decode.registry import describe
from dlm_decode.vision.attention_look import Show, looking_at
from dlm_decode.vision.base import Stage
from dlm_decode.vision.cache_stage import CacheStage, CacheView, Eviction
from dlm_decode.vision.inside import InsideStage, layout_of

__all__ = ["Evicted", "Evictor"]

_QUERIES_AT_ONCE = 128


@dataclass(frozen=True)
class Evicted:
    """What is left of the prompts.

    Attributes:
        mask: `(B, K)` long, 1 at what is left of each row, on the right.
        lengths: how much that is, by row.
        num_visual: visual tokens among it, by row and layer.
    """

    mask: Tensor
    lengths: tuple[int, ...]
    num_visual: tuple[tuple[int, ...], ...]


class Evictor:
    """The stage of one response that shortens the cache, if there is one.

    Args:
        stages: all stages of the response.
        num_layers: L.

    Raises:
        InvalidInputError: two such stages, or one beside stages between layers, whose caches are of
            unequal lengths.
    """

    def __init__(self, stages: Sequence[Stage], num_layers: int) -> None:
        own = [stage for stage in stages if isinstance(stage, CacheStage)]
        inside = [
            stage for stage in stages if isinstance(stage, InsideStage) and stage.layers(num_layers)
        ]
        if len(own) > 1 or (own and inside):
            names = [describe(stage)["name"] for stage in (*own, *inside)]
            raise InvalidInputError(
                f"stages {names} cannot work together: the cache is shortened once behind the "
                "prefill, and all layers must have cached the same; choose one of them."
            )
        self._stage = own[0] if own else None
        self._received: list[list[Tensor]] = []  # by layer and row
        self._num_layers = num_layers

    @property
    def _is_reading(self) -> bool:
        return self._stage is not None and self._stage.reads_attention()

    def num_scores(self, length: int) -> int:
        """Pairs of a query and a key that are scored for the stage, in each layer of a prefill."""
        return length**2 if self._is_reading else 0

    @contextmanager
    def watching(self, text_model: Any, prompts: Callable[[], Sequence[Prompt]]) -> Iterator[None]:
        """Sums up the attention of the prefill that runs inside, where the stage asks for it.

        Args:
            text_model: transformers' text model, with its `layers`.
            prompts: asked once a layer runs; one per row, padded on the left.
        """
        with ExitStack() as stack:
            if self._is_reading:
                self._received = [[] for _ in range(self._num_layers)]
                for sums, layer in zip(self._received, text_model.layers, strict=True):
                    show = _summing(sums, prompts)
                    stack.enter_context(looking_at(layer.self_attn, show, lambda: True))
            yield

    def evict(self, cache: Any, prompts: Sequence[Prompt]) -> Evicted | None:
        """Shortens the cache as the stage says; `None` where everything stays.

        Args:
            cache: of the prefill, just run; its layers are replaced.
            prompts: as the language model read them, one per row.

        Raises:
            InvalidInputError: layers that do not keep the whole prompt, or a stage that keeps
                unequal numbers of positions.
        """
        if self._stage is None:
            return None
        plans = [
            [self._plan(self._stage, row, prompt, layer) for layer in range(self._num_layers)]
            for row, prompt in enumerate(prompts)
        ]
        if all(plan is None for row in plans for plan in row):
            return None
        device = prompts[0].ids.device
        kept = [
            [
                Eviction(torch.arange(prompt.length, device=device)) if plan is None else plan
                for plan in row
            ]
            for row, prompt in zip(plans, prompts, strict=True)
        ]
        lengths = [{len(plan.index) for plan in row} for row in kept]
        if any(len(counts) > 1 for counts in lengths):
            raise InvalidInputError(
                f"stage {describe(self._stage)['name']!r} keeps {lengths} positions of the rows; a "
                "row must keep equally many in every layer."
            )
        counts = tuple(row.pop() for row in lengths)
        for number, layer in enumerate(cache.layers):
            if type(layer) is not DynamicLayer:
                raise InvalidInputError(
                    f"layer {number} caches in a {type(layer).__name__}; only caches that keep the "
                    "whole prompt (DynamicLayer) can be shortened behind the prefill."
                )
            own = [row[number] for row in kept]
            states = (layer.keys, layer.values)
            spans = [prompt.length for prompt in prompts]
            layer.keys, layer.values = (_gathered(part, own, spans) for part in states)
        columns = torch.arange(max(counts), device=device)
        starts = max(counts) - torch.tensor(counts, device=device)
        return Evicted(
            (columns >= starts[:, None]).long(),
            counts,
            tuple(
                tuple(int(prompt.is_visual[plan.index].sum()) for plan in row)
                for prompt, row in zip(prompts, kept, strict=True)
            ),
        )

    def _plan(self, stage: CacheStage, row: int, prompt: Prompt, layer: int) -> Eviction | None:
        received = self._received[layer][row] if self._received else None
        return stage.evict(CacheView(layer, prompt.ids, layout_of(prompt), received))


def _gathered(states: Tensor | None, kept: Sequence[Eviction], lengths: Sequence[int]) -> Tensor:
    """`(B, H, K, d)` what is left of `(B, H, S, d)`, on the right behind zeros."""
    assert states is not None, "the prefill has run"
    width = max(len(plan.index) for plan in kept)
    out = states.new_zeros(*states.shape[:2], width, states.shape[-1])
    for row, (plan, length) in enumerate(zip(kept, lengths, strict=True)):
        own, count = states[row, :, states.shape[2] - length :], len(plan.index)
        out[row, :, width - count :] = (
            own[:, plan.index] if plan.groups is None else _means(own, plan.groups, count)
        )
    return out


def _means(states: Tensor, groups: Tensor, count: int) -> Tensor:
    """`(H, K, d)` means of the groups in `(H, P, d)`, computed in float32."""
    sums = states.new_zeros(states.shape[0], count, states.shape[2], dtype=torch.float32)
    sums.index_add_(1, groups, states.float())
    return (sums / groups.bincount(minlength=count)[:, None]).to(states.dtype)


def _summing(sums: list[Tensor], prompts: Callable[[], Sequence[Prompt]]) -> Show:
    def show(query: Tensor, key: Tensor, scaling: float) -> None:
        sums[:] = [
            _received(query[row, :, -prompt.length :], key[row, :, -prompt.length :], scaling)
            for row, prompt in enumerate(prompts())
        ]

    return show


def _received(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """`(P,)` float32 causal attention that positions receive, from `(H, P, d)`, `(H_kv, P, d)`.

    Queries go in pieces, so that long prompts need no P x P matrix of every head at once.
    """
    with torch.no_grad():
        keys = key.float().repeat_interleave(len(query) // len(key), dim=0).transpose(-1, -2)
        places = torch.arange(query.shape[1], device=query.device)
        total = torch.zeros(query.shape[1], device=query.device)
        for piece in places.split(_QUERIES_AT_ONCE):
            scores = query[:, piece].float() @ keys * scaling
            scores = scores.masked_fill(places > piece[:, None], float("-inf"))
            total += scores.softmax(dim=-1).mean(dim=0).sum(dim=0)
        return total
