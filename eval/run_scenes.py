"""Held-out questions about generated scenes, as a task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dlm_decode.eval.generated import DEFAULT_LIMIT, GeneratedTask
from dlm_decode.eval.runner import batches, check_sizes, evaluate
from dlm_decode.eval.scene_questions import (
    ALL_KINDS,
    SceneSample,
    first_samples,
    score,
)
from dlm_decode.eval.scenes import DATA_VERSION

if TYPE_CHECKING:
    from dlm_decode.vlm import DiffusionVlm

__all__ = ["SCENES", "Scenes", "evaluate_scenes", "question_batches"]


@dataclass(frozen=True)
class Scenes(GeneratedTask[SceneSample]):
    """Questions about generated pictures with known answers."""

    name: ClassVar[str] = "scenes"
    version: ClassVar[str] = DATA_VERSION
    known_kinds: ClassVar[tuple[str, ...]] = ALL_KINDS

    def first(self, count: int) -> Iterator[SceneSample]:
        """The first `count` questions, scene after scene."""
        return first_samples(count, self.kinds, split=self.split)

    def media(self, sample: SceneSample) -> dict[str, list[Any]]:
        """The picture."""
        return {"images": [sample.image]}

    def judge(self, sample: SceneSample, text: str) -> dict[str, Any]:
        """See `score`."""
        return {"is_right": score(sample, text)}


SCENES = Scenes()


def evaluate_scenes(
    vlm: DiffusionVlm,
    options: dict[str, Any],
    *,
    output: str | Path,
    limit: int = DEFAULT_LIMIT,
    batch: int = 32,
    is_blind: bool = False,
) -> dict[str, Any]:
    """`evaluate` on the first `limit` held-out questions, which has the arguments and errors."""
    return evaluate(
        vlm, SCENES, options, output=output, limit=limit, batch=batch, is_blind=is_blind
    )


def question_batches(limit: int, batch: int, task: Scenes = SCENES) -> list[Sequence[SceneSample]]:
    """The first `limit` questions of a task in runs of `batch`.

    Raises:
        InvalidInputError: a limit or batch below 1.
    """
    check_sizes(limit, batch)
    return batches(task.samples(limit), batch)
