"""Several decoding settings over the same held-out questions: score against cost, in one run.

The settings take turns on each batch, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import math
import re
import statistics
import uuid
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dlm_decode.errors import InvalidInputError
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
from dlm_decode.eval.variants import Variant

if TYPE_CHECKING:
    from dlm_decode.vlm import DiffusionVlm

__all__ = ["compare", "paired_seconds", "share_to_draw", "sign_test"]


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
    for variant in variants:
        vlm.check_sampler(variant.options["sampler"])
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
