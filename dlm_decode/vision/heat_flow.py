"""Heat flow on a graph of tokens: a seed of importance spreads to tokens that look alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "Graph",
    "Symmetry",
    "attention_graph",
    "diffuse",
    "heat_step",
    "knn_graph",
    "normalized",
]

Symmetry = Literal["directed", "or", "and"]

_SCORES_AT_ONCE = 2**24  # float32 numbers
_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Graph:
    """A row-stochastic matrix W as E edges, on the host in float64.

    Sums over edges are made in a fixed order there, so that the same picture keeps the same tokens
    every time; a scattered sum on an accelerator has none.

    Attributes:
        sources: `(E,)` long, rows of W.
        targets: `(E,)` long, columns.
        weights: `(E,)` float64, those of a source sum to 1.
        num_nodes: N.
    """

    sources: Tensor
    targets: Tensor
    weights: Tensor
    num_nodes: int

    def spread(self, energy: Tensor) -> Tensor:
        """`W^T energy`: every node hands its `(N,)` energy to its targets."""
        handed = self.weights * energy[self.sources]
        return torch.bincount(self.targets, weights=handed, minlength=self.num_nodes)


def knn_graph(
    features: Tensor, num_neighbors: int, tau: float, symmetry: Symmetry = "directed"
) -> Graph:
    """Every token with its nearest ones by cosine, weighted by a softmax of tau times the cosine.

    Args:
        features: `(N, D)`; similarities are taken in float32 on their device, some rows at a time.
        num_neighbors: k, at most N - 1; a token is not its own neighbour, unless it has none.
        tau: sharpness of the softmax.
        symmetry: `"directed"`: the k nearest; `"or"`: an edge both ways where either token has the
            other among its k nearest; `"and"`: where both have.
    """
    unit = functional.normalize(features.float(), dim=-1)
    num_nodes = len(unit)
    k = min(num_neighbors, num_nodes - 1)
    values, neighbors, first = [], [], 0
    for rows in unit.split(max(1, _SCORES_AT_ONCE // num_nodes)):
        cosines = rows @ unit.T
        cosines.diagonal(first).fill_(float("-inf"))
        top = cosines.topk(k, dim=-1)
        values.append(top.values)
        neighbors.append(top.indices)
        first += len(rows)
    cosine, target = torch.cat(values).cpu().double(), torch.cat(neighbors).cpu()
    source = torch.arange(num_nodes)[:, None].expand_as(target)
    edges = (source.flatten(), target.flatten(), cosine.flatten())
    if symmetry != "directed":
        edges = _symmetric(*edges, num_nodes, at_least=1 if symmetry == "or" else 2)
    sources, targets, cosines = _with_loops(*edges, num_nodes)
    return _softmax_graph(sources, targets, tau * cosines, num_nodes)


def _symmetric(
    sources: Tensor, targets: Tensor, cosines: Tensor, num_nodes: int, at_least: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Edges that are there in at least so many of the two directions, both ways."""
    low, high = torch.minimum(sources, targets), torch.maximum(sources, targets)
    pairs, which, counts = (low * num_nodes + high).unique(return_inverse=True, return_counts=True)
    # The two directions differ by rounding.
    by_pair = torch.zeros(len(pairs), dtype=cosines.dtype).index_add_(0, which, cosines) / counts
    is_edge = counts >= at_least
    low, high, cosine = pairs[is_edge] // num_nodes, pairs[is_edge] % num_nodes, by_pair[is_edge]
    return torch.cat([low, high]), torch.cat([high, low]), torch.cat([cosine, cosine])


def _with_loops(
    sources: Tensor, targets: Tensor, cosines: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A loop for each node without an edge, so that its energy stays with it."""
    alone = (torch.bincount(sources, minlength=num_nodes) == 0).nonzero()[:, 0]
    ones = cosines.new_ones(len(alone))
    return torch.cat([sources, alone]), torch.cat([targets, alone]), torch.cat([cosines, ones])


def _softmax_graph(sources: Tensor, targets: Tensor, scores: Tensor, num_nodes: int) -> Graph:
    highest = torch.full((num_nodes,), float("-inf"), dtype=scores.dtype)
    highest = highest.scatter_reduce(0, sources, scores, "amax")
    weights = (scores - highest[sources]).exp()
    totals = torch.bincount(sources, weights=weights, minlength=num_nodes)
    return Graph(sources, targets, weights / totals[sources], num_nodes)


def attention_graph(keys: Tensor) -> Graph:
    """Every token with every token, weighted by a softmax of the scaled products of `(N, d)`."""
    num_nodes = len(keys)
    keys = keys.float()
    weights = (keys @ keys.T * keys.shape[-1] ** -0.5).softmax(dim=-1).cpu().double()
    weights = weights / weights.sum(dim=-1, keepdim=True)
    sources, targets = torch.cartesian_prod(*[torch.arange(num_nodes)] * 2).unbind(-1)
    return Graph(sources, targets, weights.flatten(), num_nodes)


def normalized(values: Tensor) -> Tensor:
    """`(N,)` numbers >= 0, scaled to sum 1; the same everywhere when all of them are 0."""
    total = values.sum()
    return values / total if total > 0 else torch.full_like(values, 1 / len(values))


def heat_step(energy: Tensor, seed: Tensor, graph: Graph, alpha: float) -> Tensor:
    """`(1 - alpha) seed + alpha W^T energy`."""
    return (1 - alpha) * seed + alpha * graph.spread(energy)


def diffuse(seed: Tensor, graph: Graph, alpha: float, num_steps: int | None) -> Tensor:
    """The seed after some steps of heat flow that starts from it and returns to it.

    Args:
        seed: `(N,)` float64, sums to 1; so does the result.
        graph: of N nodes.
        alpha: share of the energy that flows, in [0, 1).
        num_steps: `None` for the fixed point, which is reached to 1e-12: every step brings the
            energy nearer to it by the factor alpha.
    """
    if num_steps is None:
        num_steps = math.ceil(math.log(_TOLERANCE / 2) / math.log(alpha)) if alpha > 0 else 1
    energy = seed
    for _ in range(num_steps):
        energy = normalized(heat_step(energy, seed, graph, alpha))
    return energy
