"""Several decoding settings over the same held-out questions: score against cost, in one run.

The settings take turns on each batch, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.eval.generated import GeneratedTask
from dlm_decode.eval.run_scenes import SCENES
from dlm_decode.eval.runner import (
    Results,
    batches,
    check_sizes,
    decoding_settings,
    settings_of,
    summarise,
)
from dlm_decode.settings import Settings

if TYPE_CHECKING:
    from dlm_decode.vlm import DiffusionVlm

__all__ = [
    "BUDGETS",
    "SUITES",
    "Variant",
    "check_suite",
    "compare",
    "describe_match",
    "draw",
    "fewer_steps",
    "matched",
    "matched_score",
    "payable_budgets",
    "random_access",
    "render",
    "save",
    "share_to_draw",
    "suite",
    "to_csv",
    "to_markdown",
]

BUDGETS = (0.6, 0.45, 0.3, 0.2, 0.15, 0.1, 0.07)
"""Relative costs at which budgets of LOWN are tried."""

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
_OPTIONS = (
    "steps",
    "steps_per_block",
    "step_ratio",
    "schedule",
    "gen_length",
    "block_length",
    "temperature",
    "seed",
    "cfg_scale",
    "cache",
)


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

        sampler, stages, pairs = _split(text)
        options: dict[str, Any] = {
            "sampler": samplers.make(sampler),
            "stages": [vision.make(stage) for stage in stages],
        }
        for key, value in pairs.items():
            if key == "cache":
                options["cache"] = value if value == "none" else cache.make(value)
                continue
            if key == "schedule":
                options["schedule"] = quota.make(value)
                continue
            try:
                options[key] = json.loads(value)
            except json.JSONDecodeError:
                raise InvalidInputError(
                    f"'{key}={value}' in variant {text!r} is no number."
                ) from None
        return cls(text, options)

    @property
    def sampler_name(self) -> str:
        """Registered name of the sampler, whatever its options."""
        return self.options["sampler"].name

    def arguments(self) -> list[str]:
        """The same setting as options of `dlm-decode generate`."""
        sampler, stages, pairs = _split(self.name)
        parts = ["--sampler", sampler]
        for stage in stages:
            parts += ["--stage", stage]
        for key, value in pairs.items():
            parts += [f"--{key.replace('_', '-')}", value]
        return parts

    def with_random_access(self, full_share: float, seed: int) -> Variant:
        """The same setting of LOWN with FULL steps drawn at random.

        Args:
            full_share: share of the steps that run FULL, in (0, 1].
            seed: of the draw.

        Raises:
            InvalidInputError: the sampler is not LOWN with its certificate.
        """
        from dlm_decode.samplers.lown import Lown

        made = self.options["sampler"]
        if not isinstance(made, Lown) or made.access != "certificate":
            raise InvalidInputError(
                f"random access can be matched to settings of lown with access='certificate' "
                f"only, got {self.name!r}."
            )
        sampler, stages, pairs = _split(self.name)
        knobs = [] if made.budget is None else ["budget=none"]
        knobs += ["access=random", f"full_share={full_share:.4f}"]
        methods = [sampler + ("," if ":" in sampler else ":") + ",".join(knobs), *stages]
        given = {**pairs, "seed": str(seed)}
        tail = ",".join(f"{key}={value.replace(',', ';')}" for key, value in given.items())
        return Variant.parse(f"{'+'.join(methods)}@{tail}")


def _split(text: str) -> tuple[str, list[str], dict[str, str]]:
    """Sampler, stages and options of a written variant, still as text."""
    from dlm_decode import samplers

    alias = max((n for n in samplers.aliases() if text.startswith(n)), key=len, default="")
    methods, _, tail = text[len(alias) :].partition("@")
    rest, *stages = methods.split("+")
    pairs = {}
    for part in filter(None, tail.split(",")):
        key, equals, value = part.partition("=")
        if key.strip() not in _OPTIONS or not equals:
            raise InvalidInputError(
                f"cannot read {part!r} in variant {text!r}; after @ come key=value pairs of "
                f"{', '.join(_OPTIONS)}."
            )
        pairs[key.strip()] = value.strip().replace(";", ",")
    return alias + rest, stages, pairs


def fewer_steps(settings: Settings, *divisors: int) -> list[str]:
    """The baseline with a part of its steps, as variants; none that leaves all of them."""
    counts = [max(settings.blocks.num_blocks, settings.steps // part) for part in divisors]
    return [f"baseline@steps={count}" for count in counts if count < settings.steps]


def payable_budgets(settings: Settings) -> list[float]:
    """Those of `BUDGETS` that pay at least one FULL forward."""
    return [budget for budget in BUDGETS if budget * settings.blocks.num_steps() >= 1]


def _lown_suite(settings: Settings) -> list[str]:
    """LOWN, the baseline with fewer steps, access without certificates, and the ablation ladder."""
    periods = (2, 4, 8)
    return [
        *fewer_steps(settings, 2, 4),
        "lown",
        *(f"lown:access=every,every={period}" for period in periods),
        *(f"lown:access=random,full_share={1 / period}" for period in periods),
        "lown:accept=k,order=confidence",  # the ladder: routing only,
        "lown:accept=k",  # with disagreements first, and (as "lown") with the whole prefix
    ]


def _choices_suite(settings: Settings) -> list[str]:
    """What the paper leaves open: guard, exemption from it, rotary positions."""
    guards = [
        f"guard={guard},guard_exempt_special={exempt}"
        for guard in ("scan", "adjacent")
        for exempt in ("true", "false")
    ]
    return [
        f"lown:{guard},positions={positions}"
        for positions in ("packed", "original")
        for guard in (*guards, "guard=none")
    ]


def _budget_suite(settings: Settings) -> list[str]:
    """LOWN at set costs, the baseline with fewer steps, and pruning."""
    return [
        *fewer_steps(settings, 2, 4, 8),
        *(f"baseline+stride:keep_ratio={ratio}" for ratio in (0.5, 0.3, 0.2, 0.1, 0.05)),
        "lown",
        *(f"lown:budget={budget}" for budget in payable_budgets(settings)),
    ]


def _cache_suite(settings: Settings) -> list[str]:
    """Every sampler over every cache; caches that work by blocks get four blocks.

    In a single block `dual` is the same as `prefix`, and `vicinity` has no neighbours to feed.
    """
    num_blocks = settings.blocks.num_blocks
    is_blocked = num_blocks > 1
    length = -(-settings.gen_length // min(4, settings.steps, settings.gen_length))
    blocks = [] if is_blocked else [f"block_length={length}"]
    margin = max(1, (settings.block_length if is_blocked else length) // 2)
    whole = [["cache=none"], ["cache=prefix"], ["cache=dllm"]]
    parted = [
        [*blocks, f"cache={policy}"]
        for policy in ("none", "prefix", "dual", f"vicinity:before={margin};after={margin}")
    ]
    names = []
    for sampler in (
        "baseline",
        "fast_dllm:threshold=0.9",
        "fast_dllm:rule=factor,factor=1.0",
        "lown",
        "lown+fast_dllm",
    ):
        has_own_cache = "fast_dllm" in sampler
        for tail in [*whole, *parted]:
            kept = tail if has_own_cache else [part for part in tail if part != "cache=none"]
            names.append("@".join(filter(None, (sampler, ",".join(kept)))))
    return names


SUITES: dict[str, Callable[[Settings], list[str]]] = {
    "lown": _lown_suite,
    "lown-choices": _choices_suite,
    "lown-budget": _budget_suite,
    "caches": _cache_suite,
}
"""Named lists of variants, for a model whose own settings are given; `baseline` comes first."""


def suite(name: str, settings: Settings) -> list[str]:
    """The variants of a suite, `baseline` first, each once.

    Args:
        name: key of `SUITES`.
        settings: the model's own; step counts and block lengths follow from them.

    Raises:
        UnknownNameError: no such suite.
    """
    check_suite(name)
    return list(dict.fromkeys(["baseline", *SUITES[name](settings)]))


def check_suite(name: str) -> None:
    """Raises `UnknownNameError` unless there is a suite called `name`."""
    if name not in SUITES:
        raise UnknownNameError("suite", name, SUITES)


def compare(
    vlm: DiffusionVlm,
    variants: Sequence[Variant],
    folder: str | Path,
    *,
    limit: int = 1000,
    batch: int = 32,
    task: GeneratedTask[Any] = SCENES,
) -> list[dict[str, Any]]:
    """Runs every variant over the same questions; others are measured against the first.

    The order in which the variants take their turns rotates from batch to batch.

    Args:
        vlm: the model.
        variants: at least one.
        folder: one JSON-lines file per variant; a run resumes from them.
        limit: number of questions.
        batch: questions per call.
        task: whose questions.

    Returns:
        One row per variant:
        `score`; `kept` (score relative to the first variant, `None` where that is 0);
        `relative_cost` (decoder FLOPs relative to the baseline sampler with the first variant's
        schedule); `f` and `sigma` (FULL and TEXT_ONLY forwards per question / forwards of that
        schedule); `full_share` (see `share_to_draw`); `forwards` per question by view and kind;
        `seconds` of decoding per question; `seconds_ratio` (median over batches of this
        variant's seconds to the first one's, `None` where no batch was asked of both in one run); a
        paired comparison with the first variant: questions on which it does `worse` and `better`,
        and the two-sided exact sign-test `p` of that difference; `errors` (questions on which
        `generate` failed: they count as wrong, and not at all for costs) and `first_error`;
        `by_kind`, `questions`, and the `sampler`'s name.

    Raises:
        InvalidInputError: no variant, two of the same name, a limit or batch below 1, or files that
            other settings wrote.
    """
    names = [variant.name for variant in variants]
    if not names or len(set(names)) != len(names):
        raise InvalidInputError(f"give at least one variant, each once; got {names}.")
    check_sizes(limit, batch)
    parts = batches(task.samples(limit), batch)
    results = [
        Results(
            Path(folder) / _file_name(variant.name),
            {
                "variant": variant.name,
                "task": task.name,
                "split": task.split,
                **settings_of(vlm, task, variant.options),
            },
            task,
        )
        for variant in variants
    ]
    run = uuid.uuid4().hex[:8]
    turns = list(zip(variants, results, strict=True))
    for number, part in enumerate(tqdm(parts, desc="batches")):
        turn = number % len(turns)
        for variant, answers in turns[turn:] + turns[:turn]:
            answers.answer(vlm, part, variant.options, batch=f"{run}/{number}")
    entries = [[entry for part in parts for entry in answers.of(part)] for answers in results]
    chosen = [decoding_settings(vlm, variant.options) for variant in variants]
    num_forwards = chosen[0].blocks.num_steps()
    return [
        _row(variant, own, entries[0], num_forwards, settings.steps)
        for variant, own, settings in zip(variants, entries, chosen, strict=True)
    ]


def _file_name(name: str) -> str:
    readable = re.sub(r"[^\w.=-]+", "-", name)[:80]
    return f"{readable}-{zlib.crc32(name.encode()):08x}.jsonl"


def _row(
    variant: Variant,
    entries: Sequence[dict[str, Any]],
    first: Sequence[dict[str, Any]],
    num_forwards: int,
    steps: int,
) -> dict[str, Any]:
    report = summarise(entries)
    reference = summarise(first)["accuracy"]
    pairs = list(zip(entries, first, strict=True))
    worse = sum(not mine["is_right"] and theirs["is_right"] for mine, theirs in pairs)
    better = sum(mine["is_right"] and not theirs["is_right"] for mine, theirs in pairs)
    paid = [(m, t) for m, t in pairs if "error" not in m and "error" not in t]
    count = max(1, len(paid))
    kinds: Counter[str] = Counter()
    views: Counter[str] = Counter()
    for mine, _ in paid:
        kinds.update(mine["forwards"])
    for kind, number in kinds.items():
        views[kind.partition("/")[0]] += number
    return {
        "name": variant.name,
        "sampler": variant.sampler_name,
        "score": report["accuracy"],
        "kept": report["accuracy"] / reference if reference else None,
        "relative_cost": sum(mine["flops"] for mine, _ in paid)
        / max(1, sum(theirs["baseline_flops"] for _, theirs in paid)),
        "f": views["FULL"] / count / num_forwards,
        "sigma": views["TEXT_ONLY"] / count / num_forwards,
        "full_share": share_to_draw(
            views["FULL"], sum(mine["steps"] for mine, _ in paid), len(paid), steps
        ),
        "forwards": {kind: number / count for kind, number in sorted(kinds.items())},
        "seconds": sum(mine["seconds"] for mine, _ in paid) / count,
        "seconds_ratio": paired_seconds(entries, first),
        "worse": worse,
        "better": better,
        "p": sign_test(worse, better),
        "errors": report["errors"],
        "first_error": report["first_error"],
        "by_kind": report["accuracy_by_kind"],
        "questions": len(entries),
    }


def share_to_draw(num_full: int, num_steps: int, num_questions: int, steps: int) -> float | None:
    """Share of a schedule that, drawn at random, is expected to run FULL as often as was measured.

    The first step of a response always runs FULL; most responses end before their schedule does,
    and what is drawn behind their end comes to nothing.

    Args:
        num_full: FULL forwards of all questions.
        num_steps: steps that all questions took.
        num_questions: how many there are.
        steps: steps of the schedule.

    Returns:
        The share, the first step included; `None` without questions.
    """
    if not num_questions:
        return None
    later = (num_full - num_questions) / max(1, num_steps - num_questions)
    return min(1.0, (1 + (steps - 1) * later) / steps)


def paired_seconds(
    entries: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]]
) -> float | None:
    """Median over batches of seconds relative to those of `first` in the same batch of a run.

    `None` if there is no such batch.
    """
    mine, theirs = (
        {entry["batch"]: entry["batch_seconds"] for entry in part if entry["batch"] is not None}
        for part in (entries, first)
    )
    ratios = [mine[name] / theirs[name] for name in mine if name in theirs]
    return statistics.median(ratios) if ratios else None


def sign_test(worse: int, better: int) -> float:
    """Two-sided exact p of so uneven a split, if either direction were equally likely."""
    total, least = worse + better, min(worse, better)
    tail = sum(math.comb(total, count) for count in range(least + 1)) / 2**total
    return min(1.0, 2 * tail)


def matched(rows: Sequence[dict[str, Any]], reference: str) -> dict[str, Any] | None:
    """The cheapest rival that costs at least what `reference` does, as the LOWN paper matches.

    Rivals are the rows of other samplers.

    Raises:
        InvalidInputError: `reference` is not among the rows.
    """
    found = _find(rows, reference)
    able = [
        row
        for row in rows
        if row["sampler"] != found["sampler"] and row["relative_cost"] >= found["relative_cost"]
    ]
    return min(able, key=lambda row: row["relative_cost"], default=None)


def matched_score(rows: Sequence[dict[str, Any]], reference: str) -> dict[str, Any] | None:
    """The cheapest other row, of whatever sampler, whose score is at least that of `reference`.

    Raises:
        InvalidInputError: `reference` is not among the rows.
    """
    found = _find(rows, reference)
    able = [row for row in rows if row is not found and row["score"] >= found["score"]]
    return min(able, key=lambda row: row["relative_cost"], default=None)


def describe_match(rows: Sequence[dict[str, Any]], match: dict[str, Any]) -> str:
    """One line for a terminal on an entry of `matches` in `table.json`.

    Args:
        rows: of the comparison.
        match: `variant`; `by`, which is `"cost"`, `"score"` or `"random"`; and `match`, the name
            that was found, `None`, or a list of names.
    """
    titles = {
        "cost": "cheapest rival of {} at its cost or above",
        "score": "cheapest other setting with the score of {}",
        "random": "{} with its FULL steps drawn at random",
    }
    names = [match["match"]] if isinstance(match["match"], str) else match["match"] or []
    found = [
        f"{row['name']} (score {_percent(row['score'])}, f {row['f']:.3f}, "
        f"cost {row['relative_cost']:.3f})"
        for row in (_find(rows, name) for name in [match["variant"], *names])
    ]
    title = titles[match["by"]].format(found[0])
    return f"{title}: {'; '.join(found[1:]) or 'none'}"


def random_access(
    rows: Sequence[dict[str, Any]], variant: Variant, num_seeds: int = 3
) -> list[Variant]:
    """LOWN with FULL steps at random, as many as the certificates of `variant` asked for.

    Args:
        rows: of a comparison in which `variant` took part.
        variant: of LOWN with its certificate.
        num_seeds: variants to make.

    Raises:
        InvalidInputError: `variant` is not among the rows, is no such setting, or answered nothing.
    """
    share = _find(rows, variant.name)["full_share"]
    if share is None:
        raise InvalidInputError(f"{variant.name!r} answered nothing; there is no share to match.")
    return [variant.with_random_access(share, seed) for seed in range(num_seeds)]


def _find(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    found = next((row for row in rows if row["name"] == name), None)
    if found is None:
        raise InvalidInputError(
            f"{name!r} is not among the variants {[row['name'] for row in rows]}."
        )
    return found


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _cells(row: dict[str, Any]) -> list[str]:
    forwards = " ".join(f"{kind} {count:.2f}" for kind, count in row["forwards"].items())
    ratio = row["seconds_ratio"]
    return [
        row["name"],
        _percent(row["score"]),
        _percent(row["kept"]),
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
