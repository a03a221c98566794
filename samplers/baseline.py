"""The sampler of LLaDA and LLaDA-V.

It runs one FULL forward per step and commits the quota's best positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from dlm_decode.confidence import select_top
from dlm_decode.errors import UnknownNameError
from dlm_decode.predictor import FULL, Prediction, Predictor
from dlm_decode.samplers import register_sampler
from dlm_decode.samplers.base import Step, StepContext

__all__ = ["Baseline"]

Remasking = Literal["low_confidence", "margin", "entropy", "random"]


@register_sampler("baseline")
@dataclass(frozen=True)
class Baseline:
    """Commits the quota of each step, best positions first.

    Args:
        remasking: what "best" means: `"low_confidence"` probability of the proposed token,
            `"margin"` top-1 minus top-2 probability, `"entropy"` low entropy, `"random"` any order.

    Raises:
        UnknownNameError: another value.

    Source: LLaDA (arXiv 2502.09992), low-confidence and random remasking; margin and entropy as in
    Dream 7B (arXiv 2508.15487), `topk_margin` and `entropy`.
    """

    remasking: Remasking = "low_confidence"

    def __post_init__(self) -> None:
        if self.remasking not in get_args(Remasking):
            raise UnknownNameError("remasking", str(self.remasking), get_args(Remasking))

    def start(self, context: Predictor) -> None:
        """No state."""

    def step(self, context: StepContext, state: None) -> Step:
        """One FULL forward; see the class."""
        statistics = (self.remasking,) if self.remasking in ("margin", "entropy") else ()
        prediction = context.predict(FULL, context.eligible, statistics)
        score = self._score(prediction, context)
        commit = select_top(
            score, context.eligible, context.quota, context.held_back(prediction.tokens)
        )
        return Step(
            commit=commit, tokens=prediction.tokens, draft=prediction, reasons={"quota": commit}
        )

    def _score(self, prediction: Prediction, context: StepContext) -> Tensor:
        if self.remasking == "random":
            return context.uniform(context.eligible)
        if self.remasking == "margin" and prediction.margin is not None:
            return prediction.margin
        if self.remasking == "entropy" and prediction.entropy is not None:
            return -prediction.entropy
        return prediction.log_prob
