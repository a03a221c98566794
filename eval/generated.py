"""What tasks of generated pictures and clips have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from dlm_decode.errors import UnknownNameError
from dlm_decode.eval.kinds import check_kinds
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
        kinds: only questions of these kinds; those that are asked unnamed by default.

    Raises:
        UnknownNameError: a kind that does not exist.
        InvalidInputError: no kind at all.
    """

    split: Split = "heldout"
    kinds: Sequence[str] | None = None
    version: ClassVar[str]
    known_kinds: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        # The order in which kinds are named makes no other questions.
        object.__setattr__(self, "kinds", check_kinds(self.kinds, self.known_kinds))

    @property
    def data(self) -> Any:
        """Version of the generator, and the kinds if some were chosen."""
        if self.kinds is None:
            return self.version
        return {"version": self.version, "kinds": list(self.kinds)}

    @abstractmethod
    def first(self, count: int) -> Iterator[S]:
        """The first `count` questions of the split."""

    def samples(self, limit: int | None = None) -> Sequence[S]:
        """The first `limit` questions; 1000 by default, as there is no last."""
        return list(self.first(DEFAULT_LIMIT if limit is None else limit))

    def expected(self, sample: S) -> str:
        """The answer that the model was trained to give."""
        return sample.answer


def generated_task(name: str, kinds: Sequence[str] | None = None) -> GeneratedTask[Any]:
    """The held-out questions of a task.

    Args:
        name: `"scenes"` or `"clips"`.
        kinds: see `GeneratedTask`.

    Raises:
        UnknownNameError: another name or kind.
        InvalidInputError: no kind at all.
    """
    from dlm_decode.eval.run_clips import Clips
    from dlm_decode.eval.run_scenes import Scenes

    tasks = {task.name: task for task in (Scenes, Clips)}
    if name not in tasks:
        raise UnknownNameError("task", name, tasks)
    return tasks[name](kinds=kinds)
