"""DivPrune: the kept tokens are as far from each other as they can be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dlm_decode.vision import register_stage
from dlm_decode.vision.picture import Choice, Picture, PictureStage

__all__ = ["DivPrune", "farthest_first"]

_SCORES_AT_ONCE = 2**24  # float32 numbers


@register_stage("divprune")
@dataclass(frozen=True)
class DivPrune(PictureStage):
    """Keeps a diverse set by cosine distance, in prompt order; attention is not needed.

    It starts with the token whose nearest neighbour is farthest, and goes on with the token that is
    farthest from all chosen ones; ties go to the lower position.

    Args:
        keep_ratio: see `PictureStage`, and so for `keep_tokens`, `newlines` and `positions`. The
            published program keeps 0.098.

    Source: DivPrune's program for LLaVA (max-min diversity on projected tokens).
    """

    def choose(self, picture: Picture, count: int) -> Choice:
        """See `PictureStage`."""
        return Choice(farthest_first(picture.tokens, count).sort().values)


def farthest_first(tokens: Tensor, count: int) -> Tensor:
    """`(count,)` tokens of `(N, D)`, in the order in which they are chosen."""
    unit = functional.normalize(tokens.float(), dim=-1)
    nearest, first = [], 0
    for rows in unit.split(max(1, _SCORES_AT_ONCE // len(unit))):
        distances = 1 - rows @ unit.T
        distances.diagonal(first).fill_(float("inf"))
        nearest.append(distances.amin(dim=-1))
        first += len(rows)
    chosen = torch.cat(nearest).argmax()
    order = [chosen]
    distance = torch.full_like(unit[:, 0], float("inf"))
    for _ in range(count - 1):
        distance = torch.minimum(distance, 1 - unit @ unit[chosen])
        distance[chosen] = float("-inf")
        chosen = distance.argmax()
        order.append(chosen)
    return torch.stack(order)
