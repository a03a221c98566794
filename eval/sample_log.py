"""Where an evaluation is logged while it goes, beside its results file: wandb or trackio."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.services import PROJECT, SERVICES, WANDB_MODES, TrackioRun, WandbRun, flat
from dlm_decode.track import Several

__all__ = ["SampleLog", "TrackioSampleLog", "WandbSampleLog", "check_track", "make_sample_log"]

Record = dict[str, Any]
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
    if spec not in WANDB_MODES:
        raise UnknownNameError("tracker of an evaluation", spec, SERVICES)
    return WandbSampleLog(mode=WANDB_MODES[spec])


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
        mode: here and below, see `WandbRun`.
        project: wandb project.
        folder: where wandb writes.

    Raises:
        InvalidInputError: wandb is not installed.
    """

    def __init__(
        self, mode: str | None = None, project: str = PROJECT, folder: str | Path | None = None
    ) -> None:
        self._run = WandbRun(mode, project, folder)

    def start(self, settings: Record) -> None:
        """Opens the run.

        Raises:
            InvalidInputError: wandb refuses, for example without a login.
        """
        self._running, self._rows = _Running(), []
        self._run.open(settings, job_type="eval")

    def sample(self, entry: Record) -> None:
        """Logs the figures so far; the number of questions is the step."""
        self._rows.append([_cell(entry.get(name)) for name in _COLUMNS])
        self._run.log(self._running.add(entry), len(self._rows))

    def finish(self, report: Record) -> None:
        """Logs the table and the report, and closes the run."""
        kept = {name: value for name, value in report.items() if name not in ("settings", "task")}
        table = self._run.table(list(_COLUMNS), self._rows)
        self._run.close(flat("report", kept), {"samples": table})

    def abort(self) -> None:
        """Closes the run as failed."""
        self._run.fail()


class TrackioSampleLog:
    """A trackio run per evaluation: settings, running figures per question, final numbers.

    Raises:
        InvalidInputError: trackio is not installed.
    """

    def __init__(self, project: str = PROJECT) -> None:
        self._run = TrackioRun(project)

    def start(self, settings: Record) -> None:
        """Opens the run."""
        self._running = _Running()
        self._run.open(settings)

    def sample(self, entry: Record) -> None:
        """Logs the figures so far; the number of questions is the step."""
        figures = self._running.add(entry)
        self._run.log(figures, self._running.count["questions"])

    def finish(self, report: Record) -> None:
        """Logs the report's numbers and closes the run."""
        self._run.close(flat("report", report))

    def abort(self) -> None:
        """Closes the run."""
        self._run.fail()


def _cell(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
