"""Random pruning: the floor beside uniform strides."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from dlm_decode.vision import register_stage
from dlm_decode.vision.knobs import check_count
from dlm_decode.vision.picture import Choice, Picture, PictureStage

__all__ = ["Random", "generator_of"]


@register_stage("random")
@dataclass(frozen=True)
class Random(PictureStage):
    """Keeps random patches of every picture, in prompt order.

    What is drawn follows from the seed, the prompt's ids and the picture's place in it: rows with
    different questions differ, and a row keeps the same patches alone and in any batch.

    Args:
        keep_ratio: see `PictureStage`, and so for `keep_tokens`, `newlines` and `positions`.
        seed: at least 0.

    Raises:
        InvalidInputError: a seed below 0.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("seed", self.seed, least=0)

    def choose(self, picture: Picture, count: int) -> Choice:
        """See `PictureStage`."""
        generator = generator_of(self.seed, picture.text_ids, picture.index[:1])
        kept = torch.randperm(picture.num_patches, generator=generator)[:count].sort().values
        return Choice(kept.to(picture.index.device))


def generator_of(seed: int, *content: Tensor) -> torch.Generator:
    """A generator that follows from a seed and what is drawn for: `(N,)` long tensors."""
    data = torch.cat([part.cpu() for part in content]).numpy().tobytes()
    # The generator reads 32 bits of its seed, so both go into one number of that size.
    return torch.Generator().manual_seed(zlib.crc32(data, zlib.crc32(str(seed).encode())))
