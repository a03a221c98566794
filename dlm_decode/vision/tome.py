"""ToMe: bipartite merging of similar tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlm_decode.vision import register_stage
from dlm_decode.vision.merging import merge_to
from dlm_decode.vision.picture import Choice, Picture, PictureStage

__all__ = ["ToMe"]


@register_stage("tome")
@dataclass(frozen=True)
class ToMe(PictureStage):
    """Merges every second token into its most similar other one, the best pairs first.

    Args:
        keep_ratio: see `PictureStage`, and so for `keep_tokens`, `newlines` and `positions`. Below
            one half it takes several rounds.

    Source: ToMe (arXiv 2210.09461) and its program. Differs from it: it merges between the layers
    of a vision transformer and compares attention keys; here projected tokens are merged before the
    language model. A group stays where its destination was, since a language model reads order.
    """

    def choose(self, picture: Picture, count: int) -> Choice:
        """See `PictureStage`."""
        merged = merge_to(picture.tokens.float(), count, _alternating)
        return Choice(merged.index, merged.tokens)


def _alternating(cosines: Tensor, num_merged: int) -> tuple[Tensor, Tensor]:
    places = torch.arange(len(cosines), device=cosines.device)
    return places[::2], places[1::2]
