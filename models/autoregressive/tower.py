"""Attention of one layer of a vision tower, read beside its forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlm_decode.models.attention import attention_rows

__all__ = ["TowerAttention", "queries_and_keys", "received"]

_QUERY_CHUNK = 512


@dataclass(frozen=True)
class TowerAttention:
    """What one layer attended to, for R tiles of N patches; the class token is left out.

    Attributes:
        salience: `(R, N)` float32, see `received`.
        keys: `(R, N, d)` float32, mean over heads; `None` where nobody asked.
    """

    salience: Tensor
    keys: Tensor | None = None

    def picked(self, tiles: slice) -> TowerAttention:
        """The attention of some tiles."""
        return TowerAttention(self.salience[tiles], None if self.keys is None else self.keys[tiles])


def queries_and_keys(attention: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 queries and keys `(R, H, N, d)` of an attention module with separate projections.

    They are computed a second time, from the module's input, so that the forward itself stays as it
    is, whatever attention kernel it runs.

    Args:
        attention: module of CLIP, SigLIP or InternVL.
        hidden: `(R, N, D)` its input.
    """

    def heads_of(projection: str, norm: str) -> Tensor:
        states = getattr(attention, projection)(hidden)
        states = getattr(attention, norm, nn.Identity())(states)
        return states.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2).float()

    return heads_of("q_proj", "q_norm"), heads_of("k_proj", "k_norm")


def received(queries: Tensor, keys: Tensor, *, from_class: bool) -> Tensor:
    """`(R, N)` attention that each position gets, mean over heads.

    Args:
        queries: `(R, H, N, d)`.
        keys: `(R, H, N, d)`.
        from_class: count what the class token, the first position, gives; else the mean over what
            all positions give.
    """
    if from_class:
        return attention_rows(queries[:, :, :1], keys, None)[:, 0]
    total = torch.zeros_like(queries[:, 0, :, 0])
    for part in queries.split(_QUERY_CHUNK, dim=2):
        total += attention_rows(part, keys, None).sum(dim=1)
    return total / queries.shape[2]
