"""Multiple-choice questions about videos, as a task: what EgoSchema and MLVU have in common."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm_decode.errors import InvalidInputError, MediaError
from dlm_decode.eval import choices
from dlm_decode.eval.choices import LETTERS, parse_choice, plain_text
from dlm_decode.eval.runner import Task, summarise

__all__ = [
    "PRESETS",
    "VideoSample",
    "VideoTask",
    "annotation_folder",
    "find_video",
    "read_json",
    "read_parquet",
    "right_letters",
    "video_folder",
]

PRESETS: dict[str, dict[str, Any]] = {
    "lown-paper": {
        "max_frames": 32,
        "gen_length": 128,
        "steps": 128,
        "block_length": 32,
        "temperature": 0.0,
        "batch": 1,
    }
}
"""Named settings of papers.

`lown-paper`: those of LOWN (arXiv 2610.36671) on EgoSchema and MLVU, except for its prompts, its
parser and its rule for frames, which are not published.
"""

_SUFFIXES = (".mp4", ".MP4", ".mkv", ".webm", ".avi", ".mov")


@dataclass(frozen=True)
class VideoSample:
    """A question about one video.

    Attributes:
        id: unique in the task.
        kind: task type.
        question: the prompt as the model gets it, options and instruction included.
        video: file name, with or without suffix.
        options: texts, the first of which is A.
        right: letters that are right; several where options are equal, none where no option is.
        folders: folders below that of the videos in which the file may lie, beside that itself.
    """

    id: str
    kind: str
    question: str
    video: str
    options: tuple[str, ...]
    right: tuple[str, ...]
    folders: tuple[str, ...] = ()


class VideoTask(Task[VideoSample]):
    """Questions with lettered options about videos in a folder.

    Args:
        questions: all of them.
        videos: folder; `None` for a run that shows none.
        instruction: what follows the options in every question, for the report.
        split: name of the part of the benchmark.
        source: where the questions are from, for the report.

    Raises:
        InvalidInputError: no questions, ids that are not unique, or no options to choose from.
    """

    metric: str
    num_expected: int

    def __init__(
        self,
        questions: Sequence[VideoSample],
        videos: Path | None,
        *,
        instruction: str = "",
        split: str,
        source: str,
    ) -> None:
        if not questions:
            raise InvalidInputError(f"{source!r} holds no questions.")
        ids = {question.id for question in questions}
        if len(ids) < len(questions):
            raise InvalidInputError(
                f"{source!r} holds {len(questions)} questions with only {len(ids)} different ids."
            )
        for question in questions:
            if not 2 <= len(question.options) <= len(LETTERS):
                raise InvalidInputError(
                    f"question {question.id!r} of {source!r} has {len(question.options)} options; "
                    "a choice needs 2 to 26."
                )
        self.questions = tuple(questions)
        self.videos = videos
        self.instruction = instruction
        self.split = split
        self.source = source

    @property
    def data(self) -> Any:
        """Task, split, a hash of the questions with options and answers, parser."""
        facts = [[q.id, q.kind, q.question, q.video, q.options, q.right] for q in self.questions]
        text = json.dumps(facts, ensure_ascii=False)
        return {
            "task": self.name,
            "split": self.split,
            "questions": hashlib.sha256(text.encode()).hexdigest()[:16],
            "instruction": self.instruction,
            "parser": choices.VERSION,
        }

    def samples(self, limit: int | None = None) -> Sequence[VideoSample]:
        """In the order of the annotation files."""
        return self.questions[:limit]

    def media(self, sample: VideoSample) -> dict[str, list[Any]]:
        """The file, or the folder of frames; which of them are taken is an option of `generate`.

        Raises:
            MediaError: there is none.
        """
        if self.videos is None:
            raise MediaError(f"no folder of videos to find {sample.video!r} in.")
        return {"videos": [find_video(self.videos, sample.video, sample.folders)]}

    def judge(self, sample: VideoSample, text: str) -> dict[str, Any]:
        """The letter that was chosen, `None` if there is none to read, and whether it is right."""
        choice = parse_choice(text, sample.options)
        return {"choice": choice, "is_right": choice in sample.right}

    def expected(self, sample: VideoSample) -> list[str]:
        """The letters that are right."""
        return list(sample.right)

    def facts(self, sample: VideoSample) -> dict[str, Any]:
        """Beside what every task says, the video and the options."""
        return {**super().facts(sample), "video": sample.video, "options": list(sample.options)}

    def scores(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What `summarise` says, and the benchmark's own score.

        Also `split`, `source`, `metric` (what `score` is), `is_complete` (every question of the
        benchmark was asked, and none failed), `unparsed` (answers from which no option can be
        read; they count as wrong), `accuracy_of_answered` (errors left out; `None` if nothing was
        answered), and `without_right_option` (questions whose given answer is none of their
        options).
        """
        answered = [entry for entry in entries if "error" not in entry]
        report = summarise(entries)
        return {
            "split": self.split,
            "source": self.source,
            "metric": self.metric,
            "score": self.score(entries),
            "is_complete": len(answered) == len(entries) == self.num_expected,
            "questions_of_benchmark": self.num_expected,
            "unparsed": sum(entry["choice"] is None for entry in answered),
            "accuracy_of_answered": sum(entry["is_right"] for entry in answered) / len(answered)
            if answered
            else None,
            "without_right_option": sum(not entry["expected"] for entry in entries),
            **report,
        }

    @abstractmethod
    def score(self, entries: Sequence[dict[str, Any]]) -> float:
        """The figure that papers report, in [0, 1]; errors count as wrong."""


def find_video(root: Path, name: str, folders: Iterable[str] = ()) -> Path:
    """The file, or folder of frames, of a video.

    Args:
        root: folder of the videos.
        name: with or without suffix; another suffix, or none for a folder of frames, is found too.
        folders: folders in `root` to look in after `root` itself.

    Raises:
        MediaError: there is none; the message names what was looked for.
    """
    stem = name
    if Path(name).suffix in _SUFFIXES:
        stem = name[: -len(Path(name).suffix)]
    names = dict.fromkeys([name, *(stem + suffix for suffix in _SUFFIXES), stem])
    places = [root, *(root / folder for folder in folders)]
    for place in places:
        for candidate in names:
            if (place / candidate).exists():
                return place / candidate
    where = " or ".join(repr(str(place)) for place in places)
    raise MediaError(
        f"no video {name!r} in {where}; looked for {stem!r} as a folder of frames and with "
        f"{', '.join(_SUFFIXES)}."
    )


def right_letters(answer: str, options: Sequence[str]) -> tuple[str, ...]:
    """Letters of the options whose text is `answer`, but for case and punctuation."""
    wanted = plain_text(answer)
    return tuple(
        letter
        for letter, option in zip(LETTERS, options, strict=False)
        if option == answer or (wanted and plain_text(option) == wanted)
    )


def annotation_folder(source: str, patterns: Sequence[str]) -> Path:
    """A local folder as it is, or the annotation files of a hub data set.

    Args:
        source: folder, or hub id `owner/name`.
        patterns: files to fetch from the hub; videos are never fetched.

    Raises:
        InvalidInputError: neither a folder nor a hub data set that can be had.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists():
        raise InvalidInputError(f"--data {source!r} is a file; pass the folder that it lies in.")
    is_id = source.count("/") == 1 and not source.startswith((".", "/", "~"))
    if not is_id:
        raise InvalidInputError(f"no folder {source!r} for --data, and it is no hub id owner/name.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(source, repo_type="dataset", allow_patterns=list(patterns)))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InvalidInputError(
            f"cannot fetch the data set {source!r} from the hub ({reason}) Pass --data FOLDER "
            "with its annotation files, or go online; a gated data set also needs "
            "`hf auth login`."
        ) from None


def video_folder(
    given: str | Path | None, source: str, folders: Sequence[Path], cache_name: str
) -> Path:
    """The folder of the videos.

    Args:
        given: what the user said; `None` for the first of the usual places that exists.
        source: of the annotations, for the message.
        folders: usual places.
        cache_name: where lmms-eval puts the videos, in the hub's cache folder: the last such place.

    Raises:
        InvalidInputError: no such folder.
    """
    if given is not None:
        if not Path(given).is_dir():
            raise InvalidInputError(f"no folder {str(given)!r} for --videos.")
        return Path(given)
    from huggingface_hub.constants import HF_HOME

    folders = [*folders, Path(HF_HOME) / cache_name]
    found = next((folder for folder in folders if folder.is_dir()), None)
    if found is None:
        tried = ", ".join(repr(str(folder)) for folder in folders)
        raise InvalidInputError(
            f"no folder with the videos of {source!r} (looked for {tried}); pass --videos FOLDER, "
            "or --blind to ask without them."
        )
    return found


def read_parquet(paths: Sequence[Path], columns: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of parquet files, in order.

    Raises:
        InvalidInputError: unreadable, or without one of `columns`.
    """
    import pyarrow.parquet as parquet
    from pyarrow import ArrowException

    rows = []
    for path in paths:
        try:
            rows += parquet.read_table(path).to_pylist()
        except (ArrowException, OSError) as error:
            raise InvalidInputError(f"cannot read {str(path)!r}: {error}.") from None
    return check_rows(rows, columns, str(paths[0]))


def read_json(path: Path) -> Any:
    """Content of a JSON file.

    Raises:
        InvalidInputError: unreadable.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"cannot read {str(path)!r}: {error}.") from None


def check_rows(rows: Any, columns: Sequence[str], name: str) -> list[dict[str, Any]]:
    """`rows` if they are dicts that have all of `columns`.

    Raises:
        InvalidInputError: they are not; the message names the first that is missing.
    """
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InvalidInputError(f"{name!r} is no list of questions.")
    for row in rows:
        missing = [column for column in columns if column not in row]
        if missing:
            raise InvalidInputError(
                f"{name!r}: a question lacks {missing[0]!r}; it has {', '.join(map(str, row))}."
            )
    return rows
