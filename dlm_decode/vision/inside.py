"""Stages that work between decoder layers, and what they are shown there.

The same stage serves diffusion models, through our layer loop, and autoregressive ones, through
hooks on stock classes: both show it one row at a time as a `LayerView`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from dlm_decode.canvas import Prompt
from dlm_decode.vision.base import Stage
from dlm_decode.vision.knobs import check_choice

__all__ = [
    "InsideBase",
    "InsideStage",
    "LayerView",
    "Reduction",
    "RowLayout",
    "When",
    "layout_of",
]

When = Literal["every", "once"]


@dataclass(frozen=True)
class RowLayout:
    """What one row's positions are, without padding.

    Attributes:
        is_visual: `(S,)` bool.
        image_ids: `(S,)` long: which image or video, counted from 0; -1 for text.
        parts: `(S,)` long: which rectangular part (tile group, frame) of all parts of the row; -1
            for text and for newline vectors.
        cells: `(S, 2)` long: row and column inside that part; -1 likewise.
    """

    is_visual: Tensor
    image_ids: Tensor
    parts: Tensor
    cells: Tensor

    def picked(self, index: Tensor | slice) -> RowLayout:
        """The layout of the positions `index`, in that order."""
        return RowLayout(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def to(self, device: torch.device) -> RowLayout:
        """The same on another device."""
        return RowLayout(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))

    def with_text(self, count: int) -> RowLayout:
        """The layout with `count` text positions behind it (a diffusion model's canvas)."""
        return RowLayout(
            torch.cat([self.is_visual, self.is_visual.new_zeros(count)]),
            torch.cat([self.image_ids, self.image_ids.new_full((count,), -1)]),
            torch.cat([self.parts, self.parts.new_full((count,), -1)]),
            torch.cat([self.cells, self.cells.new_full((count, 2), -1)]),
        )


def layout_of(prompt: Prompt) -> RowLayout:
    """The layout of a prompt, read from its spans and their sections."""
    image_ids, parts = torch.full_like(prompt.ids, -1), torch.full_like(prompt.ids, -1)
    cells = prompt.ids.new_full((prompt.length, 2), -1)
    part = 0
    for number, span in enumerate(prompt.spans):
        image_ids[span.start : span.start + span.length] = number
        for start, rows, columns, has_newline in span.sections:
            width = columns + has_newline
            grid = torch.arange(rows * width, device=prompt.ids.device)
            at, is_cell = span.start + start + grid, grid % width < columns
            parts[at[is_cell]] = part
            cells[at[is_cell]] = torch.stack([grid // width, grid % width], dim=-1)[is_cell]
            part += 1
    return RowLayout(prompt.is_visual, image_ids, parts, cells)


@dataclass
class LayerView:
    """One row, right behind a decoder layer.

    Attributes:
        layer: the layer that has just run, counted from 0.
        num_layers: L.
        hidden: `(S, D)` its output.
        layout: what the positions are.
        position_ids: `(S,)` rotary positions, `(3, S)` with M-RoPE.
        is_masked: `(S,)` bool: response positions that are still masked; none in an autoregressive
            model.
        is_causal: whether the layer attended causally; else in both directions.
        queries: `(H, S, d)` the layer's queries after rotation, if the stage asked for them.
        keys: `(H_kv, S, d)` likewise.
        scaling: factor of the scores.
        num_scores: pairs of a query and a key that the methods below have scored, for the cost;
            stages add pairs of states that they compare.
    """

    layer: int
    num_layers: int
    hidden: Tensor
    layout: RowLayout
    position_ids: Tensor
    is_masked: Tensor
    is_causal: bool
    queries: Tensor | None = None
    keys: Tensor | None = None
    scaling: float = 1.0
    num_scores: int = field(default=0, init=False)

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """`(H, Q, K)` float32 scaled scores before any mask and softmax.

        Args:
            queries: `(Q,)` positions.
            keys: `(K,)` positions.
        """
        if self.queries is None or self.keys is None:
            raise AssertionError("the stage did not ask for queries and keys of this layer")
        groups = self.queries.shape[0] // self.keys.shape[0]
        picked = self.keys[:, keys].float().repeat_interleave(groups, dim=0)
        self.num_scores += len(queries) * len(keys)
        return self.queries[:, queries].float() @ picked.transpose(-1, -2) * self.scaling

    @property
    def visual(self) -> Tensor:
        """`(V,)` positions of visual tokens, ascending."""
        return self.layout.is_visual.nonzero()[:, 0]

    @property
    def text(self) -> Tensor:
        """Positions of text that is known: all but visual tokens and masks, ascending."""
        return (~self.layout.is_visual & ~self.is_masked).nonzero()[:, 0]

    def images(self) -> list[Tensor]:
        """Positions of each image's or video's tokens, as far as it has any; reads the device."""
        ids = self.layout.image_ids
        return [(ids == number).nonzero()[:, 0] for number in ids[ids >= 0].unique().tolist()]

    def kept(self, keep: Tensor) -> Reduction:
        """The reduction to text and the positions `keep`, in their order and at their numbers."""
        stays = ~self.layout.is_visual
        stays[keep] = True
        index = stays.nonzero()[:, 0]
        return Reduction(index, self.hidden[index], self.position_ids[..., index])

    def behind(self, reduction: Reduction) -> LayerView:
        """What the next stage of the same layer is shown, once `reduction` has been made."""
        index = reduction.index
        return replace(
            self,
            hidden=reduction.hidden,
            layout=self.layout.picked(index),
            position_ids=reduction.position_ids,
            is_masked=self.is_masked[index],
            queries=None if self.queries is None else self.queries[:, index],
            keys=None if self.keys is None else self.keys[:, index],
        )

    def attention(self, queries: Tensor) -> Tensor:
        """`(H, Q, S)` float32 attention of the positions `(Q,)`; each row sums to 1."""
        everything = torch.arange(self.hidden.shape[0], device=self.hidden.device)
        scores = self.scores(queries, everything)
        if self.is_causal:
            scores = scores.masked_fill(everything > queries[:, None], float("-inf"))
        return scores.softmax(dim=-1)


@dataclass(frozen=True)
class Reduction:
    """What deeper layers work on, in order.

    Attributes:
        index: `(S',)` ascending: which position of the view each of them is. All text positions
            must be among them.
        hidden: `(S', D)` their states; merged tokens differ from the view's.
        position_ids: `(S',)` or `(3, S')` rotary positions from here on.
        groups: `(S,)` which of them each position of the view was merged into; `None` where the
            others were dropped.
        shares: `(S,)` float32 weight of each position there; a merged token is the weighted sum.
    """

    index: Tensor
    hidden: Tensor
    position_ids: Tensor
    groups: Tensor | None = None
    shares: Tensor | None = None

    @classmethod
    def merging(
        cls, hidden: Tensor, index: Tensor, position_ids: Tensor, groups: Tensor, shares: Tensor
    ) -> Reduction:
        """Merges `(S, D)` states as `groups` and `shares` say; arguments as the attributes."""
        plan = cls(index, hidden, position_ids, groups, shares)
        return replace(plan, hidden=plan.again(hidden))

    def again(self, hidden: Tensor) -> Tensor:
        """`(S', D)` from other states `(S, D)` of the same positions."""
        if self.groups is None or self.shares is None:
            return hidden[self.index]
        merged = hidden.new_zeros(len(self.index), hidden.shape[1], dtype=torch.float32)
        merged.index_add_(0, self.groups, hidden.float() * self.shares[:, None])
        return merged.to(hidden.dtype)


@runtime_checkable
class InsideStage(Stage, Protocol):
    """A stage that drops or merges visual tokens behind some decoder layers.

    Rows without visual tokens are never shown to it. Generated tokens of an autoregressive model
    keep the rotary positions of the unreduced sequence.
    """

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers (counted from 0, ascending) behind which it acts; none where it is a no-op.

        Raises:
            InvalidInputError: a layer that a model of `num_layers` layers does not have.
        """
        ...

    def reads_attention(self, layer: int) -> bool:
        """Whether it needs the queries and keys of that layer."""
        ...

    def reduce(self, view: LayerView) -> Reduction | None:
        """What stays behind `view.layer`; `None` for everything."""
        ...

    def keeps(
        self, layer: int, num_visual: int, num_images: int, num_layers: int | None = None
    ) -> int | None:
        """How many of `num_visual` tokens that reach `layer` stay; `None` if data decide.

        For costs that are computed without running anything; square grids are assumed. Where the
        stage's layers follow the depth of the model, it takes `num_layers` to answer, and is `None`
        without.
        """
        ...


@dataclass(frozen=True)
class InsideBase:
    """Base of the stages that work between decoder layers: what they have in common.

    Args:
        when: in a diffusion model, whether each forward with the picture decides anew (`"every"`),
            or the response's first one for all of them (`"once"`; later forwards drop or merge the
            same tokens and score nothing). An autoregressive model has one such forward.

    Raises:
        UnknownNameError: another value of `when`.
    """

    when: When = field(default="every", kw_only=True)

    def __post_init__(self) -> None:
        check_choice("when", self.when, When)

    def before_lm(self, prompt: Prompt) -> Prompt:
        """The prompt as it is; layers in front of the stage read all of it."""
        return prompt
