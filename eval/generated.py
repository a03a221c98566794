"""What tasks of generated pictures and clips have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from dlm_decode.eval.runner import Sample, Task
from dlm_decode.eval.scenes import Split

__all__ = ["DEFAULT_LIMIT", "GeneratedSample", "GeneratedTask", "generated_task"]

DEFAULT_LIMIT = 1000


class GeneratedSample(Sample, Protocol):
    """A question whose answer is known from how its picture or clip was made."""

    @property
    def answer(self) -> str:
        """The expected response."""
        ...


S = TypeVar("S", bound=GeneratedSample)


@dataclass(frozen=True)
class GeneratedTask(Task[S]):
    """Questions that are made on demand, of one split.

    Args:
        split: of the pictures or clips; the ids of the questions name it.
    """

    split: Split = "heldout"

    @abstractmethod
    def first(self, count: int) -> Iterator[S]:
        """The first `count` questions of the split."""

    def samples(self, limit: int | None = None) -> Sequence[S]:
        """The first `limit` questions; 1000 by default, as there is no last."""
        return list(self.first(DEFAULT_LIMIT if limit is None else limit))

    def expected(self, sample: S) -> str:
        """The answer that the model was trained to give."""
        return sample.answer


def generated_task(name: str) -> GeneratedTask[Any]:
    """The held-out questions of a task.

    Args:
        name: `"scenes"` or `"clips"`.

    Raises:
        UnknownNameError: another name.
    """
    from dlm_decode.errors import UnknownNameError
    from dlm_decode.eval.run_clips import CLIPS
    from dlm_decode.eval.run_scenes import SCENES

    tasks = {task.name: task for task in (SCENES, CLIPS)}
    if name not in tasks:
        raise UnknownNameError("task", name, tasks)
    return tasks[name]
