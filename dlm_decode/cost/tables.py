"""Papers' tables: what is printed, and the settings that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from dlm_decode.errors import UnknownNameError

__all__ = ["TABLES", "Row", "Table", "table"]


@dataclass(frozen=True)
class Row:
    """What a paper prints.

    Attributes:
        model: published model.
        reported: operations in units of 10^12, or in percent of the unreduced model.
        stage: spec of the stage; `None` for the unreduced model.
        kv_gib: keys and values in GiB, if printed.
        text_tokens: text tokens that suit the row; `None` for the convention's.
    """

    model: str
    reported: float
    stage: str | None = None
    kv_gib: float | None = None
    text_tokens: int | None = None


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        source: where it is printed.
        convention: what it counts.
        rows: its rows, as far as they can be recomputed.
        is_ratio: whether it prints percent of the unreduced model.
        notes: what a reader should know.
    """

    source: str
    convention: str
    rows: tuple[Row, ...]
    is_ratio: bool = False
    notes: tuple[str, ...] = ()


TABLES: dict[str, Table] = {
    "lightkv-1": Table(
        source="LightKV, Tables 1 and 2",
        convention="lightkv",
        rows=(
            Row("llava-1.5-13b", 19.4, kv_gib=0.55, text_tokens=48),
            Row("llava-1.5-13b", 12.6, "lightkv@llava-1.5-13b", 0.37, text_tokens=48),
            Row("llava-1.5-7b", 10.2, kv_gib=0.35),
            Row("llava-1.5-7b", 6.6, "lightkv@llava-1.5-7b", 0.23),
            Row("llava-next-13b", 65.0, kv_gib=1.75),
            Row("llava-next-13b", 37.3, "lightkv@llava-next-13b", 1.05),
            Row("llava-next-7b", 34.8, kv_gib=1.12),
            Row("llava-next-7b", 22.3, "lightkv:at_layers=12-18-24,windows=6-4-2", 0.67),
            Row("internvl2-8b", 35.7, kv_gib=0.24, text_tokens=60),
        ),
        notes=(
            "Prompt lengths are not printed; these suit FLOPs and memory together.",
            "The schedule of LLaVA-NeXT-7B is not printed; 12-18-24 suits its memory, and the 20.0 "
            "T of other methods there.",
        ),
    ),
    "lightkv-8": Table(
        source="LightKV, Table 8",
        convention="lightkv",
        rows=tuple(
            Row(model, reported, f"lightkv:at_layers={layers},windows={windows}", kv_gib, 48)
            for model, layers, reported, kv_gib in (
                ("llava-1.5-13b", "15-23-31", 12.6, 0.37),
                ("llava-1.5-13b", "17-24-31", 13.1, 0.38),
                ("llava-next-13b", "15-23-31", 37.3, 1.05),
                ("llava-next-13b", "17-24-31", 39.0, 1.09),
            )
            for windows in ("4-2-1", "6-4-2")
        ),
        notes=("Windows that do not divide the grid cost a few tokens, below what is printed.",),
    ),
    "specflow-7": Table(
        source="SpecFlow, Table 7",
        convention="specflow",
        rows=(
            Row("llava-1.5-7b", 8.12),
            Row("llava-1.5-7b", 1.64, "fastv:k=2,keep_ratio=0.1111"),
            Row("llava-1.5-7b", 1.26, "specflow:keep_ratio=0.1111"),
        ),
        notes=("The paper does not say whether its two sink tokens are among the 64.",),
    ),
    "fastv": Table(
        source="FastV's formula, and the figures of its abstract (45 % less) and repository (57 %)",
        convention="fastv",
        is_ratio=True,
        rows=(
            Row("llava-1.5-7b", 52.4, "fastv:k=2,keep_ratio=0.5"),
            Row("llava-1.5-7b", 54.0, "fastv:k=3,keep_ratio=0.5"),
            Row("llava-1.5-7b", 29.2, "fastv:k=2,keep_ratio=0.25"),
            Row("llava-1.5-7b", 55.0, "fastv:k=2,keep_ratio=0.5", text_tokens=35),
            Row("llava-1.5-7b", 57.0, "fastv:k=3,keep_ratio=0.5", text_tokens=35),
        ),
        notes=(
            "Without text: the formula's values. With text: the rounded figures, which suit a "
            "prompt with 35 text tokens.",
        ),
    ),
}
"""By name."""


def table(name: str) -> Table:
    """The table called `name`.

    Raises:
        UnknownNameError: no such table; the message lists them.
    """
    if name not in TABLES:
        raise UnknownNameError("table", name, TABLES)
    return TABLES[name]
