"""Images to tiles of pixels: best-fitting grids, padding, normalisation. PIL and numpy only.

Source: LLaDA-V's published preprocessing (`anyres_max_N` and `pad`), which follows LLaVA-NeXT.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dlm_decode.errors import CheckpointError, MediaError

__all__ = [
    "best_resolution",
    "grid_candidates",
    "max_tiles_of",
    "pad_to_square",
    "pixels_of",
    "tiles_of",
    "unpadded_box",
]

_MEAN = _STD = 0.5
_MAX_SQUARE_PIXELS = 20_000**2


def grid_candidates(
    pinpoints: Sequence[Sequence[int]] | str | None, tile_size: int
) -> list[tuple[int, int]]:
    """Canvas sizes `(width, height)` that an image may be fitted to.

    Args:
        pinpoints: a list of sizes in pixels, or tile counts as text: `"(1x1),...,(6x6)"` means
            every pair in between.
        tile_size: pixels per tile side, used with text.

    Raises:
        CheckpointError: neither form.
    """
    if isinstance(pinpoints, str):
        pairs = [(int(a), int(b)) for a, b in re.findall(r"\((\d+)\s*x\s*(\d+)\)", pinpoints)]
        if "..." in pinpoints and len(pairs) == 2:
            (a0, b0), (a1, b1) = pairs
            pairs = [(a, b) for a in range(a0, a1 + 1) for b in range(b0, b1 + 1)]
        if pairs:
            return [(a * tile_size, b * tile_size) for a, b in pairs]
        sizes = [
            (int(a), int(b)) for a, b in re.findall(r"[\[(]\s*(\d+)\s*,\s*(\d+)\s*[\])]", pinpoints)
        ]
    else:
        sizes = [(int(size[0]), int(size[1])) for size in pinpoints or ()]
    if not sizes:
        raise CheckpointError(
            f"image_grid_pinpoints {pinpoints!r} gives no grid; use a list of [width, height] or "
            "'(1x1),...,(6x6)'."
        )
    return sizes


def best_resolution(
    size: tuple[int, int], candidates: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """The candidate that keeps most of the image's pixels, then wastes least; the first of equals.

    Args:
        size: `(width, height)` of the image.
        candidates: from `grid_candidates`.
    """
    width, height = size
    best, best_key = candidates[0], (-1, 0)
    for wide, high in candidates:
        scale = min(wide / width, high / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        key = (kept, -(wide * high - kept))
        if key > best_key:
            best, best_key = (wide, high), key
    return best


def max_tiles_of(aspect_ratio: str) -> int | None:
    """N of `"anyres_max_N"`; `None` when the mode has no limit."""
    found = re.search(r"anyres_max_(\d+)", aspect_ratio)
    return int(found[1]) if found else None


def tiles_of(
    image: Image.Image, candidates: Sequence[tuple[int, int]], tile_size: int
) -> list[Image.Image]:
    """The whole image squashed into one tile, then the tiles of its padded copy, row after row.

    Args:
        image: RGB.
        candidates: canvas sizes.
        tile_size: pixels per tile side.
    """
    width, height = best_resolution(image.size, candidates)
    if width / image.width < height / image.height:
        size = (width, min(math.ceil(image.height * (width / image.width)), height))
    else:
        size = (min(math.ceil(image.width * (height / image.height)), width), height)
    padded = Image.new("RGB", (width, height), (0, 0, 0))
    padded.paste(image.resize(size), ((width - size[0]) // 2, (height - size[1]) // 2))
    corners = [(x, y) for y in range(0, height, tile_size) for x in range(0, width, tile_size)]
    tiles = [padded.crop((x, y, x + tile_size, y + tile_size)) for x, y in corners]
    return [image.resize((tile_size, tile_size)), *tiles]


def pad_to_square(image: Image.Image) -> Image.Image:
    """The image in the middle of a grey square.

    Raises:
        MediaError: an image so thin that the square would need gigabytes.
    """
    side = max(image.size)
    if image.width == image.height:
        return image
    if side**2 > _MAX_SQUARE_PIXELS:
        raise MediaError(
            f"an image of {image.width} x {image.height} is too long to be padded to a square; "
            "crop it or make it smaller."
        )
    grey = round(255 * _MEAN - 0.5)
    square = Image.new("RGB", (side, side), (grey, grey, grey))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def pixels_of(image: Image.Image, tile_size: int) -> Tensor:
    """`(3, tile_size, tile_size)` float32 in [-1, 1]."""
    resized = image.convert("RGB").resize((tile_size, tile_size), Image.Resampling.BICUBIC)
    scaled = (np.asarray(resized).astype(np.float64) * (1 / 255)).astype(np.float32)
    normalised = (scaled - np.float32(_MEAN)) / np.float32(_STD)
    return torch.from_numpy(np.ascontiguousarray(normalised.transpose(2, 0, 1)))


def unpadded_box(rows: int, columns: int, size: tuple[int, int]) -> tuple[slice, slice]:
    """Rows and columns of a padded feature map that show the image.

    The crop is symmetric, so an odd rest stays. At least the middle of the map stays, however thin
    the image is.

    Args:
        rows: of the map.
        columns: of the map.
        size: `(width, height)` of the image.
    """
    width, height = size
    if width / height > columns / rows:
        margin = _margin(rows, int(height * (columns / width)))
        return slice(margin, rows - margin), slice(0, columns)
    margin = _margin(columns, int(width * (rows / height)))
    return slice(0, rows), slice(margin, columns - margin)


def _margin(total: int, kept: int) -> int:
    return min((total - kept) // 2, (total - 1) // 2)
