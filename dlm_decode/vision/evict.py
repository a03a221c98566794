"""Baselines that shorten the cache once the prompt has been read: at random, or by attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlm_decode.vision import register_stage
from dlm_decode.vision.base import check_keep_ratio, num_kept
from dlm_decode.vision.cache_stage import CacheBase, CacheView, Eviction
from dlm_decode.vision.fastv import strongest
from dlm_decode.vision.knobs import check_count
from dlm_decode.vision.random import generator_of

__all__ = ["ElasticCache", "ImageRandomCache", "RandomCache"]


@register_stage("kv_random")
@dataclass(frozen=True)
class RandomCache(CacheBase):
    """Keeps random positions of the prompt's cache, text and visual tokens alike.

    What is drawn follows from the seed and the prompt's ids: rows with different questions differ,
    and a row keeps the same alone and in any batch.

    Args:
        keep_ratio: share of all cached positions that stays, in (0, 1]; halves are rounded to the
            even count, and at least one stays. 1 is a no-op.
        seed: at least 0.

    Raises:
        InvalidInputError: a ratio outside (0, 1], or a seed below 0.

    Source: the baseline Rand of the LightKV paper, which says that it evicts text and vision tokens
    at random after the prefill, and no more. That all layers lose the same positions, and that no
    position is safe, is our reading.
    """

    keep_ratio: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        check_keep_ratio(self.keep_ratio)
        check_count("seed", self.seed, least=0)

    def reads_attention(self) -> bool:
        """See `CacheStage`."""
        return False

    def evict(self, view: CacheView) -> Eviction | None:
        """See `CacheStage`."""
        if self.keep_ratio == 1:
            return None
        everything = torch.arange(len(view.ids), device=view.ids.device)
        generator = generator_of(self.seed, view.ids)
        return Eviction(_drawn(everything, self.keep_ratio, generator).sort().values)


@register_stage("kv_image_random")
@dataclass(frozen=True)
class ImageRandomCache(CacheBase):
    """Keeps random visual tokens of every image or video in the cache, and all text.

    Draws as `kv_random` does.

    Args:
        keep_ratio: share of each image's or video's cached tokens that stays, in (0, 1]; rounded as
            in `kv_random`. 1 is a no-op.
        seed: at least 0.

    Raises:
        InvalidInputError: a ratio outside (0, 1], or a seed below 0.

    Source: the baseline ImgRand of the LightKV paper, which says that it evicts vision tokens only,
    at random after the prefill, and no more. That all layers lose the same positions, and each
    image the same share, is our reading.
    """

    keep_ratio: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        check_keep_ratio(self.keep_ratio)
        check_count("seed", self.seed, least=0)

    def reads_attention(self) -> bool:
        """See `CacheStage`."""
        return False

    def evict(self, view: CacheView) -> Eviction | None:
        """See `CacheStage`."""
        owners = view.layout.image_ids
        if self.keep_ratio == 1:
            return None
        stays, generator = owners < 0, generator_of(self.seed, view.ids)
        for number in owners[owners >= 0].unique().tolist():
            image = (owners == number).nonzero()[:, 0]
            stays[_drawn(image, self.keep_ratio, generator)] = True
        return Eviction(stays.nonzero()[:, 0])


@register_stage("kv_elastic")
@dataclass(frozen=True)
class ElasticCache(CacheBase):
    """Keeps the cached positions that received most attention, and merges the others into them.

    Each layer ranks for itself, text and visual tokens alike, by the attention that a position
    received from all positions of the prompt: summed over queries, mean over heads; ties go to the
    lower position. Every other position goes to the nearest one that stays, the lower of two, and
    the keys and the values of such a group are averaged with equal weights.

    Args:
        keep_ratio: share of all cached positions that stays, in (0, 1]; rounded as in `kv_random`.
            1 is a no-op.
        merges: whether the others are merged; else they are dropped.

    Raises:
        InvalidInputError: a ratio outside (0, 1].

    Source: the baseline ElasticCache of the LightKV paper, which prunes text and vision tokens
    after the prefill, and the abstract of Elastic Cache (arXiv 2407.18121): important keys and
    values are anchors, by how often they are attended to, and those around them are merged into
    them. A reconstruction from these sentences, compared with no program: sum, mean over heads,
    distance in positions, equal weights and that no position is safe are ours. Left out is what
    Elastic Cache drops while tokens are generated: all of these stay.
    """

    keep_ratio: float = 0.5
    merges: bool = True

    def __post_init__(self) -> None:
        check_keep_ratio(self.keep_ratio)

    def reads_attention(self) -> bool:
        """See `CacheStage`."""
        return self.keep_ratio < 1

    def evict(self, view: CacheView) -> Eviction | None:
        """See `CacheStage`."""
        if view.received is None:
            return None
        everything = torch.arange(len(view.ids), device=view.ids.device)
        count = num_kept(len(everything), self.keep_ratio)
        index = strongest(view.received, everything, count).sort().values
        if not self.merges:
            return Eviction(index)
        return Eviction(index, (everything[:, None] - index).abs().argmin(dim=1))


def _drawn(candidates: Tensor, keep_ratio: float, generator: torch.Generator) -> Tensor:
    count = num_kept(len(candidates), keep_ratio)
    order = torch.randperm(len(candidates), generator=generator)[:count]
    return candidates[order.to(candidates.device)]
