"""Costs of published models with stages, and papers' tables recomputed from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlm_decode.cost.geometries import Published, published
from dlm_decode.cost.response import Convention, ResponseCost, convention, response_cost
from dlm_decode.cost.schedule import schedule_of
from dlm_decode.cost.tables import Row, Table
from dlm_decode.vision import Stage, make

__all__ = ["Line", "cost_of", "lines_of"]


@dataclass(frozen=True)
class Line:
    """A row beside its recomputation.

    Attributes:
        row: what is printed.
        computed: in the unit of `row.reported`.
        cost: where `computed` comes from.
    """

    row: Row
    computed: float
    cost: ResponseCost

    @property
    def error(self) -> float:
        """Relative error of `computed`."""
        return self.computed / self.row.reported - 1

    @property
    def kv_error(self) -> float | None:
        """Relative error of the memory; `None` where none is printed."""
        return None if self.row.kv_gib is None else self.cost.kv_gib / self.row.kv_gib - 1


def cost_of(
    model: Published,
    stages: Sequence[Stage | str],
    counted: Convention,
    text_tokens: int | None = None,
    new_tokens: int | None = None,
) -> ResponseCost:
    """Cost of a published model's typical input.

    Args:
        model: the model and its input.
        stages: stages or their specs, in order.
        counted: the convention.
        text_tokens: text tokens of the prompt; `None` for the convention's.
        new_tokens: generated tokens; likewise.

    Raises:
        InvalidInputError: see `schedule_of` and `response_cost`.
        UnknownNameError: an unknown stage or knob.
    """
    text = counted.text_tokens if text_tokens is None else text_tokens
    schedule = schedule_of([make(stage) for stage in stages], model, text)
    return response_cost(
        model.geometry, schedule, counted, tiles=model.tiles, new_tokens=new_tokens
    )


def lines_of(chosen: Table) -> Iterator[Line]:
    """Recomputes the rows of a table, one by one."""
    counted = convention(chosen.convention)
    for row in chosen.rows:
        model = published(row.model)
        stages = () if row.stage is None else (row.stage,)
        cost = cost_of(model, stages, counted, row.text_tokens)
        if chosen.is_ratio:
            computed = 100 * cost.total / cost_of(model, (), counted, row.text_tokens).total
        else:
            computed = cost.total / 1e12
        yield Line(row, computed, cost)
