"""Vicinity refresh: the block is computed together with its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from dlm_decode.cache import register_cache
from dlm_decode.cache.base import FULL_FEED, Clock, Feed
from dlm_decode.cache.prefix import check_interval, is_due
from dlm_decode.cache.window import WindowPolicy
from dlm_decode.errors import InvalidInputError

__all__ = ["Vicinity"]


@register_cache("vicinity")
@dataclass(frozen=True)
class Vicinity(WindowPolicy):
    """Feeds the block with some positions on either side, against keys and values of the rest.

    With `before=0, after=0` it is the dual cache.

    Args:
        before: positions in front of the block; they reach into the prompt.
        after: positions behind the block.
        warmup: whole forwards at the start of a response.
        refresh_interval: whole forwards recur after this many forwards of a block; `None` for one
            per block.

    Raises:
        InvalidInputError: an interval below 1, or a negative count.

    Source: dInfer (arXiv 2510.08666), vicinity KV-cache refresh.
    """

    before: int = 16
    after: int = 16
    warmup: int = 4
    refresh_interval: int | None = None

    def __post_init__(self) -> None:
        check_interval("refresh_interval", self.refresh_interval)
        for name in ("before", "after", "warmup"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidInputError(
                    f"{name} must be a whole number of at least 0, got {value!r}."
                )

    @property
    def windows_lie_in_canvas(self) -> bool:
        """Only without positions in front of the block."""
        return self.before == 0

    def plan(self, clock: Clock) -> Feed:
        """The whole sequence at a refresh, else the window around the block."""
        if clock.forwards < self.warmup or is_due(clock.in_block, self.refresh_interval):
            return FULL_FEED
        return Feed("window", clock.first - self.before, clock.last + self.after)
