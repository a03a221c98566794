"""Rules that say how many of a step's proposals are committed at once; pure functions."""

from __future__ import annotations

import torch
from torch import Tensor

from dlm_decode.confidence import rank_descending
from dlm_decode.errors import InvalidInputError

__all__ = ["above_threshold", "by_factor", "check_share"]


def above_threshold(
    log_prob: Tensor, eligible: Tensor, threshold: float, *, is_strict: bool = False
) -> Tensor:
    """Every confident position, and the most confident one in any case, as `(B, C)` bool.

    Args:
        log_prob: `(B, C)` log-probability of each proposal.
        eligible: `(B, C)` bool.
        threshold: least probability.
        is_strict: it must be exceeded, not only reached.

    Source: Fast-dLLM (arXiv 2505.22618), confidence threshold, which reaches (>=); sglang and
    diffusers exceed (>).
    """
    confidence = log_prob.exp()
    is_confident = confidence > threshold if is_strict else confidence >= threshold
    return eligible & (is_confident | (rank_descending(log_prob, eligible) == 0))


def by_factor(
    log_prob: Tensor, eligible: Tensor, factor: float, *, accepts_last_rank: bool = False
) -> Tensor:
    """The longest run of ranks r = 1, 2, ... with (r + 1)(1 - c_r) <= factor, as `(B, C)` bool.

    c_1 >= c_2 >= ... are the confidences of the eligible positions. Rank 1 always passes.

    Args:
        log_prob: `(B, C)` log-probability of each proposal.
        eligible: `(B, C)` bool.
        factor: larger accepts more.
        accepts_last_rank: if only the last rank fails, it is accepted too, as the reference
            implementation does.

    Source: Fast-dLLM (arXiv 2505.22618), factor rule.
    """
    rank, width = rank_descending(log_prob, eligible), log_prob.shape[1]
    passes = (rank == 0) | ((rank + 2) * -torch.expm1(log_prob) <= factor)
    first = torch.where(eligible & ~passes, rank, width).min(dim=1, keepdim=True).values
    if accepts_last_rank:
        count = eligible.sum(dim=1, keepdim=True)
        first = torch.where(first == count - 1, count, first)
    return eligible & (rank < first)


def check_share(name: str, value: float) -> None:
    """Raises `InvalidInputError` unless `value` is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InvalidInputError(f"{name} must be from 0 to 1, got {value!r}.")
