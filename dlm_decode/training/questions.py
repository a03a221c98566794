"""Which questions a training step asks, and which visual tokens it shows."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dlm_decode.eval.clips import MOTIONS
from dlm_decode.eval.scene_questions import EXTRA_KINDS, KINDS, SceneSample, ask, practice_choice
from dlm_decode.eval.scenes import CELL_NAMES, COLOURS, SHAPES, SIZES
from dlm_decode.training.data import GRID, NAMES, ScenePool

if TYPE_CHECKING:
    from dlm_decode.training.stages import TrainingStage

__all__ = ["ANSWER_WORDS", "NUM_PATCHES", "VERDICTS", "SceneDrawer"]

NUM_PATCHES = GRID * GRID
VERDICTS = ("yes", "no", *"abcd")
"""Words that are the whole answer to a yes-or-no question or a choice."""
ANSWER_WORDS = {*SHAPES, *COLOURS, *SIZES, *MOTIONS, *VERDICTS, *map(str, range(10)), "nothing"}
ANSWER_WORDS |= {word for place in CELL_NAMES for word in place.split()}


class SceneDrawer:
    """Draws questions and visual tokens from a pool whose features are known.

    Args:
        pool: scenes.
        features: `(n, 144, d)` float16.
        kind_weights: relative frequency of each kind of question; by default 1, and 0 for extra
            kinds.
        practises: ask choices among fewer options as well.
    """

    def __init__(
        self,
        pool: ScenePool,
        features: np.ndarray,
        kind_weights: dict[str, float] | None = None,
        *,
        practises: bool = False,
    ) -> None:
        self.pool, self.features = pool, features
        self.practises = practises
        weights = dict.fromkeys(KINDS, 1.0) | (kind_weights or {})
        self.kinds = list(KINDS | EXTRA_KINDS)
        self.kind_weights = [weights.get(kind, 0.0) for kind in self.kinds]

    def samples(self, rng: random.Random, count: int) -> tuple[list[SceneSample], np.ndarray]:
        """`count` questions and the indices of their scenes; several may share a scene."""
        samples, rows = [], []
        while len(samples) < count:
            row = rng.randrange(len(self.pool))
            scene = self.pool.scenes[row]
            kind = "photo" if scene.is_photo else rng.choices(self.kinds, self.kind_weights)[0]
            is_practice = self.practises and kind == "choice"
            sample = practice_choice(scene, rng) if is_practice else ask(scene, kind, rng)
            if sample is not None:
                samples.append(sample)
                rows.append(row)
        return samples, np.array(rows)

    def patches(
        self, rows: np.ndarray, stage: TrainingStage, numbers: np.random.Generator
    ) -> tuple[Tensor, np.ndarray]:
        """Patches as the stage shows them.

        Returns:
            Features `(B, v, d)` and the indices of their patches `(B, v)`, ascending.
        """
        if stage.patches is None:
            index = np.broadcast_to(np.arange(NUM_PATCHES), (len(rows), NUM_PATCHES))
        else:
            # Anchors first, then other patches of objects, then background; in random order
            # within each.
            order = numbers.random((len(rows), NUM_PATCHES))
            order -= self.pool.is_anchor[rows] + (self.pool.names[rows] < len(NAMES)).astype(float)
            few = np.argpartition(order, stage.patches, axis=1)[:, : stage.patches]
            order = numbers.random(order.shape)
            np.put_along_axis(order, few, 2.0, axis=1)
            rest = np.argpartition(order, stage.background, axis=1)[:, : stage.background]
            index = np.sort(np.concatenate([few, rest], axis=1), axis=1)
        return torch.from_numpy(self.features[rows[:, None], index]).float(), index
