"""Where a response ends: the first position of a complete stop sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlm_decode.canvas import Canvas

__all__ = ["update_stop_position"]


def update_stop_position(canvas: Canvas, stops: Sequence[Sequence[int]], rule: str) -> None:
    """Moves `canvas.stop_position` to the earliest complete stop sequence of each row; never back.

    Args:
        canvas: read and updated.
        stops: stop sequences as ids.
        rule: `"earliest"` over all sequences, or `"listed"` as `Quirks.stop_rule` describes.
    """
    if not stops:
        return
    tokens, is_open = canvas.tokens[:, canvas.lead :], canvas.is_open[:, canvas.lead :]
    none = canvas.width
    found = torch.stack(
        [_first_match(tokens, is_open, stop, none, canvas.lead) for stop in stops], dim=1
    )
    if rule == "earliest":
        candidate = found.min(dim=1).values
    else:
        matches = found < none
        in_list_order = found.gather(1, matches.to(torch.int8).argmax(dim=1, keepdim=True)).squeeze(
            1
        )
        candidate = torch.where(canvas.stop_position < none, found[:, 0], in_list_order)
    canvas.stop_position = torch.minimum(canvas.stop_position, candidate)


def _first_match(
    tokens: Tensor, is_open: Tensor, stop: Sequence[int], none: int, lead: int
) -> Tensor:
    """`(B,)` first column where all of `stop` stands committed, `none` if nowhere."""
    num_starts = tokens.shape[1] - len(stop) + 1
    if num_starts < 1:
        return torch.full((len(tokens),), none, dtype=torch.long, device=tokens.device)
    is_match = torch.ones(len(tokens), num_starts, dtype=torch.bool, device=tokens.device)
    for offset, token_id in enumerate(stop):
        window = slice(offset, offset + num_starts)
        is_match &= (tokens[:, window] == token_id) & ~is_open[:, window]
    first = is_match.to(torch.int8).argmax(dim=1) + lead
    return torch.where(is_match.any(dim=1), first, none)
