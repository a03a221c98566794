"""LOWN: decode from text alone while the picture would not change the answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from dlm_decode.confidence import rank_descending, select_top
from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.predictor import FULL, TEXT_ONLY, TEXT_ONLY_ORIGINAL, Prediction, Predictor, View
from dlm_decode.samplers import register_sampler
from dlm_decode.samplers.base import Step, StepContext

__all__ = ["Anchor", "Lown", "blocked_by_guard", "certified_prefix"]

Guard = Literal["scan", "adjacent"]
Access = Literal["certificate", "always", "every", "random", "oracle"]


@dataclass
class Anchor:
    """What the latest FULL forward of each row said; B rows, C canvas columns.

    Attributes:
        tokens: `(B, C)` proposed tokens.
        top_tokens: `(B, C)` argmax tokens; certificates compare these.
        log_prob: `(B, C)` log-probability of `tokens`.
        step: `(B,)` step at which that forward ran; -1 before the first.
        taken: `(B,)` steps that each row has taken.
        scheduled: `(B, steps)` bool, FULL steps drawn in advance for `access="random"`.
        remaining: `(B,)` float64 FLOPs that the budget still allows; `None` without a budget.
    """

    tokens: Tensor
    top_tokens: Tensor
    log_prob: Tensor
    step: Tensor
    taken: Tensor
    scheduled: Tensor | None = None
    remaining: Tensor | None = None


def blocked_by_guard(
    tokens: Tensor,
    rank: Tensor,
    eligible: Tensor,
    committed: Tensor,
    is_committed: Tensor,
    guard: Guard | None,
    exempt: tuple[int, ...],
) -> Tensor:
    """Candidates before which the repetition guard ends the scan.

    Args:
        tokens: `(B, C)` anchor tokens.
        rank: `(B, C)` place of each candidate in the scan.
        eligible: `(B, C)` bool, the candidates.
        committed: `(B, C)` canvas tokens, read where `is_committed`.
        is_committed: `(B, C)` bool.
        guard: `"scan"`: the token stands committed next to the candidate, or was accepted anywhere
            earlier in this scan;
            `"adjacent"`: only next to it, committed or accepted earlier; `None`: never.
        exempt: ids that may repeat.

    Returns:
        `(B, C)` bool.

    Source: LOWN (arXiv 2610.36671), repetition guard.
    """
    blocked = torch.zeros_like(eligible)
    if guard is None:
        return blocked
    earlier_rank = torch.where(eligible, rank, rank.shape[1])
    for shift in (1, -1):
        neighbour = _shifted(committed, shift, -1)
        blocked |= (neighbour == tokens) & _shifted(is_committed, shift, False)
        if guard == "adjacent":
            is_earlier = _shifted(earlier_rank, shift, rank.shape[1]) < rank
            blocked |= is_earlier & (_shifted(tokens, shift, -1) == tokens)
    if guard == "scan":
        is_same = tokens[:, :, None] == tokens[:, None, :]
        is_earlier = earlier_rank[:, None, :] < rank[:, :, None]
        blocked |= (is_same & is_earlier).any(dim=-1)
    for token in exempt:
        blocked &= tokens != token
    return blocked & eligible


def certified_prefix(rank: Tensor, agrees: Tensor, blocked: Tensor, eligible: Tensor) -> Tensor:
    """The longest run of certified candidates from the start of the scan, as `(B, C)` bool.

    Args:
        rank: `(B, C)` place of each candidate in the scan.
        agrees: `(B, C)` bool, TEXT_ONLY and the anchor have the same top token.
        blocked: `(B, C)` bool, the guard ends the scan before this candidate.
        eligible: `(B, C)` bool.

    Source: LOWN (arXiv 2610.36671), certified prefix.
    """
    ends = eligible & (~agrees | blocked)
    first_end = torch.where(ends, rank, rank.shape[1]).min(dim=1, keepdim=True).values
    return eligible & (rank < first_end)


def _shifted(values: Tensor, shift: int, fill: int | bool) -> Tensor:
    """`values` of the position `shift` columns to the left; `fill` beyond the edge."""
    rolled = values.roll(shift, dims=1)
    rolled[:, 0 if shift > 0 else -1] = fill
    return rolled


@register_sampler("lown")
@dataclass(frozen=True)
class Lown:
    """Certificate-guided visual routing.

    Each row keeps an anchor: the tokens and confidences of its latest FULL forward. A step first
    runs TEXT_ONLY; the candidates whose top token still equals the anchor's, scanned in decreasing
    anchor confidence, are certified up to the first that is not. If they number at least the quota,
    they are committed and no picture is read; otherwise FULL runs, and exactly the quota is
    committed, those first where the two views disagree. Either way at least the quota is committed,
    so a response never takes more steps than the baseline.

    The first step of a row has no TEXT_ONLY forward and is charged for FULL alone. Rows without
    visual tokens run FULL in every step, as the baseline does; `info["has_visual"]` says so. At a
    temperature above 0 certificates compare argmax tokens, and the token that is committed is the
    one that the anchor's FULL forward sampled.

    Args:
        guard: repetition guard, see `blocked_by_guard`; `None` (or `"none"`) for none.
        guard_exempt_special: end-of-sequence, padding and stop ids may repeat. Without it the
            padding at the end of a response ends every scan.
        positions: rotary positions of the TEXT_ONLY view, `"packed"` or `"original"`.
        access: who decides that FULL runs. `"certificate"` is the paper's rule; ablations:
            `"always"`, `"every"` (each `every`-th step of the row), `"random"` (`full_share` of the
            schedule's steps, drawn from the row's seed). In the last two, a step without FULL
            commits the certified prefix, topped up to the quota by anchor confidence. `"oracle"`
            looks at both views without being charged, and runs (and pays) FULL exactly where it
            would commit another token than such a step does: a bound for schedules, no method.
        accept: on steps without FULL, `"prefix"` commits the whole certified prefix, `"k"` exactly
            the quota.
        order: on FULL steps, `"disagreement"` commits first where the views disagree,
            `"confidence"` does not.
        every: period for `access="every"`.
        full_share: share of FULL steps for `access="random"`, the first step included.
        budget: the most that a response may cost, relative to the decoder FLOPs of the baseline
            sampler with the same settings, in (0, 1]; `None` is the paper's rule. The bound holds
            for every row: no forward starts that would exceed it. While the budget is ample the
            paper's rule decides. When it runs short, FULL is kept for the steps whose certificates
            fail by disagreement, not by the guard, and the others commit the certified prefix,
            topped up to the quota with anchor tokens; when not even TEXT_ONLY is affordable, anchor
            tokens are committed without a forward. Only with `access="certificate"`.

    Raises:
        UnknownNameError: an unknown value of a named option.
        InvalidInputError: a period below 1, a share or budget outside (0, 1], a budget with another
            access, or (when decoding starts) a budget that cannot pay the first FULL forward.

    Source: LOWN (arXiv 2610.36671).
    """

    guard: Guard | None = "scan"
    guard_exempt_special: bool = True
    positions: Literal["packed", "original"] = "packed"
    access: Access = "certificate"
    accept: Literal["prefix", "k"] = "prefix"
    order: Literal["disagreement", "confidence"] = "disagreement"
    every: int = 4
    full_share: float = 0.25
    budget: float | None = None

    def __post_init__(self) -> None:
        if self.guard == "none":
            object.__setattr__(self, "guard", None)
        choices = {
            "guard": (None, *get_args(Guard)),
            "positions": ("packed", "original"),
            "access": get_args(Access),
            "accept": ("prefix", "k"),
            "order": ("disagreement", "confidence"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UnknownNameError(name, str(getattr(self, name)), map(str, allowed))
        if self.every < 1:
            raise InvalidInputError(f"every must be at least 1, got {self.every}.")
        if not 0 < self.full_share <= 1:
            raise InvalidInputError(
                f"full_share must be above 0 and at most 1, got {self.full_share}."
            )
        if self.budget is not None and not 0 < self.budget <= 1:
            raise InvalidInputError(f"budget must be above 0 and at most 1, got {self.budget}.")
        if self.budget is not None and self.access != "certificate":
            raise InvalidInputError(
                f"budget needs access='certificate', got {self.access!r}; drop one of them."
            )

    @property
    def _text_view(self) -> View:
        return TEXT_ONLY if self.positions == "packed" else TEXT_ONLY_ORIGINAL

    def start(self, context: Predictor) -> Anchor:
        """An empty anchor for every row."""
        tokens = context.canvas.tokens
        zeros = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
        return Anchor(
            tokens=tokens.clone(),
            top_tokens=tokens.clone(),
            log_prob=torch.full(tokens.shape, float("-inf"), device=tokens.device),
            step=zeros - 1,
            taken=zeros,
            scheduled=self._draw_schedule(context) if self.access == "random" else None,
            remaining=None if self.budget is None else self._allowance(context, self.budget),
        )

    @staticmethod
    def _allowance(context: Predictor, budget: float) -> Tensor:
        """`(B,)` FLOPs that each row may spend, checked to pay at least one FULL forward."""
        if context.baseline_flops is None:
            raise AssertionError("a budget needs the baseline's cost")
        full = context.forward_cost(FULL)
        baseline = torch.tensor(context.baseline_flops, dtype=torch.float64, device=full.device)
        allowance = budget * baseline
        least = float((full / baseline.clamp_min(1)).max())
        if bool((allowance < full).any()):
            raise InvalidInputError(
                f"budget {budget} is below the cost of one FULL forward ({least:.4f} of the "
                f"baseline's {context.settings.steps} steps); use a larger budget or more steps."
            )
        return allowance

    def _draw_schedule(self, context: Predictor) -> Tensor:
        """`(B, steps)` bool: `round(full_share * steps)` FULL steps per row, the first included."""
        steps = context.settings.steps
        num_rows, device = len(context.canvas.tokens), context.canvas.tokens.device
        numbers = torch.stack(
            [torch.rand(steps, generator=g, device=device) for g in context.generators]
        )
        numbers[:, 0] = 2.0
        count = torch.full((num_rows,), max(1, round(self.full_share * steps)), device=device)
        return select_top(numbers, torch.ones_like(numbers, dtype=torch.bool), count)

    def step(self, context: StepContext, state: Anchor) -> Step:
        """One routed step; see the class."""
        eligible, active = context.eligible, context.eligible.any(dim=1)
        may_skip = active & context.predictor.has_visual & (state.step >= 0)
        forced_full, forced_text = self._access(state)
        asks_text = may_skip & ~(forced_full & (self.order == "confidence"))
        asks_text = asks_text & self._affords(state, context, self._text_view)
        text = context.predict(self._text_view, eligible & asks_text[:, None])
        self._pay(state, context, self._text_view, asks_text)

        rank = rank_descending(state.log_prob, eligible, context.held_back(state.tokens))
        agrees = text.top_tokens == state.top_tokens
        exempt = context.predictor.padding_ids if self.guard_exempt_special else ()
        blocked = blocked_by_guard(
            state.tokens, rank, eligible, context.tokens, ~context.is_open, self.guard, exempt
        )
        prefix = certified_prefix(rank, agrees, blocked, eligible) & asks_text[:, None]
        quota = torch.minimum(context.quota, eligible.sum(dim=1))
        first_k = eligible & (rank < quota[:, None])
        is_certified = prefix.sum(dim=1) >= quota
        if self.budget is not None:
            disagreement = (first_k & ~agrees).any(dim=1) & asks_text
            forced_text = may_skip & ~self._may_look(state, context, quota, disagreement)
        by_text = may_skip & ~forced_full & (is_certified | forced_text)
        open_now = context.predictor.canvas.is_wanted
        if self.access == "oracle":
            peek = context.predict(FULL, open_now & may_skip[:, None], is_charged=False)
            would_commit = prefix | first_k
            is_changed = (would_commit & (peek.top_tokens != state.top_tokens)).any(dim=1)
            forced_text = by_text = may_skip & ~is_changed
        by_full = active & ~by_text

        from_text = prefix if self.accept == "prefix" else prefix & first_k
        from_text = from_text | (first_k & forced_text[:, None])
        full = context.predict(FULL, open_now & by_full[:, None])
        self._pay(state, context, FULL, by_full)
        disagrees = (full.top_tokens != text.top_tokens) & asks_text[:, None]
        from_full = self._from_full(context, full, disagrees, quota)
        self._refresh(state, full, by_full, context)

        on_full, on_text = from_full & by_full[:, None], from_text & by_text[:, None]
        is_full = by_full[:, None]
        return Step(
            commit=on_full | on_text,
            tokens=torch.where(is_full, full.tokens, state.tokens),
            draft=_merge(is_full, full, text),
            reasons={
                "certificate": on_text & prefix,
                "anchor": on_text,
                "disagreement": on_full & disagrees,
                "quota": on_full,
            },
            confidence=torch.where(is_full, full.log_prob, state.log_prob).exp(),
            info={
                "has_visual": context.predictor.has_visual,
                "certified": prefix.sum(dim=1),
                "guard_stop": self._guard_ended(rank, agrees, blocked, eligible) & asks_text,
                "anchor_age": torch.where(by_full, 0, context.step - state.step),
            },
        )

    @staticmethod
    def _affords(state: Anchor, context: StepContext, view: View) -> Tensor:
        """`(B,)` bool, rows whose budget pays one forward of `view`."""
        if state.remaining is None:
            return torch.ones_like(state.step, dtype=torch.bool)
        return state.remaining >= context.predictor.forward_cost(view)

    @staticmethod
    def _pay(state: Anchor, context: StepContext, view: View, rows: Tensor) -> None:
        if state.remaining is not None:
            state.remaining = state.remaining - context.predictor.forward_cost(view) * rows

    def _may_look(
        self, state: Anchor, context: StepContext, quota: Tensor, disagreement: Tensor
    ) -> Tensor:
        """`(B,)` bool, rows that may spend a FULL forward in this step.

        A row looks if it can pay, and either the views disagree on a token that it must commit, or
        what is left (TEXT_ONLY of the steps to come set aside) would pay FULL in each of them.
        """
        if state.remaining is None:
            raise AssertionError("only asked with a budget")
        full, text = (context.predictor.forward_cost(view) for view in (FULL, self._text_view))
        num_open = context.predictor.canvas.is_wanted.sum(dim=1)
        steps_left = torch.ceil(num_open / quota.clamp_min(1))
        is_ample = state.remaining >= steps_left * (full + text) - text
        return (state.remaining >= full) & (disagreement | is_ample)

    def _access(self, state: Anchor) -> tuple[Tensor, Tensor]:
        """`(B,)` bools: rows that must run FULL in this step, and rows that must not."""
        never = torch.zeros_like(state.step, dtype=torch.bool)
        if self.access in ("certificate", "oracle"):
            return never, never
        if self.access == "always":
            return ~never, never
        if state.scheduled is not None:
            must = state.scheduled.gather(
                1, state.taken.clamp_max(state.scheduled.shape[1] - 1)[:, None]
            )[:, 0]
        else:
            must = state.taken % self.every == 0
        return must, ~must

    def _from_full(
        self, context: StepContext, full: Prediction, disagrees: Tensor, quota: Tensor
    ) -> Tensor:
        held = context.held_back(full.tokens)
        if self.order == "confidence":
            return select_top(full.log_prob, context.eligible, quota, held)
        agreeing = context.eligible & ~disagrees
        last = agreeing if held is None else agreeing | held
        return select_top(full.log_prob, context.eligible, quota, last)

    @staticmethod
    def _guard_ended(rank: Tensor, agrees: Tensor, blocked: Tensor, eligible: Tensor) -> Tensor:
        width = rank.shape[1]
        first_blocked = torch.where(blocked & agrees, rank, width).min(dim=1).values
        first_disagreement = torch.where(eligible & ~agrees, rank, width).min(dim=1).values
        return first_blocked < first_disagreement

    @staticmethod
    def _refresh(state: Anchor, full: Prediction, by_full: Tensor, context: StepContext) -> None:
        is_full = by_full[:, None]
        state.tokens = torch.where(is_full, full.tokens, state.tokens)
        state.top_tokens = torch.where(is_full, full.top_tokens, state.top_tokens)
        state.log_prob = torch.where(is_full, full.log_prob, state.log_prob)
        state.step = torch.where(by_full, context.step, state.step)
        state.taken = state.taken + context.eligible.any(dim=1).long()


def _merge(choose_first: Tensor, first: Prediction, second: Prediction) -> Prediction:
    return replace(
        first,
        tokens=torch.where(choose_first, first.tokens, second.tokens),
        top_tokens=torch.where(choose_first, first.top_tokens, second.top_tokens),
        log_prob=torch.where(choose_first, first.log_prob, second.log_prob),
    )
