"""Where a run is logged while it goes: wandb, trackio, JSON lines, or several of them.

A tracker takes the records of a trajectory (`dlm_decode.record`) as they come.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.services import PROJECT, SERVICES, WANDB_MODES, Run, TrackioRun, WandbRun, flat

__all__ = ["JsonlTracker", "Tracker", "TrackioTracker", "WandbTracker", "make_tracker"]

Record = dict[str, Any]
_COLUMNS = ["row", "position", "step", "token", "text", "confidence", "reason", "route", "details"]


@runtime_checkable
class Tracker(Protocol):
    """Receives a run: one `start`, a `step` per step, one `finish`.

    A method `abort`, where there is one, is called instead of `finish` when decoding fails.
    """

    def start(self, run: Record) -> None:
        """The `run` record: version, model, sampler, settings, rows."""
        ...

    def step(self, record: Record) -> None:
        """A `step` record."""
        ...

    def finish(self, record: Record) -> None:
        """The `end` record: tokens, texts, cost."""
        ...


def make_tracker(spec: Any) -> Tracker | None:
    """A tracker from what `generate(track=)` takes.

    Args:
        spec: `None`, `"wandb"` (mode from WANDB_MODE), `"wandb:offline"`, `"wandb:online"`,
            `"wandb:disabled"`, `"trackio"`, `"jsonl:PATH"`, a tracker, or a list of these.

    Raises:
        UnknownNameError: another name.
        InvalidInputError: `"jsonl:"` without a path, or a package that is not installed.
    """
    if spec is None:
        return None
    if isinstance(spec, (list, tuple)):
        parts = [tracker for part in spec if (tracker := make_tracker(part)) is not None]
        return _Several(parts)
    if not isinstance(spec, str):
        if not isinstance(spec, Tracker):
            raise InvalidInputError(
                f"a tracker needs start, step and finish; {type(spec).__name__} lacks one of them."
            )
        return spec
    name, _, rest = spec.partition(":")
    if name == "jsonl":
        if not rest:
            raise InvalidInputError("track='jsonl:' lacks a path; write jsonl:runs/out.jsonl.")
        return JsonlTracker(rest)
    if spec in WANDB_MODES:
        return WandbTracker(mode=WANDB_MODES[spec])
    if spec == "trackio":
        return TrackioTracker()
    raise UnknownNameError("tracker", spec, [*SERVICES, "jsonl:PATH"])


def abort(tracker: Any) -> None:
    """Tells a tracker that no `finish` will come."""
    stop = getattr(tracker, "abort", None)
    if stop is not None:
        stop()


class Several:
    """Hands start, finish and abort on to several trackers.

    Args:
        parts: the trackers.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def start(self, run: Record) -> None:
        """To each."""
        for part in self.parts:
            part.start(run)

    def finish(self, record: Record) -> None:
        """To each."""
        for part in self.parts:
            part.finish(record)

    def abort(self) -> None:
        """To each."""
        for part in self.parts:
            abort(part)


class _Several(Several):
    def step(self, record: Record) -> None:
        for part in self.parts:
            part.step(record)


class JsonlTracker:
    """Writes a trajectory file line by line, so that a killed run leaves what it had.

    Args:
        path: overwritten; missing parent folders are made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def _write(self, record: Record) -> None:
        if self._file is None:
            raise InvalidInputError("start must be called before step and finish.")
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def start(self, run: Record) -> None:
        """Opens the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", encoding="utf-8")
        self._write(run)

    def step(self, record: Record) -> None:
        """Appends a line."""
        self._write(record)

    def finish(self, record: Record) -> None:
        """Appends the last line and closes the file."""
        self._write(record)
        self.abort()

    def abort(self) -> None:
        """Closes the file as it is."""
        if self._file is not None:
            self._file.close()
            self._file = None


def step_scalars(record: Record) -> dict[str, float]:
    """Numbers of one step, by name.

    Commits, mean confidence, seconds, FLOPs, active rows, row forwards by view and kind, rows by
    route, and means over rows of what the sampler says of a step or of its commits.
    """
    commits = [commit for row in record["rows"] for commit in row["commits"]]
    scalars: dict[str, float] = {
        "commits": len(commits),
        "seconds": record["seconds"],
        "flops": sum(forward["flops"] for forward in record["forwards"]),
        "active_rows": len(record["rows"]),
    }
    if commits:
        scalars["mean_confidence"] = sum(commit[3] for commit in commits) / len(commits)
    counts: Counter[str] = Counter()
    for forward in record["forwards"]:
        counts[f"forwards/{forward['view']}/{forward['kind']}"] += len(forward["rows"])
    said: dict[str, list[float | None]] = {}
    for row in record["rows"]:
        counts[f"route/{row['route']}"] += 1
        for name, value in row["info"].items():
            said.setdefault(f"info/{name}", []).append(value)
        for name, values in row.get("per_token", {}).items():
            said.setdefault(f"info/{name}", []).extend(values)
    known = {name: [float(v) for v in values if v is not None] for name, values in said.items()}
    means = {name: sum(values) / len(values) for name, values in known.items() if values}
    return {**scalars, **counts, **means}


class _RunTracker(ABC):
    """Shared by trackers with runs: scalars per step, a table of commits, a summary."""

    _run: Run

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._commits: list[list[Any]] = []

    def start(self, run: Record) -> None:
        """Opens the run, with the record as its config."""
        self._records, self._commits = [run], []
        self._run.open({key: value for key, value in run.items() if key != "type"})

    def step(self, record: Record) -> None:
        """Logs the step's numbers."""
        self._records.append(record)
        for row in record["rows"]:
            for number, (position, token, text, confidence, reason) in enumerate(row["commits"]):
                own = {name: values[number] for name, values in row.get("per_token", {}).items()}
                entry = [
                    row["row"],
                    position,
                    record["step"],
                    token,
                    text,
                    confidence,
                    reason,
                    row["route"],
                    json.dumps({**row["info"], **own}),
                ]
                self._commits.append(entry)
        self._run.log(step_scalars(record), record["step"])

    def finish(self, record: Record) -> None:
        """Logs what the tracker keeps of the whole run, and closes it."""
        self._records.append(record)
        cost = dict(record["cost"])
        shares = [row["routing"] for row in cost.pop("rows") if row["routing"] is not None]
        cost["routing"] = {
            name: sum(share[name] for share in shares) / len(shares)
            for name in (shares[0] if shares else ())
        }
        texts = [row["text"] for row in record["rows"]]
        self._close({**flat("cost", cost), "texts": texts})

    def abort(self) -> None:
        """Closes the run as failed."""
        self._run.fail()

    @abstractmethod
    def _close(self, summary: Record) -> None: ...


class WandbTracker(_RunTracker):
    """A wandb run per call.

    It holds the config, scalars per step, a table of commits, the summary, and the viewer page.

    Args:
        mode: here and below, see `WandbRun`.
        project: wandb project.
        folder: where wandb writes.

    Raises:
        InvalidInputError: wandb is not installed.
    """

    def __init__(
        self, mode: str | None = None, project: str = PROJECT, folder: str | Path | None = None
    ) -> None:
        super().__init__()
        self._run: WandbRun = WandbRun(mode, project, folder)

    def _close(self, summary: Record) -> None:
        from dlm_decode.viewer import render_html

        table = self._run.table(_COLUMNS, self._commits)
        page = self._run.page(render_html(self._records))
        self._run.close(summary, {"commits_table": table, "viewer": page})


class TrackioTracker(_RunTracker):
    """A trackio run per call: config, scalars per step, final cost.

    Raises:
        InvalidInputError: trackio is not installed.
    """

    def __init__(self, project: str = PROJECT) -> None:
        super().__init__()
        self._run: TrackioRun = TrackioRun(project)

    def _close(self, summary: Record) -> None:
        self._run.close(summary)
