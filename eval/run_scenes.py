"""Held-out questions about generated scenes, as a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dlm_decode.eval.runner import Task, batches, check_sizes, evaluate
from dlm_decode.eval.scene_questions import SceneSample, check_kinds, first_samples, score
from dlm_decode.eval.scenes import DATA_VERSION, Split

if TYPE_CHECKING:
    from dlm_decode.vlm import DiffusionVlm

__all__ = ["SCENES", "Scenes", "evaluate_scenes", "question_batches"]

DEFAULT_LIMIT = 1000


@dataclass(frozen=True)
class Scenes(Task[SceneSample]):
    """Questions about generated pictures with known answers.

    Args:
        split: of the scenes.
        kinds: only questions of these kinds, see `first_samples`.

    Raises:
        UnknownNameError: a kind that does not exist.
        InvalidInputError: no kind at all.
    """

    split: Split = "heldout"
    kinds: Sequence[str] | None = None
    name: ClassVar[str] = "scenes"

    def __post_init__(self) -> None:
        # The order in which kinds are named makes no other questions.
        object.__setattr__(self, "kinds", check_kinds(self.kinds))

    @property
    def data(self) -> Any:
        """Version of the generator, and the kinds if some were chosen.

        The ids of the questions name the split.
        """
        if self.kinds is None:
            return DATA_VERSION
        return {"version": DATA_VERSION, "kinds": list(self.kinds)}

    def samples(self, limit: int | None = None) -> Sequence[SceneSample]:
        """The first `limit` questions, scene after scene; 1000 by default, as there is no last."""
        count = DEFAULT_LIMIT if limit is None else limit
        return list(first_samples(count, self.kinds, split=self.split))

    def media(self, sample: SceneSample) -> dict[str, list[Any]]:
        """The picture."""
        return {"images": [sample.image]}

    def judge(self, sample: SceneSample, text: str) -> dict[str, Any]:
        """See `score`."""
        return {"is_right": score(sample, text)}

    def expected(self, sample: SceneSample) -> str:
        """The answer that the model was trained to give."""
        return sample.answer


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
