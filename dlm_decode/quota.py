"""Unmasking schedules: how many positions of a block each of its steps commits.

A schedule is a small frozen dataclass, chosen by `schedule=` in `generate`. Everything is computed
on the host in float32, so that counts do not depend on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dlm_decode.errors import InvalidInputError
from dlm_decode.registry import Registry
from dlm_decode.schedule import MOST_STEPS

__all__ = [
    "DEFAULT_SCHEDULE",
    "Cosine",
    "Dream",
    "Linear",
    "LogitNormal",
    "QuotaSchedule",
    "Shift",
    "Uniform",
    "get",
    "make",
    "names",
    "register_schedule",
]

DEFAULT_SCHEDULE = "uniform"


@runtime_checkable
class QuotaSchedule(Protocol):
    """A frozen dataclass of knobs; register it with `@register_schedule("name")`.

    A schedule may also have a method `count_now(num_left, step, steps)`. It is then asked in every
    step, with the positions that are open by then, and what `counts` says is only what it comes to
    where every step commits what it is told to. A method `share_now(step, steps)` says the share of
    the open positions before it is rounded to a count.
    """

    def counts(self, num_open: int, steps: int) -> tuple[int, ...]:
        """Positions to commit in each step.

        Args:
            num_open: open positions of the block when it is entered.
            steps: steps of the block, at least 1.

        Returns:
            At most `steps` counts that add up to `num_open`. A step of 0 commits one position all
            the same, but for presets of programs that let a step pass.
        """
        ...


_registry: Registry[QuotaSchedule] = Registry(
    "schedule", "dlm_decode.quota", "dlm_decode.schedules"
)
register_schedule = _registry.register


def names() -> list[str]:
    """Names of all schedules, built in, registered and installed."""
    return _registry.names()


def get(name: str) -> type[QuotaSchedule]:
    """The schedule class called `name`; raises `UnknownNameError`."""
    return _registry.get(name)


def make(spec: QuotaSchedule | str, options: Mapping[str, Any] | None = None) -> QuotaSchedule:
    """A schedule from a name, a spec such as `"shift:shift=0.25"`, or an instance.

    Raises:
        UnknownNameError: no such schedule or option; the message lists what exists.
        InvalidInputError: a malformed spec or a value that the schedule rejects.
    """
    return _registry.make(spec, options)


@register_schedule("uniform")
@dataclass(frozen=True)
class Uniform:
    """Equal shares, as even as whole numbers allow, larger ones first.

    Source: LLaDA (arXiv 2502.09992), `get_num_transfer_tokens` of the published sampler.
    """

    def counts(self, num_open: int, steps: int) -> tuple[int, ...]:
        """See `QuotaSchedule`."""
        share, rest = divmod(num_open, steps)
        return tuple(share + (step < rest) for step in range(steps))


@register_schedule("dream")
@dataclass(frozen=True)
class Dream:
    """A share of what is still masked: 1 - s/t while time runs evenly from t = 1 to `eps`.

    Shares are rounded down, so the first steps commit little and the last one what is left.

    Args:
        eps: end of the time, in (0, 1).
        grid: steps that the time is divided into; as many as the block has, unless given. With
            fewer steps than that, the last one commits a large rest.

    Raises:
        InvalidInputError: an end outside (0, 1), or a grid below 1 or above `MOST_STEPS`.

    Source: Dream 7B (arXiv 2508.15487), the published `diffusion_generate`. LaViDa's program keeps
    the grid of `steps` when a `step_ratio` shortens the loop.
    """

    eps: float = 1e-3
    grid: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.eps, float) or not 0 < self.eps < 1:
            raise InvalidInputError(f"eps must be between 0 and 1, got {self.eps!r}.")
        is_whole = isinstance(self.grid, int) and not isinstance(self.grid, bool)
        if self.grid is not None and not (is_whole and 1 <= self.grid <= MOST_STEPS):
            raise InvalidInputError(
                f"grid must be a whole number from 1 to {MOST_STEPS}, got {self.grid!r}."
            )

    def counts(self, num_open: int, steps: int) -> tuple[int, ...]:
        """See `QuotaSchedule`; zeros may also stand in front."""
        counts: list[int] = []
        for step in range(steps):
            counts.append(self.count_now(num_open - sum(counts), step, steps))
        return tuple(counts)

    def count_now(self, num_left: int, step: int, steps: int) -> int:
        """Positions to commit in one step, of `num_left` that are open now."""
        return int(num_left * self._share(step, steps))

    def share_now(self, step: int, steps: int) -> float:
        """Share of the open positions to commit in one step."""
        return float(self._share(step, steps))

    def _share(self, step: int, steps: int) -> Tensor:
        if step >= steps - 1:
            return torch.ones(())
        time = torch.linspace(1, self.eps, max(steps, self.grid or steps) + 1)
        return 1 - time[step + 1] / time[step]


class _Curve:
    """Counts that follow a curve from 0 to 1.

    Source: LaViDa (arXiv 2505.16839), time-shift schedule, as the published program rounds it.
    Differs from the reference: where float32 leaves the curve just below 1, the program refuses,
    and here the first step takes what is missing.
    """

    def curve(self, time: Tensor) -> Tensor:
        """Share of the positions that are still masked after `1 - time` of the steps."""
        raise NotImplementedError(f"{type(self).__name__} must say its curve")

    def counts(self, num_open: int, steps: int) -> tuple[int, ...]:
        """See `QuotaSchedule`."""
        steps = min(steps, num_open)
        if not steps:
            return ()
        time = torch.linspace(0, 1, steps + 1, dtype=torch.float32)
        reached = (self.curve(time) * num_open).long()
        shares = reached.diff().clamp_min(1).tolist()
        excess = sum(shares) - num_open
        for step in cycle(range(steps)):
            if excess <= 0:
                break
            if shares[step] > 1:
                shares[step] -= 1
                excess -= 1
        shares[-1] -= excess  # only what float32 left out
        return tuple(reversed(shares))


@register_schedule("linear")
@dataclass(frozen=True)
class Linear(_Curve):
    """Equal shares on average: a straight curve, rounded down at each step."""

    def curve(self, time: Tensor) -> Tensor:
        """The time itself."""
        return time


@register_schedule("cosine")
@dataclass(frozen=True)
class Cosine(_Curve):
    """Few positions in the first and last steps, many in between."""

    def curve(self, time: Tensor) -> Tensor:
        """Half a period of a cosine."""
        return 1 - 0.5 * (1 + torch.cos(torch.pi * time))


@register_schedule("logit_normal")
@dataclass(frozen=True)
class LogitNormal(_Curve):
    """As `cosine`, with a normal distribution of the time's logit for the curve."""

    def curve(self, time: Tensor) -> Tensor:
        """Normal distribution function of the logit."""
        return torch.special.ndtr(torch.logit(time))


@register_schedule("shift")
@dataclass(frozen=True)
class Shift(_Curve):
    """Many positions early where `shift` is below 1, few where it is above.

    Args:
        shift: above 0; 1 is `linear`. The default is the paper's; LaViDa's program has 3 where it
            is given none.

    Raises:
        InvalidInputError: not a finite number above 0.
    """

    shift: float = 1 / 3

    def __post_init__(self) -> None:
        is_number = isinstance(self.shift, (int, float)) and not isinstance(self.shift, bool)
        if not is_number or not 0 < self.shift < math.inf:
            raise InvalidInputError(f"shift must be a finite number above 0, got {self.shift!r}.")

    def curve(self, time: Tensor) -> Tensor:
        """`shift t / (1 + (shift - 1) t)`."""
        return self.shift * time / (1 + (self.shift - 1) * time)
