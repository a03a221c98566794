"""Runs the language model on a view of the sequence and proposes tokens.

Proposals are made at the asked canvas positions only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from dlm_decode.canvas import Canvas, Prompt
from dlm_decode.confidence import Proposal, propose
from dlm_decode.cost import CostMeter, forward_flops
from dlm_decode.settings import Settings

if TYPE_CHECKING:
    from dlm_decode.models.base import DiffusionModel

__all__ = ["FULL", "TEXT_ONLY", "TEXT_ONLY_ORIGINAL", "Prediction", "Predictor", "View"]

_HEAD_CHUNK = 256  # positions per run of the language-model head
# Positions per draw of sampling noise; fixed, because it decides which numbers a position gets.
_NOISE_CHUNK = 64


@dataclass(frozen=True)
class View:
    """What a forward sees.

    Attributes:
        name: as reported in trajectories and costs.
        has_visual: whether visual tokens are in the sequence.
        positions: without visual tokens, `"packed"` numbers the remaining tokens 0, 1, ...;
            `"original"` leaves them the numbers that they have in the full sequence.
    """

    name: str
    has_visual: bool = True
    positions: Literal["packed", "original"] = "original"


FULL = View("FULL")
TEXT_ONLY = View("TEXT_ONLY", has_visual=False, positions="packed")
TEXT_ONLY_ORIGINAL = View("TEXT_ONLY", has_visual=False, positions="original")


@dataclass(frozen=True)
class Prediction:
    """Proposals at canvas positions; B rows, C canvas columns.

    Attributes:
        tokens: `(B, C)` long proposed tokens; the mask id where nothing was asked.
        top_tokens: `(B, C)` long argmax; equals `tokens` at temperature 0.
        log_prob: `(B, C)` float32; -inf where nothing was asked.
        margin: `(B, C)` float32 top-1 minus top-2 probability, if asked for; -inf where nothing was
            asked.
        entropy: `(B, C)` float32 in nats, if asked for; +inf where nothing was asked.
    """

    tokens: Tensor
    top_tokens: Tensor
    log_prob: Tensor
    margin: Tensor | None = None
    entropy: Tensor | None = None

    @property
    def confidence(self) -> Tensor:
        """`(B, C)` probability of each proposed token; 0 where nothing was asked."""
        return self.log_prob.exp()


@dataclass(frozen=True)
class _Layout:
    """Left-padded prompts of one view. `lengths` are real lengths on the host."""

    embeds: Tensor
    positions: Tensor
    is_real: Tensor
    next_position: Tensor
    lengths: tuple[int, ...]


class Predictor:
    """Everything between a sampler's question and the model's answer, for one `generate` call.

    Args:
        model: the language model.
        prompts: one per row, after vision stages.
        canvas: the live canvas; the loop commits into it, forwards read it.
        settings: temperature, guidance and preset.
        generators: one per row.
        meter: charged for every forward.
        suffix_ids: `(F,)` ids that follow the canvas in every row.
        suppressed_ids: ids that are never proposed.
        baseline_flops: per row, decoder FLOPs of the baseline sampler with the same settings and no
            stage; what a cost budget is a share of.
    """

    def __init__(
        self,
        model: DiffusionModel,
        prompts: Sequence[Prompt],
        canvas: Canvas,
        *,
        settings: Settings,
        generators: Sequence[torch.Generator],
        meter: CostMeter,
        suffix_ids: Tensor | None = None,
        suppressed_ids: Sequence[int] = (),
        baseline_flops: Sequence[int] | None = None,
    ) -> None:
        self.model = model
        self.canvas = canvas
        self.settings = settings
        self.generators = generators
        self.meter = meter
        self.device = canvas.tokens.device
        self.has_visual = torch.tensor(
            [prompt.num_visual > 0 for prompt in prompts], device=self.device
        )
        self.has_nan = torch.zeros((), dtype=torch.bool, device=self.device)
        lead = canvas.lead
        self._prompts = [_without_tail(prompt, lead) for prompt in prompts]
        self._lead_embeds = (
            torch.stack([prompt.embeds[prompt.length - lead :] for prompt in prompts])
            if lead
            else None
        )
        self._lead_is_open = canvas.is_open[:, :lead].clone()
        self._suffix = model.embed(suffix_ids.to(self.device)) if suffix_ids is not None else None
        self._suppressed = torch.tensor(
            sorted(set(suppressed_ids)), dtype=torch.long, device=self.device
        )
        self._mask_id = model.special_ids.mask
        self._mask_embed = model.embed(torch.tensor([self._mask_id], device=self.device))[0]
        # Vocabulary size without rows that no token has.
        size = meter.geometry.vocab_size
        self._num_candidates = min(size, model.num_valid_tokens or size)
        self._layouts: dict[View, _Layout] = {}
        self._forward_costs: dict[View, Tensor] = {}
        self.baseline_flops = baseline_flops
        self._noise_dtype = torch.float32 if self.device.type == "mps" else torch.float64

    @property
    def padding_ids(self) -> tuple[int, ...]:
        """Ids that fill the canvas behind an answer."""
        return self.model.special_ids.padding

    @property
    def num_suffix(self) -> int:
        """Positions behind the canvas."""
        return 0 if self._suffix is None else self._suffix.shape[0]

    def sequence_lengths(self, view: View) -> tuple[int, ...]:
        """Real sequence length of each row under `view`."""
        extra = self.canvas.width + self.num_suffix
        return tuple(length + extra for length in self._layout(view).lengths)

    @torch.no_grad()
    def __call__(
        self,
        view: View,
        positions: Tensor,
        statistics: Collection[str] = (),
        *,
        is_charged: bool = True,
    ) -> Prediction:
        """One forward over the rows that ask for something.

        Other rows take no part and cost nothing.

        Args:
            view: what the forward sees.
            positions: `(B, C)` bool, canvas columns where a proposal is wanted.
            statistics: any of `"margin"` and `"entropy"`.
            is_charged: `False` is for measurements that a method would not run: the forward costs
                nothing, and proposes argmax tokens without drawing from the rows' generators.

        Returns:
            Prediction.
        """
        where = positions.nonzero()
        asked = where.cpu()
        rows, counts = (
            part.tolist() for part in asked[:, 0].unique_consecutive(return_counts=True)
        )
        prediction = self._empty(statistics)
        if not rows:
            return prediction
        hidden, cond_rows = self._forward(view, rows, counts, is_charged)
        local = torch.arange(len(rows)).repeat_interleave(torch.tensor(counts)).to(self.device)
        first = hidden.shape[1] - self.num_suffix - self.canvas.width
        columns = where[:, 1] + first - int(self.model.shift_logits)
        picked = hidden[local, columns]
        unconditional = hidden[local + cond_rows, columns] if self.settings.cfg_scale > 0 else None
        noise = self._noise(rows, counts, asked[:, 1]) if is_charged else None
        proposal = self._propose(picked, unconditional, noise, statistics)
        self.has_nan |= proposal.log_prob.isnan().any()

        keys = (where[:, 0], where[:, 1])
        for name in ("tokens", "top_tokens", "log_prob", *statistics):
            getattr(prediction, name).index_put_(keys, getattr(proposal, name))
        return prediction

    def charge(self, view: View, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Books a whole-sequence forward of some rows, `counts` positions given to the head."""
        lengths = self.sequence_lengths(view)
        queries = [lengths[row] for row in rows]
        self.meter.charge(view.name, "full", rows, queries, queries, counts)
        if self.settings.cfg_scale > 0:
            self.meter.charge("UNCONDITIONAL", "full", rows, queries, queries, counts)

    def forward_cost(self, view: View) -> Tensor:
        """`(B,)` float64 decoder FLOPs of one whole-sequence forward of each row under `view`."""
        if view not in self._forward_costs:
            passes = 2 if self.settings.cfg_scale > 0 else 1
            flops = [
                passes * forward_flops(self.meter.geometry, length, length)
                for length in self.sequence_lengths(view)
            ]
            cost = torch.tensor(flops, dtype=torch.float64, device=self.device)
            self._forward_costs[view] = cost
        return self._forward_costs[view]

    def uniform(self, positions: Tensor) -> Tensor:
        """`(B, C)` float32 random numbers in [0, 1) at the asked positions.

        Each row draws from its own generator.
        """
        drawn = torch.zeros(positions.shape, device=self.device)
        is_full = self.settings.quirks.random_stream == "full"
        for row in positions.any(dim=1).nonzero()[:, 0].tolist():
            generator = self.generators[row]
            if is_full:
                length = self.sequence_lengths(FULL)[row]
                numbers = torch.rand(length, generator=generator, device=self.device)
                first = length - self.num_suffix - self.canvas.width
                drawn[row] = numbers[first : first + self.canvas.width]
            else:
                drawn[row] = torch.rand(positions.shape[1], generator=generator, device=self.device)
        return drawn

    def _empty(self, statistics: Collection[str]) -> Prediction:
        shape = self.canvas.tokens.shape
        minus_infinity = torch.full(shape, float("-inf"), device=self.device)
        return Prediction(
            tokens=torch.full_like(self.canvas.tokens, self._mask_id),
            top_tokens=torch.full_like(self.canvas.tokens, self._mask_id),
            log_prob=minus_infinity,
            margin=minus_infinity.clone() if "margin" in statistics else None,
            entropy=-minus_infinity if "entropy" in statistics else None,
        )

    def _layout(self, view: View) -> _Layout:
        if view not in self._layouts:
            prompts = (
                self._prompts if view.has_visual else [_text_only(p, view) for p in self._prompts]
            )
            self._layouts[view] = _pad_left(prompts)
        return self._layouts[view]

    def _forward(
        self, view: View, rows: list[int], counts: list[int], is_charged: bool
    ) -> tuple[Tensor, int]:
        """Hidden states of the asked rows, then of their unconditional twins if there is guidance.

        Returns:
            hidden: `(R, S, D)`, or `(2R, S, D)` with the unconditional rows behind the others.
            num_rows: R, the number of asked rows.
        """
        layout = self._layout(view)
        lengths = [layout.lengths[row] for row in rows]
        start = layout.embeds.shape[1] - max(lengths)
        index = torch.tensor(rows, device=self.device)
        prompt, canvas = layout.embeds[index, start:], self._canvas_embeds(index)
        num_rows, tail = len(rows), self.canvas.width + self.num_suffix
        suffix = [] if self._suffix is None else [self._suffix.expand(num_rows, -1, -1)]
        embeds = torch.cat([prompt, canvas, *suffix], dim=1)
        offsets = torch.arange(tail, device=self.device)
        positions = torch.cat(
            [layout.positions[index, start:], layout.next_position[index, None] + offsets], dim=1
        )
        key_mask = None
        if min(lengths) < max(lengths):
            is_real = layout.is_real[index, start:]
            key_mask = torch.cat([is_real, is_real.new_ones(num_rows, tail)], dim=1)

        if is_charged:
            self.meter.calls += 1
            self.charge(view, rows, counts)
        if self.settings.cfg_scale > 0:
            masked = torch.cat([self._mask_embed.expand_as(prompt), canvas, *suffix], dim=1)
            masked[:, prompt.shape[1] : prompt.shape[1] + self.canvas.lead] = self._mask_embed
            embeds, positions = torch.cat([embeds, masked]), torch.cat([positions, positions])
            key_mask = None if key_mask is None else torch.cat([key_mask, key_mask])
        return self.model.hidden_states(embeds, positions, key_mask), num_rows

    def _canvas_embeds(self, rows: Tensor) -> Tensor:
        embeds = self.model.embed(self.canvas.tokens[rows].clamp_min(0))
        lead = self.canvas.lead
        if self._lead_embeds is not None:
            is_open = self._lead_is_open[rows].unsqueeze(-1)
            embeds[:, :lead] = torch.where(
                is_open, embeds[:, :lead], self._lead_embeds[rows].to(embeds.dtype)
            )
        return embeds

    def _noise(self, rows: list[int], counts: list[int], columns: Tensor) -> list[Tensor] | None:
        """Gumbel uniforms per asked canvas column, row by row, each `(n, candidates)`."""
        if self.settings.temperature == 0:
            return None
        size = self._num_candidates
        is_full = self.settings.quirks.random_stream == "full"
        drawn: list[Tensor] = []
        for row, wanted in zip(rows, columns.split(counts), strict=True):
            generator = self.generators[row]
            if is_full:
                length = self.sequence_lengths(FULL)[row]
                wanted = wanted + (length - self.num_suffix - self.canvas.width)
                kept = []
                for start in range(0, length, _NOISE_CHUNK):
                    shape = (min(_NOISE_CHUNK, length - start), size)
                    part = torch.rand(
                        shape, dtype=self._noise_dtype, generator=generator, device=self.device
                    )
                    inside = wanted[(wanted >= start) & (wanted < start + _NOISE_CHUNK)] - start
                    kept.append(part[inside.to(self.device)])
                drawn.append(torch.cat(kept))
            else:
                for part in wanted.split(_NOISE_CHUNK):
                    shape = (len(part), size)
                    drawn.append(
                        torch.rand(
                            shape, dtype=self._noise_dtype, generator=generator, device=self.device
                        )
                    )
        return drawn

    def _propose(
        self,
        hidden: Tensor,
        unconditional: Tensor | None,
        noise: list[Tensor] | None,
        statistics: Collection[str],
    ) -> Proposal:
        sizes = (
            [len(part) for part in noise]
            if noise is not None
            else _chunks(len(hidden), _HEAD_CHUNK)
        )
        unproposable = None if self.settings.quirks.may_predict_mask else self._mask_id
        parts, start = [], 0
        for index, size in enumerate(sizes):
            piece = slice(start, start + size)
            logits = self.model.logits(hidden[piece])[:, : self._num_candidates]
            if unconditional is not None:
                other = self.model.logits(unconditional[piece])[:, : self._num_candidates].float()
                logits = other + (self.settings.cfg_scale + 1) * (logits.float() - other)
            logits.index_fill_(1, self._suppressed, float("-inf"))
            parts.append(
                propose(
                    logits,
                    temperature=0.0 if noise is None else self.settings.temperature,
                    uniform=None if noise is None else noise[index],
                    statistics=statistics,
                    unproposable=unproposable,
                )
            )
            start += size
        if len(parts) == 1:
            return parts[0]
        return Proposal(
            **{
                name: torch.cat([getattr(part, name) for part in parts])
                for name in ("tokens", "top_tokens", "log_prob", *statistics)
            }
        )


def _chunks(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]


def _without_tail(prompt: Prompt, count: int) -> Prompt:
    if not count:
        return prompt
    keep = prompt.length - count
    return Prompt(
        embeds=prompt.embeds[:keep],
        ids=prompt.ids[:keep],
        is_visual=prompt.is_visual[:keep],
        position_ids=prompt.positions()[:keep],
        end_position=prompt.next_position - count,
    )


def _text_only(prompt: Prompt, view: View) -> Prompt:
    keep = ~prompt.is_visual
    text = replace(
        prompt,
        embeds=prompt.embeds[keep],
        ids=prompt.ids[keep],
        is_visual=prompt.is_visual[keep],
        spans=(),
    )
    if view.positions == "packed":
        return replace(text, position_ids=None, end_position=None)
    return replace(text, position_ids=prompt.positions()[keep], end_position=prompt.next_position)


def _pad_left(prompts: Sequence[Prompt]) -> _Layout:
    lengths = tuple(prompt.length for prompt in prompts)
    num_rows, longest = len(prompts), max(lengths)
    first = prompts[0].embeds
    embeds = first.new_zeros(num_rows, longest, first.shape[-1])
    positions = torch.zeros(num_rows, longest, dtype=torch.long, device=first.device)
    is_real = torch.zeros(num_rows, longest, dtype=torch.bool, device=first.device)
    for row, prompt in enumerate(prompts):
        start = longest - prompt.length
        embeds[row, start:] = prompt.embeds
        positions[row, start:] = prompt.positions()
        is_real[row, start:] = True
    ends = torch.tensor([prompt.next_position for prompt in prompts], device=first.device)
    return _Layout(embeds, positions, is_real, ends, lengths)
