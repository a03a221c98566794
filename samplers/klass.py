"""KLASS: commit what is confident and has stopped changing from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlm_decode.confidence import select_top
from dlm_decode.errors import InvalidInputError
from dlm_decode.predictor import FULL, Predictor
from dlm_decode.samplers import register_sampler
from dlm_decode.samplers.acceptance import by_stability, check_not_negative, check_share
from dlm_decode.samplers.base import Step, StepContext

__all__ = ["Klass", "KlassState"]


@dataclass
class KlassState:
    """For how long each distribution has stood still; B rows, C canvas columns.

    Attributes:
        num_stable: `(B, C)` steps in a row with a divergence below the threshold.
    """

    num_stable: Tensor

    def observe(self, kl: Tensor, is_answered: Tensor, kl_threshold: float) -> None:
        """Counts a step; positions that were not answered keep their count."""
        counted = torch.where(kl < kl_threshold, self.num_stable + 1, 0)
        self.num_stable = torch.where(is_answered, counted, self.num_stable)


@register_sampler("klass")
@dataclass(frozen=True)
class Klass:
    """Commits confident positions with a stable distribution; the quota's best where there is none.

    Stable means that KL(p_t || p_(t-1)) was below `kl_threshold` in each of the last `history`
    steps. A step that has stable positions may commit fewer than the quota, so a response can take
    more steps than the schedule has; past its end a step commits one position.

    Args:
        threshold: probability that the proposed token must exceed.
        kl_threshold: nats.
        history: steps, at least 1.

    Raises:
        InvalidInputError: a threshold outside [0, 1], a negative `kl_threshold` or a history below
            1.

    Source: KLASS (arXiv 2511.05664); defaults of the reference implementation, whose scripts set
    them by task (for LLaDA on GSM8K: 0.6, 0.015, 2). Differs from the reference: divergences are
    known inside the row's block only, so a block's first step has none and its first stable commit
    comes after `history` more steps (the reference compares with the last step of the block before,
    and is one step earlier in all blocks but the first); above temperature 0 they are those of the
    un-noised distributions.
    """

    threshold: float = 0.9
    kl_threshold: float = 0.01
    history: int = 2

    def __post_init__(self) -> None:
        check_share("threshold", self.threshold)
        check_not_negative("kl_threshold", self.kl_threshold)
        if isinstance(self.history, bool) or not isinstance(self.history, int) or self.history < 1:
            raise InvalidInputError(
                f"history must be a whole number of at least 1, got {self.history!r}."
            )

    def start(self, context: Predictor) -> KlassState:
        """Nothing has stood still yet."""
        return KlassState(num_stable=torch.zeros_like(context.canvas.tokens))

    def step(self, context: StepContext, state: KlassState) -> Step:
        """One FULL forward; see the class."""
        prediction = context.predict(FULL, context.eligible, ("kl",))
        if prediction.kl is None:
            raise AssertionError("kl was asked for")
        eligible = context.eligible & prediction.is_answered
        state.observe(prediction.kl, eligible, self.kl_threshold)
        stable = by_stability(
            prediction.log_prob,
            context.without_held_back(prediction.tokens, eligible),
            state.num_stable,
            threshold=self.threshold,
            history=self.history,
        )
        best = select_top(
            prediction.log_prob,
            eligible,
            context.quota.clamp_min(1),
            context.held_back(prediction.tokens),
        )
        commit = torch.where(stable.any(dim=1, keepdim=True), stable, best)
        return Step(
            commit=commit,
            tokens=prediction.tokens,
            draft=prediction,
            reasons={"stable": stable, "quota": commit},
        )
