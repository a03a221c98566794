"""PiToMe: merging only where many tokens are alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn import functional

from dlm_decode.errors import InvalidInputError
from dlm_decode.vision import register_stage
from dlm_decode.vision.merging import merge_to
from dlm_decode.vision.picture import Choice, Picture, PictureStage

__all__ = ["PiToMe"]


@register_stage("pitome")
@dataclass(frozen=True)
class PiToMe(PictureStage):
    """Merges among the tokens of highest energy, those with many similar ones; others are safe.

    Energy is the mean over all tokens of elu(cosine - margin). To lose r tokens, the 2 r of highest
    energy are dealt out in turn as sources and destinations, and every source is merged into its
    most similar destination.

    Args:
        keep_ratio: see `PictureStage`, and so for `keep_tokens`, `newlines` and `positions`. Below
            one half it takes several rounds.
        margin: cosine from which tokens count as alike, in [-1, 1]. The published program moves it
            from layer to layer; here there is only one place.

    Raises:
        InvalidInputError: a margin outside [-1, 1].

    Source: PiToMe (arXiv 2405.16148) and its program. Differs from it as `tome` does from ToMe.
    """

    margin: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -1 <= self.margin <= 1:
            raise InvalidInputError(f"margin must lie in [-1, 1], got {self.margin!r}.")

    def choose(self, picture: Picture, count: int) -> Choice:
        """See `PictureStage`."""
        merged = merge_to(picture.tokens.float(), count, partial(_mergeable, self.margin))
        return Choice(merged.index, merged.tokens)


def _mergeable(margin: float, cosines: Tensor, num_merged: int) -> tuple[Tensor, Tensor]:
    energy = functional.elu(cosines - margin).mean(dim=-1)
    highest = energy.argsort(descending=True, stable=True)[: 2 * num_merged]
    return highest[::2], highest[1::2]
