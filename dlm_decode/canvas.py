"""What a response is decoded from (the prompt) and into (the canvas).

Symbols, used with the same meaning in every docstring of the package:

B rows of a batch · P prompt length · V visual tokens · T canvas length · S sequence length (prompt + canvas
+ suffix) · D hidden size · L layers · H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["IMAGE_TOKEN_ID", "Prompt", "VisualSpan"]

IMAGE_TOKEN_ID = -200
"""Stands in prompt ids for one image or video, and for each of its visual tokens after expansion."""


@dataclass(frozen=True)
class VisualSpan:
    """A run of visual tokens that belong to one image or video.

    Attributes:
        start: first prompt position.
        length: number of visual tokens, learned newline vectors included.
        image_index: which image or video of the row, in prompt order.
        modality: `"image"` or `"video"`.
        frames: number of video frames (1 for an image).
        sections: `(start, rows, columns, has_newline)` of each rectangular part, start relative to the span;
            rows x columns counts patches, `has_newline` says that a newline vector ends each row.
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
    """

    embeds: Tensor
    ids: Tensor
    is_visual: Tensor
    spans: tuple[VisualSpan, ...] = ()

    @property
    def length(self) -> int:
        """P, the number of prompt positions."""
        return self.embeds.shape[0]

    @property
    def num_visual(self) -> int:
        """V, the number of visual positions (no device read: spans are counted)."""
        return sum(span.length for span in self.spans)
