"""PyramidDrop: FastV's ranking at several depths, so that ever fewer visual tokens go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch

from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.vision import register_stage
from dlm_decode.vision.fastv import Rows, query_rows, strongest
from dlm_decode.vision.inside import InsideBase, LayerView, Reduction
from dlm_decode.vision.knobs import check_layers, read_layers, spread

__all__ = ["PyramidDrop"]

_DEPTHS = 3


@register_stage("pyramiddrop")
@dataclass(frozen=True)
class PyramidDrop(InsideBase):
    """Drops the visual tokens that the text looks at least, again and again.

    Each image or video is pruned by itself; what stays keeps its position.

    Args:
        depths: numbers of layers that have run when tokens are dropped, ascending: a sequence, a
            number, or a string such as `"8-16-24"`. `None` is 1/4, 1/2 and 3/4 of the depth.
        keep_ratios: share of an image's tokens that is left behind each of them, relative to those
            that entered the language model; must descend. A string such as `"0.5-0.25-0.125"`, or a
            sequence.
        rows: whose attention ranks, see `FastV`.
        when: see `InsideBase`.

    Raises:
        InvalidInputError: depths that do not ascend from 1 on or that the model does not have,
            ratios that do not descend within (0, 1].
        UnknownNameError: another value of `rows` or `when`.

    Source: PyramidDrop (arXiv 2410.17247); depths and ratios are those of its published scripts for
    LLaVA. Not verified against its program: that the last row of the prompt ranks, and that it does
    so in the layer in front of the drop.
    """

    depths: Any = None
    keep_ratios: Any = (0.5, 0.25, 0.125)
    rows: Rows | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows is not None and self.rows not in get_args(Rows):
            raise UnknownNameError("rows", str(self.rows), get_args(Rows))
        if self.depths is not None:
            object.__setattr__(self, "depths", read_layers(self.depths, "depths", least=1))
        count = _DEPTHS if self.depths is None else len(self.depths)
        ratios = spread("keep_ratios", self.keep_ratios, float, count)
        object.__setattr__(self, "keep_ratios", ratios)
        if not all(0 < b <= a for a, b in zip((1.0, *ratios), ratios, strict=False)):
            raise InvalidInputError(
                f"keep_ratios must descend from at most 1 and stay above 0, got {ratios}."
            )

    def _shares(self, num_layers: int | None) -> dict[int, float]:
        """Share that stays of what comes in, by the layer in front of the drop."""
        depths = self.depths
        if depths is None:
            scaled = () if num_layers is None else (num_layers * part // 4 for part in (1, 2, 3))
            depths = tuple(dict.fromkeys(depth for depth in scaled if depth))
        steps = zip(depths, (1.0, *self.keep_ratios), self.keep_ratios, strict=False)
        return {depth - 1: after / before for depth, before, after in steps if after < before}

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See `InsideStage`."""
        layers = tuple(self._shares(num_layers))
        check_layers("pyramiddrop", layers, num_layers)
        return tuple(layer for layer in layers if layer < num_layers - 1)

    def reads_attention(self, layer: int) -> bool:
        """See `InsideStage`."""
        return True

    def reduce(self, view: LayerView) -> Reduction | None:
        """See `InsideStage`."""
        share = self._shares(view.num_layers)[view.layer]
        received = view.attention(query_rows(view, self.rows)).mean(dim=(0, 1))
        kept = [
            strongest(received, image, max(1, round(len(image) * share))) for image in view.images()
        ]
        return view.kept(torch.cat(kept))

    def keeps(
        self, layer: int, num_visual: int, num_images: int, num_layers: int | None = None
    ) -> int | None:
        """See `InsideStage`."""
        share = self._shares(num_layers).get(layer)
        if share is None:
            return None
        return num_images * max(1, round(num_visual // max(1, num_images) * share))
