"""The blocks of the canvas, and the steps of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dlm_decode.errors import InvalidInputError

__all__ = ["MOST_STEPS", "BlockSchedule"]

MOST_STEPS = 1_000_000
"""Steps that may be asked for, and the positions of a longer canvas; a schedule lists them all."""


@dataclass(frozen=True)
class BlockSchedule:
    """Blocks of the canvas, and the steps that each block gets.

    A last block may be shorter than the others. Steps that do not divide evenly go to the first
    blocks.

    Args:
        gen_length: T, canvas length.
        steps: steps over all blocks.
        block_length: positions per block.
        is_strict: reject what the official programs reject (any remainder).

    Raises:
        InvalidInputError: a length below 1, fewer steps than blocks, more of them than `MOST_STEPS`
            and the positions, or, when strict, a remainder.
    """

    gen_length: int
    steps: int
    block_length: int
    is_strict: bool = False

    def __post_init__(self) -> None:
        for name in ("gen_length", "steps", "block_length"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidInputError(
                    f"{name} must be a whole number of at least 1, got {value!r}."
                )
        given = (
            f"gen_length {self.gen_length}, block_length {self.block_length}, steps {self.steps}"
        )
        if self.block_length > self.gen_length:
            raise InvalidInputError(
                f"{given}: a block is longer than the canvas; "
                f"use block_length <= {self.gen_length}."
            )
        if self.steps < self.num_blocks:
            raise InvalidInputError(
                f"{given}: {self.num_blocks} blocks need at least one step each; "
                f"use steps >= {self.num_blocks}, or "
                f"block_length >= {-(-self.gen_length // self.steps)}."
            )
        if self.steps > max(MOST_STEPS, self.gen_length):
            raise InvalidInputError(
                f"steps must be at most {MOST_STEPS}, got {self.steps}; a step commits a position, "
                f"so more than {self.gen_length} (gen_length) gain nothing."
            )
        if self.is_strict and (self.gen_length % self.block_length or self.steps % self.num_blocks):
            raise InvalidInputError(
                f"{given}: preset 'official' needs block_length to divide gen_length "
                f"and the number of blocks ({self.num_blocks}) to divide steps; "
                "change one of them, or use preset=None."
            )

    @property
    def num_blocks(self) -> int:
        """Number of blocks, the last one possibly shorter."""
        return -(-self.gen_length // self.block_length)

    @cached_property
    def steps_per_block(self) -> tuple[int, ...]:
        """Steps that each block gets."""
        base, extra = divmod(self.steps, self.num_blocks)
        return tuple(base + (block < extra) for block in range(self.num_blocks))

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """`(start, end)` of each block in canvas positions."""
        starts = range(0, self.gen_length, self.block_length)
        return tuple((start, min(start + self.block_length, self.gen_length)) for start in starts)

    def num_steps(self, is_open: list[bool] | None = None) -> int:
        """Steps that a sampler which commits exactly the quota takes.

        Blocks with fewer open positions than steps end early.

        Args:
            is_open: `T` flags of positions to be decoded; all of them by default.
        """
        total = 0
        for (start, end), steps in zip(self.bounds, self.steps_per_block, strict=True):
            num_open = end - start if is_open is None else sum(is_open[start:end])
            total += min(steps, num_open)
        return total
