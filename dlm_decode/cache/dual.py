"""Dual cache: only the block is computed between refreshes."""

from __future__ import annotations

from dataclasses import dataclass

from dlm_decode.cache import register_cache
from dlm_decode.cache.base import FULL_FEED, Clock, Feed
from dlm_decode.cache.prefix import check_interval, is_due
from dlm_decode.cache.window import WindowPolicy

__all__ = ["Dual"]


@register_cache("dual")
@dataclass(frozen=True)
class Dual(WindowPolicy):
    """Feeds the block alone, against kept keys and values in front of it and behind it.

    The first forward of a block feeds the whole sequence; it commits tokens like any other.

    Args:
        refresh_interval: whole forwards recur after this many forwards of a block; `None` for one
            per block.

    Raises:
        InvalidInputError: an interval below 1.

    Source: Fast-dLLM (arXiv 2505.22618), DualCache.
    """

    refresh_interval: int | None = None

    def __post_init__(self) -> None:
        check_interval("refresh_interval", self.refresh_interval)

    def plan(self, clock: Clock) -> Feed:
        """The whole sequence at a refresh, else the block."""
        if is_due(clock.in_block, self.refresh_interval):
            return FULL_FEED
        return Feed("block", clock.first, clock.last)
