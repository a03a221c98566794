"""Rows of a comparison as tables (terminal, Markdown, CSV, JSON) and as a plot."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlm_decode.errors import InvalidInputError

__all__ = ["draw", "percent", "render", "save", "to_csv", "to_markdown"]

_COLUMNS = (
    "name",
    "score",
    "kept",
    "relative_cost",
    "f",
    "sigma",
    "forwards",
    "seconds",
    "seconds_ratio",
    "worse",
    "better",
    "p",
    "errors",
)


def percent(value: float | None) -> str:
    """A share as a percentage with one decimal; nothing for `None`."""
    return "" if value is None else f"{100 * value:.1f} %"


def _cells(row: dict[str, Any]) -> list[str]:
    forwards = " ".join(f"{kind} {count:.2f}" for kind, count in row["forwards"].items())
    ratio = row["seconds_ratio"]
    return [
        row["name"],
        percent(row["score"]),
        percent(row["kept"]),
        f"{row['relative_cost']:.3f}",
        f"{row['f']:.3f}",
        f"{row['sigma']:.3f}",
        forwards,
        f"{row['seconds']:.3f}",
        "" if ratio is None else f"{ratio:.3f}",
        str(row["worse"]),
        str(row["better"]),
        f"{row['p']:.2g}",
        str(row["errors"]),
    ]


def render(rows: Sequence[dict[str, Any]]) -> str:
    """A table for a terminal."""
    table = [list(_COLUMNS), *map(_cells, rows)]
    widths = [max(len(line[index]) for line in table) for index in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def to_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The same table in Markdown."""
    lines = [list(_COLUMNS), ["---"] * len(_COLUMNS), *map(_cells, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The same table as CSV, with full precision."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(_COLUMNS)
    for row in rows:
        writer.writerow(
            [json.dumps(row[key]) if key == "forwards" else row[key] for key in _COLUMNS]
        )
    return file.getvalue()


def save(
    folder: str | Path,
    rows: Sequence[dict[str, Any]],
    matches: Sequence[dict[str, Any]] = (),
) -> None:
    """Writes `table.json` (rows and matches), `table.csv` and `table.md` (rows) into `folder`."""
    folder = Path(folder)
    text = json.dumps({"rows": list(rows), "matches": list(matches)}, indent=2) + "\n"
    (folder / "table.json").write_text(text, encoding="utf-8")
    (folder / "table.csv").write_text(to_csv(rows), encoding="utf-8")
    (folder / "table.md").write_text(to_markdown(rows), encoding="utf-8")


def draw(rows: Sequence[dict[str, Any]], path: str | Path) -> Path:
    """Plots score against relative cost; the suffix of `path` (.png, .svg) decides the format.

    Raises:
        InvalidInputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidInputError("plots need matplotlib; install dlm-decode[plot].") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        axes.scatter(row["relative_cost"], 100 * row["score"], s=36)
        axes.annotate(
            row["name"],
            (row["relative_cost"], 100 * row["score"]),
            textcoords="offset points",
            xytext=(6, 4),
            fontsize=8,
        )
    axes.set_xlabel("decoder FLOPs relative to the first setting's schedule")
    axes.set_ylabel(f"score in % of {rows[0]['questions']} questions")
    axes.grid(alpha=0.3)
    path = Path(path)
    figure.savefig(path, dpi=150)
    return path
