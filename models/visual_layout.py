"""From tower features to the sequence of visual tokens that the language model reads.

Every function takes projected features with D channels and returns `(tokens (V, D), sections)`,
where a section is `(start, rows, columns, has_newline)` as in `VisualSpan`.

Source: LLaDA-V's published layout (`spatial_unpad` with `anyres_max_N`, video newline modes), as in
    LLaVA-NeXT.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

from dlm_decode.errors import CheckpointError, InvalidInputError
from dlm_decode.models.anyres import unpadded_box

__all__ = [
    "NEWLINE_POSITIONS",
    "POOL_MODES",
    "Sections",
    "anyres_tokens",
    "flat_tokens",
    "pool_frames",
    "single_tokens",
    "video_tokens",
]

Sections = tuple[tuple[int, int, int, bool], ...]
NEWLINE_POSITIONS = ("grid", "frame", "one_token", "no_token")
POOL_MODES = ("bilinear", "average", "max")
_SHRINK_ABOVE = 1.1


def single_tokens(features: Tensor, newline: Tensor | None) -> tuple[Tensor, Sections]:
    """One padded image `(N, D)`: its patches, and a newline vector behind them if given."""
    side = math.isqrt(features.shape[0])
    tokens = features if newline is None else torch.cat([features, newline[None]])
    return tokens, ((0, side, side, False),)


def flat_tokens(features: Tensor) -> tuple[Tensor, Sections]:
    """Tiles `(tiles, N, D)` one after the other."""
    num_tiles, num_patches, _ = features.shape
    side = math.isqrt(num_patches)
    return features.flatten(0, 1), tuple(
        (tile * num_patches, side, side, False) for tile in range(num_tiles)
    )


def anyres_tokens(
    features: Tensor,
    newline: Tensor | None,
    grid: tuple[int, int],
    size: tuple[int, int],
    max_tiles: int | None,
) -> tuple[Tensor, Sections]:
    """The base tile, then the grid, a newline after each of its rows.

    The grid is stitched from its tiles, cropped to the image and, above the limit, shrunk. Without
    a newline vector it stays as it was stitched.

    Args:
        features: `(1 + tiles, N, D)`, the base tile first.
        newline: `(D,)`, or `None`.
        grid: tiles per row and per column.
        size: `(width, height)` of the image.
        max_tiles: N of `anyres_max_N`; `None` never shrinks.

    Raises:
        InvalidInputError: a number of tiles that the grid does not have.
    """
    across, down = grid
    if features.shape[0] != 1 + across * down:
        raise InvalidInputError(
            f"an image of {size[0]} x {size[1]} makes a {across} x {down} grid, "
            f"{1 + across * down} tiles with the base, "
            f"got {features.shape[0]} tiles; image_sizes and pixel_values do not belong together."
        )
    side = math.isqrt(features.shape[1])
    base = features[0]
    stitched = rearrange(
        features[1:],
        "(down across) (h w) d -> d (down h) (across w)",
        down=down,
        across=across,
        h=side,
        w=side,
    )
    if newline is None:
        height, width = stitched.shape[1:]
        tokens = torch.cat([base, rearrange(stitched, "d h w -> (h w) d")])
        return tokens, ((0, side, side, False), (len(base), height, width, False))
    rows, columns = unpadded_box(stitched.shape[1], stitched.shape[2], size)
    stitched = stitched[:, rows, columns]
    height, width = stitched.shape[1:]
    if max_tiles is not None:
        excess = math.sqrt(height * width / (max_tiles * side**2))
        if excess > _SHRINK_ABOVE:
            target = (int(height // excess), int(width // excess))
            stitched = functional.interpolate(stitched[None], target, mode="bilinear")[0]
            height, width = target
    lines = torch.cat(
        [stitched, newline[:, None, None].expand(-1, height, 1).to(stitched.dtype)], dim=2
    )
    tokens = torch.cat([base, rearrange(lines, "d h w -> (h w) d")])
    return tokens, ((0, side, side, False), (base.shape[0], height, width, True))


def pool_frames(features: Tensor, mode: str) -> Tensor:
    """Frames or views `(F, N, D)` with both sides halved: `(F, h, w, D)`.

    Args:
        features: projected patches of each frame.
        mode: `"bilinear"` (halves are rounded up), `"average"` or `"max"` (rounded down).

    Raises:
        CheckpointError: another mode.
    """
    side = math.isqrt(features.shape[1])
    maps = rearrange(features, "f (h w) d -> f d h w", h=side)
    if mode == "bilinear":
        half = math.ceil(side / 2)
        pooled = functional.interpolate(maps, (half, half), mode="bilinear")
    elif mode == "average":
        pooled = functional.avg_pool2d(maps, 2)
    elif mode == "max":
        pooled = functional.max_pool2d(maps, 2)
    else:
        raise CheckpointError(
            f"mm_spatial_pool_mode {mode!r} is unknown; use one of {', '.join(POOL_MODES)}."
        )
    return rearrange(pooled, "f d h w -> f h w d")


def video_tokens(frames: Tensor, newline: Tensor | None, position: str) -> tuple[Tensor, Sections]:
    """Frames `(F, h, w, D)` as one sequence.

    Args:
        frames: from `pool_frames`.
        newline: `(D,)`; `None` goes with `"no_token"` only.
        position: `"grid"`: a newline after every row; `"frame"`: after every frame; `"one_token"`:
            one at the end; `"no_token"`: none.

    Raises:
        CheckpointError: another position, or a newline that the model does not have.
    """
    num_frames, height, width, channels = frames.shape
    if newline is None:
        if position != "no_token":
            raise CheckpointError(
                f"mm_newline_position {position!r} needs a newline vector, and the model has none; "
                "use 'no_token'."
            )
        newline = frames.new_empty(channels)
    newline = newline.to(frames.dtype)
    if position == "grid":
        lines = newline.expand(num_frames, height, 1, channels)
        tokens = torch.cat([frames, lines], dim=2).flatten(0, 2)
        per_frame = height * (width + 1)
    elif position == "frame":
        tokens = torch.cat(
            [frames.flatten(1, 2), newline.expand(num_frames, 1, channels)], dim=1
        ).flatten(0, 1)
        per_frame = height * width + 1
    elif position in ("one_token", "no_token"):
        tokens = frames.flatten(0, 2)
        per_frame = height * width
        if position == "one_token":
            tokens = torch.cat([tokens, newline[None]])
    else:
        raise CheckpointError(
            f"mm_newline_position {position!r} is unknown; use one of "
            f"{', '.join(NEWLINE_POSITIONS)}."
        )
    sections = tuple(
        (frame * per_frame, height, width, position == "grid") for frame in range(num_frames)
    )
    return tokens, sections
