"""VisionZip: dominant tokens by the tower's attention, and merged ones for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from dlm_decode.errors import InvalidInputError
from dlm_decode.vision import register_stage
from dlm_decode.vision.base import TowerNeed
from dlm_decode.vision.picture import Choice, Picture, PictureStage

__all__ = ["VisionZip"]


@register_stage("visionzip")
@dataclass(frozen=True)
class VisionZip(PictureStage):
    """Keeps the tokens of highest salience in prompt order, then contextual tokens.

    Of the rest, evenly spaced tokens are targets; every other one goes to the target whose tower
    key is most similar, and the mean of those is added to the target. Contextual tokens follow the
    dominant ones, so that what is kept is not in prompt order throughout.

    Args:
        keep_ratio: see `PictureStage`, and so for `keep_tokens`, `newlines` and `positions`.
        contextual: share of the kept tokens that are contextual, in [0, 1), rounded to the nearest
            number; 10 of 64 as published.

    Raises:
        InvalidInputError: a share outside [0, 1).

    Source: VisionZip (arXiv 2412.04467) and its program. Differs from it: it works on the tower's
    features and also keeps the class token; here projected tokens are merged, and the language
    model reads no class token.
    """

    contextual: float = 10 / 64

    _needs: ClassVar[tuple[TowerNeed, ...]] = ("salience", "tower_keys")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.contextual < 1:
            raise InvalidInputError(f"contextual must lie in [0, 1), got {self.contextual!r}.")

    def choose(self, picture: Picture, count: int) -> Choice:
        """See `PictureStage`."""
        if picture.salience is None or picture.tower_keys is None:
            raise AssertionError("a picture without what tower_needs names")
        num_targets = min(round(self.contextual * count), count - 1)
        order = picture.salience.argsort(descending=True, stable=True)
        dominant = order[: count - num_targets].sort().values
        if not num_targets:
            return Choice(dominant)
        rest = order[count - num_targets :].sort().values
        step = len(rest) // num_targets
        is_target = torch.zeros_like(rest, dtype=torch.bool)
        is_target[: step * num_targets : step] = True
        targets, others = rest[is_target], rest[~is_target]
        keys = functional.normalize(picture.tower_keys, dim=-1)
        nearest = (keys[others] @ keys[targets].T).argmax(dim=-1)
        tokens = picture.tokens.float()
        sums = torch.zeros_like(tokens[targets]).index_add(0, nearest, tokens[others])
        sizes = torch.bincount(nearest, minlength=num_targets).clamp(min=1)
        return Choice(dominant, added=targets, added_tokens=tokens[targets] + sums / sizes[:, None])
