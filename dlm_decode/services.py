"""Runs of wandb and trackio: how one is named, opened, logged to and closed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from dlm_decode.errors import InvalidInputError

__all__ = ["PROJECT", "SERVICES", "WANDB_MODES", "Run", "TrackioRun", "WandbRun", "flat"]

Record = dict[str, Any]
PROJECT = "dlm-decode"
WANDB_MODES = {
    "wandb": None,
    "wandb:offline": "offline",
    "wandb:online": "online",
    "wandb:disabled": "disabled",
}
"""By the name of a tracker, the mode of its runs; `None` leaves it to WANDB_MODE."""
SERVICES = (*WANDB_MODES, "trackio")


class WandbRun:
    """A run of wandb; it is there once `open` was called.

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
        self._wandb = _module("wandb", "dlm-decode[wandb]")
        self._options: Record = {
            "project": project,
            "mode": mode,
            "dir": None if folder is None else str(folder),
        }
        self._run: Any = None

    def open(self, config: Record, job_type: str | None = None) -> None:
        """Opens the run.

        Raises:
            InvalidInputError: wandb refuses, for example without a login.
        """
        try:
            self._run = self._wandb.init(
                config=config, job_type=job_type, reinit="create_new", **self._options
            )
        except self._wandb.Error as error:
            raise InvalidInputError(
                f"wandb cannot open a run: {error} Use --track wandb:offline, or log in."
            ) from None

    def log(self, scalars: dict[str, float], step: int) -> None:
        """Logs numbers of a step."""
        self._run.log(scalars, step=step)

    def table(self, columns: list[str], rows: list[list[Any]]) -> Any:
        """A table that `close` can keep."""
        return self._wandb.Table(columns=columns, data=rows)

    def page(self, html: str) -> Any:
        """A page that `close` can keep."""
        return self._wandb.Html(html, inject=False)

    def close(self, summary: Record, media: Record) -> None:
        """Logs what belongs to the whole run, tables and pages by name, and closes it."""
        self._run.log(media)
        self._run.summary.update(summary)
        self._run.finish()

    def fail(self) -> None:
        """Closes the run as failed."""
        self._run.finish(exit_code=1)


class TrackioRun:
    """A run of trackio; it is there once `open` was called.

    Args:
        project: trackio project.

    Raises:
        InvalidInputError: trackio is not installed.
    """

    def __init__(self, project: str = PROJECT) -> None:
        self._trackio = _module("trackio", "trackio")
        self._project = project

    def open(self, config: Record) -> None:
        """Opens the run."""
        self._trackio.init(project=self._project, config=config)

    def log(self, scalars: dict[str, float], step: int) -> None:
        """Logs numbers of a step."""
        # As one of the numbers, trackio would rename the step.
        self._trackio.log(scalars, step=step)

    def close(self, summary: Record) -> None:
        """Logs the summary's numbers and closes the run."""
        self._trackio.log({k: v for k, v in summary.items() if isinstance(v, (int, float))})
        self._trackio.finish()

    def fail(self) -> None:
        """Closes the run; trackio knows no failed ones."""
        self._trackio.finish()


Run = WandbRun | TrackioRun


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InvalidInputError(
            f"track={name!r} needs {name}; install it with pip install '{package}'."
        ) from None


def flat(prefix: str, value: Any) -> Record:
    """Nested dicts as one, with names joined by slashes."""
    if isinstance(value, dict):
        return {
            key: item
            for name, part in value.items()
            for key, item in flat(f"{prefix}/{name}", part).items()
        }
    return {prefix: value}
