"""MARS-Cache: the prompt is refreshed now and then, pictures and deep layers at their own pace."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dlm_decode.cache import register_cache
from dlm_decode.cache.base import Cache, Clock, Fed, Feed, Memory, RowShape
from dlm_decode.cache.frames import FrameAttention, is_bounded, num_pairs
from dlm_decode.cache.prefix import check_interval
from dlm_decode.cache.window import KeyValues, stored
from dlm_decode.canvas import NO_FRAME
from dlm_decode.cost import Work
from dlm_decode.errors import InvalidInputError

if TYPE_CHECKING:
    from dlm_decode.models.attention import Observe
    from dlm_decode.models.llada import LLaDALayer

__all__ = ["Mars"]


@register_cache("mars")
@dataclass(frozen=True)
class Mars:
    """Refreshes visual and textual prompt states at intervals, and deep layers more often.

    **A reconstruction.** No program of MARS-Cache was published with VidLaDA, and the paper's own
    text was not at hand: it was written from a description of the method. Results are not those of
    the paper.

    The first forward of a response computes everything. From then on the canvas, and a suffix, is
    computed in every layer of every forward, against kept keys and values of the prompt. Prompt
    positions are recomputed when it is their turn: visual and textual ones each at an interval, in
    the deepest group of layers; each group in front of it waits `growth` times as long, so whenever
    a group is refreshed all deeper ones are refreshed in the same forward. A group that is
    refreshed while the one in front of it is not starts from the states that the latter gave last.

    In such a refresh a visual token attends to its own frame, to the frames within `radius`, to the
    anchors of all other frames, and to text and canvas; text and canvas attend to everything.
    Anchors are the tokens of each frame that got most attention in the first forward, found for
    each layer by itself. An image is one frame. A prompt without pictures has text intervals only,
    and so has guidance's second forward.

    Known from the description: asynchronous intervals, visual about twice as long as textual; the
    rule for depth groups; neighbours one frame away; anchors of every frame, found once from
    equidistant queries, 128 of which were the best compromise. Not known: the intervals themselves;
    how many groups and by how much their intervals grow; how many anchors; that layers do not share
    anchors; that heads are summed up; that queries are taken from visual tokens; that intervals
    count the forwards of a response.

    The defaults are what keeps the answers of the shipped `tiny-video` (docs/measurements.md): all
    layers refresh alike, text in every forward, and a frame sees two on either side. On VidLaDA, 64
    frames and 128 steps take 1/11 of the FLOPs with
    `text_interval=2,growth=2,radius=1,anchors_per_frame=8`, and are reported to run 10 to 12 times
    as fast, so its authors' constants may be nearer to those; `tiny-video` loses a third of its
    right answers with them.

    Args:
        visual_interval: forwards between refreshes of visual positions in the deepest group.
        text_interval: forwards between refreshes of the prompt's other positions there.
        num_groups: groups of layers, as equal as can be; a group for each layer if there are fewer.
        growth: a group's intervals are this many times those of the next deeper one.
        radius: frames on either side that a frame attends to.
        anchors_per_frame: tokens of each frame that all frames attend to.
        anchor_queries: visual tokens whose attention decides about anchors, at most.

    With intervals and `growth` 1 and a radius that reaches from the first frame to the last, it is
    the same as no cache.

    Raises:
        InvalidInputError: an interval, a number of groups, of queries or a growth below 1, or a
            negative radius or number of anchors.

    Source: reconstructed after VidLaDA (arXiv 2601.17868), MARS-Cache.
    """

    visual_interval: int = 4
    text_interval: int = 1
    num_groups: int = 4
    growth: int = 1
    radius: int = 2
    anchors_per_frame: int = 16
    anchor_queries: int = 128

    def __post_init__(self) -> None:
        for name in ("visual_interval", "text_interval", "num_groups", "growth", "anchor_queries"):
            value = getattr(self, name)
            if value is None:
                raise InvalidInputError(f"{name} must be a whole number of at least 1, got None.")
            check_interval(name, value)
        for name in ("radius", "anchors_per_frame"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidInputError(
                    f"{name} must be a whole number of at least 0, got {value!r}."
                )

    def plan(self, clock: Clock) -> Feed:
        """Everything at first; then the canvas, and what is due of the prompt."""
        visual = self._num_due(clock.forwards, self.visual_interval)
        text = self._num_due(clock.forwards, self.text_interval)
        if not visual and not text:
            return _MarsFeed("suffix", 0, policy=self)
        is_whole = visual == text == self.num_groups
        return _MarsFeed(
            "full" if is_whole else "partial",
            policy=self,
            visual=visual,
            text=text,
            is_first=clock.forwards == 0,
        )

    def start(self) -> Cache:
        """An empty cache."""
        return _MarsCache()

    def _num_due(self, forwards: int, interval: int) -> int:
        """Groups that are refreshed, counted from the deepest."""
        due = [forwards % (interval * self.growth**group) for group in range(self.num_groups)]
        return due.count(0)


class _Due(NamedTuple):
    """Which prompt positions a layer recomputes."""

    visual: bool
    text: bool


@dataclass(frozen=True)
class _MarsFeed(Feed):
    policy: Mars = field(default_factory=Mars)
    visual: int = 0  # groups whose visual positions are recomputed, counted from the deepest
    text: int = 0
    is_first: bool = False

    def group(self, layer: int, num_layers: int) -> int:
        """Group of a layer, counted from the shallowest."""
        return layer * min(self.policy.num_groups, num_layers) // num_layers

    def due(self, layer: int, num_layers: int) -> _Due:
        groups_behind = self.group(num_layers - 1, num_layers) - self.group(layer, num_layers)
        return _Due(visual=groups_behind < self.visual, text=groups_behind < self.text)

    def work(self, row: RowShape) -> tuple[Work, ...]:
        due = [self.due(layer, row.num_layers) for layer in range(row.num_layers)]
        work = {what: self._work_when(what, row) for what in set(due)}
        return tuple(work[what] for what in due)

    def _work_when(self, due: _Due, row: RowShape) -> Work:
        policy, sizes, length = self.policy, row.frame_sizes, row.length
        num_visual = sum(sizes)
        if self.is_first:
            has_anchors = is_bounded(sizes, policy.radius) and policy.anchors_per_frame > 0
            asked = min(policy.anchor_queries, num_visual) if has_anchors else 0
            return Work(length, length**2, scores=asked * length)
        wide = length - row.num_prompt + row.num_front
        if due.text:
            wide += row.num_prompt - row.num_front - num_visual
        if not due.visual:
            return Work(wide, wide * length)
        if not is_bounded(sizes, policy.radius):
            return Work(wide + num_visual, (wide + num_visual) * length)
        narrow = num_pairs(sizes, length - num_visual, policy.radius, policy.anchors_per_frame)
        return Work(wide + num_visual, wide * length + narrow)


@dataclass
class _Scene:
    """What a row holds, its positions counted from its first real one.

    Attributes:
        text: prompt positions outside of frames, without those that speak for the canvas.
        visual: positions in frames.
        canvas: all others: those that every forward computes.
        frames: who attends to whom; `None` where everything attends to everything.
        anchors: by layer.
    """

    text: Tensor
    visual: Tensor
    canvas: Tensor
    frames: FrameAttention | None
    anchors: list[Tensor] = field(default_factory=list)


@dataclass
class _MarsCache(KeyValues):
    """Keys and values of the whole sequence, and what else the prompt's positions left.

    Attributes:
        states: by layer that begins a group, but for the first: `(rows, P, D)` inputs of the layer.
        scenes: by row.
    """

    states: dict[int, Tensor] = field(default_factory=dict)
    scenes: dict[int, _Scene] = field(default_factory=dict)

    def memory(self, fed: Fed) -> Memory:
        if not isinstance(fed.feed, _MarsFeed):
            raise AssertionError("the cache of `mars` runs the feeds that `mars` plans")
        return _MarsMemory(self, fed, fed.feed)

    def crop(self, count: int) -> None:
        super().crop(count)
        # Scenes and anchors count from a row's first real position, which stays.
        self.states = {at: part[:, count:].contiguous() for at, part in self.states.items()}

    @property
    def num_bytes(self) -> int:
        anchors = chain.from_iterable(scene.anchors for scene in self.scenes.values())
        more = chain(self.states.values(), anchors)
        return super().num_bytes + sum(part.numel() * part.element_size() for part in more)


class _Part(NamedTuple):
    """The positions of all rows that a layer computes, one row behind the other."""

    rows: Tensor  # (n,) rows of the batch
    columns: Tensor  # (n,) columns of the sequence
    stored_rows: Tensor  # (n,) rows of the store
    counts: list[tuple[int, int]]  # by row: those that attend to everything, then the others


class _MarsMemory:
    def __init__(self, cache: _MarsCache, fed: Fed, feed: _MarsFeed) -> None:
        self._cache, self._fed, self._feed = cache, fed, feed
        self._rows: list[int] = fed.rows.tolist()
        self._starts = fed.padding or (0,) * len(self._rows)
        self._num_kept = fed.num_prompt - fed.num_front
        self._first = 0 if feed.is_whole else self._num_kept  # column that `hidden` begins with
        self._parts: dict[_Due, _Part] = {}

    def run_layer(
        self,
        index: int,
        layer: LLaDALayer,
        hidden: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        mask: Any,
        observe: Observe | None = None,
    ) -> Tensor:
        feed, num_layers = self._feed, layer.self_attn.config.num_hidden_layers
        due = feed.due(index, num_layers)
        if index == 0:
            if feed.is_first:
                self._begin(hidden.shape[1])
            hidden = hidden.clone()  # it is written to
        elif feed.is_whole and feed.group(index, num_layers) > feed.group(index - 1, num_layers):
            self._enter_group(index, hidden, feed.due(index - 1, num_layers))
        scenes = (self._cache.scenes[row] for row in self._rows)
        if feed.is_first or (all(due) and all(scene.frames is None for scene in scenes)):
            return self._run_all(index, layer, hidden, cos_sin, mask, observe)
        if observe is not None:
            raise AssertionError("attention is asked for in forwards that feed everything")
        return self._run_part(index, layer, hidden, cos_sin, due)

    def _begin(self, total: int) -> None:
        """Looks at what the rows hold."""
        fed, policy = self._fed, self._feed.policy
        device = fed.rows.device
        for index, (row, start) in enumerate(zip(self._rows, self._starts, strict=True)):
            frames = torch.full((total,), NO_FRAME, device=device)
            if fed.frames is not None:
                frames[: self._num_kept] = fed.frames[index, : self._num_kept]
            frames = frames[start:]
            is_visual = frames != NO_FRAME
            is_canvas = torch.arange(start, total, device=device) >= self._num_kept
            sizes = torch.bincount(frames[is_visual]).tolist()
            attention = None
            if is_bounded(sizes, policy.radius):
                attention = FrameAttention.create(frames, policy.radius, policy.anchors_per_frame)
            self._cache.scenes[row] = _Scene(
                text=(~is_visual & ~is_canvas).nonzero()[:, 0],
                visual=is_visual.nonzero()[:, 0] if attention is None else attention.visual,
                canvas=is_canvas.nonzero()[:, 0],
                frames=attention,
            )

    def _enter_group(self, index: int, hidden: Tensor, before: _Due) -> None:
        """Keeps what the group in front recomputed, and takes from what is kept what it did not."""
        states, fed, count = self._cache.states, self._fed, self._num_kept
        is_all = len(self._rows) == fed.num_rows
        fresh = hidden[:, :count]
        if not all(before):
            kept = states[index] if is_all else states[index][fed.rows]
            if any(before):
                is_visual = self._is_visual()
                fresh = torch.where(is_visual == before.visual, fresh, kept)
            else:
                fresh = kept
            hidden[:, :count] = fresh
        if not any(before):
            return
        if is_all:
            states[index] = fresh.clone()
            return
        if index not in states:
            states[index] = fresh.new_zeros(fed.num_rows, *fresh.shape[1:])
        states[index][fed.rows] = fresh

    def _is_visual(self) -> Tensor:
        """`(R, P, 1)` bool."""
        frames, count = self._fed.frames, self._num_kept
        if frames is None:
            shape = (len(self._rows), count, 1)
            return torch.zeros(shape, dtype=torch.bool, device=self._fed.rows.device)
        return frames[:, :count, None] != NO_FRAME

    def _run_all(
        self,
        index: int,
        layer: LLaDALayer,
        hidden: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        mask: Any,
        observe: Observe | None,
    ) -> Tensor:
        """The layer as without a cache; keys and values are kept, and anchors found."""
        attention, cache, fed = layer.self_attn, self._cache, self._fed
        query, key, value = attention.project(layer.input_layernorm(hidden), cos_sin)
        stored(cache.keys, index, key, fed)
        stored(cache.values, index, value, fed)
        if observe is not None:
            observe(query, key)
        if self._feed.is_first:
            for place, (row, start) in enumerate(zip(self._rows, self._starts, strict=True)):
                scene = cache.scenes[row]
                if scene.frames is not None:
                    own = query[place, :, start:], key[place, :, start:]
                    scene.anchors.append(
                        scene.frames.find_anchors(*own, self._feed.policy.anchor_queries)
                    )
        hidden = hidden + attention.mix(query, key, value, mask)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def _run_part(
        self,
        index: int,
        layer: LLaDALayer,
        hidden: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        due: _Due,
    ) -> Tensor:
        """Writes what the layer gives for the due positions and the canvas into `hidden`."""
        part, attention = self._part(due), layer.self_attn
        at = (part.rows, part.columns - self._first)
        cos, sin = (turn[at[0], :, at[1]].transpose(0, 1)[None] for turn in cos_sin)
        before = hidden[at][None]
        query, key, value = attention.project(layer.input_layernorm(before), (cos, sin))
        keys, values = self._cache.keys[index], self._cache.values[index]
        keys[part.stored_rows, :, part.columns] = key[0].transpose(0, 1)
        values[part.stored_rows, :, part.columns] = value[0].transpose(0, 1)
        mixed, done = [], 0
        for row, start, (wide, narrow) in zip(self._rows, self._starts, part.counts, strict=True):
            scene, own = self._cache.scenes[row], query[:, :, done : done + wide + narrow]
            known = keys[row : row + 1, :, start:], values[row : row + 1, :, start:]
            mixed.append(attention.mix(own[:, :, :wide], *known, None))
            if narrow and scene.frames is not None:
                of_frames = own[0, :, wide:], known[0][0], known[1][0]
                mixed.append(scene.frames.mix(attention, *of_frames, scene.anchors[index])[None])
            done += wide + narrow
        after = before + torch.cat(mixed, dim=1)
        hidden[at] = (after + layer.mlp(layer.post_attention_layernorm(after)))[0]
        return hidden

    def _part(self, due: _Due) -> _Part:
        if due not in self._parts:
            rows, columns, stored_rows, counts = [], [], [], []
            for place, (row, start) in enumerate(zip(self._rows, self._starts, strict=True)):
                scene = self._cache.scenes[row]
                wide, narrow = [scene.canvas], []
                if due.text:
                    wide.append(scene.text)
                if due.visual:
                    (wide if scene.frames is None else narrow).append(scene.visual)
                own = torch.cat(wide + narrow) + start
                columns.append(own)
                rows.append(torch.full_like(own, place))
                stored_rows.append(torch.full_like(own, row))
                counts.append((sum(map(len, wide)), sum(map(len, narrow))))
            self._parts[due] = _Part(
                torch.cat(rows), torch.cat(columns), torch.cat(stored_rows), counts
            )
        return self._parts[due]
