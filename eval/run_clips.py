"""Held-out questions about generated clips, as a task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_decode.eval.clip_questions import KINDS, ClipSample, first_samples, score
from dlm_decode.eval.clips import DATA_VERSION
from dlm_decode.eval.generated import GeneratedTask

__all__ = ["CLIPS", "Clips"]


@dataclass(frozen=True)
class Clips(GeneratedTask[ClipSample]):
    """Multiple-choice questions about generated clips."""

    name: ClassVar[str] = "clips"
    version: ClassVar[str] = DATA_VERSION
    known_kinds: ClassVar[tuple[str, ...]] = tuple(KINDS)

    def first(self, count: int) -> Iterator[ClipSample]:
        """The first `count` questions, clip after clip."""
        return first_samples(count, self.kinds, split=self.split)

    def media(self, sample: ClipSample) -> dict[str, list[Any]]:
        """The clip, as a list of frames."""
        return {"videos": [sample.video]}

    def judge(self, sample: ClipSample, text: str) -> dict[str, Any]:
        """See `score`."""
        return {"is_right": score(sample, text)}


CLIPS = Clips()
