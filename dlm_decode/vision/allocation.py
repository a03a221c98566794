"""Shares a budget of tokens among regions that can hold only so many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

__all__ = ["Leftover", "fractional_quotas", "quotas"]

Leftover = Literal["round_robin", "largest_remainder"]


def fractional_quotas(mass: Sequence[float], budget: int) -> list[float]:
    """Shares in proportion to mass: they maximise the sum of mass times log share."""
    total = sum(mass)
    return [budget * own / total for own in mass]


def quotas(
    mass: Sequence[float],
    sizes: Sequence[int],
    budget: int,
    leftover: Leftover = "round_robin",
) -> list[int]:
    """Whole shares in proportion to mass: rounded down, clipped, and the rest handed out.

    The rest goes one by one to the regions that still have room, those with most mass first, the
    earlier of equals.

    Args:
        mass: of each region, >= 0; sizes stand in where all of it is 0.
        sizes: tokens of each region.
        budget: at most the sum of `sizes`; the shares sum to it.
        leftover: `"largest_remainder"` first serves the regions that lost most by rounding.
    """
    if not 0 <= budget <= sum(sizes):
        raise AssertionError(f"budget {budget} does not fit regions of {sum(sizes)} tokens")
    exact = fractional_quotas(mass if sum(mass) > 0 else sizes, budget)
    shares = [min(size, int(share)) for size, share in zip(sizes, exact, strict=True)]
    regions = range(len(sizes))
    rest = budget - sum(shares)
    by_mass = sorted(regions, key=lambda region: -exact[region])
    order = by_mass
    if leftover == "largest_remainder":
        order = sorted(regions, key=lambda region: int(exact[region]) - exact[region])
    while rest:
        for region in order:
            if rest and shares[region] < sizes[region]:
                shares[region] += 1
                rest -= 1
        order = by_mass
    return shares
