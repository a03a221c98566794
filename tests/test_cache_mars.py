"""MARS-Cache against a slow oracle that masks full attention; limits, costs, views and batches."""

from __future__ import annotations

import pytest
import torch
from golden_models import vidlada, vidlada_prompt

from dlm_decode import cache as caches
from dlm_decode.cache.base import Clock, Fed, RowShape
from dlm_decode.cache.frames import FrameAttention, is_bounded, num_pairs
from dlm_decode.cache.mars import Mars
from dlm_decode.cost import Work, forward_flops, kv_bytes_per_token, layer_flops
from dlm_decode.cost.geometries import LLADA_8B
from dlm_decode.errors import InvalidInputError
from dlm_decode.models.llada import rotary
from dlm_decode.vlm import DiffusionVlm

SAMPLERS = ["baseline", "lown", "fast_dllm:cache=none", "lown:parallel=threshold,threshold=0.2"]
LENGTHS = {"gen_length": 8, "steps": 8, "block_length": 4, "stop": False}
# Text, a frame of three, one of two, one whose tokens are all gone, text, four more, text.
FRAMES = [-1, -1, 0, 0, 0, 1, 1, -1, 3, 3, 3, 3, 4, 4, 5, 6, 6, 6, 6, 6, -1, -1]
SIZES = (3, 2, 0, 4, 2, 1, 5)


@pytest.fixture(scope="module")
def model():
    return vidlada(mm_spatial_pool_mode="max", mm_newline_position="no_token")


@pytest.fixture(scope="module")
def vlm(model):
    return DiffusionVlm(model)


def video(num_frames: int, seed: int = 0) -> dict:
    """Ids around one video of noise; 169 tokens a frame."""
    prompt = vidlada_prompt()
    noise = torch.Generator().manual_seed(seed)
    shape = (num_frames, *prompt["pixel_values"][0].shape[1:])
    return {**prompt, "pixel_values": [torch.randn(shape, generator=noise)]}


def due(policy: Mars, forwards: int, num_layers: int) -> list[tuple[bool, bool]]:
    """Whether visual and textual positions are recomputed, by layer."""
    feed = policy.plan(Clock(0, 4, 0, forwards))
    return [tuple(feed.due(layer, num_layers)) for layer in range(num_layers)]


def test_deep_groups_come_first():
    policy = Mars(visual_interval=4, text_interval=2, num_groups=3, growth=2)
    groups = [0, 0, 0, 1, 1, 1, 2, 2]  # 8 layers in 3 groups
    for forwards in range(100):
        expected = [
            (forwards % (4 * 2 ** (2 - group)) == 0, forwards % (2 * 2 ** (2 - group)) == 0)
            for group in groups
        ]
        assert due(policy, forwards, 8) == expected
        for kind in range(2):
            flags = [flag[kind] for flag in expected]
            assert flags == sorted(flags), "a refresh reaches the last layer"
    assert due(policy, 4, 2) == [(False, True), (True, True)], "a group for each of two layers"
    kinds = [policy.plan(Clock(0, 4, 0, forwards)).kind for forwards in (0, 1, 2, 4, 16)]
    assert kinds == ["full", "suffix", "partial", "partial", "full"]
    together = Mars(visual_interval=2, text_interval=1, growth=1)
    assert due(together, 1, 4) == [(False, True)] * 4
    assert due(together, 2, 4) == [(True, True)] * 4


@pytest.mark.parametrize("radius", [0, 1, 2, 5, 6])
@pytest.mark.parametrize("num_anchors", [0, 2, 4, 99])
def test_pairs_are_those_that_are_seen(radius, num_anchors):
    numbers = torch.tensor(FRAMES)
    assert tuple(torch.bincount(numbers[numbers >= 0]).tolist()) == SIZES
    assert is_bounded(SIZES, radius) == (radius < 6)
    frames = FrameAttention.create(numbers, radius, num_anchors)
    sizes = torch.tensor([size for size in SIZES if size])
    counted = int((frames.is_seen.sum(dim=1) * sizes).sum())
    assert counted == num_pairs(SIZES, 5, radius, num_anchors)
    if radius == 6 or num_anchors == 99:
        assert counted == 17 * 22
    assert not is_bounded((), radius) and not is_bounded((0, 0, 7), radius)


def test_anchors_are_what_gets_most_attention():
    torch.manual_seed(0)
    query, key = torch.randn(4, len(FRAMES), 8), torch.randn(2, len(FRAMES), 8)
    frames = FrameAttention.create(torch.tensor(FRAMES), 1, 2)
    found = frames.find_anchors(query, key, num_queries=99)
    is_visual = torch.tensor(FRAMES) >= 0
    weights = query[is_visual.expand(4, -1)].view(4, -1, 8) @ key[[0, 0, 1, 1]].mT / 8**0.5
    strength = weights.softmax(dim=-1).sum(dim=(0, 1))
    for row, frame in enumerate((0, 1, 3, 4, 5, 6)):
        own = [place for place, number in enumerate(FRAMES) if number == frame]
        best = sorted(own, key=lambda place: -strength[place])[:2]
        assert found[row, : len(best)].tolist() == best
    few = frames.find_anchors(query, key, num_queries=3)
    asked = torch.tensor([place for place, number in enumerate(FRAMES) if number >= 0])[[0, 5, 11]]
    strength = (query[:, asked] @ key[[0, 0, 1, 1]].mT / 8**0.5).softmax(dim=-1).sum(dim=(0, 1))
    assert few[5, 0] == 15 + strength[15:20].argmax()


class Oracle:
    """One row; every layer computes everything, of which only what is due counts."""

    def __init__(self, model, policy: Mars, frames: list[int], num_front: int) -> None:
        self.model, self.policy, self.num_front = model, policy, num_front
        self.frames = torch.tensor(frames)
        self.kept: list[list[torch.Tensor]] = []  # keys and values by layer
        self.inputs: list[torch.Tensor] = []
        self.anchors: list[list[int]] = []
        self.work: list[tuple[int, int]] = []  # of the last forward, by layer

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, forwards: int):
        """States `(S, D)`, and `(S,)` bool where the last layer computed them."""
        config, layers = self.model.config, self.model.model.layers
        cos_sin = rotary(positions[None], config.head_dim, config.rope_theta, embeds.dtype)
        numbers = torch.full((len(embeds),), -1)
        numbers[: len(self.frames) - self.num_front] = self.frames[
            : len(self.frames) - self.num_front
        ]
        is_canvas = torch.arange(len(embeds)) >= len(self.frames) - self.num_front
        flags = due(self.policy, forwards, len(layers))
        hidden, self.work, fresh = embeds, [], torch.ones(len(embeds), dtype=torch.bool)
        for index, layer in enumerate(layers):
            if forwards:
                hidden = torch.where(fresh[:, None], hidden, self.inputs[index])
                self.inputs[index] = hidden
            else:
                self.inputs.append(hidden)
            visual, text = flags[index]
            fresh = is_canvas | ((numbers >= 0) & visual) | ((numbers < 0) & text)
            query, key, value = layer.self_attn.project(
                layer.input_layernorm(hidden[None]), cos_sin
            )
            if forwards:
                old_key, old_value = self.kept[index]
                key = torch.where(fresh[:, None], key, old_key)
                value = torch.where(fresh[:, None], value, old_value)
                self.kept[index] = [key, value]
                is_seen = self.is_seen(numbers, self.anchors[index])
            else:
                self.kept.append([key, value])
                self.anchors.append(self.find(query[0], key[0], numbers))
                is_seen = torch.ones(len(embeds), len(embeds), dtype=torch.bool)
            self.work.append((int(fresh.sum()), int(is_seen[fresh].sum())))
            mixed = layer.self_attn.mix(query, key, value, is_seen[None, None])[0]
            middle = hidden + mixed
            hidden = middle + layer.mlp(layer.post_attention_layernorm(middle))
        return self.model.model.norm(hidden), fresh

    def find(self, query, key, numbers) -> list[int]:
        visual = (numbers >= 0).nonzero()[:, 0]
        count = min(self.policy.anchor_queries, len(visual))
        asked = visual[[i * len(visual) // count for i in range(count)]] if count else visual
        weights = query[:, asked] @ key.mT / query.shape[-1] ** 0.5
        strength = weights.softmax(dim=-1).sum(dim=(0, 1))
        anchors = []
        for frame in set(numbers[visual].tolist()):
            own = (numbers == frame).nonzero()[:, 0].tolist()
            own.sort(key=lambda place: -strength[place])
            anchors += own[: self.policy.anchors_per_frame]
        return anchors

    def is_seen(self, numbers, anchors) -> torch.Tensor:
        is_near = (numbers[:, None] - numbers).abs() <= self.policy.radius
        is_seen = is_near | (numbers < 0) | (numbers < 0)[:, None]
        is_seen[:, anchors] = True
        return is_seen


POLICIES = [
    Mars(),
    Mars(visual_interval=2, text_interval=1, num_groups=2, anchors_per_frame=1, anchor_queries=5),
    Mars(visual_interval=1, text_interval=1, growth=1, radius=0, anchors_per_frame=2),
    Mars(visual_interval=1, text_interval=3, growth=3, num_groups=3, anchors_per_frame=0),
    Mars(visual_interval=1, text_interval=1, growth=1, radius=5),
    Mars(visual_interval=2, text_interval=1, num_groups=2, radius=6),
]


@pytest.mark.parametrize("num_front", [0, 1])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_against_the_oracle(monkeypatch, policy, num_front):
    """A batch of a row of frames and a padded row of text, some forwards with the first alone.

    In float64, norms included: these weights make 4e-3 of a change by 1e-7 of noise.
    """
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model, dtype = vidlada().double(), torch.float64
    torch.manual_seed(0)
    num_prompt, canvas, padding = len(FRAMES), 5, 9
    prompts = [
        torch.randn(num_prompt, 32, dtype=dtype),
        torch.randn(num_prompt - padding, 32, dtype=dtype),
    ]
    oracles = [
        Oracle(model, policy, FRAMES, num_front),
        Oracle(model, policy, [-1] * (num_prompt - padding), num_front),
    ]
    frames = torch.full((2, num_prompt), -1)
    frames[0] = torch.tensor(FRAMES)
    cache, counts = policy.start(), [0, 0]
    with torch.no_grad():
        for turn in range(18):
            rows = [0] if turn in (3, 4, 9) else [0, 1]
            for own in {counts[row] for row in rows}:
                together = [row for row in rows if counts[row] == own]
                feed = policy.plan(Clock(0, canvas, 0, own))
                expected, inputs, positions, real = [], [], [], []
                for row in together:
                    whole = torch.cat([prompts[row], torch.randn(canvas, 32, dtype=dtype)])
                    places = torch.arange(len(whole))
                    expected.append(oracles[row].forward(whole, places, own))
                    space = num_prompt + canvas - len(whole)
                    inputs.append(torch.cat([torch.zeros(space, 32, dtype=dtype), whole]))
                    positions.append(torch.cat([torch.zeros(space).long(), places]))
                    real.append(torch.arange(num_prompt + canvas) >= space)
                    check_work(feed, oracles[row], len(whole), len(whole) - canvas, num_front)
                first = 0 if feed.first is None else num_prompt - num_front
                fed = Fed(
                    feed,
                    torch.tensor(together),
                    2,
                    None if feed.first is None else torch.arange(first, num_prompt + canvas)[None],
                    num_prompt,
                    frames[together],
                    tuple([0, padding][row] for row in together),
                    num_front,
                )
                got = model.hidden_states(
                    torch.stack(inputs)[:, first:],
                    torch.stack(positions)[:, first:],
                    torch.stack(real) if 1 in together else None,
                    cache.memory(fed),
                )
                for states, (wanted, is_fresh), row in zip(got, expected, together, strict=True):
                    start = max(0, len(is_fresh) - len(states))
                    if feed.first is None:
                        states = states[[0, padding][row] :]
                    picked = states[is_fresh[start:]]
                    error = (picked - wanted[is_fresh]).abs().max()
                    assert error < 1e-9, (turn, row, error)
            for row in rows:
                counts[row] += 1


def check_work(feed, oracle, length, num_prompt, num_front):
    numbers = oracle.frames[oracle.frames >= 0]
    shape = RowShape(
        num_fed=length if feed.first is None else length - num_prompt + num_front,
        length=length,
        num_prompt=num_prompt,
        num_layers=len(oracle.work),
        num_front=num_front,
        frame_sizes=tuple(torch.bincount(numbers).tolist()),
    )
    assert [(work.queries, work.pairs) for work in feed.work(shape)] == oracle.work


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_refreshing_all_with_a_wide_radius_is_no_cache(model, vlm, monkeypatch, sampler, backend):
    monkeypatch.setattr(model.config, "_attn_implementation_internal", backend)
    every = {"visual_interval": 1, "text_interval": 1, "growth": 1}
    ask = {**video(4), "sampler": sampler, **LENGTHS}
    plain = vlm.generate(**ask)
    wide = vlm.generate(cache=Mars(**every, radius=3), **ask)
    assert torch.equal(plain.sequences, wide.sequences)
    assert plain.cost.flops == wide.cost.flops
    for own, other in zip(plain.trajectory.steps, wide.trajectory.steps, strict=True):
        assert torch.equal(own.commit, other.commit)
        assert torch.equal(own.confidence, other.confidence), "bit for bit"
    narrow = vlm.generate(cache=Mars(**every, radius=2), **ask)
    assert narrow.cost.flops < plain.cost.flops
    steps = zip(plain.trajectory.steps, narrow.trajectory.steps, strict=False)
    assert any(not torch.equal(own.confidence, other.confidence) for own, other in steps)


def test_costs_at_most_half_by_default(vlm):
    ask = {"gen_length": 32, "steps": 32, "block_length": 32, "stop": False}
    out = vlm.generate(**video(16), cache="mars", **ask)
    assert out.cost.visual_tokens == (16 * 169,)
    assert out.cost.relative < 0.15
    assert out.cost.forwards == {("FULL", "full"): 1 + 7, ("FULL", "partial"): 24}


def relative(policy: Mars, num_frames: int, num_steps: int) -> float:
    """Cost of VidLaDA at its published size, relative to no cache."""
    canvas = num_steps
    length, total = 120 + 210 * num_frames + canvas, 0
    for forwards in range(num_steps):
        feed = policy.plan(Clock(0, canvas, 0, forwards))
        num_fed = length if feed.is_whole else canvas
        row = RowShape(num_fed, length, length - canvas, 32, 0, (210,) * num_frames)
        total += sum(layer_flops(LLADA_8B, work) for work in feed.work(row))
    return total / num_steps / forward_flops(LLADA_8B, length, length)


def test_published_size():
    fast = Mars(text_interval=2, growth=2, radius=1, anchors_per_frame=8)
    assert 1 / 12 < relative(fast, 64, 128) < 1 / 10
    assert relative(Mars(), 64, 128) < 0.2
    every = Mars(visual_interval=1, text_interval=1, growth=1, radius=63)
    assert relative(every, 64, 128) == 1
    assert relative(Mars(visual_interval=8), 64, 128) < relative(Mars(), 64, 128)


def test_work_is_counted_by_hand():
    policy = Mars(
        visual_interval=2, text_interval=1, num_groups=2, growth=2, radius=1, anchors_per_frame=3
    )
    row = RowShape(140, 140, 130, num_layers=2, frame_sizes=(40, 40, 40))
    first, later = (policy.plan(Clock(0, 10, 0, count)).work(row) for count in (0, 2))
    assert first == (Work(140, 140**2, scores=120 * 140),) * 2
    near = 40 * (20 + 80 + 3) * 2 + 40 * 140  # the middle frame sees all
    assert later == (Work(20, 20 * 140), Work(140, 20 * 140 + near))
    assert policy.plan(Clock(0, 10, 0, 1)).work(row) == (Work(10, 1400), Work(20, 2800))
    unbounded = Mars(anchors_per_frame=0).plan(Clock(0, 10, 0, 0)).work(row)
    assert unbounded[0].scores == 0, "nothing is searched"


def test_all_that_is_kept_is_reported(model, vlm):
    out = vlm.generate(**video(4), cache="mars:num_groups=2,anchors_per_frame=5", **LENGTHS)
    prompt, geometry = out.cost.prompt_lengths[0], model.geometry
    expected = (prompt + 8) * kv_bytes_per_token(geometry, 4) + prompt * geometry.hidden_size * 4
    assert out.cost.kv_bytes == expected + geometry.num_layers * 4 * 5 * 8


@pytest.mark.parametrize("sampler", ["baseline", "lown", "fast_dllm", "lown+fast_dllm"])
@pytest.mark.parametrize("cfg_scale", [0.0, 0.5])
@pytest.mark.parametrize("is_shifted", [False, True])
def test_rows_of_a_batch_are_as_alone(model, vlm, monkeypatch, sampler, cfg_scale, is_shifted):
    """Videos of unequal length, of which one sees all of itself, and a prompt of text."""
    monkeypatch.setattr(type(model), "shift_logits", is_shifted)
    text = vidlada_prompt(has_video=False)["input_ids"]
    videos = [video(4), video(2, seed=1)]
    settings = {
        "sampler": sampler,
        "cache": "mars:visual_interval=2,text_interval=1,num_groups=2,anchors_per_frame=3",
        "cfg_scale": cfg_scale,
        **LENGTHS,
    }
    alone = [vlm.generate(**row, **settings) for row in (*videos, {"input_ids": text})]
    both = vlm.generate(
        input_ids=[*(row["input_ids"] for row in videos), text],
        pixel_values=[*(row["pixel_values"] for row in videos), None],
        modalities=[*(row["modalities"] for row in videos), None],
        **settings,
    )
    assert both.sequences.tolist() == [out.sequences[0].tolist() for out in alone]
    assert both.cost.row_flops == tuple(out.cost.flops for out in alone)
    assert model.special_ids.mask not in both.sequences


def test_text_has_text_intervals_only(vlm):
    """As prompts without pictures, and as the view without them."""
    text = vidlada_prompt(has_video=False)
    costs = [
        vlm.generate(**text, cache=Mars(visual_interval=visual, text_interval=2), **LENGTHS).cost
        for visual in (1, 3, 99)
    ]
    assert len({cost.flops for cost in costs}) == 1
    ask = {**video(4), "sampler": "lown:access=every,every=2,accept=k", **LENGTHS}
    often, seldom = (
        vlm.generate(cache=Mars(visual_interval=interval), **ask).cost.row_view_flops[0]
        for interval in (1, 3)
    )
    assert often["TEXT_ONLY"] == seldom["TEXT_ONLY"]
    assert often["FULL"] > seldom["FULL"]


def test_images_are_frames(vlm):
    """Four images of one tile see each other as four frames of a video would."""
    prompt = video(4)
    ids = prompt["input_ids"].tolist()
    place = ids.index(-200)
    ids = torch.tensor([*ids[:place], *[-200] * 4, *ids[place + 1 :]])
    images = {
        "input_ids": ids,
        "pixel_values": [frame[None] for frame in prompt["pixel_values"][0]],
        "modalities": ["image"] * 4,
        "image_sizes": [(55, 55)] * 4,
    }
    every = {"visual_interval": 1, "text_interval": 1, "growth": 1}
    lengths = {**LENGTHS, "gen_length": 2, "steps": 2, "block_length": 2}
    plain = vlm.generate(**images, **lengths).cost.flops
    costs = [
        vlm.generate(**images, cache=Mars(**every, radius=radius), **lengths).cost.flops
        for radius in (1, 2, 3)
    ]
    assert costs[0] < costs[1] < costs[2] == plain


def test_shifted_logits_read_a_fresh_state(model, vlm, monkeypatch):
    """What speaks for the first canvas position is never a kept state."""
    monkeypatch.setattr(type(model), "shift_logits", True)
    seldom = "mars:visual_interval=99,text_interval=99"
    out = vlm.generate(**video(3), cache=seldom, temperature=0.0, **LENGTHS)
    lengths = [forward.queries[0] for step in out.trajectory.steps for forward in step.forwards]
    assert lengths == [out.cost.prompt_lengths[0] + 8] + [9] * 7


@pytest.mark.parametrize("backend", ["eager", "flex_attention"])
def test_backends_agree(model, vlm, monkeypatch, backend):
    ask = {**video(4), "cache": "mars:visual_interval=1,text_interval=1,growth=1", **LENGTHS}
    expected = vlm.generate(**ask)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", backend)
    assert torch.equal(vlm.generate(**ask).sequences, expected.sequences)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mars:visual_interval=0", "visual_interval must be a whole number of at least 1, got 0"),
        ("mars:text_interval=1.5", "text_interval must be a whole number of at least 1, got 1.5"),
        ("mars:text_interval=none", "text_interval must be a whole number of at least 1, got None"),
        ("mars:num_groups=0", "num_groups must be a whole number of at least 1"),
        ("mars:growth=0", "growth must be a whole number of at least 1"),
        ("mars:radius=-1", "radius must be a whole number of at least 0, got -1"),
        ("mars:anchors_per_frame=true", "anchors_per_frame must be a whole number of at least 0"),
        ("mars:anchor_queries=0", "anchor_queries must be a whole number of at least 1"),
        ("mars:radios=2", "Did you mean 'radius'"),
    ],
)
def test_bad_options(spec, message):
    with pytest.raises(InvalidInputError, match=message):
        caches.make(spec)


def test_it_is_found_and_says_what_it_is():
    assert "mars" in caches.names()
    assert caches.make("mars:visual_interval=8") == Mars(visual_interval=8)
    assert "reconstruction" in (Mars.__doc__ or "")
