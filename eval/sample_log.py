"""Where an evaluation is logged while it goes, beside its results file: wandb or trackio."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.track import PROJECT, Several, flat, import_trackio, import_wandb

__all__ = ["SampleLog", "TrackioSampleLog", "WandbSampleLog", "check_track", "make_sample_log"]

Record = dict[str, Any]
_NAMES = ("wandb", "wandb:offline", "wandb:online", "wandb:disabled", "trackio")
_COLUMNS = (
    "id",
    "kind",
    "question",
    "expected",
    "answer",
    "choice",
    "is_right",
    "error",
    "flops",
    "steps",
    "seconds",
)


@runtime_checkable
class SampleLog(Protocol):
    """Receives an evaluation: one `start`, a `sample` per question, then `finish` or `abort`."""

    def start(self, settings: Record) -> None:
        """What the answers depend on."""
        ...

    def sample(self, entry: Record) -> None:
        """A line of the results file; those of an earlier run come first."""
        ...

    def finish(self, report: Record) -> None:
        """The report."""
        ...

    def abort(self) -> None:
        """No report will come."""
        ...


def check_track(spec: Any) -> None:
    """Raises what `make_sample_log` would, without making anything."""
    make_sample_log(spec)


def make_sample_log(spec: Any) -> SampleLog:
    """A log from a name, a log, a list of these, or `None`.

    Args:
        spec: `"wandb"` (mode from WANDB_MODE), `"wandb:offline"`, `"wandb:online"`,
            `"wandb:disabled"`, `"trackio"`.

    Raises:
        UnknownNameError: another name.
        InvalidInputError: a package that is not installed, or an object that is no log.
    """
    if spec is None:
        return _Several([])
    if isinstance(spec, (list, tuple)):
        return _Several([make_sample_log(part) for part in spec])
    if not isinstance(spec, str):
        if not isinstance(spec, SampleLog):
            raise InvalidInputError(
                "a log of an evaluation needs start, sample, finish and abort; "
                f"{type(spec).__name__} lacks one of them."
            )
        return spec
    if spec == "trackio":
        return TrackioSampleLog()
    if spec not in _NAMES:
        raise UnknownNameError("tracker of an evaluation", spec, _NAMES)
    return WandbSampleLog(mode=spec.partition(":")[2] or None)


class _Several(Several):
    def sample(self, entry: Record) -> None:
        for part in self.parts:
            part.sample(entry)


class _Running:
    """Figures of the questions so far."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    def add(self, entry: Record) -> dict[str, float]:
        count = self.count
        count["questions"] += 1
        count["right"] += entry["is_right"]
        count["errors"] += "error" in entry
        count["flops"] += entry["flops"]
        count["baseline_flops"] += entry["baseline_flops"]
        scalars = {
            "eval/accuracy": count["right"] / count["questions"],
            "eval/questions": count["questions"],
            "eval/errors": count["errors"],
            "cost/flops": entry["flops"],
            "cost/relative": count["flops"] / max(1, count["baseline_flops"]),
            "perf/seconds": entry["seconds"],
        }
        if "choice" in entry:
            count["unparsed"] += entry["choice"] is None
            scalars["eval/unparsed"] = count["unparsed"]
        return scalars


class WandbSampleLog:
    """A wandb run per evaluation.

    It holds the settings as its config, running figures per question, a table of the questions,
    and the report as its summary.

    Args:
        mode: `"online"`, `"offline"` or `"disabled"`; `None` leaves it to WANDB_MODE.
        project: wandb project.
        folder: where wandb writes; its own default when `None`.

    Raises:
        InvalidInputError: wandb is not installed.
    """

    def __init__(
        self, mode: str | None = None, project: str = PROJECT, folder: str | Path | None = None
    ) -> None:
        self._wandb = import_wandb()
        self._options = {
            "project": project,
            "mode": mode,
            "dir": None if folder is None else str(folder),
        }
        self._run: Any = None

    def start(self, settings: Record) -> None:
        """Opens the run.

        Raises:
            InvalidInputError: wandb refuses, for example without a login.
        """
        self._running, self._rows = _Running(), []
        try:
            self._run = self._wandb.init(
                config=settings, job_type="eval", reinit="create_new", **self._options
            )
        except self._wandb.Error as error:
            raise InvalidInputError(
                f"wandb cannot open a run: {error} Use --track wandb:offline, or log in."
            ) from None

    def sample(self, entry: Record) -> None:
        """Logs the figures so far; the number of questions is the step."""
        self._rows.append([_cell(entry.get(name)) for name in _COLUMNS])
        self._run.log(self._running.add(entry), step=len(self._rows))

    def finish(self, report: Record) -> None:
        """Logs the table and the report, and closes the run."""
        self._run.log({"samples": self._wandb.Table(columns=list(_COLUMNS), data=self._rows)})
        kept = {name: value for name, value in report.items() if name not in ("settings", "task")}
        self._run.summary.update(flat("report", kept))
        self._run.finish()

    def abort(self) -> None:
        """Closes the run as failed."""
        self._run.finish(exit_code=1)


class TrackioSampleLog:
    """A trackio run per evaluation: settings, running figures per question, final numbers.

    Raises:
        InvalidInputError: trackio is not installed.
    """

    def __init__(self, project: str = PROJECT) -> None:
        self._trackio = import_trackio()
        self._project = project

    def start(self, settings: Record) -> None:
        """Opens the run."""
        self._running = _Running()
        self._trackio.init(project=self._project, config=settings)

    def sample(self, entry: Record) -> None:
        """Logs the figures so far."""
        self._trackio.log(self._running.add(entry))

    def finish(self, report: Record) -> None:
        """Logs the report's numbers and closes the run."""
        numbers = flat("report", report).items()
        self._trackio.log({key: value for key, value in numbers if isinstance(value, (int, float))})
        self._trackio.finish()

    def abort(self) -> None:
        """Closes the run."""
        self._trackio.finish()


def _cell(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
