"""Tokens that stand for the pruned ones: their mean, and the one that the mean explains least."""

from __future__ import annotations

from torch import Tensor

__all__ = ["mean_and_residual"]


def mean_and_residual(pruned: Tensor) -> tuple[Tensor, Tensor]:
    """The mean `(D,)` of pruned tokens `(M, D)` in float32, and which is farthest from it.

    The mean minimises the summed squared distances; every pruned token lies within the distance of
    the second, a 0-dimensional long tensor (the first of equals).
    """
    tokens = pruned.float()
    mean = tokens.mean(dim=0)
    return mean, (tokens - mean).square().sum(dim=-1).argmax()
