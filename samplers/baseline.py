"""The sampler of LLaDA and LLaDA-V.

It runs one FULL forward per step and commits the quota's best positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dlm_decode.confidence import select_top
from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.predictor import FULL, Prediction, Predictor
from dlm_decode.samplers import register_sampler
from dlm_decode.samplers.base import Step, StepContext

__all__ = ["Baseline"]

Remasking = Literal["low_confidence", "margin", "entropy", "random", "origin"]


@register_sampler("baseline")
@dataclass(frozen=True)
class Baseline:
    """Commits the quota of each step, best positions first.

    Args:
        remasking: what "best" means: `"low_confidence"` probability of the proposed token,
            `"margin"` top-1 minus top-2 probability, `"entropy"` low entropy, `"random"` any order.
            `"origin"` commits each position with the probability that the schedule says (its share
            of the open ones), so that steps commit the quota on average.
        alg_temp: above 0, the quota's positions are drawn without replacement from
            softmax(score / alg_temp), the score being what `remasking` names.

    Raises:
        UnknownNameError: another value of `remasking`.
        InvalidInputError: an `alg_temp` that is negative or not finite, or one for an order without
            scores.

    Source: LLaDA (arXiv 2502.09992), low-confidence and random remasking; the others as in
    Dream 7B (arXiv 2508.15487), `topk_margin`, `entropy`, `origin` and `alg_temp`.
    """

    remasking: Remasking = "low_confidence"
    alg_temp: float = 0.0

    def __post_init__(self) -> None:
        if self.remasking not in get_args(Remasking):
            raise UnknownNameError("remasking", str(self.remasking), get_args(Remasking))
        is_number = isinstance(self.alg_temp, (int, float)) and not isinstance(self.alg_temp, bool)
        if not is_number or not 0 <= self.alg_temp < math.inf:
            raise InvalidInputError(
                f"alg_temp must be a finite number of at least 0, got {self.alg_temp!r}."
            )
        if self.alg_temp and self.remasking in ("random", "origin"):
            raise InvalidInputError(
                f"alg_temp={self.alg_temp} needs scores to draw by, and remasking="
                f"{self.remasking!r} has none; use low_confidence, margin or entropy."
            )

    def start(self, context: Predictor) -> None:
        """No state."""

    def step(self, context: StepContext, state: None) -> Step:
        """One FULL forward; see the class."""
        if self.remasking == "origin":
            return self._step_by_chance(context)
        statistics = (self.remasking,) if self.remasking in ("margin", "entropy") else ()
        prediction = context.predict(FULL, context.eligible, statistics)
        score = self._score(prediction, context)
        commit = select_top(
            score, context.eligible, context.quota, context.held_back(prediction.tokens)
        )
        return Step(
            commit=commit, tokens=prediction.tokens, draft=prediction, reasons={"quota": commit}
        )

    def _step_by_chance(self, context: StepContext) -> Step:
        chosen = context.eligible & (context.uniform(context.eligible) < context.share[:, None])
        is_partial = chosen.any(dim=1, keepdim=True) & (not context.last)
        prediction = context.predict(FULL, torch.where(is_partial, chosen, context.eligible))
        commit = chosen & context.without_held_back(prediction.tokens, context.eligible)
        return Step(
            commit=commit, tokens=prediction.tokens, draft=prediction, reasons={"chance": commit}
        )

    def _score(self, prediction: Prediction, context: StepContext) -> Tensor:
        if self.remasking == "random":
            return context.uniform(context.eligible)
        score = prediction.log_prob
        if self.remasking == "margin" and prediction.margin is not None:
            score = prediction.margin
        if self.remasking == "entropy" and prediction.entropy is not None:
            score = -prediction.entropy
        if not self.alg_temp:
            return score
        # The largest of p / e, e exponentially distributed, are a draw from p without replacement.
        score = prediction.confidence if self.remasking == "low_confidence" else score
        drawn = context.exponential(context.eligible)
        return score / self.alg_temp - drawn.log()
