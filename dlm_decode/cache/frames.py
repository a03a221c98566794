"""Attention inside a row of frames: each sees its neighbours, a few tokens of all, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dlm_decode.canvas import NO_FRAME

if TYPE_CHECKING:
    from dlm_decode.models.llada import LLaDAAttention

__all__ = ["FrameAttention", "is_bounded", "num_pairs"]

_FRAMES_AT_ONCE = 16  # whose keys and values are copied side by side


def is_bounded(sizes: Sequence[int], radius: int) -> bool:
    """Whether some frame does not see some other.

    Args:
        sizes: tokens of each frame, by frame number; 0 where a stage dropped all of them.
        radius: frames on either side that a frame sees.
    """
    held = [number for number, size in enumerate(sizes) if size]
    return bool(held) and held[-1] - held[0] > radius


def num_pairs(sizes: Sequence[int], num_rest: int, radius: int, num_anchors: int) -> int:
    """Pairs of a frame's token and what it attends to.

    Args:
        sizes: as in `is_bounded`.
        num_rest: positions outside of frames, which every token attends to.
        radius: as in `is_bounded`.
        num_anchors: tokens of each frame that every frame sees; all of a smaller frame.
    """
    pairs = 0
    for own, size in enumerate(sizes):
        seen = num_rest
        for other, length in enumerate(sizes):
            seen += length if abs(other - own) <= radius else min(length, num_anchors)
        pairs += size * seen
    return pairs


@dataclass(frozen=True)
class FrameAttention:
    """Who attends to whom in one row, whose positions count from its first real one.

    F frames that hold tokens, V tokens in them, n tokens of the largest, A anchors of each, K keys.

    Attributes:
        visual: `(V,)` positions of the frames' tokens, frame by frame.
        members: `(F, n)` positions by frame, filled up.
        is_member: `(F, n)` bool, false where filled up.
        places: `(F, n)` where in `visual` the members stand.
        picks: `(V,)` where in `members`, row after row, the tokens of `visual` stand.
        near: `(F, W)` positions that a frame sees of itself and its neighbours, filled up.
        rest: positions outside of frames.
        is_seen: `(F, K)` bool: of `near`, of all frames' anchors, of `rest`. An anchor that is near
            counts once.
        num_anchors: A.
    """

    visual: Tensor
    members: Tensor
    is_member: Tensor
    places: Tensor
    picks: Tensor
    near: Tensor
    rest: Tensor
    is_seen: Tensor
    num_anchors: int

    @classmethod
    def create(cls, frames: Tensor, radius: int, num_anchors: int) -> FrameAttention:
        """Tables for a row, on the device of `frames`.

        Args:
            frames: `(S,)` frame number of each position, -1 outside of frames.
            radius: frames on either side that a frame sees.
            num_anchors: tokens of each frame that every frame sees.
        """
        host = frames.cpu()
        numbers = host[host != NO_FRAME].unique()
        of_frame = [(host == number).nonzero()[:, 0] for number in numbers]
        near_frames = (numbers[:, None] - numbers).abs() <= radius
        near = [
            torch.cat([of_frame[other] for other in row.nonzero()[:, 0].tolist()])
            for row in near_frames
        ]
        sizes = torch.tensor([len(positions) for positions in of_frame])
        is_member = _is_filled(sizes)
        num_anchors = min(num_anchors, is_member.shape[1])
        is_anchor = torch.arange(num_anchors) < sizes[:, None]
        is_far_anchor = (~near_frames[:, :, None] & is_anchor).flatten(1)
        rest = (host == NO_FRAME).nonzero()[:, 0]
        is_seen = [
            _is_filled(torch.tensor([len(positions) for positions in near])),
            is_far_anchor,
            torch.ones(len(sizes), len(rest), dtype=torch.bool),
        ]
        places = torch.zeros_like(is_member, dtype=torch.long)
        places[is_member] = torch.arange(int(sizes.sum()))
        device = frames.device
        return cls(
            visual=torch.cat(of_frame).to(device),
            members=pad_sequence(of_frame, batch_first=True).to(device),
            is_member=is_member.to(device),
            places=places.to(device),
            picks=is_member.flatten().nonzero()[:, 0].to(device),
            near=pad_sequence(near, batch_first=True).to(device),
            rest=rest.to(device),
            is_seen=torch.cat(is_seen, dim=1).to(device),
            num_anchors=num_anchors,
        )

    def find_anchors(self, query: Tensor, key: Tensor, num_queries: int) -> Tensor:
        """`(F, A)` positions of each frame that the frames' tokens attend to most.

        Their attention is summed over heads and over equidistant queries; equally strong tokens are
        taken in order.

        Args:
            query: `(H, S, d)`.
            key: `(H_kv, S, d)`.
            num_queries: how many of the V tokens are asked, at most.
        """
        if not self.num_anchors:
            return self.members[:, :0]
        total = len(self.visual)
        count = min(num_queries, total)
        asked = self.visual[torch.arange(count, device=query.device) * total // count]
        wide_key = key.float().repeat_interleave(query.shape[0] // key.shape[0], dim=0)
        scores = query[:, asked].float() @ wide_key.transpose(1, 2) * query.shape[-1] ** -0.5
        strength = scores.softmax(dim=-1).sum(dim=(0, 1))[self.members]
        strength = strength.masked_fill(~self.is_member, float("-inf"))
        order = strength.argsort(dim=1, descending=True, stable=True)
        return self.members.gather(1, order[:, : self.num_anchors])

    def mix(
        self, attention: LLaDAAttention, query: Tensor, key: Tensor, value: Tensor, anchors: Tensor
    ) -> Tensor:
        """What attention gives for the frames' tokens, `(V, D)`.

        Args:
            attention: mixes values, and projects them out.
            query: `(H, V, d)` of `visual`.
            key: `(H_kv, S, d)` of the whole row.
            value: `(H_kv, S, d)`.
            anchors: `(F, A)` from `find_anchors`.
        """
        num_frames = len(self.near)
        everywhere = torch.cat([anchors.flatten(), self.rest]).expand(num_frames, -1)
        seen = torch.cat([self.near, everywhere], dim=1)
        parts = []
        for first in range(0, num_frames, _FRAMES_AT_ONCE):
            some = slice(first, first + _FRAMES_AT_ONCE)
            own, keys, values = (
                states[:, columns[some]].transpose(0, 1)
                for states, columns in ((query, self.places), (key, seen), (value, seen))
            )
            parts.append(attention.mix(own, keys, values, self.is_seen[some, None, None]))
        return torch.cat(parts).flatten(0, 1)[self.picks]


def _is_filled(sizes: Tensor) -> Tensor:
    """`(F, largest)` bool, true at the first `sizes[f]` of each row."""
    return torch.arange(int(sizes.max())) < sizes[:, None]
