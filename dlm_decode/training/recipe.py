"""What the two kinds of models that learn from scenes do differently; `tiny.run` does the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from dlm_decode.training.data import ScenePool
from dlm_decode.training.tower import PatchReader

__all__ = ["Lesson", "Recipe"]


@dataclass(frozen=True)
class Lesson:
    """What a language model is trained with.

    Attributes:
        pool: training scenes.
        features: `(n, 144, d)` of them, from the trained tower.
        heldout: scenes that are watched.
        heldout_features: of them.
        tokenizer: folder of the tokenizer.
        work: folder of checkpoints and the log.
        scale: multiplies the steps of the curriculum.
        seed: of weights and batches.
        start: weights to begin with; fresh ones otherwise.
    """

    pool: ScenePool
    features: np.ndarray
    heldout: ScenePool
    heldout_features: np.ndarray
    tokenizer: Path
    work: Path
    scale: float
    seed: int
    start: dict[str, torch.Tensor] | None


class Recipe(ABC):
    """One kind of model."""

    tower_kind: ClassVar[type[PatchReader]] = PatchReader

    @abstractmethod
    def build_tokenizer(self, folder: Path) -> None:
        """Writes the tokenizer."""

    @abstractmethod
    def read(
        self, folder: Path, pool: ScenePool
    ) -> tuple[PatchReader, dict[str, torch.Tensor] | None]:
        """Tower and language model of an exported folder to start from.

        Without a language model, the tower is only a beginning: it is trained further.

        Raises:
            InvalidInputError: a folder that holds no such model.
        """

    @abstractmethod
    def train(self, lesson: Lesson) -> nn.Module:
        """The language model, trained."""

    @abstractmethod
    def export(self, folder: Path, tower: Any, reader: Any, tokenizer_folder: Path) -> None:
        """Writes a checkpoint folder."""
