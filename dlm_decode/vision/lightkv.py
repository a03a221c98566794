"""LightKV: between some layers, merge alike visual tokens of a window, weighted by the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dlm_decode.errors import InvalidInputError
from dlm_decode.vision import register_alias, register_stage
from dlm_decode.vision.base import Positions
from dlm_decode.vision.inside import InsideBase, LayerView, Reduction
from dlm_decode.vision.knobs import check_choice, check_layers, read_layers, spread
from dlm_decode.vision.matching import (
    cell_windows,
    match,
    merge_shares,
    num_merged,
    square_windows,
)

__all__ = ["Grid", "Guidance", "LightKV", "softmax_guidance"]

Guidance = Literal["query_softmax", "causal_attention", "uniform", "random"]
Grid = Literal["fake_square", "cells"]

_DEPTHS = 3  # layers of the schedule that follows the depth
_LEAST_PER_WINDOW = 8  # an image with fewer tokens per window is left as it is


@register_stage("lightkv")
@dataclass(frozen=True)
class LightKV(InsideBase):
    """Merges visual tokens behind some layers; deeper layers see and keep fewer of them.

    At each of the layers an image's tokens are cut into windows. In a window every second token is
    a source, the others are destinations; a share of the sources, those with the most similar
    destination, is merged into it. A merged token is the mean of its sources and its destination,
    weighted by guidance, and keeps the destination's place. Layers in front keep all keys and
    values. Text is never touched.

    Nothing happens at a layer while any image or video has fewer than eight tokens per window.

    Args:
        at_layers: layers (from 0, ascending) behind which it acts: a sequence, a number, or a
            string such as `"12-18-24"`. `None` is 3/8, 9/16 and 3/4 of the depth (12, 18 and 24 of
            32; of a few layers each once). A model's last layer is a no-op.
        windows: parts per axis at each of the layers, or one number for all.
        ratios: share of each window's tokens that is merged, from 0 to 0.5, likewise. 0 is a no-op.
        guidance: weights of merging. `"query_softmax"`: scores of all queries against text keys,
            without a causal mask, normalised over the queries, and summed over heads and text;
            `"causal_attention"`: attention that a token pays to text, summed likewise (in a causal
            model only to text in front of it); `"uniform"`: plain means; `"random"`.
        grid: `"fake_square"` lays an image's tokens, newline vectors included, row by row into the
            smallest square that holds them; `"cells"` uses their cells, cuts each tile group or
            frame by itself, and leaves newline vectors alone. What is left keeps its cell.
        positions: rotary positions behind each of the layers: `"renumbered"` counts 0, 1, ... (with
            M-RoPE on all axes), `"original"` leaves what stays at its numbers.
        seed: of `"random"`; 0 if left out.
        when: see `InsideBase`.

    Raises:
        InvalidInputError: layers that are not ascending or that the model does not have, lists of
            unequal length, ratios outside [0, 0.5], windows below 1, a seed without random
            guidance; `grid="cells"` behind a stage that took tokens out of the grid.
        UnknownNameError: another value of `guidance`, `grid`, `positions` or `when`.

    Source: LightKV and its published program; named settings such as `lightkv@llava-1.5-13b` are
    their schedules. What the program does, and what differs here:

    - In its LLaVA models guidance is overwritten by random numbers (`guidance="random"`); only its
      Qwen2.5-VL reads scores (`"query_softmax"`). The paper's Equation 7 is `"causal_attention"`.
    - Its first stage layer runs without a causal mask in the prefill, because eager attention is
      given the absent mask of sdpa. Here every layer attends as the model does.
    - The paper merges the globally cheapest pairs, in which a source may occur twice; the program,
      and we, merge sources, each once.
    - It runs single prompts, and asks for equal token counts of all images; neither holds here.
    """

    at_layers: Any = None
    windows: Any = (4, 2, 1)
    ratios: Any = 0.5
    guidance: Guidance = "query_softmax"
    grid: Grid = "fake_square"
    positions: Positions = "renumbered"
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (("guidance", Guidance), ("grid", Grid), ("positions", Positions)):
            check_choice(name, getattr(self, name), allowed)
        if self.seed is not None and self.guidance != "random":
            raise InvalidInputError(
                f"seed={self.seed!r} goes with guidance='random', and guidance is "
                f"{self.guidance!r}; leave it out."
            )
        if self.at_layers is not None:
            object.__setattr__(self, "at_layers", read_layers(self.at_layers))
        count = _DEPTHS if self.at_layers is None else len(self.at_layers)
        for name, kind in (("windows", int), ("ratios", float)):
            object.__setattr__(self, name, spread(name, getattr(self, name), kind, count))
        if any(window < 1 for window in self.windows):
            raise InvalidInputError(f"windows must be at least 1, got {self.windows}.")
        if any(not 0 <= ratio <= 0.5 for ratio in self.ratios):
            raise InvalidInputError(
                f"ratios must lie between 0 and 0.5, got {self.ratios}; a window loses half of its "
                "tokens at most."
            )

    def _schedule(self, num_layers: int | None) -> dict[int, tuple[int, float]]:
        """Windows and ratio by layer; empty where the depth is needed and not known."""
        layers = self.at_layers
        if layers is None:
            layers = () if num_layers is None else _scaled(num_layers)
        entries = zip(layers, self.windows, self.ratios, strict=False)
        return {layer: (windows, ratio) for layer, windows, ratio in entries if ratio > 0}

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See `InsideStage`."""
        layers = tuple(self._schedule(num_layers))
        check_layers("lightkv", layers, num_layers)
        return tuple(layer for layer in layers if layer < num_layers - 1)

    def reads_attention(self, layer: int) -> bool:
        """See `InsideStage`."""
        return self.guidance in ("query_softmax", "causal_attention")

    def reduce(self, view: LayerView) -> Reduction | None:
        """See `InsideStage`."""
        windows, ratio = self._schedule(view.num_layers)[view.layer]
        parts = self._parts(view, windows)
        if any(len(places) < _LEAST_PER_WINDOW * windows**2 for places, _ in parts):
            return None
        weights = self._weights(view)
        everything = torch.arange(view.hidden.shape[0], device=view.hidden.device)
        target, shares = everything.clone(), torch.ones_like(everything, dtype=torch.float32)
        for places, labels in parts:
            into = match(view.hidden[places], labels, ratio)
            target[places] = places[into]
            shares[places] = merge_shares(into, weights[places])
            view.num_scores += sum((n // 2) * (n - n // 2) for n in torch.bincount(labels).tolist())
        stays = target == everything
        index = stays.nonzero()[:, 0]
        position_ids = view.position_ids[..., index]
        if self.positions == "renumbered":
            position_ids = torch.arange(len(index), device=index.device).expand_as(position_ids)
        groups = (stays.cumsum(0) - 1)[target]
        return Reduction.merging(view.hidden, index, position_ids, groups, shares)

    def _parts(self, view: LayerView, windows: int) -> list[tuple[Tensor, Tensor]]:
        """Positions that are windowed together, and the window of each; in reading order."""
        if self.grid == "fake_square":
            return [
                (image, square_windows(len(image), windows, image.device))
                for image in view.images()
            ]
        layout, parts = view.layout, []
        if not bool((layout.parts >= 0).any()):
            raise InvalidInputError(
                "grid='cells' needs to know where in the picture each visual token lies, and an "
                "earlier stage took tokens out of the grid, or the prompt came without grids; use "
                "grid='fake_square'."
            )
        for number in layout.parts[layout.parts >= 0].unique().tolist():
            places = (layout.parts == number).nonzero()[:, 0]
            cells = layout.cells[places]
            # What is left: of every two neighbours in a window one stays, so borders are still
            # there.
            rows, columns = (cells.amax(dim=0) + 1).tolist()
            parts.append((places, cell_windows(cells, rows, columns, windows)))
        return parts

    def _weights(self, view: LayerView) -> Tensor:
        """`(S,)` float32 weights, read at visual positions."""
        visual, weights = view.visual, view.hidden.new_ones(len(view.hidden), dtype=torch.float32)
        text = (~view.layout.is_visual).nonzero()[:, 0]
        if self.guidance == "random":
            generator = torch.Generator().manual_seed((self.seed or 0) + view.layer)
            weights = torch.rand(len(weights), generator=generator).to(weights.device)
        elif self.guidance == "query_softmax":
            everything = torch.arange(len(weights), device=weights.device)
            weights = softmax_guidance(view.scores(everything, text))
        elif self.guidance == "causal_attention":
            weights[visual] = view.attention(visual)[..., text].sum(dim=(0, 2))
        return weights

    def keeps(
        self, layer: int, num_visual: int, num_images: int, num_layers: int | None = None
    ) -> int | None:
        """See `InsideStage`."""
        if layer not in (schedule := self._schedule(num_layers)):
            return None
        windows, ratio = schedule[layer]
        count = num_visual // max(1, num_images)
        if count < _LEAST_PER_WINDOW * windows**2:
            return num_visual
        sizes = torch.bincount(square_windows(count, windows)).tolist()
        return num_images * (count - sum(num_merged(size, ratio) for size in sizes))


def softmax_guidance(scores: Tensor) -> Tensor:
    """`(S,)` weights of scores `(H, S, K)`: each key's softmax over the queries, summed."""
    return scores.softmax(dim=1).sum(dim=(0, 2))


def _scaled(num_layers: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(num_layers * share // 16 for share in (6, 9, 12)))


# Of LLaVA-1.5-7B the paper's text and its Table 15 name different windows; this is the text.
for _name, _layers, _windows in (
    ("llava-1.5-7b", "12-18-24", "4-2-1"),
    ("llava-1.5-13b", "15-23-31", "4-2-1"),
    ("llava-next-13b", "15-23-31", "6-4-2"),
    ("qwen2.5-vl", "12-17-22", "6-4-2"),
):
    register_alias(f"lightkv@{_name}", f"lightkv:at_layers={_layers},windows={_windows}")
