"""A trajectory as one HTML page that plays it back; no network, no dependencies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from dlm_decode.errors import InvalidInputError
from dlm_decode.record import read_records

__all__ = ["render_html", "write_html"]

_SLOT = "/*TRAJECTORY*/null"


def render_html(trajectory: str | Path | Sequence[dict[str, Any]]) -> str:
    """The page for a trajectory file or its records.

    Texts stand in the page as JSON with `<`, `>` and `&` escaped, and are inserted as text nodes,
    so no token can become markup.

    Raises:
        InvalidInputError: not a trajectory.
    """
    records = read_records(trajectory) if isinstance(trajectory, (str, Path)) else list(trajectory)
    if not records or records[0].get("type") != "run":
        raise InvalidInputError("a trajectory begins with a 'run' record; these records do not.")
    template = files("dlm_decode").joinpath("viewer.html").read_text(encoding="utf-8")
    data = json.dumps(records, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return template.replace(_SLOT, data)


def write_html(trajectory: str | Path | Sequence[dict[str, Any]], path: str | Path) -> Path:
    """Writes the page; missing parent folders are made.

    Raises:
        InvalidInputError: not a trajectory.
    """
    page = render_html(trajectory)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path
