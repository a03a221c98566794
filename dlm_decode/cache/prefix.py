"""Prefix cache: the prompt and finished blocks are computed once per block."""

from __future__ import annotations

from dataclasses import dataclass

from dlm_decode.cache import register_cache
from dlm_decode.cache.base import FULL_FEED, Clock, Feed
from dlm_decode.cache.window import WindowPolicy
from dlm_decode.errors import InvalidInputError

__all__ = ["Prefix"]


@register_cache("prefix")
@dataclass(frozen=True)
class Prefix(WindowPolicy):
    """Feeds the block and everything behind it, against kept keys and values in front of it.

    The first forward of a block feeds the whole sequence; it commits tokens like any other.

    Args:
        refresh_interval: whole forwards recur after this many forwards of a block; `None` for one
            per block. 1 is the same as no cache.

    Raises:
        InvalidInputError: an interval below 1.

    Source: Fast-dLLM (arXiv 2505.22618), prefix KV cache; the interval as in LLaDA-V's Fast-dLLM
    hook.
    """

    refresh_interval: int | None = None

    def __post_init__(self) -> None:
        check_interval("refresh_interval", self.refresh_interval)

    def plan(self, clock: Clock) -> Feed:
        """The whole sequence at a refresh, else from the block to the end."""
        if is_due(clock.in_block, self.refresh_interval):
            return FULL_FEED
        return Feed("suffix", clock.first)


def is_due(count: int, interval: int | None) -> bool:
    """Whether a refresh comes at this count; without an interval only at 0."""
    return count == 0 if interval is None else count % interval == 0


def check_interval(name: str, value: int | None) -> None:
    """Raises `InvalidInputError` unless `value` is `None` or a whole number of at least 1."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_whole and value >= 1):
        raise InvalidInputError(f"{name} must be a whole number of at least 1, got {value!r}.")
