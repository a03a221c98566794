"""Merges similar tokens two by two, round after round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Merged", "Split", "merge_to"]

Split = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""From cosines `(n, n)` and the number r of tokens to be merged, which tokens may be merged away
and which they may go to; at least r of the former."""


@dataclass(frozen=True)
class Merged:
    """Tokens after merging.

    Attributes:
        index: `(K,)` which token each of them was, ascending; a group stands where its destination
            stood.
        tokens: `(K, D)` float32, means of the groups.
        sizes: `(K,)` tokens in each group.
    """

    index: Tensor
    tokens: Tensor
    sizes: Tensor


def merge_to(tokens: Tensor, count: int, split: Split) -> Merged:
    """Merges `(N, D)` tokens until `count` are left.

    A round takes away at most half of them: each source finds its most similar destination by
    cosine (the first of equals), and the sources with the best match are merged into theirs, as
    means that weigh every original token the same.

    Args:
        tokens: float32.
        count: at least 1.
        split: sources and destinations of a round.
    """
    index = torch.arange(len(tokens), device=tokens.device)
    sizes = torch.ones(len(tokens), device=tokens.device)
    while len(tokens) > count:
        num_merged = min(len(tokens) - count, len(tokens) // 2)
        unit = functional.normalize(tokens, dim=-1)
        cosines = unit @ unit.T
        sources, destinations = split(cosines, num_merged)
        best = cosines[sources[:, None], destinations].max(dim=-1)
        order = best.values.argsort(descending=True, stable=True)[:num_merged]
        gone, into = sources[order], destinations[best.indices[order]]
        sums = (tokens * sizes[:, None]).index_add(0, into, tokens[gone] * sizes[gone, None])
        sizes = sizes.index_add(0, into, sizes[gone])
        is_left = torch.ones_like(index, dtype=torch.bool)
        is_left[gone] = False
        is_touched = torch.zeros_like(is_left)
        is_touched[into] = True
        # Untouched tokens stay bit for bit.
        tokens = torch.where(is_touched[:, None], sums / sizes[:, None], tokens)[is_left]
        index, sizes = index[is_left], sizes[is_left]
    return Merged(index, tokens, sizes)
