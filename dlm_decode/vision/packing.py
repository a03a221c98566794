"""Rows of a batch between two decoder layers, and how stages shorten them.

B rows, S columns of the batch; real positions stand on the right.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlm_decode.errors import InvalidInputError
from dlm_decode.vision.inside import InsideStage, LayerView, Reduction, RowLayout

__all__ = ["Attended", "Decisions", "Rows", "StageStack", "pinned"]

Decisions = MutableMapping[tuple[int, int], Reduction | None]
"""What was decided for one row, by layer and place of the stage."""


@dataclass(frozen=True)
class Rows:
    """What the next layer works on.

    Attributes:
        hidden: `(B, S, D)`.
        position_ids: `(B, S)`, or `(3, B, S)` with M-RoPE.
        columns: `(B, S)` which column of the unreduced batch each position is; 0 at padding that
            the batch did not have.
        padding: columns of padding in front of each row.
        layouts: what each row's real positions are.
        is_masked: `(n,)` bool for each row's real positions, see `LayerView`.
    """

    hidden: Tensor
    position_ids: Tensor
    columns: Tensor
    padding: tuple[int, ...]
    layouts: tuple[RowLayout, ...]
    is_masked: tuple[Tensor, ...]

    @classmethod
    def start(
        cls,
        hidden: Tensor,
        position_ids: Tensor,
        padding: Sequence[int],
        layouts: Sequence[RowLayout],
        is_masked: Sequence[Tensor] | None = None,
    ) -> Rows:
        """Unreduced rows; arguments as the attributes, nothing masked by default.

        The last position of each row counts as text, because its state speaks for the next token.
        """
        num_rows, length = hidden.shape[:2]
        layouts = [pinned(layout, 1) for layout in layouts]
        return cls(
            hidden=hidden,
            position_ids=position_ids,
            columns=torch.arange(length, device=hidden.device).expand(num_rows, -1),
            padding=tuple(padding),
            layouts=tuple(layouts),
            is_masked=tuple(torch.zeros_like(layout.is_visual) for layout in layouts)
            if is_masked is None
            else tuple(is_masked),
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Real positions of each row."""
        return tuple(self.hidden.shape[1] - padding for padding in self.padding)

    @property
    def key_mask(self) -> Tensor | None:
        """`(B, S)` bool, `True` at real positions; `None` without padding."""
        if not any(self.padding):
            return None
        places = torch.arange(self.hidden.shape[1], device=self.hidden.device)
        return places >= torch.tensor(self.padding, device=places.device)[:, None]


def pinned(layout: RowLayout, count: int) -> RowLayout:
    """The layout with its last `count` positions as text, so that no stage takes them away."""
    return layout.picked(slice(len(layout.is_visual) - count)).with_text(count)


@dataclass(frozen=True)
class Attended:
    """What a layer's attention was made of.

    Attributes:
        is_causal: whether it was causal.
        queries: `(B, H, S, d)` after rotation, if a stage asks for them.
        keys: `(B, H_kv, S, d)` likewise.
        scaling: factor of the scores.
    """

    is_causal: bool
    queries: Tensor | None = None
    keys: Tensor | None = None
    scaling: float = 1.0


class StageStack:
    """Stages by the layer behind which they act.

    Args:
        stages: in the order in which they act behind the same layer.
        num_layers: L.

    Raises:
        InvalidInputError: a stage that does not act between layers, or one that acts behind layers
            that the model does not have.
    """

    def __init__(self, stages: Sequence[InsideStage], num_layers: int) -> None:
        self.num_layers = num_layers
        self._by_layer: dict[int, list[tuple[int, InsideStage]]] = {}
        for place, stage in enumerate(stages):
            if not isinstance(stage, InsideStage):
                raise InvalidInputError(
                    f"stage {stage!r} does not act between decoder layers; apply its before_lm to "
                    "the prompt instead."
                )
            for layer in stage.layers(num_layers):
                self._by_layer.setdefault(layer, []).append((place, stage))

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers behind which something happens, ascending."""
        return tuple(sorted(self._by_layer))

    def reads_attention(self, layer: int) -> bool:
        """Whether queries and keys of that layer are needed."""
        return any(stage.reads_attention(layer) for _, stage in self._by_layer.get(layer, ()))

    def reduce(
        self,
        rows: Rows,
        layer: int,
        attended: Attended,
        decisions: Sequence[Decisions] | None = None,
    ) -> tuple[Rows, tuple[int, ...]]:
        """The rows behind `layer`, and how many pairs were scored for each of them.

        Args:
            rows: that layer's output.
            layer: counted from 0.
            attended: the layer's attention.
            decisions: of each row; stages that decide once write to it, and read what they find.
        """
        views, columns, counts, is_changed = [], [], [], False
        device = rows.hidden.device  # a model may lie on several
        for row, (padding, layout) in enumerate(zip(rows.padding, rows.layouts, strict=True)):
            own = rows.columns[row, padding:].to(device)
            view = LayerView(
                layer=layer,
                num_layers=self.num_layers,
                hidden=rows.hidden[row, padding:],
                layout=layout.to(device),
                position_ids=rows.position_ids[..., row, padding:].to(device),
                is_masked=rows.is_masked[row].to(device),
                is_causal=attended.is_causal,
                queries=None if attended.queries is None else attended.queries[row, :, padding:],
                keys=None if attended.keys is None else attended.keys[row, :, padding:],
                scaling=attended.scaling,
            )
            memory = None if decisions is None else decisions[row]
            num_scores = 0
            for place, stage in self._by_layer[layer] if bool(layout.is_visual.any()) else ():
                counted = view.num_scores  # by stages in front that left this very view as it is
                reduction = _decide(stage, view, (layer, place), memory)
                num_scores += view.num_scores - counted
                if reduction is not None:
                    view, own, is_changed = view.behind(reduction), own[reduction.index], True
            views.append(view)
            columns.append(own)
            counts.append(num_scores)
        return (_packed(rows, views, columns) if is_changed else rows), tuple(counts)


def _decide(
    stage: InsideStage, view: LayerView, key: tuple[int, int], memory: Decisions | None
) -> Reduction | None:
    if memory is None or getattr(stage, "when", "every") == "every":
        return stage.reduce(view)
    if key not in memory:
        memory[key] = stage.reduce(view)
        return memory[key]
    known = memory[key]
    return None if known is None else replace(known, hidden=known.again(view.hidden))


def _packed(rows: Rows, views: Sequence[LayerView], columns: Sequence[Tensor]) -> Rows:
    longest = max(len(view.hidden) for view in views)
    padding = tuple(longest - len(view.hidden) for view in views)
    shape = rows.hidden.shape
    hidden = rows.hidden.new_zeros(shape[0], longest, shape[2])
    position_ids = rows.position_ids.new_zeros(*rows.position_ids.shape[:-1], longest)
    packed = rows.columns.new_zeros(shape[0], longest)
    for row, (view, own, start) in enumerate(zip(views, columns, padding, strict=True)):
        hidden[row, start:] = view.hidden
        position_ids[..., row, start:] = view.position_ids
        packed[row, start:] = own
    return Rows(
        hidden=hidden,
        position_ids=position_ids,
        columns=packed,
        padding=padding,
        layouts=tuple(view.layout for view in views),
        is_masked=tuple(view.is_masked for view in views),
    )
