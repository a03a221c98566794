"""What a sampler is.

It asks for predictions and says which open positions are committed with which token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dlm_decode.predictor import Prediction, Predictor, View

__all__ = ["Sampler", "Step", "StepContext"]


@dataclass(frozen=True)
class StepContext:
    """What a sampler may know at one step; B rows, C canvas columns.

    Attributes:
        tokens: `(B, C)` canvas ids, the mask id at open positions.
        is_open: `(B, C)` bool, positions that are not committed yet.
        eligible: `(B, C)` bool, open positions that may be committed now: inside the row's block
            and before its stop. A row without any is finished.
        quota: `(B,)` positions that the schedule commits in this step: at least 1, but for presets
            of programs that let a step pass.
        share: `(B,)` float32, the quota as a share of the block's open positions, before rounding.
        block: `(B,)` index of each row's block.
        step_in_block: `(B,)` steps that the row has taken in its block.
        step: steps of the whole call so far.
        last: ids that `eos_last` holds back; empty without it.
        predictor: answers questions; use `predict` and `uniform`.
    """

    tokens: Tensor
    is_open: Tensor
    eligible: Tensor
    quota: Tensor
    share: Tensor
    block: Tensor
    step_in_block: Tensor
    step: int
    last: tuple[int, ...]
    predictor: Predictor

    def predict(
        self,
        view: View,
        positions: Tensor,
        statistics: Collection[str] = (),
        *,
        is_charged: bool = True,
        samples: bool = True,
    ) -> Prediction:
        """Tokens and confidences at `(B, C)` bool `positions`, see `Predictor`.

        It costs one forward over the rows that ask; `is_charged=False` is for measurements, which
        cost nothing and propose argmax tokens, as any forward does with `samples=False`.
        """
        return self.predictor(
            view,
            positions,
            statistics,
            blocks=self.block,
            is_charged=is_charged,
            samples=samples,
        )

    def uniform(self, positions: Tensor) -> Tensor:
        """`(B, C)` random numbers in [0, 1) at `positions`, from each row's own generator."""
        return self.predictor.uniform(positions)

    def exponential(self, positions: Tensor) -> Tensor:
        """`(B, C)` exponentially distributed numbers at `positions`, as `uniform`."""
        return self.predictor.exponential(positions)

    def held_back(self, tokens: Tensor) -> Tensor | None:
        """`(B, C)` bool, where `tokens` are ids to be committed last.

        It is `None` when `eos_last` is off.
        """
        if not self.last:
            return None
        held = tokens == self.last[0]
        for token_id in self.last[1:]:
            held = held | (tokens == token_id)
        return held

    def without_held_back(self, tokens: Tensor, eligible: Tensor) -> Tensor:
        """`eligible` without positions to be committed last, in rows that have others."""
        held = self.held_back(tokens)
        if held is None:
            return eligible
        others = eligible & ~held
        return torch.where(others.any(dim=1, keepdim=True), others, eligible)


@dataclass(frozen=True)
class Step:
    """A sampler's decision.

    Attributes:
        commit: `(B, C)` bool, positions to fix now.
        tokens: `(B, C)` long, read where `commit` is set.
        draft: the prediction that was decided on; the trajectory shows it, and the loop takes its
            most confident position where a row commits nothing.
        reasons: `(B, C)` bool masks by reason (`"quota"`, `"threshold"`, `"certificate"`, ...); the
            first that holds is recorded.
        info: further `(B,)` tensors for the trajectory, by name.
        confidence: `(B, C)` probability recorded for each commit; the draft's when `None`.
        per_token: further `(B, C)` tensors by name, recorded for each commit.
    """

    commit: Tensor
    tokens: Tensor
    draft: Prediction
    reasons: Mapping[str, Tensor]
    info: Mapping[str, Tensor] = field(default_factory=dict)
    confidence: Tensor | None = None
    per_token: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class Sampler(Protocol):
    """A frozen dataclass of knobs with two methods.

    Register it with `@register_sampler("name")`. Optional: an attribute `cache` names the cache
    policy that `generate` uses unless it is given another, a method `preset(cache)` the preset of
    `Settings`, and a method `notes(context)` lists what a user should know beforehand.
    """

    def start(self, context: Predictor) -> Any:
        """State of one response, handed to every `step`; `None` where none is needed."""
        ...

    def step(self, context: StepContext, state: Any) -> Step:
        """Decides one step.

        It commits inside `context.eligible` only, at least one position per unfinished row.
        """
        ...
