"""EB-Sampler: commit as many positions as a bound on their joint uncertainty allows."""

from __future__ import annotations

from dataclasses import dataclass

from dlm_decode.predictor import FULL, Predictor
from dlm_decode.samplers import register_sampler
from dlm_decode.samplers.acceptance import by_entropy_bound, check_not_negative
from dlm_decode.samplers.base import Step, StepContext

__all__ = ["EntropyBound"]


@register_sampler("entropy_bound")
@dataclass(frozen=True)
class EntropyBound:
    """Commits the positions of lowest entropy whose entropies, but for the largest, sum to gamma.

    The sum bounds how much the committed tokens may depend on each other. At least one position is
    committed; the quota plays no part. Entropies are those of the un-noised distribution at every
    temperature.

    Args:
        gamma: nats; 0 commits positions without any doubt together, and one at a time otherwise.

    Raises:
        InvalidInputError: a negative gamma.

    Source: EB-Sampler (arXiv 2505.24857). The default gamma is that of DiffusionGemma's sampler in
    transformers; the paper's gamma depends on the task.
    """

    gamma: float = 0.1

    def __post_init__(self) -> None:
        check_not_negative("gamma", self.gamma)

    def start(self, context: Predictor) -> None:
        """No state."""

    def step(self, context: StepContext, state: None) -> Step:
        """One FULL forward; see the class."""
        prediction = context.predict(FULL, context.eligible, ("entropy",))
        if prediction.entropy is None:
            raise AssertionError("entropy was asked for")
        candidates = context.without_held_back(
            prediction.tokens, context.eligible & prediction.is_answered
        )
        commit = by_entropy_bound(prediction.entropy, candidates, self.gamma)
        return Step(
            commit=commit,
            tokens=prediction.tokens,
            draft=prediction,
            reasons={"entropy_bound": commit},
        )
