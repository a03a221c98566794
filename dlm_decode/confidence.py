"""From logits at a few positions to a proposed token and how sure the model is of it.

Everything is float32 whatever the dtype of the model: in bfloat16 different confidences collapse to
the same number, and "most confident first" turns into "leftmost first". The vocabulary is read in
slices, so no float32 copy of it is made.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = [
    "PreviousLogProb",
    "Proposal",
    "drop_unlikely",
    "propose",
    "rank_descending",
    "select_top",
]

_VOCABULARY_SLICE = 16384
_LARGEST_GAP = 80.0  # exp of more overflows float32
_LAST_GROUP = 127  # behind every group that a caller names


@dataclass(frozen=True)
class Proposal:
    """One proposed token for each of N positions.

    Attributes:
        tokens: `(N,)` long, the proposed token.
        top_tokens: `(N,)` long, the argmax; equals `tokens` at temperature 0.
        log_prob: `(N,)` float32 log-probability of the proposed token under the un-noised
            distribution. NaN where the logits were.
        margin: `(N,)` float32 top-1 minus top-2 probability, if asked for.
        logit_margin: `(N,)` float32 top-1 minus top-2 logit, if asked for.
        entropy: `(N,)` float32 in nats, if asked for.
        kl: `(N,)` float32 KL(now || previous) in nats, if asked for; +inf where there is no
            previous distribution.
    """

    tokens: Tensor
    top_tokens: Tensor
    log_prob: Tensor
    margin: Tensor | None = None
    logit_margin: Tensor | None = None
    entropy: Tensor | None = None
    kl: Tensor | None = None


@dataclass(frozen=True)
class PreviousLogProb:
    """Log-probabilities that N positions had last, for the `kl` statistic.

    Attributes:
        store: `(M, V)` float16; a row without a distribution is -inf throughout.
        rows: `(N,)` long, the row of `store` that belongs to each position.
    """

    store: Tensor
    rows: Tensor


def drop_unlikely(logits: Tensor, top_k: int | None, top_p: float | None, scale: float) -> None:
    """Sets all but the likeliest entries to -inf, in place.

    Args:
        logits: `(N, V)`.
        top_k: entries to keep, those that equal the last of them included; `None` for all.
        top_p: keep entries until their probability exceeds this, at least one; `None` for all. It
            is applied first.
        scale: temperature of the probabilities that `top_p` counts.

    Source: as Dream 7B (arXiv 2508.15487) samples, `top_p_logits` and `top_k_logits`.
    """
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = (ordered.float() / scale).softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)
        before[:, 0] = 0
        logits.masked_fill_((before > top_p).scatter(1, order, before > top_p), float("-inf"))
    if top_k is not None and top_k < logits.shape[1]:
        last = logits.topk(top_k, dim=-1).values[:, -1:]
        logits.masked_fill_(logits < last, float("-inf"))


def propose(
    logits: Tensor,
    *,
    temperature: float = 0.0,
    uniform: Tensor | None = None,
    generator: torch.Generator | None = None,
    statistics: Collection[str] = (),
    unproposable: int | None = None,
    previous: PreviousLogProb | None = None,
) -> Proposal:
    """Chooses a token per position and measures its probability.

    The log-probability of the top token is `-log1p(sum of the others' exp(l - l_top))`: near
    certainty this keeps differences that `softmax` rounds to 1.0, so float32 orders positions as a
    float64 softmax does.

    Args:
        logits: `(N, V)`, suppressed entries at -inf. Used as scratch space; its content is
            restored.
        temperature: 0 takes the argmax (ties: lowest id); above 0, Gumbel-max sampling from
            softmax(logits / temperature).
        uniform: `(N, V)` numbers in [0, 1) for the Gumbel noise.
        generator: instead of `uniform`, where the token is drawn from; all that is measured then
            belongs to softmax(logits / temperature). A temperature above 0 needs one of the two.
        statistics: any of `"margin"`, `"logit_margin"`, `"entropy"` and `"kl"`.
        unproposable: id that is never proposed but keeps its share of the probability (the mask
            id). Taking it out of the softmax as well would raise confidences, and with them change
            which position is the most confident.
        previous: what `"kl"` compares with; overwritten with the log-probabilities of `logits`.
            Float16 costs less than 5e-4 nats where the top token has a probability of 0.9 or more.

    Returns:
        Proposal.

    Source: LLaDA (arXiv 2502.09992), `add_gumbel_noise`: argmax of exp(l) / (-ln u)^T, here in log
    space; with a generator, Dream 7B (arXiv 2508.15487), `sample_tokens`.
    """
    if generator is not None:
        return _categorical(
            logits.float() / temperature, generator, statistics, unproposable, previous
        )
    withheld = None
    if unproposable is not None:
        withheld = logits[:, unproposable, None].clone()
        logits[:, unproposable] = float("-inf")
    top, top_token = logits.max(dim=-1, keepdim=True)
    logits.scatter_(1, top_token, float("-inf"))
    top = top.float()
    rest = torch.zeros_like(top)
    for part in logits.split(_VOCABULARY_SLICE, dim=-1):
        rest += (part.float() - top).exp_().sum(dim=-1, keepdim=True)
    gap = None if withheld is None else (withheld.float() - top).clamp_max(_LARGEST_GAP)
    if gap is not None:
        rest += gap.exp()
    top_log_prob = -torch.log1p(rest)

    margin = logit_margin = entropy = kl = None
    if "margin" in statistics or "logit_margin" in statistics:
        second = logits.max(dim=-1, keepdim=True).values.float()
        if "margin" in statistics:
            margin = (top_log_prob.exp() - (second - top + top_log_prob).exp()).squeeze(-1)
        if "logit_margin" in statistics:
            logit_margin = (top - second).squeeze(-1)
    logits.scatter_(1, top_token, top.to(logits.dtype))
    if "entropy" in statistics:
        total = torch.zeros_like(top)
        for part in logits.split(_VOCABULARY_SLICE, dim=-1):
            total += torch.special.entr((part.float() - top + top_log_prob).exp_()).sum(
                dim=-1, keepdim=True
            )
        if gap is not None:
            total += torch.special.entr((gap + top_log_prob).exp())
        entropy = total.squeeze(-1)

    token, log_prob = top_token, top_log_prob
    if temperature > 0:
        if uniform is None:
            raise AssertionError("temperature > 0 needs uniform numbers or a generator")
        token = _gumbel_argmax(logits, temperature, uniform)
        log_prob = logits.gather(1, token).float() - top + top_log_prob
    if withheld is not None and unproposable is not None:
        logits[:, unproposable] = withheld[:, 0]
    if "kl" in statistics:
        kl = _divergence(logits, top, top_log_prob, previous)
    return Proposal(
        tokens=token.squeeze(-1),
        top_tokens=top_token.squeeze(-1),
        log_prob=log_prob.squeeze(-1),
        margin=margin,
        logit_margin=logit_margin,
        entropy=entropy,
        kl=kl,
    )


def _categorical(
    logits: Tensor,
    generator: torch.Generator,
    statistics: Collection[str],
    unproposable: int | None,
    previous: PreviousLogProb | None,
) -> Proposal:
    """Tokens drawn from softmax(logits), in one call for all positions."""
    proposal = propose(logits, statistics=statistics, unproposable=unproposable, previous=previous)
    top = logits.gather(1, proposal.top_tokens[:, None])
    if unproposable is not None:
        logits[:, unproposable] = float("-inf")
    tokens = logits.softmax(dim=-1).multinomial(1, generator=generator)
    log_prob = (logits.gather(1, tokens) - top).squeeze(1) + proposal.log_prob
    return replace(proposal, tokens=tokens.squeeze(1), log_prob=log_prob)


def _divergence(
    logits: Tensor, top: Tensor, top_log_prob: Tensor, previous: PreviousLogProb | None
) -> Tensor:
    """`(N,)` KL(now || previous); takes over what is now into `previous`."""
    if previous is None:
        return torch.full_like(top, float("inf")).squeeze(-1)
    total, start = torch.zeros_like(top), 0
    for part in logits.split(_VOCABULARY_SLICE, dim=-1):
        columns = slice(start, start + part.shape[-1])
        # The top leaves out the id that is never proposed, so that one alone can exceed it.
        log_prob = (part.float() - top).clamp_max_(_LARGEST_GAP) + top_log_prob
        probability = log_prob.exp()
        terms = probability * (log_prob - previous.store[previous.rows, columns].float())
        total += terms.masked_fill_(probability == 0, 0.0).sum(dim=-1, keepdim=True)
        previous.store[previous.rows, columns] = log_prob.to(previous.store.dtype)
        start += part.shape[-1]
    return total.clamp_min_(0.0).squeeze(-1)


def _gumbel_argmax(logits: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    best, token = None, None
    start = 0
    for part in logits.split(_VOCABULARY_SLICE, dim=-1):
        noise = uniform[:, start : start + part.shape[-1]]
        noisy = part.to(uniform.dtype) - temperature * torch.log(-torch.log(noise))
        value, index = noisy.max(dim=-1, keepdim=True)
        if best is None or token is None:
            best, token = value, index
        else:
            is_better = value > best
            token = torch.where(is_better, index + start, token)
            best = torch.where(is_better, value, best)
        start += part.shape[-1]
    if token is None:
        raise AssertionError("logits without a vocabulary")
    return token


def rank_descending(score: Tensor, eligible: Tensor, group: Tensor | None = None) -> Tensor:
    """Rank of each eligible position by decreasing score; ties go to the lower position.

    Args:
        score: `(B, T)`.
        eligible: `(B, T)` bool.
        group: `(B, T)` bool or small whole numbers from 0; a position ranks behind all eligible
            ones of a lower group, whatever their scores.

    Returns:
        `(B, T)` long, 0 for the first; positions that are not eligible rank behind all others.
    """
    order = torch.where(eligible, score, float("-inf")).argsort(
        dim=-1, descending=True, stable=True
    )
    chosen = torch.zeros_like(order) if group is None else group.long()
    chosen = torch.where(eligible, chosen, _LAST_GROUP)
    order = order.gather(1, chosen.gather(1, order).argsort(dim=-1, stable=True))
    positions = torch.arange(score.shape[1], device=score.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, positions)


def select_top(
    score: Tensor, eligible: Tensor, quota: Tensor, group: Tensor | None = None
) -> Tensor:
    """The `quota` best eligible positions of each row, as `(B, T)` bool.

    Args:
        score: `(B, T)`, higher is better.
        eligible: `(B, T)` bool.
        quota: `(B,)` counts; a row with fewer eligible positions gives all of them.
        group: as in `rank_descending`: positions of a higher group are taken only when no others
            are left.
    """
    return (rank_descending(score, eligible, group) < quota[:, None]) & eligible
