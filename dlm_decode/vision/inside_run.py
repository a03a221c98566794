"""Stages between the layers of a diffusion model, during one `generate` call.

R rows of a forward (guidance doubles them), S columns, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dlm_decode.canvas import Canvas, Prompt
from dlm_decode.cost import Work
from dlm_decode.vision.inside import InsideStage, RowLayout, layout_of
from dlm_decode.vision.packing import Attended, Decisions, Rows, StageStack, pinned

__all__ = ["InsideForward", "InsideRun", "Shortened"]


@dataclass(frozen=True)
class Shortened:
    """What a layer works on, where it differs from the layer in front.

    Attributes:
        hidden: `(R, n, D)`.
        position_ids: `(R, n)`.
        key_mask: `(R, K)` bool, as `DiffusionModel.hidden_states` takes it.
    """

    hidden: Tensor
    position_ids: Tensor
    key_mask: Tensor | None


@dataclass
class _Kept:
    """What whole forwards left of each row's sequence at one layer, for forwards over a window.

    Attributes:
        lengths: real positions, by batch row.
        width: columns of the widest of these forwards, which is what a cache's store has.
        position_ids: `(rows, S)`, on the right.
    """

    lengths: dict[int, int] = field(default_factory=dict)
    width: int = 0
    position_ids: Tensor | None = None


class InsideRun:
    """What the stages decided, and what is left of each row at each layer.

    Args:
        stages: act in this order behind the same layer.
        num_layers: L.
        prompts: one per row.
        num_front: last prompt positions whose states speak for the canvas; they count as text.

    Raises:
        InvalidInputError: as `StageStack`.
    """

    def __init__(
        self,
        stages: Sequence[InsideStage],
        num_layers: int,
        prompts: Sequence[Prompt],
        num_front: int = 0,
    ) -> None:
        self.stack = StageStack(stages, num_layers)
        layouts = [layout_of(prompt) for prompt in prompts]
        self.layouts = [pinned(layout, num_front) for layout in layouts]
        self.num_visual = [prompt.num_visual for prompt in prompts]
        self.decisions: list[Decisions] = [{} for _ in prompts]
        self.kept = [_Kept() for _ in range(num_layers)]
        # By row, of its newest whole forward.
        self._works: dict[int, tuple[Work, ...]] = {}

    def note(self, row: int, works: tuple[Work, ...]) -> None:
        """Keeps what a row's whole forward cost."""
        self._works[row] = works

    def works(self, row: int, length: int) -> tuple[Work, ...]:
        """What each layer does in the row's next whole forward over `length` positions.

        As in the newest one; before the first, no more than this.
        """
        if row in self._works or not self.num_visual[row]:
            return self._works.get(row, (Work(length, length**2),) * len(self.kept))
        return tuple(
            Work(length, length**2, scores=length**2 if layer in self.stack.layers else 0)
            for layer in range(len(self.kept))
        )

    def visual_tokens(self, row: int) -> tuple[int, ...]:
        """Visual tokens that each layer read in the row's newest whole forward."""
        works, count = self._works.get(row), self.num_visual[row]
        if works is None:
            return (count,) * len(self.kept)
        return tuple(count - works[0].queries + work.queries for work in works)


class InsideForward:
    """One forward; the layer loop asks it before each layer, and shows it attention on request.

    Args:
        run: what lasts from forward to forward.
        batch_rows: batch row of each conditional row.
        canvas: read for masked positions.
        padding: columns of padding in front of each conditional row.
        position_ids: `(R, n)` of the fed positions.
        num_columns: S.
        fed: `(R, n)` columns that are fed; `None` for all.
        decides: whether what is decided counts for later forwards.
        has_cache: whether windows of the sequence may be fed later.
    """

    def __init__(
        self,
        run: InsideRun,
        batch_rows: Sequence[int],
        canvas: Canvas,
        padding: Sequence[int],
        position_ids: Tensor,
        num_columns: int,
        fed: Tensor | None = None,
        *,
        decides: bool = True,
        has_cache: bool = False,
    ) -> None:
        self._run, self._batch_rows, self._num_columns = run, tuple(batch_rows), num_columns
        self._position_ids, self._fed = position_ids, fed
        self._decides, self._has_cache = decides, has_cache
        self._attended: Attended | None = None
        self._rows: Rows | None = None
        passes = len(position_ids) // len(batch_rows)
        self._padding = tuple(padding) * passes
        layouts, masked, decisions = [], [], []
        for row, pad in zip(batch_rows, padding, strict=True):
            layout = run.layouts[row]
            tail = num_columns - pad - len(layout.is_visual)
            layouts.append(layout.with_text(tail))
            is_masked = torch.zeros_like(layouts[-1].is_visual)
            start = len(layout.is_visual) + canvas.lead
            own = canvas.is_open[row, canvas.lead :]
            is_masked[start : start + len(own)] = own
            masked.append(is_masked)
            decisions.append(run.decisions[row] if decides else dict(run.decisions[row]))
        unconditional = [_all_text(layout) for layout in layouts] * (passes - 1)
        self._layouts, self._is_masked = [*layouts, *unconditional], masked * passes
        self._decisions: list[Decisions] = [*decisions, *({} for _ in unconditional)]
        # By layer and row of the forward.
        self._lengths: list[tuple[int, ...]] = []
        self._num_scores: list[tuple[int, ...]] = []

    def wants(self, layer: int) -> bool:
        """Whether `observe` is to be shown that layer's queries and keys."""
        return self._fed is None and self._run.stack.reads_attention(layer)

    def observe(self, query: Tensor, key: Tensor) -> None:
        """See `Observe`."""
        self._attended = Attended(False, query, key, query.shape[-1] ** -0.5)

    def before(self, layer: int, hidden: Tensor) -> Shortened | None:
        """What `layer` works on; `None` where nothing changes.

        Args:
            layer: counted from 0; every layer asks in turn.
            hidden: `(R, n, D)` output of the layer in front.
        """
        if self._fed is not None:
            return self._window(layer, hidden, self._fed)
        if self._rows is None:
            self._rows = Rows.start(
                hidden, self._position_ids, self._padding, self._layouts, self._is_masked
            )
        rows = replace(self._rows, hidden=hidden)
        self._num_scores.append((0,) * len(hidden))
        if layer - 1 in self._run.stack.layers:
            attended, self._attended = self._attended or Attended(is_causal=False), None
            rows, self._num_scores[layer - 1] = self._run.stack.reduce(
                rows, layer - 1, attended, self._decisions
            )
        is_changed = rows.columns is not self._rows.columns
        self._rows = rows
        self._lengths.append(rows.lengths)
        if self._decides and self._has_cache:
            self._keep(layer, rows)
        if not is_changed:
            return None
        return Shortened(rows.hidden, rows.position_ids, rows.key_mask)

    def _store_rows(self) -> list[int]:
        """Rows of the run's tables, those of unconditional twins behind the others."""
        count, passes = len(self._run.layouts), len(self._layouts) // len(self._batch_rows)
        return [row + part * count for part in range(passes) for row in self._batch_rows]

    def _keep(self, layer: int, rows: Rows) -> None:
        kept, store_rows = self._run.kept[layer], self._store_rows()
        kept.lengths.update(zip(store_rows, rows.lengths, strict=True))
        count, passes = len(self._run.layouts), len(self._layouts) // len(self._batch_rows)
        kept.width = max(kept.width, rows.hidden.shape[1])
        if kept.position_ids is None:
            shape = (count * passes, self._num_columns)
            kept.position_ids = rows.position_ids.new_zeros(shape)
        start = self._num_columns - rows.hidden.shape[1]
        kept.position_ids[store_rows, start:] = rows.position_ids

    def _window(self, layer: int, hidden: Tensor, fed: Tensor) -> Shortened | None:
        kept, store_rows = self._run.kept[layer], self._store_rows()
        lengths = tuple(kept.lengths[row] for row in store_rows)
        self._num_scores.append((0,) * len(hidden))
        in_front = self._run.kept[max(layer - 1, 0)]
        is_changed = kept.width != in_front.width or lengths != tuple(
            in_front.lengths[row] for row in store_rows
        )
        self._lengths.append(lengths)
        if not is_changed or kept.position_ids is None:
            return None
        columns = torch.arange(kept.width, device=hidden.device)
        starts = torch.tensor([kept.width - length for length in lengths], device=hidden.device)
        position_ids = kept.position_ids[torch.tensor(store_rows, device=hidden.device)]
        is_real = columns >= starts[:, None] if any(n < kept.width for n in lengths) else None
        return Shortened(hidden, position_ids.gather(1, fed), is_real)

    def works(self, entry: int) -> tuple[Work, ...]:
        """What each layer did for the conditional row `entry`, once the forward has run."""
        fed = None if self._fed is None else self._fed.shape[1]
        works = []
        for lengths, scores in zip(self._lengths, self._num_scores, strict=True):
            keys = lengths[entry]
            queries = keys if fed is None else fed
            works.append(Work(queries, queries * keys, scores=scores[entry]))
        return tuple(works)


def _all_text(layout: RowLayout) -> RowLayout:
    return pinned(layout, len(layout.is_visual))
