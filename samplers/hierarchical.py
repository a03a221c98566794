"""Hierarchical decoding of dInfer: commit the best of every run of masks, to break it in two."""

from __future__ import annotations

from dataclasses import dataclass

from dlm_decode.errors import InvalidInputError
from dlm_decode.predictor import FULL, Predictor
from dlm_decode.samplers import register_sampler
from dlm_decode.samplers.acceptance import by_hierarchy, check_share
from dlm_decode.samplers.base import Step, StepContext

__all__ = ["Hierarchical"]


@register_sampler("hierarchical")
@dataclass(frozen=True)
class Hierarchical:
    """Commits confident positions, and of every run of masks the most confident one.

    What is committed in one step then stands apart, or is sure. Runs are maximal runs of
    consecutive open positions in the row's block. The most confident position of all is committed
    in any case; the quota plays no part.

    Args:
        threshold: probability that a position must exceed.
        low_threshold: probability that the best of a run must exceed.

    Raises:
        InvalidInputError: a threshold outside [0, 1], or a `low_threshold` above `threshold`.

    Source: dInfer (arXiv 2510.08666), hierarchical decoder; its serving code sets `low_threshold`
    to 0.6. Differs from the reference: batches of any size.
    """

    threshold: float = 0.9
    low_threshold: float = 0.4

    def __post_init__(self) -> None:
        check_share("threshold", self.threshold)
        check_share("low_threshold", self.low_threshold)
        if self.low_threshold > self.threshold:
            raise InvalidInputError(
                f"low_threshold must be at most threshold ({self.threshold}), "
                f"got {self.low_threshold}."
            )

    def start(self, context: Predictor) -> None:
        """No state."""

    def step(self, context: StepContext, state: None) -> Step:
        """One FULL forward; see the class."""
        prediction = context.predict(FULL, context.eligible)
        eligible = context.eligible & prediction.is_answered
        commit = by_hierarchy(
            prediction.log_prob,
            context.without_held_back(prediction.tokens, eligible),
            context.eligible,
            threshold=self.threshold,
            low_threshold=self.low_threshold,
        )
        confident = commit & (prediction.confidence > self.threshold)
        parted = commit & (prediction.confidence > self.low_threshold)
        return Step(
            commit=commit,
            tokens=prediction.tokens,
            draft=prediction,
            reasons={"threshold": confident, "hierarchy": parted, "best": commit},
        )
