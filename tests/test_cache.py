"""Cache policies: plans on tables; against no cache; per row as alone; what they cost and keep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_vlm import picture

from dlm_decode import cache as caches
from dlm_decode import samplers
from dlm_decode.cache.base import Clock, RowShape
from dlm_decode.cache.dllm import Dllm
from dlm_decode.cache.dual import Dual
from dlm_decode.cache.mars import Mars
from dlm_decode.cache.prefix import Prefix
from dlm_decode.cache.vicinity import Vicinity
from dlm_decode.cost import Work, forward_flops, kv_bytes_per_token
from dlm_decode.errors import InvalidInputError
from dlm_decode.samplers.fast_dllm import FastDllm

QUESTIONS = ["what colour is the circle ?", "where is the red square ? what is in the picture ?"]
LENGTHS = {"gen_length": 12, "steps": 12, "block_length": 4, "stop": False}
EVERY_STEP = [
    Prefix(refresh_interval=1),
    Dual(refresh_interval=1),
    Vicinity(refresh_interval=1),
    Vicinity(warmup=99),
    Dllm(prompt_interval=1, gen_interval=1),
    Mars(visual_interval=1, text_interval=1, growth=1),
]
SAMPLERS = ["baseline", "lown", "fast_dllm:cache=none", "lown:parallel=threshold,threshold=0.2"]


def pictures(count):
    return [picture(seed=seed) for seed in range(count)]


@pytest.mark.parametrize(
    ("policy", "in_block", "forwards", "expected"),
    [
        (Prefix(), 0, 7, ("full", None, None)),
        (Prefix(), 1, 8, ("suffix", 8, None)),
        (Prefix(refresh_interval=3), 3, 9, ("full", None, None)),
        (Prefix(refresh_interval=3), 4, 9, ("suffix", 8, None)),
        (Dual(), 0, 0, ("full", None, None)),
        (Dual(), 5, 5, ("block", 8, 12)),
        (Vicinity(before=2, after=3, warmup=0), 1, 1, ("window", 6, 15)),
        (Vicinity(before=20, after=3, warmup=0), 1, 1, ("window", -12, 15)),
        (Vicinity(warmup=4), 2, 3, ("full", None, None)),
        (Dllm(prompt_interval=6, gen_interval=3), 0, 0, ("full", None, None)),
        (Dllm(prompt_interval=6, gen_interval=3), 3, 3, ("partial", None, None)),
    ],
)
def test_plans(policy, in_block, forwards, expected):
    feed = policy.plan(Clock(first=8, last=12, in_block=in_block, forwards=forwards))
    assert (feed.kind, feed.first, feed.last) == expected


def test_work_of_a_partial_forward():
    policy = Dllm(prompt_interval=6, gen_interval=3, transfer_ratio=0.25)

    def work(forwards):
        return policy.plan(Clock(0, 10, 0, forwards)).work(row)

    row = RowShape(num_fed=110, length=110, num_prompt=100, num_layers=3)
    assert work(0) == (Work(110, 110 * 110),) * 3
    # Two response positions, values of the other eight.
    assert work(1) == (Work(2, 2 * 110, values=8),) * 3
    assert work(3) == (Work(10, 10 * 110),) * 3
    assert Dllm(transfer_ratio=0.0).plan(Clock(0, 10, 0, 1)).work(row) == (Work(0, 0),) * 3
    only_prompt = Dllm(prompt_interval=2, gen_interval=7, transfer_ratio=0.25)
    assert only_prompt.plan(Clock(0, 10, 0, 2)).work(row)[0] == Work(102, 102 * 110, values=8)


@pytest.mark.parametrize("policy", EVERY_STEP, ids=str)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_refreshing_every_step_is_no_cache(vlm, policy, sampler):
    ask = {"images": picture(), "sampler": sampler, **LENGTHS}
    plain = vlm.generate(QUESTIONS[0], **ask)
    cached = vlm.generate(QUESTIONS[0], cache=policy, **ask)
    assert torch.equal(plain.sequences, cached.sequences)
    assert plain.cost.flops == cached.cost.flops
    for own, other in zip(plain.trajectory.steps, cached.trajectory.steps, strict=True):
        assert torch.equal(own.commit, other.commit)
        assert torch.equal(own.confidence, other.confidence), "bit for bit"


def test_dual_is_a_vicinity_without_neighbours(vlm):
    ask = {"images": picture(), **LENGTHS}
    dual = vlm.generate(QUESTIONS[0], cache="dual", **ask)
    window = vlm.generate(QUESTIONS[0], cache="vicinity:before=0,after=0,warmup=0", **ask)
    assert torch.equal(dual.sequences, window.sequences)
    assert dual.cost.flops == window.cost.flops


def test_everything_transferred_is_a_refresh(vlm):
    ask = {"images": picture(), **LENGTHS}
    transferred = vlm.generate(QUESTIONS[0], cache=Dllm(4, 3, transfer_ratio=1.0), **ask)
    refreshed = vlm.generate(QUESTIONS[0], cache=Dllm(4, 1), **ask)
    assert torch.equal(transferred.sequences, refreshed.sequences)


@pytest.mark.parametrize("policy", sorted(caches.names()))
@pytest.mark.parametrize("sampler", ["baseline", "lown", "fast_dllm", "lown+fast_dllm"])
@pytest.mark.parametrize("cfg_scale", [0.0, 0.5])
def test_rows_of_a_batch_are_as_alone(vlm, policy, sampler, cfg_scale):
    """Prompts of unequal length, rows that drift apart, a row that is half given."""
    ask = {"sampler": sampler, "cache": policy, "cfg_scale": cfg_scale, **LENGTHS}
    prefill = [None, "the circle is red ."]
    both = vlm.generate(QUESTIONS, images=pictures(2), prefill=prefill, **ask)
    mask = vlm.model.special_ids.mask
    assert mask not in both.sequences
    for row, question in enumerate(QUESTIONS):
        alone = vlm.generate(question, images=pictures(2)[row], prefill=prefill[row], **ask)
        assert alone.sequences[0].tolist() == both.sequences[row].tolist()
        assert alone.cost.flops == both.cost.row_flops[row]


@pytest.mark.parametrize("name", sorted(caches.names()))
def test_cached_forwards_are_cheaper_and_memory_is_reported(vlm, name):
    ask = {"images": picture(), **LENGTHS}
    plain, cached = (vlm.generate(QUESTIONS[0], cache=policy, **ask) for policy in (None, name))
    assert plain.cost.kv_bytes == 0
    assert cached.cost.flops < plain.cost.flops
    assert cached.cost.calls == 12 + (name == "prefix_lm")
    assert plain.cost.calls == 12
    length = cached.cost.prompt_lengths[0] + 12
    if name == "dllm":
        width = 2 * vlm.geometry.hidden_size * vlm.geometry.num_layers * 4
        expected = length * (kv_bytes_per_token(vlm.geometry, 4) + width)
    elif name == "mars":  # and what the second of two groups of layers begins with
        expected = length * kv_bytes_per_token(vlm.geometry, 4)
        expected += (length - 12) * vlm.geometry.hidden_size * 4
    else:
        kept = length - 12 if name == "prefix_lm" else length
        expected = kept * kv_bytes_per_token(vlm.geometry, 4)
    assert cached.cost.kv_bytes == expected
    first = {"prefill"} if name == "prefix_lm" else {"full"}
    assert {kind for _, kind in cached.cost.forwards} > first


def test_dual_costs_what_its_forwards_cost(vlm):
    out = vlm.generate(QUESTIONS[0], images=picture(), cache="dual", **LENGTHS)
    length = out.cost.prompt_lengths[0] + 12
    geometry = vlm.geometry
    full, block = forward_flops(geometry, length, length), forward_flops(geometry, 4, length)
    assert out.cost.flops == 3 * full + 9 * block
    assert out.cost.forwards == {("FULL", "full"): 3, ("FULL", "block"): 9}


def test_prefix_lm_reads_the_prompt_once(vlm):
    ask = {"images": picture(), "cache": "prefix_lm", **LENGTHS}
    out = vlm.generate(QUESTIONS[0], suffix="yes .", **ask)
    prompt, canvas = out.cost.prompt_lengths[0], 14  # the suffix is fed with the canvas
    geometry = vlm.geometry
    prefill = forward_flops(geometry, prompt, prompt)
    assert out.cost.flops == prefill + 12 * forward_flops(geometry, canvas, prompt + canvas)
    assert out.cost.forwards == {("FULL", "prefill"): 1, ("FULL", "suffix"): 12}
    assert out.cost.kv_bytes == prompt * kv_bytes_per_token(geometry, 4)
    views = vlm.generate(QUESTIONS[0], sampler="lown:access=every,every=2,accept=k", **ask)
    assert views.cost.forwards[("FULL", "prefill")] == 1
    assert views.cost.forwards[("TEXT_ONLY", "prefill")] == 1


def test_prefix_lm_is_a_mask(vlm):
    """Prompt rows see the prompt, response rows everything: the same as one masked forward."""
    from dlm_decode.cache.base import Fed
    from dlm_decode.cache.prefix_lm import PrefixLm
    from dlm_decode.models.llada import rotary

    model, policy = vlm.model, PrefixLm()
    torch.manual_seed(0)
    embeds, num_prompt = torch.randn(2, 9, 32), 5
    positions = torch.arange(9).expand(2, -1)
    is_allowed = torch.ones(9, 9, dtype=torch.bool)
    is_allowed[:num_prompt, num_prompt:] = False
    with torch.no_grad():
        hidden = embeds
        cos_sin = rotary(positions, model.config.head_dim, model.config.rope_theta, embeds.dtype)
        for layer in model.model.layers:
            hidden = layer(hidden, cos_sin, is_allowed[None, None])
        expected = model.model.norm(hidden)
        cache, parts = policy.start(), []
        for feed in policy.plan(Clock(0, 4, 0, 0)):
            part = slice(0, num_prompt) if feed.last == 0 else slice(num_prompt, None)
            memory = cache.memory(Fed(feed, torch.arange(2), 2, positions[:, part], num_prompt))
            parts.append(model.hidden_states(embeds[:, part], positions[:, part], None, memory))
    assert torch.allclose(torch.cat(parts, dim=1), expected, atol=1e-5)


@pytest.mark.parametrize("policy", sorted(caches.names()))
@pytest.mark.parametrize("cfg_scale", [0.0, 0.5])
def test_shifted_logits_with_every_cache(vlm, monkeypatch, policy, cfg_scale):
    """Rows of a batch as alone; everything is committed, whatever stands for the first position."""
    monkeypatch.setattr(type(vlm.model), "shift_logits", True)
    ask = {"cache": policy, "cfg_scale": cfg_scale, **LENGTHS}
    both = vlm.generate(QUESTIONS, images=pictures(2), **ask)
    assert vlm.model.special_ids.mask not in both.sequences
    for row, question in enumerate(QUESTIONS):
        alone = vlm.generate(question, images=pictures(2)[row], **ask)
        assert alone.sequences[0].tolist() == both.sequences[row].tolist()


def test_every_view_has_its_own_cache(vlm):
    out = vlm.generate(
        QUESTIONS[0],
        images=picture(),
        sampler="lown:access=every,every=2,accept=k",
        cache="prefix",
        **{**LENGTHS, "block_length": 12},
    )
    assert out.cost.forwards == {
        ("FULL", "full"): 1,
        ("FULL", "suffix"): 5,
        ("TEXT_ONLY", "full"): 1,
        ("TEXT_ONLY", "suffix"): 10,
    }
    geometry, canvas = vlm.geometry, 12
    length = out.cost.prompt_lengths[0] + canvas
    text = length - out.cost.visual_tokens[0]
    one = kv_bytes_per_token(geometry, 4)
    assert out.cost.kv_bytes == one * (length + text)


def test_equal_similarities_may_be_left_to_rounding(vlm):
    ask = {"images": picture(), **LENGTHS}
    outs = [
        vlm.generate(QUESTIONS[0], cache=Dllm(99, 99, ties=ties), **ask)
        for ties in ("position", "rounding")
    ]
    assert outs[0].cost.flops == outs[1].cost.flops
    with pytest.raises(InvalidInputError, match="Did you mean 'position'"):
        Dllm(ties="positions")


def test_nothing_survives_a_call(vlm):
    ask = {"images": picture(), "cache": "prefix", "sampler": "lown", **LENGTHS}
    first = vlm.generate(QUESTIONS[0], **ask)
    vlm.generate(QUESTIONS[1], **{**ask, "images": picture(seed=3)})
    again = vlm.generate(QUESTIONS[0], **ask)
    assert torch.equal(first.sequences, again.sequences)


def test_a_window_stays_inside_the_sequence(vlm):
    ask = {"cache": "vicinity:before=500,after=500,warmup=0", **LENGTHS}
    wide = vlm.generate(QUESTIONS, images=pictures(2), **ask)
    plain = vlm.generate(QUESTIONS, images=pictures(2), **LENGTHS)
    assert torch.equal(wide.sequences, plain.sequences), "a window of everything is no cache"


@pytest.mark.parametrize("backend", ["eager", "flex_attention"])
def test_backends_agree(checkpoint, vlm, backend):
    import dlm_decode

    other = dlm_decode.load(checkpoint, attn_implementation=backend)
    for policy in ("prefix", "dllm:prompt_interval=4,gen_interval=1"):
        ask = {"images": pictures(2), "cache": policy, **LENGTHS}
        ours, theirs = (model.generate(QUESTIONS, **ask) for model in (vlm, other))
        assert torch.equal(ours.sequences, theirs.sequences)


def test_a_sampler_brings_its_cache(vlm):
    ask = {"images": picture(), **LENGTHS}
    assert ("FULL", "suffix") in vlm.generate(
        QUESTIONS[0], sampler="fast_dllm", **ask
    ).cost.forwards
    none = vlm.generate(QUESTIONS[0], sampler="fast_dllm", cache="none", **ask)
    assert set(none.cost.forwards) == {("FULL", "full")}
    assert none.trajectory.run["cache"] is None
    dual = vlm.generate(QUESTIONS[0], sampler="fast_dllm", cache="dual", **ask)
    assert dual.trajectory.run["cache"]["name"] == "dual"
    hook = samplers.make("llada_v_hook:factor=0.5")
    assert isinstance(hook, FastDllm)
    assert (hook.rule, hook.factor, hook.cache) == ("factor", 0.5, "prefix:refresh_interval=32")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("prefixes", "Did you mean 'prefix'"),
        ("prefix:refresh_interval=0", "refresh_interval must be a whole number"),
        ("vicinity:before=-1", "before must be"),
        ("dllm:transfer_ratio=1.5", "transfer_ratio must be from 0 to 1"),
        ("dllm:gen_intervall=2", "Did you mean 'gen_interval'"),
    ],
)
def test_bad_policies(spec, message):
    with pytest.raises(InvalidInputError, match=message):
        caches.make(spec)


@given(
    schedule=st.sampled_from(["uniform", "dream", "cosine", "shift:shift=3.0"]),
    policy=st.sampled_from(["none", *sorted(caches.names())]),
    knobs=st.sampled_from(["", ",guard=none", ",parallel=factor", ",order=confidence"]),
    budget=st.floats(0.3, 1.0),
    lengths=st.sampled_from([(12, 12, 4), (12, 7, 5), (9, 9, 9), (8, 16, 3)]),
    temperature=st.sampled_from([0.0, 1.0]),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_budget_holds_over_every_cache_and_schedule(
    vlm, schedule, policy, knobs, budget, lengths, temperature
):
    gen_length, steps, block_length = lengths
    ask = {
        "sampler": f"lown:budget={budget}{knobs}",
        "cache": policy,
        "schedule": schedule,
        "temperature": temperature,
        "gen_length": gen_length,
        "steps": steps,
        "block_length": block_length,
        "stop": False,
    }
    both = vlm.generate(QUESTIONS, images=pictures(2), **ask)
    assert vlm.model.special_ids.mask not in both.sequences
    for row, question in enumerate(QUESTIONS):
        assert both.cost.row_flops[row] <= budget * both.cost.row_baseline_flops[row]
        assert sum(bool(step.active[row]) for step in both.trajectory.steps) <= steps
        alone = vlm.generate(question, images=pictures(2)[row], **ask)
        assert alone.sequences[0].tolist() == both.sequences[row].tolist()
        assert alone.cost.flops == both.cost.row_flops[row]
