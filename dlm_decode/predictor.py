"""Runs the language model on a view of the sequence and proposes tokens.

Proposals are made at the asked canvas positions only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from dlm_decode.cache.base import FULL_FEED, CachePolicy, Clock, Fed, Feed, Memory, RowShape
from dlm_decode.canvas import NO_FRAME, Canvas, Prompt
from dlm_decode.confidence import PreviousLogProb, Proposal, drop_unlikely, propose
from dlm_decode.cost import CostMeter, Work, attention_row_flops, forward_flops, layer_flops
from dlm_decode.settings import Settings
from dlm_decode.vision.inside_run import InsideForward, InsideRun
from dlm_decode.vision.watch import Pruning, Watch

if TYPE_CHECKING:
    from dlm_decode.models.attention import RowProbe
    from dlm_decode.models.base import DiffusionModel
    from dlm_decode.vision.base import AttentionStage
    from dlm_decode.vision.inside import InsideStage

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
        logit_margin: `(B, C)` float32 top-1 minus top-2 logit, if asked for; -inf where nothing was
            asked.
        entropy: `(B, C)` float32 in nats, if asked for; +inf where nothing was asked.
        kl: `(B, C)` float32 KL divergence in nats of the distribution from the one that the view
            gave when it last answered the position, if asked for; +inf where it never did, or where
            the row's question before this one left the position out.
    """

    tokens: Tensor
    top_tokens: Tensor
    log_prob: Tensor
    margin: Tensor | None = None
    logit_margin: Tensor | None = None
    entropy: Tensor | None = None
    kl: Tensor | None = None

    @property
    def is_answered(self) -> Tensor:
        """`(B, C)` bool, where there is a proposal."""
        return self.log_prob > float("-inf")

    @property
    def confidence(self) -> Tensor:
        """`(B, C)` probability of each proposed token; 0 where nothing was asked."""
        return self.log_prob.exp()


@dataclass(frozen=True)
class _Layout:
    """Left-padded prompts of one view. `lengths` are real lengths on the host."""

    embeds: Tensor
    frames: Tensor
    positions: Tensor
    is_real: Tensor
    next_position: Tensor
    lengths: tuple[int, ...]

    @cached_property
    def frame_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Each row's prompt positions by frame number, on the host; reads the device once."""
        return tuple(
            tuple(torch.bincount(row[row != NO_FRAME]).tolist()) for row in self.frames.cpu()
        )


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
        cache: policy that lets forwards reuse what earlier ones computed, one cache per view;
            `None` recomputes everything.
        stage: prunes each row after its first forward with visual tokens; `None` for no such stage.
        inside: stages between the layers of forwards with visual tokens.
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
        cache: CachePolicy | None = None,
        stage: AttentionStage | None = None,
        inside: Sequence[InsideStage] = (),
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
        # What views with visual tokens show: the prompts, until a stage prunes them.
        self._shown = list(self._prompts)
        self._num_visual = [prompt.num_visual for prompt in prompts]
        request = None if stage is None else stage.request()
        self._watch = None
        if stage is not None and request is not None:
            self._watch = Watch(stage, request, self._prompts)
        self._inside = None
        if inside:
            num_layers, num_front = meter.geometry.num_layers, int(model.shift_logits)
            run = InsideRun(inside, num_layers, self._prompts, num_front)
            self._inside = run if run.stack.layers else None
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
        self._policy = cache
        self._caches: dict[View, _ViewCache] = {}
        self._log_probs: dict[View, _ViewLogProb] = {}
        self._layouts: dict[View, _Layout] = {}
        self._forward_costs: dict[View, Tensor] = {}
        # By row: positions that noise is drawn for (of the last forward or of the block), and how
        # many of them stand in front of the canvas.
        self._drawn: dict[int, tuple[int, int]] = {}
        self.baseline_flops = baseline_flops
        self._noise_dtype = torch.float32 if self.device.type == "mps" else torch.float64

    @property
    def padding_ids(self) -> tuple[int, ...]:
        """Ids that fill the canvas behind an answer."""
        return self.model.special_ids.padding

    @property
    def knows_first(self) -> bool:
        """Whether the prompt alone speaks for the first canvas position."""
        return self.model.shift_logits and getattr(self._policy, "reads_prompt_alone", False)

    @property
    def has_cache(self) -> bool:
        """Whether forwards reuse what earlier ones computed."""
        return self._policy is not None

    @property
    def kept_visual_tokens(self) -> tuple[int, ...]:
        """Visual tokens of each row that its forwards still read."""
        if self._inside is None:
            return tuple(self._num_visual)
        return tuple(counts[-1] for counts in self.layer_visual_tokens)

    @property
    def layer_visual_tokens(self) -> tuple[tuple[int, ...], ...]:
        """Visual tokens that each layer reads, by row; nothing without stages between layers."""
        if self._inside is None:
            return ()
        return tuple(self._inside.visual_tokens(row) for row in range(len(self._prompts)))

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
        blocks: Tensor | None = None,
        is_charged: bool = True,
        samples: bool = True,
    ) -> Prediction:
        """One forward over the rows that ask for something.

        Other rows take no part and cost nothing.

        Args:
            view: what the forward sees.
            positions: `(B, C)` bool, canvas columns where a proposal is wanted.
            statistics: any of `"margin"`, `"logit_margin"`, `"entropy"` and `"kl"`.
            blocks: `(B,)` block of each row, which a cache policy plans by.
            is_charged: `False` is for measurements that a method would not run: the forward costs
                nothing, uses no cache, proposes argmax tokens without drawing from the rows'
                generators, and has no previous distribution for `"kl"`.
            samples: at a temperature above 0, `False` proposes argmax tokens and draws nothing.

        Returns:
            Prediction; with a cache, positions that were not fed stay unanswered.
        """
        prediction = self._empty(statistics)
        asked = positions.nonzero().cpu()
        if not len(asked):
            return prediction
        rows = asked[:, 0].unique_consecutive().tolist()
        cache = self._view_cache(view) if is_charged else None
        if cache is None:
            feeds = dict.fromkeys(rows, (FULL_FEED,))
        else:
            feeds = cache.plan(rows, blocks, self._layout(view).lengths)
        if blocks is not None and self.settings.quirks.random_stream == "block":
            self._note_blocks(rows, blocks.tolist())
        log_prob = self._view_log_prob(view, asked) if is_charged and "kl" in statistics else None
        for group in dict.fromkeys(feeds.values()):
            own = [row for row in rows if feeds[row] == group]
            places = asked[torch.isin(asked[:, 0], torch.tensor(own))]
            for feed in group:
                if len(places):
                    places = self._run(
                        view, own, feed, places, cache, log_prob, prediction, is_charged, samples
                    )
        if cache is not None:
            self.meter.kv_bytes = max(
                self.meter.kv_bytes, sum(kept.num_bytes for kept in self._caches.values())
            )
        return prediction

    def _run(
        self,
        view: View,
        rows: list[int],
        feed: Feed,
        asked: Tensor,
        cache: _ViewCache | None,
        log_prob: _ViewLogProb | None,
        prediction: Prediction,
        is_charged: bool,
        samples: bool,
    ) -> Tensor:
        """One forward over rows with the same feed; writes what it says into `prediction`.

        Args:
            view: what the forward sees.
            rows: batch rows.
            feed: what is fed of them.
            asked: `(n, 2)` row and canvas column on the host; columns that are not fed stay
                unanswered.
            cache: what keys and values are kept in.
            log_prob: what distributions are kept in, for `"kl"`.
            prediction: written to.
            is_charged: as in `__call__`.
            samples: as in `__call__`.

        Returns:
            The places of `asked` that were not fed.
        """
        batch = self._batch(view, rows, feed, is_cached=cache is not None)
        local = torch.zeros(self.canvas.tokens.shape[0], dtype=torch.long)
        local[rows] = torch.arange(len(rows))
        # Columns of the fed part; the states that speak for a column may stand one in front of it.
        index = local[asked[:, 0]]
        places = (
            asked[:, 1] + batch.canvas_start - int(self.model.shift_logits) - batch.start[index]
        )
        has_front = feed.is_detached and self.model.shift_logits
        places = places + int(has_front)
        is_fed = (places >= 0) & (places < batch.num_fed + int(has_front))
        unanswered = asked[~is_fed]
        asked, index, places = asked[is_fed], index[is_fed], places[is_fed]
        counts = torch.bincount(index, minlength=len(rows)).tolist()
        probe = self._row_probe(view, rows, batch) if is_charged else None
        inside = self._inside_forward(view, rows, feed, batch, is_charged, cache)
        inputs = (batch.embeds, batch.positions, batch.key_mask)
        extra: dict[str, Any] = {} if probe is None else {"probe": probe}
        if inside is not None:
            extra["inside"] = inside
        if cache is None:
            hidden = self.model.hidden_states(*inputs, **extra)
        else:
            hidden = self.model.hidden_states(*inputs, cache.memory(feed, batch), **extra)
            if feed.is_prompt:
                cache.keep_last(batch, hidden)
            elif has_front:
                hidden = cache.with_last(batch, hidden)
        if is_charged:
            self._charge(view, rows, counts, feed, batch, probe is not None, inside)
        if probe is not None and self._watch is not None:
            self._watch.take(probe)
        if not len(asked):
            return unanswered
        # Stages between layers took tokens in front of the canvas away.
        places = places - (batch.num_fed + int(has_front) - hidden.shape[1])
        index, places = index.to(self.device), places.to(self.device)
        picked = hidden[index, places]
        unconditional = None
        if self.settings.cfg_scale > 0:
            unconditional = hidden[index + len(rows), places]
        self._note_drawn(rows, feed, batch)
        draws = is_charged and samples and self.settings.temperature > 0
        noise = self._noise(rows, counts, asked[:, 1]) if draws else None
        previous = None if log_prob is None else log_prob.at(asked)
        proposal = self._propose(picked, unconditional, noise, _statistics(prediction), previous)
        self.has_nan |= proposal.log_prob.isnan().any()
        asked = asked.to(self.device)
        for name in ("tokens", "top_tokens", "log_prob", *_statistics(prediction)):
            values = getattr(proposal, name)
            getattr(prediction, name).index_put_((asked[:, 0], asked[:, 1]), values)
        return unanswered

    def _row_probe(self, view: View, rows: list[int], batch: _Batch) -> RowProbe | None:
        """Observes a forward that feeds the whole canvas of rows that the stage waits for."""
        first = int(batch.start[0])
        covers = first <= batch.canvas_start
        covers = covers and first + batch.num_fed >= batch.canvas_start + self.canvas.width
        if self._watch is None or not view.has_visual or not covers:
            return None
        return self._watch.probe(rows, self.canvas, first, batch.canvas_start, batch.key_mask)

    def _inside_forward(
        self,
        view: View,
        rows: list[int],
        feed: Feed,
        batch: _Batch,
        is_charged: bool,
        cache: _ViewCache | None,
    ) -> InsideForward | None:
        """What acts between the layers of a forward."""
        if self._inside is None or not view.has_visual:
            return None
        return InsideForward(
            self._inside,
            rows,
            self.canvas,
            batch.padding,
            batch.positions,
            batch.canvas_start + self.canvas.width + self.num_suffix,
            None if feed.is_whole else batch.columns,
            decides=is_charged,
            has_cache=cache is not None,
        )

    def end_step(self) -> list[Pruning]:
        """Lets the stage prune the rows that it has seen; the loop calls it after each commit.

        From the next forward on, views with visual tokens show the shortened prompts, and their
        caches begin anew in these rows.
        """
        if self._watch is None or not self._watch.is_waiting:
            return []
        prunings = self._watch.settle(self.canvas)
        for pruning in prunings:
            before, self._shown[pruning.row] = self._shown[pruning.row], pruning.prompt
            self._num_visual[pruning.row] -= before.num_visual - pruning.prompt.num_visual
        for view in [view for view in self._layouts if view.has_visual]:
            width = self._layouts.pop(view).embeds.shape[1]
            if view in self._caches:
                crop = width - self._layout(view).embeds.shape[1]
                self._caches[view].restart([pruning.row for pruning in prunings], crop)
        for view in [view for view in self._forward_costs if view.has_visual]:
            del self._forward_costs[view]
        return prunings

    def _charge(
        self,
        view: View,
        rows: Sequence[int],
        counts: Sequence[int],
        feed: Feed,
        batch: _Batch,
        has_probe: bool,
        inside: InsideForward | None,
    ) -> None:
        """Books a forward of some rows, `counts` positions given to the head."""
        self.meter.calls += 1
        lengths, tail = self.sequence_lengths(view), self.canvas.width + self.num_suffix
        shapes = [
            RowShape(
                num_fed=lengths[row] if feed.is_whole else batch.num_fed,
                length=lengths[row],
                num_prompt=lengths[row] - tail,
                num_layers=self.meter.geometry.num_layers,
                num_front=batch.num_front,
                frame_sizes=self._layout(view).frame_sizes[row] if self.has_cache else (),
            )
            for row in rows
        ]
        asked, layers = [], 0
        if has_probe and self._watch is not None:
            asked = [self._watch.num_asked(row) for row in rows]
            layers = self._watch.request.num_layers(self.meter.geometry.num_layers)
        if inside is not None:
            works = [inside.works(entry) for entry in range(len(rows))]
            self._note_works(view, feed, rows, works)
        else:
            works = [feed.work(shape) for shape in shapes]
        passes = {view.name: (shapes, works)}
        if self.settings.cfg_scale > 0:
            twins = [replace(shape, frame_sizes=()) for shape in shapes]
            passes["UNCONDITIONAL"] = (twins, [feed.work(shape) for shape in twins])
        for name, (own, works) in passes.items():
            is_asked = name == view.name
            self.meter.charge(
                name,
                feed.kind,
                rows,
                works,
                [feed.num_keys(shape) for shape in own],
                counts,
                asked if is_asked else (),
                layers,
            )

    def _note_works(
        self, view: View, feed: Feed, rows: Sequence[int], works: Sequence[tuple[Work, ...]]
    ) -> None:
        if self._inside is None or not feed.is_whole:
            return
        for row, work in zip(rows, works, strict=True):
            self._inside.note(row, work)
        self._forward_costs.pop(view, None)

    def forward_cost(self, view: View) -> Tensor:
        """`(B,)` float64 decoder FLOPs of each row's next whole-sequence forward under `view`.

        With stages between layers: of one like the row's newest, and at first the most that it may
        cost.
        """
        if view not in self._forward_costs:
            geometry, has_twin = self.meter.geometry, self.settings.cfg_scale > 0
            flops = []
            for row, length in enumerate(self.sequence_lengths(view)):
                whole = forward_flops(geometry, length, length)
                own = whole
                if self._inside is not None and view.has_visual:
                    works = self._inside.works(row, length)
                    own = sum(layer_flops(geometry, work) for work in works)
                flops.append(own + has_twin * whole + self._attention_cost(view, row, length))
            cost = torch.tensor(flops, dtype=torch.float64, device=self.device)
            self._forward_costs[view] = cost
        return self._forward_costs[view]

    def _attention_cost(self, view: View, row: int, length: int) -> int:
        watch, geometry = self._watch, self.meter.geometry
        if watch is None or not view.has_visual or not watch.waits_for(row):
            return 0
        layers = watch.request.num_layers(geometry.num_layers)
        return attention_row_flops(geometry, len(watch.queries(self.canvas, row)), length, layers)

    def uniform(self, positions: Tensor) -> Tensor:
        """`(B, C)` float32 random numbers in [0, 1) at the asked positions.

        Each row draws from its own generator.
        """
        return self._canvas_numbers(positions, torch.Tensor.uniform_)

    def exponential(self, positions: Tensor) -> Tensor:
        """`(B, C)` float32 numbers of mean 1, exponentially distributed, as `uniform`."""
        return self._canvas_numbers(positions, torch.Tensor.exponential_)

    def _canvas_numbers(self, positions: Tensor, fill: Callable[..., Tensor]) -> Tensor:
        """Numbers for the whole canvas, or as the preset's stream has it."""
        drawn = torch.zeros(positions.shape, device=self.device)
        stream = self.settings.quirks.random_stream
        for row in positions.any(dim=1).nonzero()[:, 0].tolist():
            length, front, generator = self.canvas.width, 0, self.generators[row]
            if stream == "masked":
                places = positions[row].nonzero()[:, 0]
                drawn[row, places] = fill(drawn.new_empty(len(places)), generator=generator)
                continue
            if stream != "rows":
                length, front = self._drawn.get(row) or self._whole(row)
            numbers = fill(drawn.new_empty(length), generator=generator)
            first, last = max(0, -front), min(self.canvas.width, length - front)
            drawn[row, first:last] = numbers[first + front : last + front]
        return drawn

    def _empty(self, statistics: Collection[str]) -> Prediction:
        shape = self.canvas.tokens.shape
        minus_infinity = torch.full(shape, float("-inf"), device=self.device)
        return Prediction(
            tokens=torch.full_like(self.canvas.tokens, self._mask_id),
            top_tokens=torch.full_like(self.canvas.tokens, self._mask_id),
            log_prob=minus_infinity,
            margin=minus_infinity.clone() if "margin" in statistics else None,
            logit_margin=minus_infinity.clone() if "logit_margin" in statistics else None,
            entropy=-minus_infinity if "entropy" in statistics else None,
            kl=-minus_infinity if "kl" in statistics else None,
        )

    def _layout(self, view: View) -> _Layout:
        if view not in self._layouts:
            prompts = (
                self._shown if view.has_visual else [_text_only(p, view) for p in self._prompts]
            )
            self._layouts[view] = _pad_left(prompts)
        return self._layouts[view]

    def _view_cache(self, view: View) -> _ViewCache | None:
        if self._policy is None:
            return None
        if view not in self._caches:
            lead = self.canvas.lead
            bounds = [(first + lead, last + lead) for first, last in self.settings.blocks.bounds]
            num_rows = len(self._prompts)
            passes = 2 if self.settings.cfg_scale > 0 else 1
            self._caches[view] = _ViewCache(self._policy, bounds, num_rows, passes)
        return self._caches[view]

    def _view_log_prob(self, view: View, asked: Tensor) -> _ViewLogProb:
        """What distributions of `view` are kept in, with room for the `(n, 2)` asked positions."""
        if view not in self._log_probs:
            shape = (len(self._prompts), self.canvas.width)
            self._log_probs[view] = _ViewLogProb(shape, self._num_candidates, self.device)
        self._log_probs[view].make_room(asked)
        return self._log_probs[view]

    def _batch(self, view: View, rows: list[int], feed: Feed, *, is_cached: bool) -> _Batch:
        """The fed part of the asked rows; with guidance, of their unconditional twins as well."""
        layout = self._layout(view)
        lengths = [layout.lengths[row] for row in rows]
        # Without a cache, columns that are padding in all of these rows are left out.
        crop = 0 if is_cached else layout.embeds.shape[1] - max(lengths)
        index = torch.tensor(rows, device=self.device)
        prompt, canvas = layout.embeds[index, crop:], self._canvas_embeds(index)
        num_rows, tail = len(rows), self.canvas.width + self.num_suffix
        suffix = [] if self._suffix is None else [self._suffix.expand(num_rows, -1, -1)]
        embeds, frames = torch.cat([prompt, canvas, *suffix], dim=1), layout.frames[index, crop:]
        offsets = torch.arange(tail, device=self.device)
        positions = torch.cat(
            [layout.positions[index, crop:], layout.next_position[index, None] + offsets], dim=1
        )
        key_mask = None
        if min(lengths) < prompt.shape[1]:
            is_real = layout.is_real[index, crop:]
            key_mask = torch.cat([is_real, is_real.new_ones(num_rows, tail)], dim=1)
        if self.settings.cfg_scale > 0:
            masked = torch.cat([self._mask_embed.expand_as(prompt), canvas, *suffix], dim=1)
            masked[:, prompt.shape[1] : prompt.shape[1] + self.canvas.lead] = self._mask_embed
            embeds, positions = torch.cat([embeds, masked]), torch.cat([positions, positions])
            frames = torch.cat([frames, torch.full_like(frames, NO_FRAME)])
            key_mask = None if key_mask is None else torch.cat([key_mask, key_mask])

        start, columns, total = torch.zeros(num_rows, dtype=torch.long), None, embeds.shape[1]
        if not feed.is_whole:
            first, last = self._fed_columns(feed, prompt.shape[1], total)
            start += first
            columns = torch.arange(first, last, device=self.device).expand(len(embeds), -1)
            embeds, positions = embeds[:, first:last], positions[:, first:last]
        return _Batch(
            embeds=embeds,
            positions=positions,
            key_mask=key_mask,
            frames=frames,
            rows=index,
            columns=columns,
            start=start,
            canvas_start=prompt.shape[1],
            num_front=min(int(self.model.shift_logits), prompt.shape[1]),
            padding=tuple(prompt.shape[1] - length for length in lengths),
        )

    def _fed_columns(self, feed: Feed, canvas_start: int, total: int) -> tuple[int, int]:
        """First sequence column that is fed, and the one behind the last."""
        first = 0
        if feed.first is not None:
            first = canvas_start + feed.first
            first -= int(self.model.shift_logits and not feed.is_detached)
        last = total if feed.last is None else canvas_start + feed.last
        return max(first, 0), min(last, total)

    def _canvas_embeds(self, rows: Tensor) -> Tensor:
        embeds = self.model.embed(self.canvas.tokens[rows].clamp_min(0))
        lead = self.canvas.lead
        if self._lead_embeds is not None:
            is_open = self._lead_is_open[rows].unsqueeze(-1)
            embeds[:, :lead] = torch.where(
                is_open, embeds[:, :lead], self._lead_embeds[rows].to(embeds.dtype)
            )
        return embeds

    def _noise(
        self, rows: list[int], counts: list[int], columns: Tensor
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """How many of the asked canvas columns, row by row, draw their tokens from what."""
        size, quirks = self._num_candidates, self.settings.quirks
        for row, wanted in zip(rows, columns.split(counts), strict=True):
            if quirks.token_sampling == "categorical":
                yield len(wanted), {"generator": self.generators[row]}
            elif quirks.random_stream != "rows":
                yield len(wanted), {"uniform": self._noise_of_whole_row(row, wanted)}
            else:
                for part in wanted.split(_NOISE_CHUNK):
                    yield len(part), {"uniform": self._uniform_numbers(row, len(part), size)}

    def _noise_of_whole_row(self, row: int, columns: Tensor) -> Tensor:
        """Draws for every position that `_note_drawn` noted, and keeps the asked columns."""
        length, front = self._drawn[row]
        wanted = columns + front
        kept = []
        for start in range(0, length, _NOISE_CHUNK):
            part = self._uniform_numbers(
                row, min(_NOISE_CHUNK, length - start), self._num_candidates
            )
            inside = wanted[(wanted >= start) & (wanted < start + _NOISE_CHUNK)] - start
            kept.append(part[inside.to(self.device)])
        return torch.cat(kept)

    def _note_drawn(self, rows: Sequence[int], feed: Feed, batch: _Batch) -> None:
        """Keeps what programs that draw for all of a forward's positions draw for."""
        if self.settings.quirks.random_stream == "block":
            return
        for row in rows:
            self._drawn[row] = (
                self._whole(row) if feed.first is None else (batch.num_fed, -feed.first)
            )

    def _note_blocks(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Keeps what programs that draw for all of a block's positions draw for."""
        for row in rows:
            first, last = self.settings.blocks.bounds[blocks[row]]
            self._drawn[row] = (last - first, -first - self.canvas.lead)

    def _whole(self, row: int) -> tuple[int, int]:
        length = self.sequence_lengths(FULL)[row]
        return length, length - self.num_suffix - self.canvas.width

    def _uniform_numbers(self, row: int, count: int, size: int) -> Tensor:
        return torch.rand(
            (count, size),
            dtype=self._noise_dtype,
            generator=self.generators[row],
            device=self.device,
        )

    def _propose(
        self,
        hidden: Tensor,
        unconditional: Tensor | None,
        noise: Iterator[tuple[int, dict[str, Any]]] | None,
        statistics: Collection[str],
        previous: PreviousLogProb | None,
    ) -> Proposal:
        temperature = 0.0 if noise is None else self.settings.temperature
        pieces = ((size, {}) for size in _chunks(len(hidden), _HEAD_CHUNK))
        unproposable = None if self.settings.quirks.may_predict_mask else self._mask_id
        parts, start = [], 0
        for size, source in pieces if noise is None else noise:
            if not size:
                continue
            piece = slice(start, start + size)
            logits = self.model.logits(hidden[piece])[:, : self._num_candidates]
            if unconditional is not None:
                other = self.model.logits(unconditional[piece])[:, : self._num_candidates].float()
                logits = other + (self.settings.cfg_scale + 1) * (logits.float() - other)
            logits.index_fill_(1, self._suppressed, float("-inf"))
            self._drop_unlikely(logits, unproposable)
            parts.append(
                propose(
                    logits,
                    temperature=temperature,
                    **source,
                    statistics=statistics,
                    unproposable=unproposable,
                    previous=None
                    if previous is None
                    else replace(previous, rows=previous.rows[piece]),
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

    def _drop_unlikely(self, logits: Tensor, unproposable: int | None) -> None:
        """Leaves the tokens that take part, and an id that cannot be proposed as it is."""
        settings = self.settings
        if settings.num_likeliest is None and settings.top_p is None:
            return
        withheld = None if unproposable is None else logits[:, unproposable].clone()
        if unproposable is not None:
            logits[:, unproposable] = float("-inf")
        drop_unlikely(logits, settings.num_likeliest, settings.top_p, settings.temperature or 1.0)
        if withheld is not None:
            logits[:, unproposable] = withheld


@dataclass(frozen=True)
class _Batch:
    """One forward's input; R rows, doubled by guidance in the first four and in `columns`."""

    embeds: Tensor
    positions: Tensor
    key_mask: Tensor | None
    frames: Tensor  # (R, num_prompt), see `Prompt.frames`
    rows: Tensor  # (R,)
    columns: Tensor | None  # (R, n) sequence columns that are fed; None for all
    start: Tensor  # (R,) on the host: sequence column of the first fed position
    canvas_start: int
    num_front: int  # prompt columns that speak for the canvas
    padding: tuple[int, ...]  # columns in front of each prompt; not doubled

    @property
    def num_fed(self) -> int:
        return self.embeds.shape[1]


class _ViewCache:
    """A policy's cache for one view, and where each row is as that view counts."""

    def __init__(
        self, policy: CachePolicy, bounds: list[tuple[int, int]], num_rows: int, passes: int
    ) -> None:
        self._policy, self._bounds = policy, bounds
        self._cache = policy.start()
        self._num_rows, self._passes = num_rows, passes
        self._last: Tensor | None = None
        self._block, self._in_block, self._forwards = ([value] * num_rows for value in (-1, 0, 0))

    @property
    def num_bytes(self) -> int:
        return self._cache.num_bytes

    def plan(
        self, rows: list[int], blocks: Tensor | None, prompt_lengths: Sequence[int]
    ) -> dict[int, tuple[Feed, ...]]:
        """Each row's feeds, for forwards that then run; no feed reaches into a row's padding."""
        if blocks is None:
            raise AssertionError("a cache policy plans by blocks")
        feeds = {}
        current = blocks.tolist()
        for row in rows:
            if current[row] != self._block[row]:
                self._block[row], self._in_block[row] = current[row], 0
            first, last = self._bounds[current[row]]
            clock = Clock(first, last, self._in_block[row], self._forwards[row])
            planned = self._policy.plan(clock)
            feeds[row] = tuple(
                replace(feed, first=-prompt_lengths[row])
                if feed.first is not None and feed.first < -prompt_lengths[row]
                else feed
                for feed in (planned if isinstance(planned, tuple) else (planned,))
            )
            self._in_block[row] += 1
            self._forwards[row] += 1
        return feeds

    def restart(self, rows: Sequence[int], crop: int) -> None:
        """Plans for these rows as for new responses; `crop` leading columns are there no more."""
        for row in rows:
            self._block[row], self._in_block[row], self._forwards[row] = -1, 0, 0
        if crop:
            self._cache.crop(crop)

    def _twins(self, batch: _Batch) -> Tensor:
        """Rows of the store: a batch's rows, and with guidance their twins."""
        return torch.cat([batch.rows + part * self._num_rows for part in range(self._passes)])

    def keep_last(self, batch: _Batch, hidden: Tensor) -> None:
        """Keeps the last of the states `(R, n, D)`."""
        if self._last is None:
            self._last = hidden.new_zeros(self._num_rows * self._passes, hidden.shape[2])
        self._last[self._twins(batch)] = hidden[:, -1]

    def with_last(self, batch: _Batch, hidden: Tensor) -> Tensor:
        """The states `(R, n, D)` behind the ones that were kept: `(R, 1 + n, D)`."""
        if self._last is None:
            raise AssertionError("a detached feed comes after a prompt by itself")
        return torch.cat([self._last[self._twins(batch), None], hidden], dim=1)

    def memory(self, feed: Feed, batch: _Batch) -> Memory:
        return self._cache.memory(
            Fed(
                feed=feed,
                rows=self._twins(batch),
                num_rows=self._num_rows * self._passes,
                columns=batch.columns,
                num_prompt=batch.canvas_start,
                frames=batch.frames,
                padding=batch.padding * self._passes,
                num_front=batch.num_front,
            )
        )


class _ViewLogProb:
    """The distributions that one view gave last: a vocabulary of float16 per asked position.

    When a row asks again, those of its positions that it leaves out are forgotten, and their place
    is used again.
    """

    def __init__(self, shape: tuple[int, int], vocab_size: int, device: torch.device) -> None:
        self._slots = torch.full(shape, -1)  # (B, C) on the host: rows of the store
        self._store = torch.empty(0, vocab_size, dtype=torch.float16, device=device)

    def make_room(self, asked: Tensor) -> None:
        """Gives a place to each of the `(n, 2)` positions that has none."""
        is_asked = torch.zeros_like(self._slots, dtype=torch.bool)
        is_asked[asked[:, 0], asked[:, 1]] = True
        self._slots[is_asked.any(dim=1, keepdim=True) & ~is_asked] = -1
        is_new = is_asked & (self._slots < 0)
        num_new, num_slots = int(is_new.sum()), len(self._store)
        if not num_new:
            return
        is_free = torch.ones(num_slots, dtype=torch.bool)
        is_free[self._slots[self._slots >= 0]] = False
        free = is_free.nonzero()[:, 0]
        missing = max(0, num_new - len(free))
        if missing:
            more = self._store.new_empty(missing, self._store.shape[1])
            self._store = torch.cat([self._store, more])
            free = torch.cat([free, torch.arange(num_slots, num_slots + missing)])
        self._slots[is_new] = free[:num_new]
        self._store[free[:num_new].to(self._store.device)] = float("-inf")

    def at(self, asked: Tensor) -> PreviousLogProb:
        """The places of `(n, 2)` positions that have room."""
        rows = self._slots[asked[:, 0], asked[:, 1]]
        return PreviousLogProb(self._store, rows.to(self._store.device))


def _statistics(prediction: Prediction) -> tuple[str, ...]:
    """Which of the optional statistics a prediction holds."""
    names = ("margin", "logit_margin", "entropy", "kl")
    return tuple(name for name in names if getattr(prediction, name) is not None)


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
        spans=tuple(span for span in prompt.spans if span.start + span.length <= keep),
        position_ids=prompt.positions()[:keep],
        end_position=prompt.next_position - count,
        frame_ids=prompt.frames()[:keep],
        salience=None if prompt.salience is None else prompt.salience[:keep],
        tower_keys=None if prompt.tower_keys is None else prompt.tower_keys[:keep],
    )


def _text_only(prompt: Prompt, view: View) -> Prompt:
    keep = ~prompt.is_visual
    text = replace(
        prompt,
        embeds=prompt.embeds[keep],
        ids=prompt.ids[keep],
        is_visual=prompt.is_visual[keep],
        spans=(),
        frame_ids=None,
        salience=None,
        tower_keys=None,
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
    frames = torch.full_like(positions, NO_FRAME)
    for row, prompt in enumerate(prompts):
        start = longest - prompt.length
        embeds[row, start:] = prompt.embeds
        positions[row, start:] = prompt.positions()
        is_real[row, start:] = True
        frames[row, start:] = prompt.frames()
    ends = torch.tensor([prompt.next_position for prompt in prompts], device=first.device)
    return _Layout(embeds, frames, positions, is_real, ends, lengths)
