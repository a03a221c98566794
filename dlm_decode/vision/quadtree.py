"""Splits a map where it is uneven: a quadtree of a picture, an octree of a video."""

from __future__ import annotations

from itertools import product

from torch import Tensor

__all__ = ["Box", "cells_of", "partition"]

Box = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
"""First and one past the last frame, row and column."""


def partition(energy: Tensor, delta: float, min_crop: int, min_frames: int = 1) -> list[Box]:
    """Leaves that cover the map without overlap, frames first, then rows, then columns.

    A box is cut at its midpoints (rounded down) while the standard deviation of its energies is
    above `delta`: into four where both its sides can be halved, along time where its frames can.

    Args:
        energy: `(F, H, W)` on the host.
        delta: below 0, everything is cut as far as it goes; infinity cuts nothing.
        min_crop: rows and columns that a part has at least, if the map has them.
        min_frames: frames, likewise.
    """
    values = energy.numpy()

    def leaves(box: Box) -> list[Box]:
        frames, rows, columns = ((last - first) for first, last in box)
        cuts_space = rows >= 2 * min_crop and columns >= 2 * min_crop
        is_cut = (frames >= 2 * min_frames, cuts_space, cuts_space)
        if not any(is_cut) or values[tuple(slice(*side) for side in box)].std() <= delta:
            return [box]
        sides = [_halves(*side) if cut else [side] for side, cut in zip(box, is_cut, strict=True)]
        return [
            leaf
            for first, second, third in product(*sides)
            for leaf in leaves((first, second, third))
        ]

    frames, rows, columns = energy.shape
    return leaves(((0, frames), (0, rows), (0, columns)))


def _halves(first: int, last: int) -> list[tuple[int, int]]:
    middle = (first + last) // 2
    return [(first, middle), (middle, last)]


def cells_of(box: Box, numbers: Tensor) -> Tensor:
    """The part `(C,)` of a map `(F, H, W)` that lies in the box, row after row."""
    return numbers[tuple(slice(*side) for side in box)].flatten()
