"""What a response is decoded from (the prompt) and into (the canvas).

Symbols, used with the same meaning in every docstring of the package:

B rows of a batch · P prompt length · V visual tokens · T canvas length · S sequence length (prompt
+ canvas + suffix) · D hidden size · L layers · H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["IMAGE_TOKEN_ID", "NO_FRAME", "Canvas", "Prompt", "VisualSpan"]

IMAGE_TOKEN_ID = -200
"""Stands in prompt ids for one image or video, and for each of its visual tokens after
expansion."""

NO_FRAME = -1
"""Frame number of positions that belong to no picture."""


@dataclass(frozen=True)
class VisualSpan:
    """A run of visual tokens that belong to one image or video.

    Attributes:
        start: first prompt position.
        length: number of visual tokens, learned newline vectors included.
        image_index: which image or video of the row, in prompt order.
        modality: `"image"` or `"video"`.
        frames: number of video frames (1 for an image).
        sections: `(start, rows, columns, has_newline)` of each rectangular part, start relative to
            the span; rows x columns counts patches, `has_newline` says that a newline vector ends
            each row. A video has one for each frame, an image one for each group of patches.
    """

    start: int
    length: int
    image_index: int
    modality: str = "image"
    frames: int = 1
    sections: tuple[tuple[int, int, int, bool], ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One row's prompt, ready for the language model.

    Attributes:
        embeds: `(P, D)` input embeddings, visual tokens in place.
        ids: `(P,)` token ids, `IMAGE_TOKEN_ID` at every visual position.
        is_visual: `(P,)` bool.
        spans: where each image's tokens lie.
        position_ids: `(P,)` rotary positions, or `(3, P)` in models that count time, height and
            width apart (M-RoPE); 0..P-1 when `None`. A stage that drops tokens may keep the old
            numbers.
        end_position: rotary position of the first canvas token; P when `None`.
        frame_ids: `(P,)` long, what `frames` returns; read from `spans` when `None`. A stage that
            drops tokens keeps the numbers of those that stay.
        salience: `(P,)` float32: attention that the vision tower gave each visual token (from its
            class token, or where there is none from all its patches), 0 elsewhere; `None` unless a
            stage needs it.
        tower_keys: `(P, d)` float32 keys of the tower's attention there, mean over heads; likewise.
    """

    embeds: Tensor
    ids: Tensor
    is_visual: Tensor
    spans: tuple[VisualSpan, ...] = ()
    position_ids: Tensor | None = None
    end_position: int | None = None
    frame_ids: Tensor | None = None
    salience: Tensor | None = None
    tower_keys: Tensor | None = None

    @property
    def length(self) -> int:
        """P, the number of prompt positions."""
        return self.embeds.shape[0]

    @property
    def num_visual(self) -> int:
        """V, the number of visual positions (no device read: spans are counted)."""
        return sum(span.length for span in self.spans)

    def positions(self) -> Tensor:
        """`(P,)` rotary positions of the prompt, `(3, P)` with M-RoPE."""
        if self.position_ids is not None:
            return self.position_ids
        return torch.arange(self.length, device=self.embeds.device)

    def frames(self) -> Tensor:
        """`(P,)` long: the number of the frame that each position belongs to, -1 for text.

        Frames are counted from 0 through all videos of the prompt, newline vectors with the frame
        in front of them; an image counts as one frame, whatever its tiles.

        Source: VidLaDA's program, which differs where one newline vector ends a whole video: it
        cuts such a video into equal parts.
        """
        if self.frame_ids is not None:
            return self.frame_ids
        numbers = torch.full_like(self.ids, NO_FRAME)
        number = 0
        for span in self.spans:
            end = span.start + span.length
            starts = [span.start]
            if span.modality == "video":
                starts = [span.start + section[0] for section in span.sections] or starts
            for start, stop in zip(starts, [*starts[1:], end], strict=True):
                numbers[start:stop] = number
                number += 1
        return numbers

    @property
    def next_position(self) -> int:
        """Rotary position of the first canvas token."""
        return self.length if self.end_position is None else self.end_position


@dataclass
class Canvas:
    """The response of each row while it is decoded; the loop is the only writer.

    What is still to be decoded is tracked by `is_open`, not by comparing tokens with the mask id,
    so a mask id in the prompt or in a predicted token cannot be mistaken for an open position.

    Attributes:
        tokens: `(B, lead + T)` ids, the mask id at open positions.
        is_open: `(B, lead + T)` bool.
        stop_position: `(B,)` first column of the earliest complete stop sequence, `lead + T` while
            there is none.
        lead: prompt columns in front of the response. 0, but for `preset="official"` with a mask id
            in the prompt, which the official program fills like the response.
    """

    tokens: Tensor
    is_open: Tensor
    stop_position: Tensor
    lead: int = 0

    @classmethod
    def create(cls, tokens: Tensor, is_open: Tensor, lead: int = 0) -> Canvas:
        """A canvas without a stop so far; tensors as in the attributes."""
        num_rows, width = tokens.shape
        stop = torch.full((num_rows,), width, dtype=torch.long, device=tokens.device)
        return cls(tokens=tokens, is_open=is_open, stop_position=stop, lead=lead)

    @property
    def width(self) -> int:
        """Columns: lead + T."""
        return self.tokens.shape[1]

    @property
    def is_wanted(self) -> Tensor:
        """`(B, lead + T)` bool: open, and not behind the row's stop."""
        columns = torch.arange(self.width, device=self.tokens.device)
        return self.is_open & (columns < self.stop_position[:, None])
