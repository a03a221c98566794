"""Bipartite matching of visual tokens in windows: who is merged into whom, and in which shares.

n tokens of one image or video, in reading order.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cell_windows", "match", "merge_shares", "num_merged", "square_windows"]


def num_merged(count: int, ratio: float) -> int:
    """Tokens that a window of `count` loses: the share `ratio`, rounded down, at most half."""
    return min(int(ratio * count), count // 2)


def _part(places: Tensor, size: int, parts: int) -> Tensor:
    """Which of `parts` parts of an axis the places lie in; the first `size % parts` are longer."""
    short, num_long = divmod(size, parts)
    border = num_long * (short + 1)
    behind = num_long + (places - border) // max(1, short)
    return torch.where(places < border, places // (short + 1), behind)


def cell_windows(cells: Tensor, rows: int, columns: int, windows: int) -> Tensor:
    """`(n,)` window of each token: the grid is cut into `windows` parts along either axis.

    Args:
        cells: `(n, 2)` row and column of each token.
        rows: of the grid.
        columns: of the grid.
        windows: parts per axis.
    """
    row, column = cells.unbind(dim=-1)
    return _part(row, rows, windows) * windows + _part(column, columns, windows)


def square_windows(count: int, windows: int, device: torch.device | None = None) -> Tensor:
    """`(count,)` windows of tokens that fill the smallest square that holds them, row by row."""
    side = 0
    while side * side < count:
        side += 1
    places = torch.arange(count, device=device)
    return cell_windows(torch.stack([places // side, places % side], dim=-1), side, side, windows)


def match(hidden: Tensor, windows: Tensor, ratio: float) -> Tensor:
    """`(n,)` which token each one is merged into; itself if it stays.

    Within a window, tokens alternate between sources and destinations, sources first. Each source's
    partner is the destination of highest cosine similarity; `num_merged` sources, those with the
    most similar partners, are merged. Several may share a partner. Ties go to lower positions.

    Args:
        hidden: `(n, D)`.
        windows: `(n,)` window of each token.
        ratio: share of each window that is merged.
    """
    order = windows.argsort(stable=True)
    counts = torch.bincount(windows)
    sizes = counts.tolist()
    starts = counts.cumsum(0) - counts
    labels = windows[order]
    local = torch.arange(len(order), device=order.device) - starts[labels]
    table = order.new_full((len(counts), 2 * ((max(sizes) + 1) // 2)), -1)
    table[labels, local] = order
    sources, partners = table[:, 0::2], table[:, 1::2]
    unit = hidden.float()
    unit = unit / unit.norm(dim=-1, keepdim=True).clamp_min(1e-8)
    similarity = unit[sources.clamp_min(0)] @ unit[partners.clamp_min(0)].transpose(1, 2)
    similarity = similarity.masked_fill((partners < 0)[:, None], float("-inf"))
    best = similarity.max(dim=-1)
    closeness = best.values.masked_fill(sources < 0, float("-inf"))
    rank = closeness.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    limits = order.new_tensor([num_merged(size, ratio) for size in sizes])
    is_merged = rank < limits[:, None]
    target = torch.arange(len(order), device=order.device)
    target[sources[is_merged]] = partners.gather(1, best.indices)[is_merged]
    return target


def merge_shares(target: Tensor, weights: Tensor) -> Tensor:
    """`(n,)` float32 share of each token in what it is merged into; shares of a token sum to 1.

    Args:
        target: from `match`.
        weights: `(n,)` at least 0.
    """
    weights = weights.float()
    total = torch.zeros_like(weights).index_add_(0, target, weights)
    count = torch.bincount(target, minlength=len(target))[target]
    return torch.where(count == 1, 1.0, weights / total[target].clamp_min(1e-8))
