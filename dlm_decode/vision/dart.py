"""DART: keep a few pivots, and the visual tokens that are least like them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dlm_decode.errors import InvalidInputError
from dlm_decode.vision import register_stage
from dlm_decode.vision.base import check_keep_ratio, num_kept
from dlm_decode.vision.fastv import strongest
from dlm_decode.vision.inside import InsideBase, LayerView, Reduction
from dlm_decode.vision.knobs import check_count, check_layers

__all__ = ["Dart"]


@register_stage("dart")
@dataclass(frozen=True)
class Dart(InsideBase):
    """Drops visual tokens that repeat others, without attention scores.

    Pivots are the visual tokens and the text tokens with the largest keys (L1 norm over all heads).
    One after another takes the visual tokens, of those still free, whose states are least similar
    to its own. What stays keeps its position. All images of a prompt are pruned together.

    Args:
        k: decoder layers that see everything, at least 1; keys of the last of them choose pivots.
        keep_ratio: share of the visual tokens that the pivots take, in (0, 1]; equal parts, rounded
            down. The visual pivots come on top, and at least one token stays. 1 is a no-op.
        visual_pivots: at least 1.
        text_pivots: at least 1; of text that is known, and not of masks.
        when: see `InsideBase`.

    Raises:
        InvalidInputError: a ratio outside (0, 1], a count below 1, k above the model's layers.
        UnknownNameError: another value of `when`.

    Source: DART (arXiv 2502.11494), from a copy of its published code. Differs from it: states are
    compared as they are, and not behind the model's final norm. The counts of pivots are not
    verified.
    """

    k: int = 2
    keep_ratio: float = 0.5
    visual_pivots: int = 4
    text_pivots: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_keep_ratio(self.keep_ratio)
        for name in ("k", "visual_pivots", "text_pivots"):
            check_count(name, getattr(self, name))

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See `InsideStage`."""
        check_layers("dart", (self.k - 1,), num_layers)
        return () if self.keep_ratio == 1 or self.k == num_layers else (self.k - 1,)

    def reads_attention(self, layer: int) -> bool:
        """See `InsideStage`."""
        return True

    def reduce(self, view: LayerView) -> Reduction | None:
        """See `InsideStage`."""
        if view.keys is None:
            raise InvalidInputError("dart needs the layer's keys.")
        size = view.keys.float().abs().sum(dim=(0, 2))
        visual = strongest(size, view.visual, self.visual_pivots)
        text = strongest(size, view.text, self.text_pivots)
        pivots = torch.cat([visual, text])
        each = num_kept(len(view.visual), self.keep_ratio) // len(pivots)
        kept = self._differing(view, pivots, each)
        kept[visual] = True
        return view.kept(kept.nonzero()[:, 0])

    def _differing(self, view: LayerView, pivots: Tensor, each: int) -> Tensor:
        """`(S,)` bool, what the pivots take."""
        unit = functional.normalize(view.hidden.float(), dim=-1)
        taken = torch.zeros_like(view.layout.is_visual)
        is_free = view.layout.is_visual.clone()
        is_free[pivots] = False
        view.num_scores += len(pivots) * len(view.visual)
        for pivot in pivots.tolist():
            candidates = is_free.nonzero()[:, 0]
            chosen = strongest(-(unit @ unit[pivot]), candidates, each)
            taken[chosen], is_free[chosen] = True, False
        return taken

    def keeps(
        self, layer: int, num_visual: int, num_images: int, num_layers: int | None = None
    ) -> int | None:
        """See `InsideStage`; as many known text tokens as pivots are assumed."""
        visual = min(self.visual_pivots, num_visual)
        pivots = visual + self.text_pivots
        each = num_kept(num_visual, self.keep_ratio) // pivots
        return min(num_visual, visual + pivots * each)
