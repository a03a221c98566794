"""The cheapest setting that keeps a wanted share of the score, found on a calibration set.

The calibration set are questions about training-split scenes, so that a score on held-out scenes
says how well the choice carries over.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.eval.compare import compare
from dlm_decode.eval.run_scenes import Scenes
from dlm_decode.eval.tables import save
from dlm_decode.eval.variants import Variant, fewer_steps, payable_budgets, suite
from dlm_decode.settings import Settings, resolve_settings

if TYPE_CHECKING:
    from dlm_decode.vlm import DiffusionVlm

__all__ = ["By", "candidates", "choose", "command", "tune"]

By = Literal["flops", "seconds"]
CALIBRATION = Scenes("train")
_COSTS = {"flops": "relative_cost", "seconds": "seconds_ratio"}
_THRESHOLDS = (0.95, 0.8, 0.7, 0.6, 0.5)


def candidates(settings: Settings) -> list[str]:
    """The settings that are tried, as variants; `baseline` comes first.

    - the `caches` suite: every sampler over every cache, `fast_dllm` with threshold 0.9 and
      factor 1;
    - `baseline` with a half and a quarter of the steps;
    - `lown` with each budget of `BUDGETS` that pays one FULL forward;
    - `fast_dllm` with thresholds 0.95, 0.8, 0.7, 0.6 and 0.5, over its prefix cache and without;
    - `lown+fast_dllm` with the same thresholds and 0.9 in place of the factor.

    Args:
        settings: the model's own.
    """
    return [
        *suite("caches", settings),
        *fewer_steps(settings, 2, 4),
        *(f"lown:budget={budget}" for budget in payable_budgets(settings)),
        *(
            f"fast_dllm:threshold={threshold}@cache={cache}"
            for threshold in _THRESHOLDS
            for cache in ("none", "prefix")
        ),
        *(
            f"lown+fast_dllm:parallel=threshold,threshold={threshold}"
            for threshold in (0.9, *_THRESHOLDS)
        ),
    ]


def choose(rows: Sequence[dict[str, Any]], keep: float, by: By = "flops") -> dict[str, Any]:
    """The cheapest row whose score is at least `keep` times that of the first.

    Rows on which more questions failed than on the first are left out, and by seconds those that
    were never timed beside the first. The first row itself always qualifies. Of equally cheap rows
    the one with the higher score wins, then the earlier.

    Args:
        rows: of `compare`.
        keep: share of the score, in (0, 1].
        by: `"flops"` (relative to the baseline's schedule) or `"seconds"` (paired).
    """
    first, cost = rows[0], _COSTS[by]
    wanted = keep * first["score"] - 1e-9  # 0.99 * 0.7 is no exact number
    able = [
        row
        for row in rows[1:]
        if row["score"] >= wanted and row["errors"] <= first["errors"] and row[cost] is not None
    ]
    own = 1.0 if by == "seconds" else first[cost]
    priced = [(own, first), *((row[cost], row) for row in able)]
    return min(priced, key=lambda pair: (pair[0], -pair[1]["score"]))[1]


def command(variant: Variant, model: str) -> str:
    """The `dlm-decode generate` line that decodes with a setting."""
    question = ["--image", "IMAGE", "--prompt", "QUESTION"]
    line = ["dlm-decode", "generate", "--model", model, *variant.arguments(), *question]
    return shlex.join(line)


def tune(
    vlm: DiffusionVlm,
    folder: str | Path,
    *,
    keep: float = 0.99,
    by: By = "flops",
    limit: int = 200,
    batch: int = 32,
) -> dict[str, Any]:
    """Tries `candidates` on a calibration set and writes `tuned.json` and the tables of `save`.

    Args:
        vlm: the model.
        folder: one JSON-lines file per setting; a run resumes from them.
        keep: share of the baseline's score that must be kept, in (0, 1].
        by: what is to be cheap, see `choose`.
        limit: number of questions. One question in 200 is half a point of the score: the fewer
            there are, the more of what is kept is luck.
        batch: questions per call.

    Returns:
        What `tuned.json` holds: `keep`, `by`, `questions`, `split`; `chosen` and `reference`, rows
        of `compare`; and `command`. Under `rows`, which only the return value has, all rows.

    Raises:
        UnknownNameError: another value of `by`.
        InvalidInputError: a share outside (0, 1], a limit or batch below 1, files that other
            settings wrote, or a baseline that answers nothing right.
    """
    if not 0 < keep <= 1:
        raise InvalidInputError(f"keep must be above 0 and at most 1, got {keep}.")
    if by not in get_args(By):
        raise UnknownNameError("by", by, get_args(By))
    names = candidates(resolve_settings({}, vlm.generation_defaults))
    variants = {name: Variant.parse(name) for name in names}
    rows = compare(vlm, list(variants.values()), folder, limit=limit, batch=batch, task=CALIBRATION)
    save(folder, rows)
    if rows[0]["score"] == 0:
        raise InvalidInputError(
            f"{rows[0]['name']!r} answers none of the {rows[0]['questions']} calibration questions "
            "right, so there is no score to keep; use a trained model or a larger limit."
        )
    chosen = choose(rows, keep, by)
    result = {
        "keep": keep,
        "by": by,
        "questions": chosen["questions"],
        "split": CALIBRATION.split,
        "chosen": chosen,
        "reference": rows[0],
        "command": command(variants[chosen["name"]], vlm.name),
    }
    (Path(folder) / "tuned.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return {**result, "rows": rows}
