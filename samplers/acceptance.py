"""Rules that say how many of a step's proposals are committed at once; pure functions."""

from __future__ import annotations

import torch
from torch import Tensor

from dlm_decode.confidence import rank_descending
from dlm_decode.errors import InvalidInputError

__all__ = [
    "above_threshold",
    "by_entropy_bound",
    "by_factor",
    "by_hierarchy",
    "by_stability",
    "check_not_negative",
    "check_share",
    "is_wide",
    "mean_over",
]


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


def by_entropy_bound(entropy: Tensor, eligible: Tensor, gamma: float) -> Tensor:
    """The largest set, lowest entropies first, with sum H - max H <= gamma, as `(B, C)` bool.

    With H_1 <= H_2 <= ... the first n are accepted while H_1 + ... + H_(n-1) <= gamma, so the
    lowest always is.

    Args:
        entropy: `(B, C)` in nats.
        eligible: `(B, C)` bool.
        gamma: nats; larger accepts more.

    Source: EB-Sampler (arXiv 2505.24857), entropy bound.
    """
    ascending = torch.where(eligible, entropy, float("inf")).sort(dim=1).values
    sum_before = torch.zeros_like(ascending)
    sum_before[:, 1:] = ascending.cumsum(dim=1)[:, :-1]
    return eligible & (sum_before.gather(1, rank_descending(-entropy, eligible)) <= gamma)


def by_stability(
    log_prob: Tensor, eligible: Tensor, num_stable: Tensor, *, threshold: float, history: int
) -> Tensor:
    """Every confident position whose distribution has stood still, as `(B, C)` bool.

    It may be none.

    Args:
        log_prob: `(B, C)` log-probability of each proposal.
        eligible: `(B, C)` bool.
        num_stable: `(B, C)` steps in a row, up to now, in which the distribution hardly moved.
        threshold: probability to be exceeded.
        history: least `num_stable`.

    Source: KLASS (arXiv 2511.05664), stable and confident tokens.
    """
    return eligible & (log_prob.exp() > threshold) & (num_stable >= history)


def by_hierarchy(
    log_prob: Tensor,
    eligible: Tensor,
    is_masked: Tensor,
    *,
    threshold: float,
    low_threshold: float,
) -> Tensor:
    """The best of every run of masks, and every confident position, as `(B, C)` bool.

    A run's best must exceed `low_threshold`, other positions `threshold`; the best of all is
    accepted in any case.

    Args:
        log_prob: `(B, C)` log-probability of each proposal.
        eligible: `(B, C)` bool, the candidates.
        is_masked: `(B, C)` bool, whose maximal runs are the parts; holds all candidates, and may
            hold positions that are none.
        threshold: probability.
        low_threshold: probability.

    Source: dInfer (arXiv 2510.08666), hierarchical decoding.
    """
    rank, width = rank_descending(log_prob, eligible), log_prob.shape[1]
    is_first = is_masked.clone()
    is_first[:, 1:] &= ~is_masked[:, :-1]
    run = is_first.cumsum(dim=1)
    lowest = rank.new_full((len(rank), width + 1), width)
    lowest.scatter_reduce_(1, run, torch.where(eligible, rank, width), "amin")
    is_best = rank == lowest.gather(1, run)
    confidence = log_prob.exp()
    is_sure = (confidence > threshold) | (is_best & (confidence > low_threshold))
    return eligible & (is_sure | (rank == 0))


def mean_over(values: Tensor, eligible: Tensor) -> Tensor:
    """`(B,)` mean of the `(B, C)` values at eligible positions; 0 in rows without any."""
    count = eligible.sum(dim=1).clamp_min(1)
    return torch.where(eligible, values, 0.0).sum(dim=1) / count


def is_wide(gap: Tensor, progress: Tensor, *, early: float, middle: float, late: float) -> Tensor:
    """Rows whose gap reaches the threshold of their phase, as `(B,)` bool.

    Args:
        gap: `(B,)` mean of top-1 minus top-2 logits.
        progress: `(B,)` how much of the response is done, from 0 to 1.
        early: least gap while progress is below 0.33.
        middle: least gap from there to 0.67.
        late: least gap from 0.67.

    Source: Prophet (arXiv 2508.19982), staged threshold; phases as the reference rounds them.
    """
    after_early = torch.where(progress < 0.67, middle, late)
    return gap >= torch.where(progress < 0.33, early, after_early)


def check_not_negative(name: str, value: float) -> None:
    """Raises `InvalidInputError` unless `value` is a number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise InvalidInputError(f"{name} must be a number of at least 0, got {value!r}.")


def check_share(name: str, value: float) -> None:
    """Raises `InvalidInputError` unless `value` is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InvalidInputError(f"{name} must be from 0 to 1, got {value!r}.")
