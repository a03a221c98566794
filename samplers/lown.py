"""LOWN: decode from text alone while the picture would not change the answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from dlm_decode import cache as caches
from dlm_decode.cache.prefix import check_interval
from dlm_decode.confidence import rank_descending, select_top
from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.predictor import FULL, TEXT_ONLY, TEXT_ONLY_ORIGINAL, Prediction, Predictor, View
from dlm_decode.samplers import register_alias, register_sampler
from dlm_decode.samplers.acceptance import (
    above_threshold,
    by_factor,
    check_not_negative,
    check_share,
)
from dlm_decode.samplers.base import Step, StepContext

__all__ = ["Lown", "LownState", "blocked_by_guard", "certified_prefix", "full_step_commit"]

Guard = Literal["scan", "adjacent"]
Access = Literal["certificate", "always", "every", "random", "oracle"]
Parallel = Literal["threshold", "factor"]
_EVERY = 4
_FULL_SHARE = 0.25


@dataclass
class LownState:
    """What the FULL forwards of each row said last; B rows, C canvas columns.

    Attributes:
        tokens: `(B, C)` proposed tokens, the anchors.
        top_tokens: `(B, C)` argmax tokens; certificates compare these.
        log_prob: `(B, C)` log-probability of `tokens`; -inf where FULL never answered.
        step: `(B, C)` step at which that forward ran.
        has_looked: `(B,)` bool, FULL has run for the row.
        taken: `(B,)` steps that each row has taken.
        scheduled: `(B, steps)` bool, FULL steps drawn in advance for `access="random"`.
        allowance: `(B,)` float64 decoder FLOPs that the budget allows; `None` without a budget.
    """

    tokens: Tensor
    top_tokens: Tensor
    log_prob: Tensor
    step: Tensor
    has_looked: Tensor
    taken: Tensor
    scheduled: Tensor | None = None
    allowance: Tensor | None = None

    def refresh(self, full: Prediction, rows: Tensor, step: int) -> None:
        """Takes over what FULL answered in `rows` `(B,)` bool; other anchors stay."""
        fresh = full.is_answered & rows[:, None]
        self.tokens = torch.where(fresh, full.tokens, self.tokens)
        self.top_tokens = torch.where(fresh, full.top_tokens, self.top_tokens)
        self.log_prob = torch.where(fresh, full.log_prob, self.log_prob)
        self.step = torch.where(fresh, step, self.step)
        self.has_looked = self.has_looked | rows


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


def full_step_commit(
    log_prob: Tensor,
    eligible: Tensor,
    disagrees: Tensor,
    quota: Tensor,
    held: Tensor | None = None,
) -> Tensor:
    """What a FULL step commits: exactly the quota, disagreeing positions first, as `(B, C)` bool.

    Args:
        log_prob: `(B, C)` confidences of FULL; within a group the higher goes first.
        eligible: `(B, C)` bool.
        disagrees: `(B, C)` bool, the views propose different tokens; all `False` orders by
            confidence alone.
        quota: `(B,)` counts.
        held: `(B, C)` bool, positions that go behind all others.

    Source: LOWN (arXiv 2610.36671), disagreement-first order.
    """
    group = (~disagrees).long()
    if held is not None:
        group = group + 2 * held
    return select_top(log_prob, eligible, quota, group)


@register_sampler("lown")
@dataclass(frozen=True)
class Lown:
    """Certificate-guided visual routing.

    Each row keeps anchors: the tokens and confidences of its latest FULL forward. A step first runs
    TEXT_ONLY; the candidates whose top token still equals the anchor's, scanned in decreasing
    anchor confidence, are certified up to the first that is not. If they number at least the quota,
    they are committed and no picture is read; otherwise FULL runs, and exactly the quota is
    committed, those first where the two views disagree. Either way at least the quota is committed,
    so a response never takes more steps than the baseline.

    The first step of a row has no TEXT_ONLY forward and is charged for FULL alone. Rows without
    visual tokens run FULL in every step, as the baseline does; `info["has_visual"]` says so. At a
    temperature above 0 certificates compare argmax tokens, and the token that is committed is the
    one that the anchor's FULL forward sampled. `guard`, `positions` and the exemption are choices
    that the paper leaves open (docs/measurements.md compares them); `budget` and `parallel` on
    TEXT_ONLY steps are ours.

    Args:
        guard: repetition guard, see `blocked_by_guard`; `None` (or `"none"`) for none.
        guard_exempt_special: end-of-sequence, padding and stop ids may repeat. Without it the
            padding at the end of a response ends every scan.
        positions: rotary positions of the TEXT_ONLY view, `"packed"` or `"original"`.
        access: who decides that FULL runs. `"certificate"` is the paper's rule; ablations:
            `"always"`, `"every"` (each `every`-th step of the row), `"random"` (`full_share` of the
            schedule's steps, drawn from the row's seed). In the last two, a step without FULL
            commits the certified prefix, topped up to the quota by anchor confidence. `"oracle"`
            looks at both views for nothing, and pays for FULL exactly where FULL would commit
            another token than such a step does, and for TEXT_ONLY elsewhere: a bound for schedules,
            no method.
        accept: on steps without FULL, `"prefix"` commits the whole certified prefix, `"k"` exactly
            the quota.
        order: on FULL steps, `"disagreement"` commits first where the views disagree,
            `"confidence"` does not.
        every: period for `access="every"`; 4 if `None`.
        full_share: share of FULL steps for `access="random"`, the first step included; 0.25 if
            `None`.
        budget: the most that a response may cost, relative to the decoder FLOPs of the baseline
            sampler with the same settings, in (0, 1]; `None` is the paper's rule. The bound holds
            for every row: no forward starts that would exceed it. While the budget is ample the
            paper's rule decides. When it runs short, FULL is kept for the steps whose certificates
            fail by disagreement, not by the guard, and the others commit the certified prefix,
            topped up to the quota with anchor tokens; when not even TEXT_ONLY is affordable, anchor
            tokens are committed without a forward. Only with `access="certificate"`.
        parallel: Fast-dLLM's rule, united with LOWN's: `"threshold"` or `"factor"`. A FULL step
            also commits what the rule accepts of FULL; a step without FULL also commits what it
            accepts of TEXT_ONLY, where that agrees with the anchor.
        threshold: for `parallel="threshold"`.
        factor: for `parallel="factor"`.
        accepts_last_rank: as in `FastDllm`.
        cache: cache policy that `generate` uses unless it is given another; each view has its own
            cache.

    Raises:
        UnknownNameError: an unknown value of a named option, or an unknown cache policy.
        InvalidInputError: a period below 1, a negative factor, a share or budget outside (0, 1],
            an option that the access has no use for, or (when decoding starts) a budget that cannot
            pay the first FULL forward.

    Source: LOWN (arXiv 2610.36671).
    """

    guard: Guard | None = "scan"
    guard_exempt_special: bool = True
    positions: Literal["packed", "original"] = "packed"
    access: Access = "certificate"
    accept: Literal["prefix", "k"] = "prefix"
    order: Literal["disagreement", "confidence"] = "disagreement"
    every: int | None = None
    full_share: float | None = None
    budget: float | None = None
    parallel: Parallel | None = None
    threshold: float = 0.9
    factor: float = 1.0
    accepts_last_rank: bool = False
    cache: str | None = None

    def __post_init__(self) -> None:
        if self.guard == "none":
            object.__setattr__(self, "guard", None)
        choices = {
            "guard": (None, *get_args(Guard)),
            "positions": ("packed", "original"),
            "access": get_args(Access),
            "accept": ("prefix", "k"),
            "order": ("disagreement", "confidence"),
            "parallel": (None, *get_args(Parallel)),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UnknownNameError(name, str(getattr(self, name)), map(str, allowed))
        for name, access in (
            ("every", "every"),
            ("full_share", "random"),
            ("budget", "certificate"),
        ):
            if getattr(self, name) is not None and self.access != access:
                raise InvalidInputError(
                    f"{name} needs access={access!r}, got {self.access!r}; drop one of them."
                )
        check_interval("every", self.every)
        for name in ("full_share", "budget"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value <= 1):
                raise InvalidInputError(f"{name} must be above 0 and at most 1, got {value!r}.")
        check_share("threshold", self.threshold)
        check_not_negative("factor", self.factor)
        caches.check(self.cache)

    @property
    def _text_view(self) -> View:
        return TEXT_ONLY if self.positions == "packed" else TEXT_ONLY_ORIGINAL

    def notes(self, context: Predictor) -> list[str]:
        """What a user should know before decoding: rows that have no visual tokens."""
        rows = [row for row, has_visual in enumerate(context.has_visual.tolist()) if not has_visual]
        if not rows:
            return []
        return [f"rows {rows} have no visual tokens; lown decodes them as the baseline does."]

    def start(self, context: Predictor) -> LownState:
        """No anchors yet."""
        tokens = context.canvas.tokens
        zeros = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
        return LownState(
            tokens=tokens.clone(),
            top_tokens=tokens.clone(),
            log_prob=torch.full(tokens.shape, float("-inf"), device=tokens.device),
            step=torch.zeros_like(tokens),
            has_looked=zeros.bool(),
            taken=zeros,
            scheduled=self._draw_schedule(context) if self.access == "random" else None,
            allowance=None if self.budget is None else self._allowance(context, self.budget),
        )

    @staticmethod
    def _allowance(context: Predictor, budget: float) -> Tensor:
        """`(B,)` FLOPs that each row may spend, checked to pay at least one FULL forward."""
        if context.baseline_flops is None:
            raise AssertionError("a budget needs the baseline's cost")
        full = context.forward_cost(FULL)
        baseline = torch.tensor(context.baseline_flops, dtype=torch.float64, device=full.device)
        short = (baseline > 0) & (budget * baseline < full)
        if bool(short.any()):
            least = float((full / baseline)[short].max())
            raise InvalidInputError(
                f"budget {budget} is below the cost of one FULL forward ({least:.4f} of what the "
                "baseline costs); use a larger budget, or more steps if there are fewer than "
                "positions."
            )
        return budget * baseline

    def _draw_schedule(self, context: Predictor) -> Tensor:
        """`(B, steps)` bool: the share's number of FULL steps per row, the first included."""
        steps = context.settings.steps
        num_rows, device = len(context.canvas.tokens), context.canvas.tokens.device
        numbers = torch.stack(
            [torch.rand(steps, generator=g, device=device) for g in context.generators]
        )
        numbers[:, 0] = 2.0
        share = _FULL_SHARE if self.full_share is None else self.full_share
        count = torch.full((num_rows,), max(1, round(share * steps)), device=device)
        return select_top(numbers, torch.ones_like(numbers, dtype=torch.bool), count)

    def step(self, context: StepContext, state: LownState) -> Step:
        """One routed step; see the class."""
        eligible, active = context.eligible, context.eligible.any(dim=1)
        has_visual, is_oracle = context.predictor.has_visual, self.access == "oracle"
        may_skip = active & has_visual & state.has_looked
        forced_full, forced_text = self._scheduled_access(state)
        forced_text = forced_text & may_skip
        asks_text = may_skip & ~(forced_full & (self.order == "confidence"))
        asks_text = asks_text & self._affords(state, context, self._text_view)
        text = context.predict(
            self._text_view,
            eligible & asks_text[:, None],
            is_charged=not is_oracle,
            samples=False,
        )

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
        if state.allowance is not None:
            disagreement = (first_k & ~agrees).any(dim=1) & asks_text
            may_look = self._may_look(state, context, quota, disagreement | ~has_visual)
            forced_text = active & state.has_looked & ~may_look
        from_text = prefix if self.accept == "prefix" else prefix & first_k
        if self.parallel is not None:
            from_text = from_text | self._accepted(context, text, eligible & agrees)
        # Certified prefixes hold the quota already; schedules and budgets top up with anchors.
        from_text = from_text | first_k
        # Later steps read anchors everywhere; without them FULL need only answer what it commits.
        wanted = eligible if self.access == "always" else context.predictor.canvas.is_wanted
        if is_oracle:
            peek = context.predict(FULL, wanted & may_skip[:, None], is_charged=False)
            is_changed = (from_text & (peek.top_tokens != state.top_tokens)).any(dim=1)
            forced_text = may_skip & ~is_changed
            context.predict(self._text_view, eligible & forced_text[:, None], samples=False)
        else:
            forced_text = forced_text | (may_skip & is_certified)
        by_text = forced_text & ~forced_full & active & state.has_looked
        by_full = active & ~by_text

        full = context.predict(FULL, wanted & by_full[:, None])
        disagrees = (full.top_tokens != text.top_tokens) & asks_text[:, None]
        if self.order == "confidence":
            disagrees = torch.zeros_like(disagrees)
        answered = eligible & full.is_answered
        from_full = full_step_commit(
            full.log_prob, answered, disagrees, quota, context.held_back(full.tokens)
        )
        from_quota = from_full
        if self.parallel is not None:
            from_full = from_full | self._accepted(context, full, answered)
        state.refresh(full, by_full, context.step)
        state.taken = state.taken + active.long()

        on_full = from_full & by_full[:, None]
        on_text = from_text & by_text[:, None]
        is_full = by_full[:, None]
        return Step(
            commit=on_full | on_text,
            tokens=torch.where(is_full, full.tokens, state.tokens),
            draft=_merge(is_full, full, text),
            reasons={
                "certificate": on_text & prefix,
                "anchor": on_text & first_k,
                "disagreement": on_full & from_quota & disagrees,
                "quota": on_full & from_quota,
                "parallel": on_full | on_text,
            },
            confidence=torch.where(is_full, full.log_prob, state.log_prob).exp(),
            info={
                "has_visual": has_visual,
                "certified": prefix.sum(dim=1),
                "guard_stop": self._guard_ended(rank, agrees, blocked, eligible) & asks_text,
            },
            per_token={"anchor_age": context.step - state.step},
        )

    def _accepted(self, context: StepContext, said: Prediction, eligible: Tensor) -> Tensor:
        """What Fast-dLLM's rule accepts of a view's proposals."""
        candidates = context.without_held_back(said.tokens, eligible & said.is_answered)
        if self.parallel == "threshold":
            return above_threshold(said.log_prob, candidates, self.threshold)
        return by_factor(
            said.log_prob, candidates, self.factor, accepts_last_rank=self.accepts_last_rank
        )

    @staticmethod
    def _remaining(state: LownState, context: StepContext) -> Tensor | None:
        """`(B,)` FLOPs that the budget still allows."""
        if state.allowance is None:
            return None
        spent = context.predictor.meter.row_flops
        return state.allowance - torch.tensor(
            spent, dtype=torch.float64, device=state.allowance.device
        )

    @classmethod
    def _affords(cls, state: LownState, context: StepContext, view: View) -> Tensor:
        """`(B,)` bool, rows whose budget pays one forward of `view`."""
        remaining = cls._remaining(state, context)
        if remaining is None:
            return torch.ones_like(state.has_looked)
        return remaining >= context.predictor.forward_cost(view)

    def _may_look(
        self, state: LownState, context: StepContext, quota: Tensor, is_worth_it: Tensor
    ) -> Tensor:
        """`(B,)` bool, rows that may spend a FULL forward in this step.

        A row looks if it can pay, and either it is worth it, or what is left (TEXT_ONLY of the
        steps to come set aside) would pay FULL in each of them.
        """
        remaining = self._remaining(state, context)
        if remaining is None:
            raise AssertionError("only asked with a budget")
        full, text = (context.predictor.forward_cost(view) for view in (FULL, self._text_view))
        num_open = context.predictor.canvas.is_wanted.sum(dim=1)
        steps_left = torch.ceil(num_open / quota.clamp_min(1))
        is_ample = remaining >= steps_left * (full + text) - text
        return (remaining >= full) & (is_worth_it | is_ample)

    def _scheduled_access(self, state: LownState) -> tuple[Tensor, Tensor]:
        """`(B,)` bools: rows that must run FULL in this step, and rows that must not."""
        never = torch.zeros_like(state.has_looked)
        if self.access in ("certificate", "oracle"):
            return never, never
        if self.access == "always":
            return ~never, never
        if state.scheduled is not None:
            must = state.scheduled.gather(
                1, state.taken.clamp_max(state.scheduled.shape[1] - 1)[:, None]
            )[:, 0]
        else:
            must = state.taken % (_EVERY if self.every is None else self.every) == 0
        return must, ~must

    @staticmethod
    def _guard_ended(rank: Tensor, agrees: Tensor, blocked: Tensor, eligible: Tensor) -> Tensor:
        width = rank.shape[1]
        first_blocked = torch.where(blocked & agrees, rank, width).min(dim=1).values
        first_disagreement = torch.where(eligible & ~agrees, rank, width).min(dim=1).values
        return first_blocked < first_disagreement


def _merge(choose_first: Tensor, first: Prediction, second: Prediction) -> Prediction:
    return replace(
        first,
        tokens=torch.where(choose_first, first.tokens, second.tokens),
        top_tokens=torch.where(choose_first, first.top_tokens, second.top_tokens),
        log_prob=torch.where(choose_first, first.log_prob, second.log_prob),
    )


register_alias(
    "lown+fast_dllm",
    "lown:parallel=factor,accepts_last_rank=true,cache=prefix:refresh_interval=32",
)
