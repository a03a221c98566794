"""FastV: after the first layers, keep the visual tokens that the text looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dlm_decode.errors import InvalidInputError
from dlm_decode.vision import register_stage
from dlm_decode.vision.base import check_keep_ratio, num_kept
from dlm_decode.vision.inside import InsideBase, LayerView, Reduction
from dlm_decode.vision.knobs import check_choice, check_count, check_layers

__all__ = ["FastV", "Rows", "query_rows", "strongest"]

Rows = Literal["last", "text_mean", "mask_mean"]


@register_stage("fastv")
@dataclass(frozen=True)
class FastV(InsideBase):
    """Ranks visual tokens by the attention that they receive in one layer, and drops the others.

    Layers in front of the drop work on the whole sequence and keep all keys and values; the others
    work on the tokens that are left, at their original rotary positions. Several images or videos
    are pruned each by itself. Ties go to the lower position.

    Args:
        k: decoder layers that see everything, at least 1; attention of the last of them ranks. All
            of a model's layers is a no-op.
        keep_ratio: share of each image's visual tokens that stays, in (0, 1]; halves are rounded to
            the even count, and at least one token stays. 1 is a no-op.
        rows: whose attention ranks, mean over heads: `"last"`, the last position of the sequence;
            `"text_mean"`, the known text behind the pictures (that in front of them where there is
            none, and else the last position); `"mask_mean"`, response positions that are still
            masked. `None` is `"last"` where attention is causal, and else `"mask_mean"`: in a
            diffusion model the last position is no summary of the others.
        when: see `InsideBase`.

    Raises:
        InvalidInputError: a ratio outside (0, 1], k below 1 or above the model's layers, or
            `"mask_mean"` in an autoregressive model.
        UnknownNameError: another value of `rows` or `when`.

    Source: FastV (arXiv 2403.06764) and its published program, which names the share that is
    dropped (see `from_drop_ratio`). Differs from it: batches, padding and several images work,
    `"text_mean"` and `"mask_mean"` are ours, and decoding goes on with what the prefill kept, as in
    the program's variant with a cache.
    """

    k: int = 2
    keep_ratio: float = 0.5
    rows: Rows | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("k", self.k)
        check_keep_ratio(self.keep_ratio)
        if self.rows is not None:
            check_choice("rows", self.rows, Rows)

    @classmethod
    def from_drop_ratio(cls, k: int, r: float) -> FastV:
        """FastV by its paper's K and R, the share of visual tokens that is dropped, in [0, 1)."""
        return cls(k=k, keep_ratio=1 - r)

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See `InsideStage`."""
        check_layers("fastv", (self.k - 1,), num_layers)
        return () if self.keep_ratio == 1 or self.k == num_layers else (self.k - 1,)

    def reads_attention(self, layer: int) -> bool:
        """See `InsideStage`."""
        return True

    def reduce(self, view: LayerView) -> Reduction | None:
        """See `InsideStage`."""
        received = view.attention(query_rows(view, self.rows)).mean(dim=(0, 1))
        return view.kept(
            torch.cat(
                [
                    strongest(received, image, num_kept(len(image), self.keep_ratio))
                    for image in view.images()
                ]
            )
        )

    def keeps(
        self, layer: int, num_visual: int, num_images: int, num_layers: int | None = None
    ) -> int | None:
        """See `InsideStage`."""
        return num_images * num_kept(num_visual // max(1, num_images), self.keep_ratio)


def strongest(scores: Tensor, candidates: Tensor, count: int) -> Tensor:
    """The `count` of the positions `candidates` that have the highest of the scores `(S,)`.

    Ties go to the candidate that comes first.
    """
    order = scores[candidates].argsort(descending=True, stable=True)
    return candidates[order[:count]]


def query_rows(view: LayerView, rows: Rows | None) -> Tensor:
    """The positions whose attention ranks; see `FastV`.

    Raises:
        InvalidInputError: masked positions are asked for where there are none.
    """
    if rows is None:
        rows = "last" if view.is_causal else "mask_mean"
    last = torch.tensor([view.hidden.shape[0] - 1], device=view.hidden.device)
    if rows == "last":
        return last
    if rows == "mask_mean":
        masked = view.is_masked.nonzero()[:, 0]
        if not len(masked):
            raise InvalidInputError(
                "rows='mask_mean' needs masked response positions, which only diffusion models "
                "have; use rows='last' or rows='text_mean'."
            )
        return masked
    text = view.text
    behind = text[text > view.visual[-1]]
    return next((known for known in (behind, text) if len(known)), last)
