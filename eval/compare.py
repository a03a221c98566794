"""Several decoding settings over the same held-out questions: score against cost, in one run.

The settings take turns on each batch, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dlm_decode.errors import InvalidInputError
from dlm_decode.eval.run_scenes import Results, batches, settings_of, summarise
from dlm_decode.eval.scene_questions import heldout_samples

if TYPE_CHECKING:
    from dlm_decode.vlm import DiffusionVlm

__all__ = ["Variant", "compare", "draw", "matched", "render", "to_csv", "to_markdown"]

_COLUMNS = ("name", "score", "kept", "relative_cost", "forwards", "seconds", "worse", "better", "p")


@dataclass(frozen=True)
class Variant:
    """One setting, written `SAMPLER[+STAGE...][@key=value,...]`.

    Keys are arguments of `generate`. A spec with several options separates them by semicolons
    behind the `@`.

    Examples: `"lown:guard=none+stride:keep_ratio=0.5@steps=16"`,
    `"baseline@cache=dllm:gen_interval=4;transfer_ratio=0.5"`.

    Attributes:
        name: as written.
        options: arguments of `generate`.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Reads the written form.

        Raises:
            UnknownNameError: an unknown sampler, stage or option.
            InvalidInputError: a malformed text.
        """
        from dlm_decode import cache, quota, samplers, vision

        alias = max((n for n in samplers.aliases() if text.startswith(n)), key=len, default="")
        methods, _, tail = text[len(alias) :].partition("@")
        rest, *stages = methods.split("+")
        sampler = alias + rest
        options: dict[str, Any] = {
            "sampler": samplers.make(sampler),
            "stages": [vision.make(stage) for stage in stages],
        }
        lengths = ("steps", "steps_per_block", "step_ratio", "gen_length", "block_length")
        allowed = (*lengths, "schedule", "temperature", "seed", "cfg_scale", "cache")
        for part in filter(None, tail.split(",")):
            key, equals, value = part.partition("=")
            if key.strip() not in allowed or not equals:
                raise InvalidInputError(
                    f"cannot read {part!r} in variant {text!r}; after @ come key=value pairs of "
                    f"{', '.join(allowed)}."
                )
            if key.strip() == "cache":
                spec = value.replace(";", ",")
                options["cache"] = spec if spec == "none" else cache.make(spec)
                continue
            if key.strip() == "schedule":
                options["schedule"] = quota.make(value.replace(";", ","))
                continue
            try:
                options[key.strip()] = json.loads(value)
            except json.JSONDecodeError:
                raise InvalidInputError(f"{part!r} in variant {text!r} is no number.") from None
        return cls(text, options)


def compare(
    vlm: DiffusionVlm,
    variants: Sequence[Variant],
    folder: str | Path,
    *,
    limit: int = 1000,
    batch: int = 32,
) -> list[dict[str, Any]]:
    """Runs every variant over the same questions; others are measured against the first.

    Args:
        vlm: the model.
        variants: at least one.
        folder: one JSON-lines file per variant; a run resumes from them.
        limit: number of questions.
        batch: questions per call.

    Returns:
        One row per variant: `score`, `kept` (score relative to the first variant, `None` where that
        is 0), `relative_cost` (decoder FLOPs relative to the baseline sampler with the first
        variant's schedule), `forwards` per question by view, `seconds` per question, and a paired
        comparison with the first variant: questions on which it does `worse` and `better`, and the
        two-sided exact sign-test `p` of that difference.

    Raises:
        InvalidInputError: no variant, two of the same name, or files that other settings wrote.
    """
    names = [variant.name for variant in variants]
    if not names or len(set(names)) != len(names):
        raise InvalidInputError(f"give at least one variant, each once; got {names}.")
    folder = Path(folder)
    results = [
        Results(
            folder / f"{number:02d}.jsonl",
            {"variant": variant.name, **settings_of(vlm, variant.options, False)},
        )
        for number, variant in enumerate(variants)
    ]
    samples = list(heldout_samples(limit))
    for part in tqdm(batches(samples, batch), desc="batches"):
        for variant, answers in zip(variants, results, strict=True):
            answers.answer(vlm, part, variant.options)
    first = results[0].of(samples)
    return [
        _row(name, answers.of(samples), first) for name, answers in zip(names, results, strict=True)
    ]


def _row(
    name: str, entries: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    report = summarise(entries)
    reference = summarise(first)["accuracy"]
    pairs = list(zip(entries, first, strict=True))
    worse = sum(not mine["is_right"] and theirs["is_right"] for mine, theirs in pairs)
    better = sum(mine["is_right"] and not theirs["is_right"] for mine, theirs in pairs)
    forwards: Counter[str] = Counter()
    for entry in entries:
        forwards.update(entry["forwards"])
    return {
        "name": name,
        "score": report["accuracy"],
        "kept": report["accuracy"] / reference if reference else None,
        "relative_cost": sum(entry["flops"] for entry in entries)
        / max(1, sum(entry["baseline_flops"] for entry in first)),
        "forwards": {view: count / len(entries) for view, count in sorted(forwards.items())},
        "seconds": sum(entry["seconds"] for entry in entries) / len(entries),
        "worse": worse,
        "better": better,
        "p": sign_test(worse, better),
        "by_kind": report["accuracy_by_kind"],
        "questions": len(entries),
    }


def sign_test(worse: int, better: int) -> float:
    """Two-sided exact p of so uneven a split, if either direction were equally likely."""
    total, least = worse + better, min(worse, better)
    tail = sum(math.comb(total, count) for count in range(least + 1)) / 2**total
    return min(1.0, 2 * tail)


def matched(rows: Sequence[dict[str, Any]], reference: str) -> dict[str, Any] | None:
    """The cheapest other row that costs at least what `reference` does, as the LOWN paper matches.

    Raises:
        InvalidInputError: `reference` is not among the rows.
    """
    found = next((row for row in rows if row["name"] == reference), None)
    if found is None:
        raise InvalidInputError(
            f"{reference!r} is not among the variants {[row['name'] for row in rows]}."
        )
    others = [row for row in rows if row["name"].partition("@")[0] != reference.partition("@")[0]]
    able = [row for row in others if row["relative_cost"] >= found["relative_cost"]]
    return min(able, key=lambda row: row["relative_cost"], default=None)


def _cells(row: dict[str, Any]) -> list[str]:
    forwards = " ".join(f"{view} {count:.2f}" for view, count in row["forwards"].items())
    return [
        row["name"],
        f"{100 * row['score']:.1f} %",
        "" if row["kept"] is None else f"{100 * row['kept']:.1f} %",
        f"{row['relative_cost']:.3f}",
        forwards,
        f"{row['seconds']:.3f}",
        str(row["worse"]),
        str(row["better"]),
        f"{row['p']:.2g}",
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
