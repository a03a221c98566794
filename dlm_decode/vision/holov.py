"""HoloV: budgets for crops by attention and by how varied their tokens are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from dlm_decode.errors import InvalidInputError
from dlm_decode.vision import register_stage
from dlm_decode.vision.allocation import quotas
from dlm_decode.vision.base import TowerNeed
from dlm_decode.vision.knobs import check_count
from dlm_decode.vision.picture import Choice, Picture, PictureStage

__all__ = ["HoloV"]

_ATTENTION_SCALE = 1000


@register_stage("holov")
@dataclass(frozen=True)
class HoloV(PictureStage):
    """Cuts the sequence of patches into equal runs and keeps the best-attended of each.

    A token's score is 1000 times its salience plus `variety` times the variance of its cosines to
    the run's tokens, brought to the same mean as the former; a run's score is the mean of its
    tokens', and its budget in proportion to that, what rounding leaves going to the best runs.

    Args:
        keep_ratio: see `PictureStage`, and so for `keep_tokens`, `newlines` and `positions`.
        num_crops: runs of consecutive patches, the first ones longer by one where it does not
            divide; as many as there are patches at most.
        variety: weight of the variance, at least 0.

    Raises:
        InvalidInputError: fewer than one crop, or a weight below 0.

    Source: HoloV (arXiv 2510.02912) and its program. Differs from it: what a full run cannot take
    goes to the next instead of becoming zero vectors, and patches stay in prompt order, not in the
    order of their attention.
    """

    num_crops: int = 16
    variety: float = 0.09

    _needs: ClassVar[tuple[TowerNeed, ...]] = ("salience",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_crops", self.num_crops)
        if not self.variety >= 0:
            raise InvalidInputError(f"variety must be at least 0, got {self.variety!r}.")

    def choose(self, picture: Picture, count: int) -> Choice:
        """See `PictureStage`."""
        if picture.salience is None:
            raise AssertionError("a picture without what tower_needs names")
        runs = torch.arange(picture.num_patches, device=picture.index.device).tensor_split(
            min(self.num_crops, picture.num_patches)
        )
        attention = _ATTENTION_SCALE * picture.salience
        variance = torch.cat([_variance(picture.tokens[run]) for run in runs])
        scale = attention.mean() / variance.mean().clamp(min=torch.finfo(variance.dtype).tiny)
        score = attention + self.variety * scale * variance
        mass = torch.stack([score[run].mean() for run in runs]).tolist()
        shares = quotas(mass, [len(run) for run in runs], count)
        kept = [
            run[picture.salience[run].argsort(descending=True, stable=True)[:share]]
            for run, share in zip(runs, shares, strict=True)
        ]
        return Choice(torch.cat(kept).sort().values)


def _variance(tokens: Tensor) -> Tensor:
    """Of each token's cosines to the others, the zero that stands for itself included."""
    unit = functional.normalize(tokens.float(), dim=-1)
    cosines = (unit @ unit.T).fill_diagonal_(0)
    others = max(1, len(tokens) - 1)
    mean = cosines.sum(dim=-1, keepdim=True) / others
    return (cosines - mean).square().sum(dim=-1) / others
