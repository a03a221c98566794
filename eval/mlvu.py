"""MLVU: multiple-choice questions about videos of three minutes to nine hours, by task type.

`python eval/mlvu.py ...` is `dlm-decode eval mlvu ...`.

Source: MLVU (arXiv 2406.04264); layouts of its own hub data sets and of the mirrors that lmms-eval
reads. Sub-scene captioning and summaries are judged by a language model and are not here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.eval.choices import LETTERS
from dlm_decode.eval.video_questions import (
    VideoSample,
    VideoTask,
    annotation_folder,
    check_rows,
    read_json,
    read_parquet,
    right_letters,
    video_folder,
)

__all__ = ["SPLITS", "Mlvu", "SplitRules", "load_task"]

Split = Literal["test", "dev"]


@dataclass(frozen=True)
class SplitRules:
    """What differs between the splits.

    Attributes:
        hub_id: the mirror that can be had without asking its owners.
        types: task types, over which the score is a mean.
        num_questions: of the whole split.
        instruction: what follows the options by default. lmms-eval and VidLaDA's program ask the
            test questions without any.
        mirror: folder of the mirror's parquet files.
        cache_name: folder in which lmms-eval puts the videos.
    """

    hub_id: str
    types: tuple[str, ...]
    num_questions: int
    instruction: str
    mirror: str
    cache_name: str


SPLITS: dict[str, SplitRules] = {
    "test": SplitRules(
        hub_id="sy1998/MLVU_Test",
        types=(
            "anomaly_reco",
            "count",
            "ego",
            "needleQA",
            "order",
            "plotQA",
            "sportsQA",
            "topic_reasoning",
            "tutorialQA",
        ),
        num_questions=502,
        instruction="",
        mirror="mlvu_test",
        cache_name="mlvu_test",
    ),
    "dev": SplitRules(
        hub_id="sy1998/MLVU_dev",
        types=("anomaly_reco", "count", "ego", "needle", "order", "plotQA", "topic_reasoning"),
        num_questions=2175,
        instruction="Only give the best option.\nBest option: (",
        mirror="mlvu",
        cache_name="mlvu",
    ),
}

# Folders of the dev videos, which are also the names of its annotation files.
_DEV_FILES = {
    "plotQA": "1_plotQA",
    "needle": "2_needle",
    "ego": "3_ego",
    "count": "4_count",
    "order": "5_order",
    "anomaly_reco": "6_anomaly_reco",
    "topic_reasoning": "7_topic_reasoning",
}
_SAME_TYPE = {"findNeedle": "needle"}
_TEST_FILE = "test_mcq_gt.json"
_OFFICIAL = ("video", "question", "candidates", "answer", "question_type")
_MIRROR = ("video_name", "question", "candidates", "answer", "task_type", "question_id")
_PATTERNS = ("mlvu/*.parquet", "mlvu_test/*.parquet", "MLVU/json/*.json", f"*/{_TEST_FILE}")


class Mlvu(VideoTask):
    """One split of it."""

    name = "mlvu"

    def __init__(
        self, questions: Sequence[VideoSample], videos: Path | None, *, split: str, **rest: Any
    ) -> None:
        super().__init__(questions, videos, split=split, **rest)
        self.rules = SPLITS[split]
        self.num_expected = self.rules.num_questions
        self.metric = f"mean over {len(self.rules.types)} task types of the accuracy on each"

    def score(self, entries: Sequence[dict[str, Any]]) -> float:
        """Unweighted mean over the task types that were asked; papers call it M-Avg."""
        hits: dict[str, list[bool]] = {}
        for entry in entries:
            hits.setdefault(entry["kind"], []).append(entry["is_right"])
        return sum(sum(part) / len(part) for part in hits.values()) / max(1, len(hits))

    def scores(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Also `types_not_asked`: those over which `score` is no mean, as with a limit."""
        asked = {entry["kind"] for entry in entries}
        absent = [kind for kind in self.rules.types if kind not in asked]
        return {**super().scores(entries), "types_not_asked": absent}


def load_task(
    data: str | None = None,
    *,
    split: Split = "test",
    videos: str | Path | None = None,
    instruction: str | None = None,
    is_blind: bool = False,
) -> Mlvu:
    """The task, from a folder or a hub id.

    Args:
        data: hub id or folder; the mirror of the split by default. Read are `mlvu/*.parquet` and
            `mlvu_test/*.parquet` (mirrors), `MLVU/json/*.json` or `json/*.json` (dev as published),
            and `test-ground-truth/test_mcq_gt.json` (test as published).
        split: `"test"` (six options, nine types) or `"dev"` (four options, seven types).
        videos: folder of the files that the annotations name, in itself or in the published
            folders by task type; by default `video` or `videos` beside the annotations, or where
            lmms-eval puts those of the hub, in `mlvu` or `mlvu_test` of the hub's cache folder.
        instruction: what follows the options; the split's own by default, `""` for none.
        is_blind: the videos are not needed.

    Raises:
        UnknownNameError: another split.
        InvalidInputError: annotations or videos that are not there or not readable.
    """
    if split not in SPLITS:
        raise UnknownNameError("split", split, SPLITS)
    rules = SPLITS[split]
    source = rules.hub_id if data is None else data
    folder = annotation_folder(source, _PATTERNS)
    shown = rules.instruction if instruction is None else instruction
    rows = _read(folder, split)
    if len({row["id"] for row in rows}) < len(rows):
        rows = [{**row, "id": f"{number}/{row['id']}"} for number, row in enumerate(rows)]
    questions = [_sample(row, rules, split, shown) for row in rows]
    root = None
    if not is_blind:
        names = ("video", "videos", "MLVU/video", "MLVU_Test/video", rules.cache_name)
        places = [folder / name for name in names]
        root = video_folder(videos, source, places, rules.cache_name)
    return Mlvu(questions, root, split=split, instruction=shown, source=source)


def _read(folder: Path, split: Split) -> list[dict[str, Any]]:
    """Rows with the names of the published files."""
    files = sorted((folder / SPLITS[split].mirror).glob("*.parquet"))
    if files:
        return [
            {
                "id": row["question_id"],
                "video": row["video_name"],
                "question": row["question"],
                "candidates": row["candidates"],
                "letter": row["answer"],
                "type": row["task_type"],
            }
            for row in read_parquet(files, _MIRROR)
        ]
    found: list[tuple[str, dict[str, Any]]] = []
    if split == "test":
        paths = [folder / "test-ground-truth" / _TEST_FILE, folder / _TEST_FILE]
        wanted = f"test-ground-truth/{_TEST_FILE}"
    else:
        names = [f"{name}.json" for name in _DEV_FILES.values()]
        paths = [folder / part / name for part in ("MLVU/json", "json", ".") for name in names]
        wanted = "MLVU/json/*.json"
    for path in paths:
        if path.exists():
            rows = check_rows(read_json(path), _OFFICIAL, str(path))
            found += [(f"{path.stem}/{number}", row) for number, row in enumerate(rows)]
    if not found:
        raise InvalidInputError(
            f"{str(folder)!r} holds no questions of the split {split!r}: neither "
            f"{SPLITS[split].mirror}/*.parquet nor {wanted}."
        )
    return [
        {
            "id": row.get("question_id", default),
            "video": row["video"],
            "question": row["question"],
            "candidates": row["candidates"],
            "text": row["answer"],
            "type": row["question_type"],
        }
        for default, row in found
    ]


def _sample(row: dict[str, Any], rules: SplitRules, split: Split, instruction: str) -> VideoSample:
    options = tuple(map(str, row["candidates"] or ()))
    kind = _SAME_TYPE.get(row["type"], row["type"]) if split == "dev" else row["type"]
    if kind not in rules.types:
        raise UnknownNameError(f"task type of MLVU's {split} split", str(kind), rules.types)
    if "text" in row:
        right = right_letters(str(row["text"]), options)
    else:
        letter = str(row["letter"]).strip("() .").upper()
        if letter not in LETTERS[: len(options)] or len(letter) != 1:
            raise InvalidInputError(
                f"question {row['id']!r}: answer {row['letter']!r} is no letter."
            )
        right = right_letters(options[LETTERS.index(letter)], options)
    return VideoSample(
        id=str(row["id"]),
        kind=kind,
        question="\n".join(filter(None, [_with_options(row["question"], options), instruction])),
        video=row["video"],
        options=options,
        right=right,
        folders=(_DEV_FILES[kind],) if split == "dev" else (),
    )


def _with_options(question: str, options: Sequence[str]) -> str:
    """The question with a line per option; the mirrors' have them already."""
    lines = question.split("\n")
    for start in range(1, len(lines) - len(options) + 1):
        window = lines[start : start + len(options)]
        if all(line.strip().endswith(option) for line, option in zip(window, options, strict=True)):
            return question
    shown = [f"({letter}) {option}" for letter, option in zip(LETTERS, options, strict=False)]
    return "\n".join([question, *shown])


if __name__ == "__main__":
    from dlm_decode.cli import main

    raise SystemExit(main(["eval", "mlvu", *sys.argv[1:]]))
