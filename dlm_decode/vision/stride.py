"""Uniform-stride pruning: the floor that every method with a score has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dlm_decode.canvas import Prompt
from dlm_decode.vision import register_stage
from dlm_decode.vision.base import check_keep_ratio, keep_positions, num_kept

__all__ = ["Stride"]


@register_stage("stride")
@dataclass(frozen=True)
class Stride:
    """Keeps visual tokens at even distances, in every image by the same ratio.

    Args:
        keep_ratio: share of each image's visual tokens that stays, in (0, 1]; at least one stays.

    Raises:
        InvalidInputError: a ratio outside (0, 1].
    """

    keep_ratio: float = 0.5

    def __post_init__(self) -> None:
        check_keep_ratio(self.keep_ratio)

    def before_lm(self, prompt: Prompt) -> Prompt:
        """See the class."""
        if self.keep_ratio == 1 or not prompt.spans:
            return prompt
        keep = torch.zeros_like(prompt.is_visual)
        for span in prompt.spans:
            count = num_kept(span.length, self.keep_ratio)
            picks = torch.arange(count, device=keep.device) * span.length // count
            keep[span.start + picks] = True
        return keep_positions(prompt, keep)
