"""EgoSchema: 500 public five-option questions about three-minute first-person videos.

`python eval/egoschema.py ...` is `dlm-decode eval egoschema ...`.

Source: EgoSchema (arXiv 2308.09126); layouts of its GitHub repository and of the hub data sets
`lmms-lab/egoschema` and `lmms-eval/egoschema`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlm_decode.errors import InvalidInputError
from dlm_decode.eval.choices import LETTERS
from dlm_decode.eval.video_questions import (
    VideoSample,
    VideoTask,
    annotation_folder,
    check_rows,
    read_json,
    read_parquet,
    video_folder,
)

__all__ = ["HUB_ID", "INSTRUCTION", "EgoSchema", "load_task"]

HUB_ID = "lmms-lab/egoschema"
INSTRUCTION = "Answer with the option's letter from the given choices directly."
"""Line behind the options, as lmms-eval and VidLaDA ask."""

_PATTERNS = ("Subset/*.parquet", "questions.json", "subset_answers.json")
_COLUMNS = ("question_idx", "question", "video_idx", "option", "answer")


class EgoSchema(VideoTask):
    """The subset whose answers are public; every question has five options."""

    name = "egoschema"
    metric = "accuracy"
    num_expected = 500

    def score(self, entries: Sequence[dict[str, Any]]) -> float:
        """Share of right answers."""
        return sum(entry["is_right"] for entry in entries) / max(1, len(entries))


def load_task(
    data: str | None = None,
    *,
    videos: str | Path | None = None,
    instruction: str | None = None,
    is_blind: bool = False,
) -> EgoSchema:
    """The task, from a folder or a hub id.

    Args:
        data: hub id (`HUB_ID` by default), or a folder with `Subset/*.parquet` (hub layout) or with
            `questions.json` and `subset_answers.json` (GitHub layout).
        videos: folder of `<video id>.mp4`; by default `videos` in the folder of the annotations, or
            where lmms-eval puts those of the hub, in `egoschema/videos` of the hub's cache folder.
        instruction: line behind the options; `INSTRUCTION` by default, `""` for none.
        is_blind: the videos are not needed.

    Raises:
        InvalidInputError: annotations or videos that are not there or not readable.
    """
    source = HUB_ID if data is None else data
    folder = annotation_folder(source, _PATTERNS)
    shown = INSTRUCTION if instruction is None else instruction
    questions = [_sample(*row, shown) for row in _read(folder)]
    root = None
    if not is_blind:
        root = video_folder(videos, source, [folder / "videos"], "egoschema/videos")
    return EgoSchema(questions, root, instruction=shown, split="subset", source=source)


def _read(folder: Path) -> list[tuple[str, str, list[str], int]]:
    """Video, question, option texts and index of the right one, per question."""
    files = sorted((folder / "Subset").glob("*.parquet"))
    if files:
        rows = read_parquet(files, _COLUMNS)
        return [
            (
                row["video_idx"],
                row["question"],
                _texts(row["option"]),
                _index(row["answer"], files[0]),
            )
            for row in rows
        ]
    listed, answers = folder / "questions.json", folder / "subset_answers.json"
    if not listed.exists() or not answers.exists():
        raise InvalidInputError(
            f"{str(folder)!r} holds neither Subset/*.parquet nor questions.json with "
            "subset_answers.json; the full set has no public answers."
        )
    right = read_json(answers)
    if not isinstance(right, dict):
        raise InvalidInputError(f"{str(answers)!r} does not map question ids to answers.")
    options = [f"option {number}" for number in range(5)]
    rows = check_rows(read_json(listed), ["q_uid", "question", *options], str(listed))
    missing = {*right} - {row["q_uid"] for row in rows}
    if missing:
        raise InvalidInputError(f"{str(listed)!r} lacks {len(missing)} of the answered questions.")
    return [
        (
            row["q_uid"],
            row["question"],
            [row[name] for name in options],
            _index(right[row["q_uid"]], answers),
        )
        for row in rows
        if row["q_uid"] in right
    ]


def _texts(options: Sequence[str]) -> list[str]:
    """Options without the letters that the hub's rows begin with."""
    return [
        re.sub(rf"^\(?{letter}[.):]\s*", "", option)
        for letter, option in zip(LETTERS, options, strict=False)
    ]


def _index(answer: Any, path: Path) -> int:
    if isinstance(answer, int) or (isinstance(answer, str) and answer.strip().isdigit()):
        index = int(answer)
        if 0 <= index < 5:
            return index
    raise InvalidInputError(
        f"{str(path)!r}: answer {answer!r} is no index from 0 to 4; the full set has no public "
        "answers, use the subset."
    )


def _sample(
    video: str, question: str, options: Sequence[str], right: int, instruction: str
) -> VideoSample:
    if len(options) != 5:
        raise InvalidInputError(f"question {video!r} has {len(options)} options instead of 5.")
    lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False)]
    return VideoSample(
        id=video,
        kind="subset",
        question="\n".join(filter(None, [question, *lines, instruction])),
        video=video,
        options=tuple(options),
        right=(LETTERS[right],),
    )


if __name__ == "__main__":
    from dlm_decode.cli import main

    raise SystemExit(main(["eval", "egoschema", *sys.argv[1:]]))
