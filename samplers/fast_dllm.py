"""Fast-dLLM: commit every confident proposal at once, over a prefix or dual cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from dlm_decode import cache as caches
from dlm_decode.cache import CachePolicy
from dlm_decode.confidence import select_top
from dlm_decode.errors import UnknownNameError
from dlm_decode.predictor import FULL, Prediction, Predictor
from dlm_decode.samplers import register_alias, register_sampler
from dlm_decode.samplers.acceptance import (
    above_threshold,
    by_factor,
    check_not_negative,
    check_share,
)
from dlm_decode.samplers.base import Step, StepContext

__all__ = ["FastDllm"]

Rule = Literal["threshold", "factor", "quota"]
Version = Literal["2025-06", "2026-04"]


@register_sampler("fast_dllm")
@dataclass(frozen=True)
class FastDllm:
    """Parallel decoding: each step commits what the rule accepts, at least one position.

    Args:
        rule: `"threshold"`, `"factor"`, or `"quota"` for the fixed schedule.
        threshold: least probability, for `rule="threshold"`.
        factor: for `rule="factor"`, see `acceptance.by_factor`.
        is_strict: the threshold must be exceeded, not only reached.
        accepts_last_rank: the reference's factor rule also takes the last eligible position when it
            is the only one that fails.
        cache: cache policy that `generate` uses unless it is given another; `None` for none.
        version: reproduces a release of the reference with its quirks: rows of a batch wait for
            each other at the end of a block, nothing stops early; `"2025-06"` runs a useless
            forward after a block that its first forward finished; `"2026-04"` ends a block of the
            dual cache after its steps, even with positions left open. `None` has them fixed.

    Raises:
        UnknownNameError: an unknown rule, version or cache policy.
        InvalidInputError: a threshold outside [0, 1] or a negative factor.

    Source: Fast-dLLM (arXiv 2505.22618).
    """

    rule: Rule = "threshold"
    threshold: float = 0.9
    factor: float = 1.0
    is_strict: bool = False
    accepts_last_rank: bool = False
    cache: str | None = "prefix"
    version: Version | None = None

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise UnknownNameError("rule", str(self.rule), get_args(Rule))
        if self.version not in (None, *get_args(Version)):
            raise UnknownNameError("version", str(self.version), get_args(Version))
        check_share("threshold", self.threshold)
        check_not_negative("factor", self.factor)
        caches.check(self.cache)

    def preset(self, cache: CachePolicy | None) -> str | None:
        """Preset of the loop that goes with the version."""
        if self.version is None:
            return None
        is_truncated = self.version == "2026-04" and getattr(cache, "name", None) == "dual"
        return f"fast_dllm@{self.version}" + ("/dual" if is_truncated else "")

    def start(self, context: Predictor) -> None:
        """No state."""

    def step(self, context: StepContext, state: None) -> Step:
        """One FULL forward; see the class."""
        prediction = context.predict(FULL, context.eligible)
        eligible = context.eligible & prediction.is_answered
        commit = self._accept(context, prediction, eligible)
        if self.version == "2025-06" and context.predictor.has_cache:
            self._waste_a_forward(context, commit)
        confident = commit & (prediction.confidence >= self.threshold)
        reasons = {
            "threshold": {"threshold": confident, "fallback": commit},
            "factor": {"factor": commit},
            "quota": {"quota": commit},
        }
        return Step(
            commit=commit,
            tokens=prediction.tokens,
            draft=prediction,
            reasons=reasons[self.rule],
        )

    def _accept(self, context: StepContext, prediction: Prediction, eligible: Tensor) -> Tensor:
        if self.rule == "quota":
            held = context.held_back(prediction.tokens)
            return select_top(prediction.log_prob, eligible, context.quota, held)
        candidates = context.without_held_back(prediction.tokens, eligible)
        if self.rule == "threshold":
            return above_threshold(
                prediction.log_prob, candidates, self.threshold, is_strict=self.is_strict
            )
        return by_factor(
            prediction.log_prob,
            candidates,
            self.factor,
            accepts_last_rank=self.accepts_last_rank,
        )

    @staticmethod
    def _waste_a_forward(context: StepContext, commit: Tensor) -> None:
        """The reference always runs a cached forward after a block's first one."""
        is_first = (context.step_in_block == 0) & context.eligible.any(dim=1)
        is_done = ~(context.eligible & ~commit).any(dim=1)
        if bool((is_first & is_done).all()):
            context.predict(FULL, context.eligible)


for _version in get_args(Version):
    register_alias(
        f"fast_dllm@{_version}", f"fast_dllm:accepts_last_rank=true,version='{_version}'"
    )
register_alias(
    "llada_v_hook",
    "fast_dllm:rule=factor,accepts_last_rank=true,cache=prefix:refresh_interval=32",
)
