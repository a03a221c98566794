"""Stages between the layers of diffusion models: against whole masks, over caches, per row as
alone, and what they cost."""

from __future__ import annotations

import pytest
import torch
from test_vlm import picture

from dlm_decode.cost import Work, forward_flops, layer_flops
from dlm_decode.errors import InvalidInputError
from dlm_decode.models.configuration import LlavaLLaDAConfig
from dlm_decode.models.llada import rotary
from dlm_decode.models.llava_llada import LlavaLLaDAModelLM
from dlm_decode.vision.fastv import FastV
from dlm_decode.vision.inside import layout_of
from dlm_decode.vision.lightkv import LightKV
from dlm_decode.vlm import DiffusionVlm

QUESTION = "what colour is the circle ?"
LONGER = "where is the red square ? what is in the picture ?"
LENGTHS = {"gen_length": 8, "steps": 8, "block_length": 4, "stop": False}
FASTV = "fastv:k=2,keep_ratio=0.5"
LIGHT = "lightkv:at_layers=0-2,windows=1,ratios=0.5"
LAYERS = 4


@pytest.fixture(scope="module")
def vlm(vlm):
    """Four layers, so that some are in front of a stage and some behind it."""
    raw = {**vlm.model.config.to_dict(), "num_hidden_layers": LAYERS}
    torch.manual_seed(0)
    model = LlavaLLaDAModelLM(LlavaLLaDAConfig.from_dict(raw))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return DiffusionVlm(model, vlm.processor)


def prompt_of(vlm, images=None):
    inputs = vlm.processor(QUESTION, images=[picture()] if images is None else images)
    return vlm.model.encode_prompt(
        inputs.input_ids, inputs.pixel_values, inputs.image_sizes, inputs.modalities
    )


@torch.no_grad()
def by_masks(vlm, prompt, k, keep_ratio, gen_length, block_length, *, is_once, is_cached):
    """The whole sequence throughout; from layer k on nobody attends to what is dropped.

    One token per step. With a cache, the steps of a block behind its first compute the block and
    everything behind it, against kept keys and values.
    """
    model, config, mask = vlm.model, vlm.model.config, vlm.model.special_ids.mask
    tokens, num_prompt = torch.full((gen_length,), mask), prompt.length
    total, visual = num_prompt + gen_length, prompt.is_visual.nonzero()[:, 0]
    cos, sin = rotary(torch.arange(total)[None], config.head_dim, config.rope_theta, torch.float32)
    is_seen, kept_sets, store = torch.ones(total, dtype=torch.bool), [], {}
    for block in range(0, gen_length, block_length):
        for step in range(block_length):
            start = num_prompt + block if is_cached and step else 0
            hidden = torch.cat([prompt.embeds, model.embed(tokens)])[None, start:]
            decides = start == 0 and not (is_once and kept_sets)
            for index, layer in enumerate(model.model.layers):
                here = cos[:, :, start:], sin[:, :, start:]
                query, key, value = layer.self_attn.project(layer.input_layernorm(hidden), here)
                if start:
                    key = torch.cat([store[index][0][:, :, :start], key], dim=2)
                    value = torch.cat([store[index][1][:, :, :start], value], dim=2)
                store[index] = key, value
                groups = query.shape[1] // key.shape[1]
                wide = key.repeat_interleave(groups, 1)
                scores = query @ wide.transpose(-1, -2) / query.shape[-1] ** 0.5
                if index == k - 1 and decides:
                    asked = num_prompt + (tokens == mask).nonzero()[:, 0]
                    importance = scores.softmax(-1)[0, :, asked].mean(dim=(0, 1))[visual]
                    count = max(1, round(len(visual) * keep_ratio))
                    kept = importance.topk(count).indices.sort().values
                    kept_sets.append(kept.tolist())
                    is_seen[visual] = False
                    is_seen[visual[kept]] = True
                if index >= k:
                    scores = scores.masked_fill(~is_seen, float("-inf"))
                mixed = scores.softmax(-1) @ value.repeat_interleave(groups, 1)
                hidden = hidden + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            logits = model.lm_head(model.model.norm(hidden)[0, num_prompt - total :])
            logits[:, mask] = float("-inf")
            logits[:, list(model.special_ids.suppress)] = float("-inf")
            best = logits.log_softmax(-1).max(-1)
            behind = torch.arange(gen_length - len(logits), gen_length)
            is_open = (tokens[behind] == mask) & (behind >= block) & (behind < block + block_length)
            place = torch.where(is_open, best.values, float("-inf")).argmax()
            tokens[behind[place]] = best.indices[place]
    return tokens.tolist(), kept_sets


def kept_by(vlm, monkeypatch, **options):
    """The output, and which visual tokens each decision kept."""
    decided, reduce = [], FastV.reduce

    def noting(self, view):
        reduction = reduce(self, view)
        kept = reduction.index[view.layout.is_visual[reduction.index]]
        decided.append((kept - view.visual[0]).tolist())
        assert kept.tolist() == sorted(set(kept.tolist()))
        assert set(kept.tolist()) <= set(view.visual.tolist())
        return reduction

    monkeypatch.setattr(FastV, "reduce", noting)
    return vlm.generate(QUESTION, images=picture(), **LENGTHS, **options), decided


@pytest.mark.parametrize("cache", ["none", "prefix"])
@pytest.mark.parametrize("when", ["every", "once"])
@pytest.mark.parametrize("k", [1, 3])
def test_dropping_is_masking(vlm, monkeypatch, k, when, cache):
    stages = [f"fastv:k={k},keep_ratio=0.4,when={when}"]
    out, decided = kept_by(vlm, monkeypatch, stages=stages, cache=cache)
    tokens, kept = by_masks(
        vlm, prompt_of(vlm), k, 0.4, 8, 4, is_once=when == "once", is_cached=cache == "prefix"
    )
    assert out.sequences[0].tolist() == tokens
    assert decided == kept
    assert len(kept) == (1 if when == "once" else 2 if cache == "prefix" else 8)
    plain = vlm.generate(QUESTION, images=picture(), cache=cache, **LENGTHS)
    assert plain.sequences[0].tolist() != tokens, "pruning must show"


@pytest.mark.parametrize(
    "stage",
    ["fastv:keep_ratio=1.0", "fastv:k=4", "lightkv:ratios=0.0", "lightkv:at_layers=3,windows=1"],
)  # fmt: skip
def test_what_changes_nothing_is_bit_for_bit_no_stage(vlm, stage):
    ask = {"images": picture(), "sampler": "lown", **LENGTHS}
    plain, same = (vlm.generate(QUESTION, stages=stages, **ask) for stages in ([], [stage]))
    assert plain.cost.row_flops == same.cost.row_flops
    for own, other in zip(plain.trajectory.steps, same.trajectory.steps, strict=True):
        assert torch.equal(own.confidence, other.confidence)
        assert torch.equal(own.tokens, other.tokens)


@pytest.mark.parametrize(
    ("sampler", "cfg_scale"), [("baseline", 0.0), ("baseline", 0.5), ("lown", 0.0), ("lown", 0.5)]
)
@pytest.mark.parametrize("cache", ["none", "prefix", "dual", "vicinity:before=0,warmup=2"])
@pytest.mark.parametrize("stage", [FASTV, LIGHT, LIGHT + ",when=once"])
def test_rows_of_a_batch_are_as_alone(vlm, sampler, stage, cache, cfg_scale):
    """Unequal prompts and pictures, a row without a picture, one with two, one half given."""
    questions = [QUESTION, LONGER, QUESTION, LONGER]
    images = [picture(), None, [picture(), picture(80, 60, seed=1)], picture(seed=2)]
    prefill = [None, None, None, "the circle is red ."]
    ask = {"sampler": sampler, "cache": cache, "cfg_scale": cfg_scale, "stages": [stage]}
    ask = {**ask, **LENGTHS}
    batch = vlm.generate(questions, images=images, prefill=prefill, **ask)
    assert vlm.model.special_ids.mask not in batch.sequences
    for row, question in enumerate(questions):
        alone = vlm.generate(question, images=images[row], prefill=prefill[row], **ask)
        assert alone.sequences[0].tolist() == batch.sequences[row].tolist()
        assert alone.cost.flops == batch.cost.row_flops[row]
        assert alone.cost.layer_visual_tokens[0] == batch.cost.layer_visual_tokens[row]
        first, last = (batch.cost.layer_visual_tokens[row][at] for at in (0, -1))
        assert first == batch.cost.visual_tokens[row]
        assert last == batch.cost.kept_visual_tokens[row]
        assert last < first or row == 1


@pytest.mark.parametrize("stage", [FASTV, LIGHT, LIGHT + ",positions=original"])
@pytest.mark.parametrize("cache", ["prefix:refresh_interval=1", "dual:refresh_interval=1"])
def test_refreshing_every_step_is_no_cache(vlm, cache, stage):
    ask = {"images": picture(), "stages": [stage], **LENGTHS}
    plain, cached = (vlm.generate(QUESTION, cache=name, **ask) for name in ("none", cache))
    assert plain.cost.flops == cached.cost.flops
    for own, other in zip(plain.trajectory.steps, cached.trajectory.steps, strict=True):
        assert torch.equal(own.confidence, other.confidence), "bit for bit"


@pytest.mark.parametrize("stage", [FASTV, LIGHT])
def test_what_is_kept_is_as_short_as_the_layers(vlm, stage):
    ask = {"images": [picture(), picture(80, 60, seed=1)], **LENGTHS, "block_length": 8}
    spec = "prefix:refresh_interval=2"
    out, plain = (
        vlm.generate([QUESTION, LONGER], cache=spec, stages=stages, **ask)
        for stages in ([stage], [])
    )
    kinds = [step.forwards[0].kind for step in out.trajectory.steps]
    assert kinds == ["full", "suffix"] * 4
    longest = [
        max(
            out.cost.prompt_lengths[row] + 8 - out.cost.visual_tokens[row] + counts[layer]
            for row, counts in enumerate(out.cost.layer_visual_tokens)
        )
        for layer in range(LAYERS)
    ]
    assert longest[-1] < longest[0]
    per_layer = plain.cost.kv_bytes // LAYERS // longest[0]
    assert out.cost.kv_bytes == per_layer * sum(longest)


@pytest.mark.parametrize("cache", ["none", "prefix"])
def test_shifted_logits(vlm, monkeypatch, cache):
    """The last prompt position speaks for the canvas, and stays even if it is a visual token."""
    monkeypatch.setattr(type(vlm.model), "shift_logits", True)
    prompt = prompt_of(vlm)
    ask = {"cache": cache, "stages": ["fastv:k=1,keep_ratio=0.1"], **LENGTHS}
    both = vlm.generate([QUESTION, LONGER], images=[picture(), picture(seed=1)], **ask)
    assert vlm.model.special_ids.mask not in both.sequences
    alone = vlm.generate(LONGER, images=picture(seed=1), **ask)
    assert alone.sequences[0].tolist() == both.sequences[1].tolist()
    end = prompt.spans[-1].start + prompt.spans[-1].length
    monkeypatch.setattr(vlm.model, "encode_prompt", lambda *_, **__: _cut(prompt, end))
    at_end = vlm.generate(QUESTION, images=picture(), **ask)
    assert vlm.model.special_ids.mask not in at_end.sequences
    visual = prompt.num_visual
    assert at_end.cost.layer_visual_tokens[0] == (visual, *[1 + round((visual - 1) / 10)] * 3)


def _cut(prompt, end):
    from dataclasses import replace

    names = ("embeds", "ids", "is_visual")
    return replace(prompt, **{name: getattr(prompt, name)[:end] for name in names})


def works(vlm, length, num_visual, kept, num_asked):
    """One forward with fastv:k=2, by hand."""
    short = length - num_visual + kept
    layers = [Work(length, length**2), Work(length, length**2, scores=num_asked * length)]
    layers += [Work(short, short**2)] * (LAYERS - 2)
    return sum(layer_flops(vlm.geometry, work) for work in layers)


@pytest.mark.parametrize("when", ["every", "once"])
def test_cost_by_hand(vlm, when):
    stages = [f"{FASTV},when={when}"]
    out = vlm.generate(QUESTION, images=picture(), stages=stages, **LENGTHS)
    visual, length = out.cost.visual_tokens[0], out.cost.prompt_lengths[0] + 8
    kept = round(visual / 2)
    assert out.cost.layer_visual_tokens == ((visual, visual, kept, kept),)
    assert f"{kept} of {visual} visual tokens kept" in out.cost.summary()
    assert out.cost.to_dict()["layer_visual_tokens"] == [[visual, visual, kept, kept]]
    asked = [8 - step if when == "every" or step == 0 else 0 for step in range(8)]
    assert out.cost.flops == sum(works(vlm, length, visual, kept, count) for count in asked)
    guided = vlm.generate(QUESTION, images=picture(), stages=stages, cfg_scale=0.5, **LENGTHS)
    whole = forward_flops(vlm.geometry, length, length)
    assert guided.cost.flops == out.cost.flops + 8 * whole


def test_cost_of_windows_by_hand(vlm):
    out = vlm.generate(QUESTION, images=picture(), stages=[FASTV], cache="dual", **LENGTHS)
    visual, length = out.cost.visual_tokens[0], out.cost.prompt_lengths[0] + 8
    kept = round(visual / 2)
    short = length - visual + kept
    block = sum(
        layer_flops(vlm.geometry, Work(4, 4 * keys)) for keys in (length, length, short, short)
    )
    refreshes = [works(vlm, length, visual, kept, count) for count in (8, 4)]
    assert out.cost.flops == sum(refreshes) + 6 * block


@pytest.mark.parametrize("when", ["every", "once"])
def test_relative_cost_is_pi_f_plus_sigma_rho(vlm, when):
    ask = {"images": picture(), "gen_length": 12, "steps": 6, "block_length": 6, "stop": False}
    sampler = "lown:access=every,every=2,accept=k"
    out = vlm.generate(QUESTION, sampler=sampler, stages=[f"{FASTV},when={when}"], **ask)
    visual, length = out.cost.visual_tokens[0], out.cost.prompt_lengths[0] + 12
    kept, blind = round(visual / 2), length - visual
    whole = forward_flops(vlm.geometry, length, length)
    counts, shares = out.cost.row_forwards[0], out.cost.routing()
    opens, is_first, full = 12, True, 0
    for step in out.trajectory.steps:
        for _ in (forward for forward in step.forwards if forward.view == "FULL"):
            full += works(vlm, length, visual, kept, opens if when == "every" or is_first else 0)
            is_first = False
        opens -= int(step.commit.sum())
    assert counts["FULL"] > 1 and counts["TEXT_ONLY"] > 1
    assert shares.pi == pytest.approx(full / counts["FULL"] / whole)
    assert shares.rho == pytest.approx(forward_flops(vlm.geometry, blind, blind) / whole)
    assert (shares.f, shares.sigma) == (counts["FULL"] / 6, counts["TEXT_ONLY"] / 6)
    assert 0 < shares.pi < 1
    assert out.cost.relative == pytest.approx(shares.pi * shares.f + shares.sigma * shares.rho)


@pytest.mark.parametrize("when", ["every", "once"])
@pytest.mark.parametrize("budget", [0.3, 0.5, 0.8])
def test_a_budget_holds(vlm, budget, when):
    stages = [f"{FASTV},when={when}"]
    sampler = f"lown:budget={budget}"
    out = vlm.generate(QUESTION, images=picture(), sampler=sampler, stages=stages, **LENGTHS)
    assert out.cost.relative <= budget
    assert out.cost.kept_visual_tokens < out.cost.visual_tokens


def test_behind_other_stages(vlm):
    stages = ["stride:keep_ratio=0.5", FASTV]
    out = vlm.generate(QUESTION, images=picture(), stages=stages, **LENGTHS)
    whole = vlm.generate(QUESTION, images=picture(), **LENGTHS).cost.visual_tokens[0]
    entered = round(whole / 2)
    assert out.cost.visual_tokens == (entered,)
    assert out.cost.layer_visual_tokens[0] == (entered, entered, *[round(entered / 2)] * 2)
    two = vlm.generate(QUESTION, images=picture(80, 60), stages=[LIGHT, FASTV], **LENGTHS)
    counts = two.cost.layer_visual_tokens[0]
    first = LightKV(0, 1).keeps(0, counts[0], 1) or 0
    assert counts[1:3] == (first, round(first / 2))


def test_measurements_decide_nothing(vlm):
    """What `probe` looks at is neither charged nor the first forward."""
    ask = {"images": picture(), "sampler": "lown:access=every,every=2,accept=k", **LENGTHS}
    ask["stages"] = [FASTV + ",when=once"]
    plain, probed = (vlm.generate(QUESTION, probe=probe, **ask) for probe in (None, "packed"))
    assert torch.equal(plain.sequences, probed.sequences)
    assert plain.cost.flops == probed.cost.flops


def test_rows_without_pictures_are_noted(vlm):
    out = vlm.generate(QUESTION, stages=[FASTV], **LENGTHS)
    plain = vlm.generate(QUESTION, **LENGTHS)
    assert torch.equal(out.sequences, plain.sequences)
    assert out.cost.flops == plain.cost.flops
    note = "rows [0] have no visual tokens; fastv leaves them as they are."
    assert out.trajectory.run["notes"] == [note]


@pytest.mark.parametrize(
    ("stages", "cache", "message"),
    [
        ([FASTV, "redvtp"], None, "use one kind"),
        ([FASTV], "dllm", "use cache 'prefix', 'dual'"),
        ([FASTV], "mars", "use cache"),
        ([FASTV], "prefix_lm", "use cache"),
        ([FASTV], "vicinity", "use cache"),
        (["fastv:k=5"], None, "layers \\[4\\], and the model has 4"),
    ],
)
def test_what_is_refused_before_the_model_runs(vlm, monkeypatch, stages, cache, message):
    monkeypatch.setattr(vlm.model, "encode_prompt", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(InvalidInputError, match=message):
        vlm.generate(QUESTION, images=picture(), stages=stages, cache=cache)


def test_layouts_of_prompts(vlm):
    """Cells of what the model's own tiles are."""
    prompt = prompt_of(vlm)
    layout = layout_of(prompt)
    is_cell = layout.parts >= 0
    assert bool((is_cell <= prompt.is_visual).all()) and bool(is_cell.any())
    out = vlm.generate(
        QUESTION,
        images=picture(80, 60),
        stages=["lightkv:at_layers=0,windows=1,grid=cells"],
        **LENGTHS,
    )
    assert out.cost.kept_visual_tokens < out.cost.visual_tokens
