"""Rows of a comparison against each other: at equal cost, at equal score, at random access."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlm_decode.errors import InvalidInputError
from dlm_decode.eval.tables import percent
from dlm_decode.eval.variants import Variant

__all__ = ["describe_match", "matched", "matched_score", "random_access"]


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
        f"{row['name']} (score {percent(row['score'])}, f {row['f']:.3f}, "
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
