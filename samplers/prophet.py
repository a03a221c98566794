"""Prophet: commit everything at once when the model already knows the answer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dlm_decode.confidence import select_top
from dlm_decode.predictor import FULL, Predictor
from dlm_decode.samplers import register_sampler
from dlm_decode.samplers.acceptance import check_not_negative, is_wide, mean_over
from dlm_decode.samplers.base import Step, StepContext

__all__ = ["Prophet"]


@register_sampler("prophet")
@dataclass(frozen=True)
class Prophet:
    """Commits the quota, until the gap between the best two tokens is wide enough for all the rest.

    The gap is the top-1 minus the top-2 logit, averaged over the row's eligible positions. The
    threshold that it must reach falls in three phases of a response. Ids that `eos_last` holds back
    are left for the steps after that.

    Args:
        early: least gap in logits while less than 0.33 of the response is done.
        middle: least gap from there to 0.67.
        late: least gap from 0.67.

    Raises:
        InvalidInputError: a negative threshold.

    Source: Prophet (arXiv 2508.19982); thresholds and phases of the reference implementation. Our
    reading: the reference averages over five positions where the caller expects the answer, open or
    not; here all eligible positions count, since a response has no marked answer. It then
    fills the whole canvas; here the rest of the block is committed, and later blocks decide on
    their own. Its progress is step / steps; here it is the share of positions that are done once
    this step's quota is (behind a stop sequence there is nothing to do), which is the same until a
    block ends early, and does not fall behind after that.
    """

    early: float = 7.5
    middle: float = 5.0
    late: float = 2.5

    def __post_init__(self) -> None:
        for name in ("early", "middle", "late"):
            check_not_negative(name, getattr(self, name))

    def start(self, context: Predictor) -> Tensor:
        """`(B,)` positions to be decoded."""
        return context.canvas.is_open.sum(dim=1)

    def step(self, context: StepContext, state: Tensor) -> Step:
        """One FULL forward; see the class."""
        prediction = context.predict(FULL, context.eligible, ("logit_margin",))
        if prediction.logit_margin is None:
            raise AssertionError("logit_margin was asked for")
        eligible = context.eligible & prediction.is_answered
        quota = context.quota.clamp_min(1)
        num_left = context.predictor.canvas.is_wanted.sum(dim=1)
        progress = (state - num_left + quota) / state.clamp_min(1)
        gap = mean_over(prediction.logit_margin, eligible)
        knows = is_wide(gap, progress, early=self.early, middle=self.middle, late=self.late)
        best = select_top(
            prediction.log_prob, eligible, quota, context.held_back(prediction.tokens)
        )
        rest = context.without_held_back(prediction.tokens, eligible) & knows[:, None]
        return Step(
            commit=best | rest,
            tokens=prediction.tokens,
            draft=prediction,
            reasons={"early_commit": rest, "quota": best},
            info={"logit_margin": gap},
        )
