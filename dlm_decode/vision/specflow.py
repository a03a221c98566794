"""SpecFlow: heat flow on a token graph, quadtree budgets, and sinks for what is pruned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dlm_decode.errors import InvalidInputError
from dlm_decode.vision import register_stage
from dlm_decode.vision.allocation import Leftover, quotas
from dlm_decode.vision.base import TowerNeed
from dlm_decode.vision.heat_flow import (
    Graph,
    Symmetry,
    attention_graph,
    diffuse,
    knn_graph,
    normalized,
)
from dlm_decode.vision.knobs import check_choice, check_count
from dlm_decode.vision.picture import Choice, Picture, PictureStage
from dlm_decode.vision.quadtree import Box, cells_of, partition
from dlm_decode.vision.sinks import mean_and_residual

__all__ = ["EnergyMap", "SpecFlow"]

Seed = Literal["salience", "norm", "uniform"]
GraphKind = Literal["knn", "token_attention", "none"]
Features = Literal["tokens", "tower_keys"]
Allocation = Literal["quadtree", "uniform", "topk"]
DeltaUnit = Literal["mean", "absolute"]
Share = Literal["size", "energy"]
Video = Literal["per_frame", "octree"]
Sinks = Literal["none", "mean", "both"]

_CHOICES: dict[str, Any] = {
    "seed": Seed,
    "graph": GraphKind,
    "features": Features,
    "symmetry": Symmetry,
    "allocation": Allocation,
    "delta_unit": DeltaUnit,
    "leftover": Leftover,
    "share": Share,
    "video": Video,
    "sinks": Sinks,
}


@dataclass(frozen=True)
class EnergyMap:
    """The energy of one part of a picture, and where it is cut.

    Attributes:
        energy: `(F, H, W)` float64 on the host; an image's part, or one frame, has F = 1.
        leaves: boxes that cover it.
        first: number of its first patch in the picture.
    """

    energy: Tensor
    leaves: list[Box]
    first: int

    @property
    def patches(self) -> list[Tensor]:
        """Patches of each leaf, ascending."""
        numbers = torch.arange(self.energy.numel()).reshape(self.energy.shape) + self.first
        return [cells_of(leaf, numbers) for leaf in self.leaves]


@register_stage("specflow")
@dataclass(frozen=True)
class SpecFlow(PictureStage):
    """Prunes by diffused importance with a budget for every region, and condenses the rest.

    In each rectangular part of a picture, importance (`seed`) spreads over a graph of similar
    tokens; the map of the resulting energy is cut where it is uneven; each leaf gets tokens in
    proportion to its energy and keeps its best (the earlier of equals), in prompt order. The mean
    of a picture's pruned patches and the one that the mean explains least follow, one pair for each
    picture. Similarities are taken in float32, the rest in float64 on the host. Needs pictures from
    which no earlier stage took tokens.

    Args:
        keep_ratio: see `PictureStage`, and so for `keep_tokens`, `newlines` and `positions`.
        seed: `"salience"`: the tower's attention, that of its class token, or where there is none
            the attention received from all patches; `"norm"`: the length of each token;
            `"uniform"`: energy is then how central a token is in the graph.
        graph: `"knn"`; `"token_attention"`: every token to every token, by the keys of the tower's
            last layer; `"none"`: the seed as it is.
        features: what the graph compares: `"tokens"` as the language model reads them, or
            `"tower_keys"`. With `"token_attention"` the keys are compared anyway.
        alpha: share of the energy that flows. At 0.5 the seed, its neighbours and theirs weigh
            0.5, 0.25 and 0.25 after two steps; at 0.85, PageRank's value, 0.15, 0.13 and 0.72, and
            the seed is nearly forgotten.
        num_steps: steps of heat flow; `None` for the fixed point.
        tau: sharpness of edge weights; cosines of neighbours differ by about 0.1, so 10 makes the
            better one weigh e times as much.
        num_neighbors: 8 as on a grid.
        symmetry: of the graph: `"directed"`, `"or"` or `"and"`; see `knn_graph`.
        allocation: `"quadtree"`; `"uniform"`: equal crops, each with the same share of its patches;
            `"topk"`: no regions.
        delta: how uneven a region is that gets cut: the least standard deviation of its energy.
        delta_unit: `"mean"`: delta is in units of the part's mean energy, as energies sum to 1 and
            so depend on the number of tokens; `"absolute"`.
        min_crop: rows and columns that a region has at least.
        min_frames: frames that it has at least, with `video="octree"`.
        leftover: who gets what rounding leaves: `"round_robin"`, most energy first, or
            `"largest_remainder"`.
        share: budgets of several parts (tiles, frames): `"size"`: in proportion to their patches;
            `"energy"`: all their leaves share one budget, by a seed that sums to 1 over the
            picture.
        video: `"per_frame"`; or `"octree"`: one graph through all frames, and regions that are also
            cut in time, which goes beyond the paper.
        sinks: `"both"`, `"mean"` or `"none"`. There are never more of them than pruned patches.
        sinks_in_budget: whether sinks count; one patch stays in any case.

    Raises:
        InvalidInputError: a number outside its range, or a pruned picture.
        UnknownNameError: an unknown choice.

    Source: SpecFlow, algorithms 1 and 2, and Equation 15. The paper gives `num_steps` 2 and
    `min_crop` 4; the other defaults are ours, as no program is published. Differs from it where it
    divides by a sum plus epsilon: a seed of zeros becomes uniform here. Raw attention maps are not
    handed to stages, so `"token_attention"` takes the keys for both sides of the product.
    """

    seed: Seed = "salience"
    graph: GraphKind = "knn"
    features: Features = "tokens"
    alpha: float = 0.5
    num_steps: int | None = 2
    tau: float = 10.0
    num_neighbors: int = 8
    symmetry: Symmetry = "directed"
    allocation: Allocation = "quadtree"
    delta: float = 0.5
    delta_unit: DeltaUnit = "mean"
    min_crop: int = 4
    min_frames: int = 1
    leftover: Leftover = "round_robin"
    share: Share = "size"
    video: Video = "per_frame"
    sinks: Sinks = "both"
    sinks_in_budget: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in _CHOICES.items():
            if getattr(self, name) is None and "none" in get_args(allowed):  # as specs are read
                object.__setattr__(self, name, "none")
            check_choice(name, getattr(self, name), allowed)
        if self.graph == "token_attention" and self.video == "octree":
            raise InvalidInputError(
                "graph='token_attention' joins all pairs of tokens, too many for a whole video; "
                "use graph='knn' with video='octree'."
            )
        if self.num_steps is not None:
            check_count("num_steps", self.num_steps, least=0)
        for name in ("num_neighbors", "min_crop", "min_frames"):
            check_count(name, getattr(self, name))
        for name, is_right, rule in (
            ("alpha", 0 <= self.alpha < 1, "at least 0 and below 1"),
            ("tau", 0 < self.tau < float("inf"), "above 0 and finite"),
            ("delta", self.delta >= 0, "at least 0"),
        ):
            if not is_right:
                raise InvalidInputError(f"{name} must be {rule}, got {getattr(self, name)!r}.")

    @property
    def tower_needs(self) -> tuple[TowerNeed, ...]:
        """Salience, keys or neither, as the options say."""
        if self.keep_ratio == 1:
            return ()
        reads_keys = self.graph == "token_attention" or (
            self.graph == "knn" and self.features == "tower_keys"
        )
        needs: tuple[TowerNeed, ...] = ("salience",) if self.seed == "salience" else ()
        return (*needs, "tower_keys") if reads_keys else needs

    def choose(self, picture: Picture, count: int) -> Choice:
        """See `PictureStage`."""
        num_sinks = {"none": 0, "mean": 1, "both": 2}[self.sinks]
        if self.sinks_in_budget:
            num_sinks = min(num_sinks, count - 1)
            count -= num_sinks
        device = picture.tokens.device
        kept = self.select(self.maps(picture), count).to(device)
        is_pruned = torch.ones(picture.num_patches, dtype=torch.bool, device=device)
        is_pruned[kept] = False
        pruned = is_pruned.nonzero()[:, 0]
        num_sinks = min(num_sinks, len(pruned))
        if not num_sinks:
            return Choice(kept)
        mean, farthest = mean_and_residual(picture.tokens[pruned])
        ids = picture.position_ids[..., pruned]
        middle = ids.float().mean(dim=-1, keepdim=True)
        # The mean sink has no place of its own: it stands with the pruned patch nearest to theirs.
        distance = (ids - middle).abs().reshape(-1, len(pruned)).sum(dim=0)
        places = torch.stack([distance.argmin(), farthest])[:num_sinks]
        tokens = torch.stack([mean.to(picture.tokens), picture.tokens[pruned[farthest]]])
        positions = torch.cat([middle.round().to(ids), ids[..., farthest, None]], dim=-1)
        return Choice(
            kept,
            added=pruned[places],
            added_tokens=tokens[:num_sinks],
            added_positions=positions[..., :num_sinks],
        )

    def maps(self, picture: Picture) -> list[EnergyMap]:
        """Energy and leaves of each part; energies sum to 1 over the picture.

        Raises:
            InvalidInputError: the picture has lost tokens and has no grid any more.
        """
        if not picture.grids:
            raise InvalidInputError(
                "specflow needs the grid of the picture, and an earlier stage took tokens out of "
                "it; put specflow first."
            )
        seed = normalized(self._seed(picture).cpu().double())
        maps, first = [], 0
        for shape in self._shapes(picture):
            last = first + shape[0] * shape[1] * shape[2]
            own = seed[first:last]
            energy = normalized(own)
            graph = self._graph(picture, slice(first, last))
            if graph is not None:
                energy = diffuse(energy, graph, self.alpha, self.num_steps)
            energy = (energy * own.sum()).reshape(shape)
            maps.append(EnergyMap(energy, self._leaves(energy), first))
            first = last
        return maps

    def select(self, maps: Sequence[EnergyMap], count: int) -> Tensor:
        """The `(count,)` patches that stay, ascending, on the host."""
        groups = [list(maps)] if self.share == "energy" else [[part] for part in maps]
        sizes = [sum(part.energy.numel() for part in group) for group in groups]
        budgets = quotas(sizes, sizes, count, "largest_remainder")
        kept = []
        for group, budget in zip(groups, budgets, strict=True):
            leaves = [patches for part in group for patches in part.patches]
            energies = [cells_of(leaf, part.energy) for part in group for leaf in part.leaves]
            rooms = [len(patches) for patches in leaves]
            mass = [float(energy.sum()) for energy in energies]
            shares = quotas(
                rooms if self.allocation == "uniform" else mass, rooms, budget, self.leftover
            )
            for patches, energy, share in zip(leaves, energies, shares, strict=True):
                kept.append(patches[energy.argsort(descending=True, stable=True)[:share]])
        return torch.cat(kept).sort().values

    def _seed(self, picture: Picture) -> Tensor:
        if self.seed == "norm":
            return picture.tokens.float().norm(dim=-1)
        if self.seed == "uniform" or picture.salience is None:
            return torch.ones(picture.num_patches)
        return picture.salience

    def _shapes(self, picture: Picture) -> list[tuple[int, int, int]]:
        if self.video == "octree" and picture.is_video and len(set(picture.grids)) == 1:
            return [(len(picture.grids), *picture.grids[0])]
        return [(1, *grid) for grid in picture.grids]

    def _graph(self, picture: Picture, part: slice) -> Graph | None:
        keys = picture.tower_keys
        if self.graph == "token_attention" and keys is not None:
            return attention_graph(keys[part])
        if self.graph == "none":
            return None
        use_keys = self.features == "tower_keys" and keys is not None
        features = keys if use_keys and keys is not None else picture.tokens
        return knn_graph(features[part], self.num_neighbors, self.tau, self.symmetry)

    def _leaves(self, energy: Tensor) -> list[Box]:
        if self.allocation == "topk":
            delta = float("inf")
        elif self.allocation == "uniform":
            delta = -1.0
        else:
            unit = float(energy.mean()) if self.delta_unit == "mean" else 1.0
            delta = self.delta * unit
        return partition(energy, delta, self.min_crop, self.min_frames)
