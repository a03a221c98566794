"""RedVTP and attention rows on request: against full attention maps, per row as alone, over caches,
what it costs, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from golden_models import read_json, tiny56, tiny_prompt
from test_cache import EVERY_STEP
from test_vlm import picture
from torch.utils.flop_counter import FlopCounterMode

import dlm_decode
from dlm_decode import cache as caches
from dlm_decode.canvas import IMAGE_TOKEN_ID, Prompt, VisualSpan
from dlm_decode.cli import main
from dlm_decode.cost import attention_row_flops, forward_flops
from dlm_decode.errors import InvalidInputError
from dlm_decode.models import attention
from dlm_decode.models.attention import RowProbe, attention_rows
from dlm_decode.models.llada import rotary
from dlm_decode.vision.redvtp import RedVtp
from dlm_decode.vlm import DiffusionVlm

QUESTION = "what colour is the circle ?"
LONGER = "where is the red square ? what is in the picture ?"
LENGTHS = {"gen_length": 12, "steps": 12, "block_length": 4, "stop": False}


@torch.no_grad()
def attention_maps(model, embeds, positions):
    """States `(1, S, D)` and softmax attention `(L, H, S, S)`, computed with whole maps."""
    hidden, maps, config = embeds, [], model.config
    cos_sin = rotary(positions, config.head_dim, config.rope_theta, embeds.dtype)
    for layer in model.model.layers:
        query, key, value = layer.self_attn.project(layer.input_layernorm(hidden), cos_sin)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        weights = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
        maps.append(weights[0])
        mixed = (weights @ value).transpose(1, 2).flatten(2)
        hidden = hidden + layer.self_attn.o_proj(mixed)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.model.norm(hidden), torch.stack(maps)


@pytest.mark.parametrize("chunk", [2**24, 1])
def test_rows_are_those_of_the_whole_map(monkeypatch, chunk):
    monkeypatch.setattr(attention, "_SCORES_AT_ONCE", chunk)
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 9, 8)
    is_real = torch.ones(2, 9, dtype=torch.bool)
    is_real[1, :3] = False
    scores = query @ key.repeat_interleave(2, dim=1).transpose(-1, -2) / 8**0.5
    expected = scores.masked_fill(~is_real[:, None, None], float("-inf")).softmax(-1).mean(1)
    rows = attention_rows(query[:, :, [1, 4, 5]], key, is_real)
    assert torch.allclose(rows, expected[:, [1, 4, 5]], atol=1e-6)
    assert torch.allclose(rows.sum(-1), torch.ones(2, 3))
    half = attention_rows(query.bfloat16(), key.bfloat16(), None)
    assert half.dtype == torch.float32
    wide = attention_rows(query.bfloat16().float(), key.bfloat16().float(), None)
    assert torch.equal(half, wide), "nothing is rounded to bfloat16 on the way"


@pytest.mark.parametrize("layers", [None, [1], [0]])
def test_a_probe_changes_nothing_and_leaves_the_backend(vlm, monkeypatch, layers):
    model = vlm.model
    embeds = torch.randn(1, 11, 32, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(11)[None]
    plain = model.hidden_states(embeds, positions)
    _, maps = attention_maps(model, embeds, positions)
    monkeypatch.setattr(attention, "_eager", lambda *_: pytest.fail("eager attention"))
    probe = RowProbe(torch.tensor([0]), torch.tensor([[7, 9]]), 5, layers=layers)
    assert torch.equal(model.hidden_states(embeds, positions, probe=probe), plain)
    expected = maps[[0, 1] if layers is None else layers].mean(dim=(0, 1))
    assert torch.allclose(probe.mean[0], expected[[7, 9], :5], atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "flex_attention"])
def test_every_backend_gives_the_same_rows(vlm, checkpoint, backend):
    other = dlm_decode.load(checkpoint, attn_implementation=backend)
    ask = {"images": [picture(), picture(seed=1)], "stages": ["redvtp"], "stop": False}
    ours, theirs = (model.generate([QUESTION, LONGER], **ask) for model in (vlm, other))
    assert torch.equal(ours.sequences, theirs.sequences)
    assert kept_of(ours) == kept_of(theirs)


def kept_of(out):
    """By row: the kept visual tokens, and the step after which the others went."""
    return {
        pruning.row: (step.index, pruning.kept.tolist())
        for step in out.trajectory.steps
        for pruning in step.prunings
    }


@torch.no_grad()
def by_hand(model, inputs, keep_ratio, gen_length, block_length, is_renumbered):
    """The method, written down again: one token per step, whole attention maps in the first."""
    mask = model.special_ids.mask
    prompt = model.encode_prompt(**inputs)
    embeds, visual, kept = prompt.embeds, prompt.is_visual.nonzero()[:, 0], None
    tokens = torch.full((gen_length,), mask)
    positions = torch.arange(prompt.length + gen_length)
    for block in range(0, gen_length, block_length):
        for _ in range(block_length):
            whole = torch.cat([embeds, model.embed(tokens)])[None]
            hidden, maps = attention_maps(model, whole, positions[None])
            logits = model.lm_head(hidden[0, -gen_length:])
            logits[:, mask] = float("-inf")
            for suppressed in model.special_ids.suppress:
                logits[:, suppressed] = float("-inf")
            best = logits.log_softmax(-1).max(-1)
            is_open = (tokens == mask) & (
                torch.arange(gen_length) // block_length == block // block_length
            )
            place = torch.where(is_open, best.values, float("-inf")).argmax()
            tokens[place] = best.indices[place]
            if kept is None:
                rows = len(embeds) + (tokens == mask).nonzero()[:, 0]
                importance = maps.mean(dim=(0, 1))[rows][:, visual].mean(0)
                kept = importance.topk(max(1, int(len(visual) * keep_ratio))).indices.sort().values
                stays = torch.ones(len(embeds) + gen_length, dtype=torch.bool)
                stays[visual] = False
                stays[visual[kept]] = True
                embeds = embeds[stays[: len(embeds)]]
                positions = torch.arange(int(stays.sum())) if is_renumbered else positions[stays]
    return tokens.tolist(), kept.tolist()


@pytest.mark.parametrize("positions", ["renumbered", "original"])
@pytest.mark.parametrize("block_length", [12, 4])
def test_lladav_against_whole_maps(positions, block_length):
    model = tiny56()
    name = next(
        name
        for name, prompt in read_json("lladav", "tiny56", "cases.json")["prompts"].items()
        if len(prompt["images"]) == 1
    )
    inputs = tiny_prompt(model, name)
    tokens, kept = by_hand(model, inputs, 0.4, 12, block_length, positions == "renumbered")
    out = DiffusionVlm(model).generate(
        **inputs,
        stages=[RedVtp(0.4, positions)],
        gen_length=12,
        block_length=block_length,
        stop=False,
    )
    assert out.sequences[0].tolist() == tokens
    assert kept_of(out) == {0: (0, kept)}


def prompt_with(*spans, length=30):
    is_visual = torch.zeros(length, dtype=torch.bool)
    for start, count in spans:
        is_visual[start : start + count] = True
    visual = tuple(VisualSpan(start, count, index) for index, (start, count) in enumerate(spans))
    ids = torch.where(is_visual, IMAGE_TOKEN_ID, 1)
    return Prompt(torch.zeros(length, 4), ids, is_visual, visual)


def test_each_image_keeps_its_share_and_ties_go_to_the_front():
    prompt = prompt_with((2, 9), (14, 5), (25, 1))
    rows = torch.zeros(2, 30)
    rows[:, 11:14] = 1.0  # text draws attention, and is no candidate
    rows[0, 8], rows[1, 4], rows[0, 18] = 0.5, 0.5, 0.9
    kept = RedVtp(0.5).keep(prompt, rows).nonzero()[:, 0].tolist()
    assert kept == [2, 3, 4, 8, 14, 18, 25]
    assert RedVtp(0.01).keep(prompt, rows).nonzero()[:, 0].tolist() == [4, 18, 25]


@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.5, 0.99])
def test_what_is_kept(vlm, ratio):
    out = vlm.generate(QUESTION, images=picture(), stages=[RedVtp(ratio)], **LENGTHS)
    ((step, kept),) = kept_of(out).values()
    total = out.cost.visual_tokens[0]
    assert step == 0
    assert kept == sorted(set(kept))
    assert 0 <= kept[0] <= kept[-1] < total
    assert out.cost.kept_visual_tokens == (len(kept),) == (max(1, int(ratio * total)),)


def test_ratio_one_is_no_stage_bit_for_bit(vlm):
    ask = {"images": picture(), "sampler": "lown", **LENGTHS}
    plain, same = (
        vlm.generate(QUESTION, stages=stages, **ask) for stages in ([], ["redvtp:keep_ratio=1"])
    )
    assert plain.cost.row_flops == same.cost.row_flops
    for own, other in zip(plain.trajectory.steps, same.trajectory.steps, strict=True):
        assert torch.equal(own.commit, other.commit)
        assert torch.equal(own.confidence, other.confidence)
        assert not any(forward.attention_rows for forward in other.forwards)


@pytest.mark.parametrize("cfg_scale", [0.0, 0.5])
@pytest.mark.parametrize("cache", ["none", *sorted(caches.names())])
@pytest.mark.parametrize("sampler", ["baseline", "lown", "fast_dllm", "lown:positions=original"])
def test_rows_of_a_batch_are_as_alone(vlm, sampler, cache, cfg_scale):
    """Unequal prompts and pictures, a row without a picture, one that is half given."""
    questions = [QUESTION, LONGER, QUESTION, LONGER]
    images = [picture(), None, picture(80, 60, seed=1), picture(seed=2)]
    prefill = [None, None, None, "the circle is red ."]
    ask = {"sampler": sampler, "cache": cache, "cfg_scale": cfg_scale, "stages": ["redvtp"]}
    ask = {**ask, **LENGTHS}
    batch = vlm.generate(questions, images=images, prefill=prefill, **ask)
    assert vlm.model.special_ids.mask not in batch.sequences
    kept = kept_of(batch)
    assert kept.keys() == {0, 2, 3}
    for row, question in enumerate(questions):
        alone = vlm.generate(question, images=images[row], prefill=prefill[row], **ask)
        assert alone.sequences[0].tolist() == batch.sequences[row].tolist()
        assert kept_of(alone).get(0) == kept.get(row)
        assert alone.cost.flops == batch.cost.row_flops[row]
        assert alone.cost.kept_visual_tokens[0] == batch.cost.kept_visual_tokens[row]


@pytest.mark.parametrize("policy", EVERY_STEP, ids=str)
@pytest.mark.parametrize("sampler", ["baseline", "lown"])
def test_refreshing_every_step_is_no_cache(vlm, policy, sampler):
    ask = {"images": picture(), "sampler": sampler, "stages": ["redvtp"], **LENGTHS}
    plain, cached = (vlm.generate(QUESTION, cache=cache, **ask) for cache in ("none", policy))
    assert torch.equal(plain.sequences, cached.sequences)
    assert plain.cost.flops == cached.cost.flops
    for own, other in zip(plain.trajectory.steps, cached.trajectory.steps, strict=True):
        assert torch.equal(own.confidence, other.confidence), "bit for bit"


# Embeddings alone do not say what is visual, so `mars` must treat both alike to be comparable.
SPECS = {"mars": "mars:visual_interval=2,text_interval=2"}


@pytest.mark.parametrize("cache", ["none", *(SPECS.get(name, name) for name in caches.names())])
def test_a_pruned_row_goes_on_as_a_new_response_on_the_short_prompt(vlm, cache):
    """No key, value or position from before the pruning is left."""
    ask = {"cache": cache, **LENGTHS}
    out = vlm.generate(QUESTION, images=picture(), stages=["redvtp"], **ask)
    first, *later = out.trajectory.steps
    (pruning,) = first.prunings
    mask = vlm.model.special_ids.mask
    given = torch.where(first.commit[0], first.tokens[0], mask).tolist()
    new = vlm.generate(inputs_embeds=pruning.prompt.embeds, prefill=given, **ask)
    assert new.sequences.tolist() == out.sequences.tolist()
    for step, other in zip(later, new.trajectory.steps, strict=True):
        assert torch.equal(step.commit, other.commit)
        assert torch.allclose(step.confidence, other.confidence, atol=1e-6)
        assert [forward.to_dict() for forward in step.forwards] == [
            forward.to_dict() for forward in other.forwards
        ]


@pytest.mark.parametrize(
    ("cache", "kinds"),
    [
        ("prefix", ["full", "full", "suffix", "suffix", "full", "suffix"]),
        ("dual", ["full", "full", "block", "block", "full", "block"]),
        ("vicinity:warmup=2", ["full", "full", "full", "window", "full", "window"]),
        ("dllm:gen_interval=3", ["full", "full", "partial", "partial", "partial", "partial"]),
        ("prefix_lm", ["prefill", "suffix", "prefill", "suffix", "suffix", "suffix"]),
    ],
)
def test_what_each_policy_feeds(vlm, cache, kinds):
    out = vlm.generate(QUESTION, images=picture(), stages=["redvtp"], cache=cache, **LENGTHS)
    forwards = [forward for step in out.trajectory.steps for forward in step.forwards]
    assert [forward.kind for forward in forwards][:6] == kinds
    lost = out.cost.visual_tokens[0] - out.cost.kept_visual_tokens[0]
    length = out.cost.prompt_lengths[0] + 12
    short = {forward.keys[0] for step in out.trajectory.steps[1:] for forward in step.forwards}
    assert short - {length - lost - 12} == {length - lost}  # a prefill attends to the prompt
    plain = vlm.generate(QUESTION, images=picture(), cache=cache, **LENGTHS)
    assert out.cost.kv_bytes == plain.cost.kv_bytes, "the first forward fills a whole cache"


def test_only_the_view_with_the_picture_is_pruned(vlm):
    """TEXT_ONLY keeps its cache, length and positions while rows drop out of FULL."""
    ask = {"images": [picture(), picture(seed=1)], "cache": "prefix", **LENGTHS}
    ask["sampler"] = "lown:access=every,every=2,accept=k,positions=original"
    out = vlm.generate([QUESTION, LONGER], stages=["redvtp"], **{**ask, "block_length": 12})
    for row in range(2):
        text = out.cost.prompt_lengths[row] - out.cost.visual_tokens[row] + 12
        forwards = [
            (forward.view, forward.kind, forward.keys[forward.rows.index(row)])
            for step in out.trajectory.steps
            for forward in step.forwards
            if row in forward.rows
        ]
        texts = [forward for forward in forwards if forward[0] == "TEXT_ONLY"]
        assert [kind for _, kind, _ in texts] == ["full"] + ["suffix"] * (len(texts) - 1)
        assert {keys for *_, keys in texts} == {text}
        full = [keys for view, _, keys in forwards if view == "FULL"]
        assert full == [text + out.cost.visual_tokens[row]] + [
            text + out.cost.kept_visual_tokens[row]
        ] * (len(full) - 1)


def test_rotary_positions_of_both_views(vlm, monkeypatch):
    """FULL counts anew after the pruning; TEXT_ONLY stays at the numbers of the whole prompt."""
    run, seen = vlm.model.hidden_states, []

    def hidden_states(embeds, positions, *rest, **extra):
        seen.append(positions[0].tolist())
        return run(embeds, positions, *rest, **extra)

    monkeypatch.setattr(vlm.model, "hidden_states", hidden_states)
    ask = {"images": picture(), "gen_length": 4, "steps": 4, "stop": False}
    ask["sampler"] = "lown:access=every,every=2,accept=k,positions=original"
    for stages in ([], ["redvtp"], ["redvtp:positions=original"]):
        out = vlm.generate(QUESTION, stages=stages, **ask)
        assert [len(step.forwards) for step in out.trajectory.steps] == [1, 1, 2, 1]
    plain, renumbered, original = seen[:5], seen[5:10], seen[10:]
    assert plain[0] == renumbered[0] == original[0] == list(range(len(plain[0])))
    for place in (1, 2, 4):
        assert plain[place] == renumbered[place] == original[place]
    assert renumbered[3] == list(range(len(renumbered[3])))
    assert len(original[3]) == len(renumbered[3]) < len(plain[3])
    assert original[3][-5:] == plain[3][-5:]
    assert set(plain[1]) < set(original[3]) < set(plain[3])


def test_a_forward_with_rows_costs_what_torch_counts(vlm, checkpoint):
    model = dlm_decode.load(checkpoint, attn_implementation="eager").model
    probe = RowProbe(torch.tensor([0]), torch.tensor([[3, 7, 9]]), 5, layers=[1])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.hidden_states(torch.randn(1, 11, 32), torch.arange(11)[None], probe=probe)
    rows = attention_row_flops(model.geometry, 3, 11, 1)
    assert rows > 0
    assert counter.get_total_flops() == forward_flops(model.geometry, 11, 11) + rows


def test_cost_by_hand(vlm):
    prefill = "the circle is"  # three positions are given, so nine are asked about
    out = vlm.generate(QUESTION, images=picture(), prefill=prefill, stages=["redvtp"], **LENGTHS)
    geometry, length = vlm.geometry, out.cost.prompt_lengths[0] + 12
    short = length - out.cost.visual_tokens[0] + out.cost.kept_visual_tokens[0]
    rows = attention_row_flops(geometry, 9, length, geometry.num_layers)
    first = forward_flops(geometry, length, length) + rows
    assert out.trajectory.steps[0].forwards[0].attention_rows == (9,)
    assert out.cost.flops == first + 8 * forward_flops(geometry, short, short)
    guided = vlm.generate(
        QUESTION, images=picture(), prefill=prefill, stages=["redvtp"], cfg_scale=0.5, **LENGTHS
    )
    assert guided.cost.flops == 2 * out.cost.flops - rows


def test_relative_cost_is_pi_f_plus_sigma_rho(vlm):
    ask = {"images": picture(), "gen_length": 12, "steps": 6, "block_length": 6, "stop": False}
    sampler = "lown:access=every,every=2,accept=k"
    out = vlm.generate(QUESTION, sampler=sampler, stages=["redvtp"], **ask)
    geometry, length = vlm.geometry, out.cost.prompt_lengths[0] + 12
    text = length - out.cost.visual_tokens[0]
    whole, short, blind = (
        forward_flops(geometry, count, count)
        for count in (length, text + out.cost.kept_visual_tokens[0], text)
    )
    rows = attention_row_flops(geometry, 12, length, geometry.num_layers)
    counts, shares = out.cost.row_forwards[0], out.cost.routing()
    full = counts["FULL"]
    assert full > 1
    assert shares.pi == pytest.approx((whole + rows + (full - 1) * short) / full / whole)
    assert shares.rho == pytest.approx(blind / whole)
    assert (shares.f, shares.sigma) == (full / 6, counts["TEXT_ONLY"] / 6)
    assert out.cost.relative == pytest.approx(shares.pi * shares.f + shares.sigma * shares.rho)


@pytest.mark.parametrize("budget", [0.3, 0.5, 0.8])
def test_a_budget_holds_with_the_rows(vlm, budget):
    ask = {"images": picture(), "gen_length": 8, "steps": 8, "stop": False, "stages": ["redvtp"]}
    out = vlm.generate(QUESTION, sampler=f"lown:budget={budget}", **ask)
    assert kept_of(out)
    assert out.cost.relative <= budget
    one = {**ask, "steps": 1}
    with pytest.raises(InvalidInputError, match="budget"):
        vlm.generate(QUESTION, sampler="lown:budget=1.0", **one)


@pytest.mark.parametrize(
    "sampler",
    ["lown:access=oracle", "lown:access=random", "lown:access=always", "lown+fast_dllm",
     "fast_dllm@2025-06", "fast_dllm@2026-04:cache=dual", "llada_v_hook"],
)  # fmt: skip
def test_samplers_that_look_more_than_once(vlm, sampler):
    ask = {"images": picture(), "sampler": sampler, **LENGTHS}
    out = vlm.generate(QUESTION, stages=["redvtp:keep_ratio=0.3"], probe="packed", **ask)
    asked = [f for step in out.trajectory.steps for f in step.forwards if f.attention_rows]
    assert len(asked) == 1
    assert [step for step, _ in kept_of(out).values()] == [0]


def test_nothing_to_prune(vlm):
    """No picture; everything committed in the first step; a picture of one token."""
    blind = vlm.generate(QUESTION, stages=["redvtp"], **LENGTHS)
    plain = vlm.generate(QUESTION, **LENGTHS)
    assert torch.equal(blind.sequences, plain.sequences)
    assert blind.cost.flops == plain.cost.flops
    note = "rows [0] have no visual tokens; redvtp leaves them as they are."
    assert blind.trajectory.run["notes"] == [note]
    ask = {"images": picture(), "gen_length": 4, "steps": 1, "stop": False}
    at_once = vlm.generate(QUESTION, stages=["redvtp"], **ask)
    assert torch.equal(at_once.sequences, vlm.generate(QUESTION, **ask).sequences)
    assert at_once.cost.kept_visual_tokens == at_once.cost.visual_tokens
    assert at_once.trajectory.run["notes"] == []
    stages = ["stride:keep_ratio=0.01", "redvtp"]
    single = vlm.generate(QUESTION, images=picture(), stages=stages, **LENGTHS)
    assert single.cost.kept_visual_tokens == single.cost.visual_tokens == (1,)


def test_behind_another_stage(vlm):
    stages = ["stride:keep_ratio=0.5", "redvtp:keep_ratio=0.5"]
    out = vlm.generate(QUESTION, images=picture(), stages=stages, **LENGTHS)
    whole = vlm.generate(QUESTION, images=picture(), **LENGTHS).cost.visual_tokens[0]
    assert out.cost.visual_tokens[0] == round(whole / 2)
    assert out.cost.kept_visual_tokens[0] == int(round(whole / 2) / 2)
    (pruning,) = out.trajectory.steps[0].prunings
    assert pruning.prompt.positions().tolist() == list(range(pruning.prompt.length))


def test_several_pictures_and_a_video(vlm):
    two = vlm.generate(QUESTION, images=[picture(), picture(seed=3)], stages=["redvtp"], **LENGTHS)
    assert two.cost.kept_visual_tokens == (2 * int(17 / 2),)
    frames = [picture(32, 32, seed) for seed in range(3)]
    video = vlm.generate(QUESTION, videos=[frames], stages=["redvtp"], **LENGTHS)
    assert video.cost.kept_visual_tokens[0] == video.cost.visual_tokens[0] // 2


def test_prompt_masks_are_no_response(vlm):
    """The official program fills mask ids of the prompt; only the response's rows are averaged."""
    inputs = vlm.processor(QUESTION, images=[picture()])
    ids = torch.cat([inputs.input_ids, torch.tensor([vlm.model.special_ids.mask, 5])])
    out = vlm.generate(
        input_ids=ids,
        pixel_values=inputs.pixel_values,
        image_sizes=inputs.image_sizes,
        modalities=inputs.modalities,
        preset="official",
        stages=["redvtp"],
        **LENGTHS,
    )
    assert out.trajectory.steps[0].forwards[0].attention_rows == (12,)
    assert out.cost.kept_visual_tokens[0] == out.cost.visual_tokens[0] // 2


@pytest.mark.parametrize("cache", ["none", "prefix", "prefix_lm"])
def test_shifted_logits(vlm, monkeypatch, cache):
    monkeypatch.setattr(type(vlm.model), "shift_logits", True)
    ask = {"cache": cache, "stages": ["redvtp"], **LENGTHS}
    both = vlm.generate([QUESTION, LONGER], images=[picture(), picture(seed=1)], **ask)
    assert vlm.model.special_ids.mask not in both.sequences
    assert kept_of(both).keys() == {0, 1}
    alone = vlm.generate(LONGER, images=picture(seed=1), **ask)
    assert alone.sequences[0].tolist() == both.sequences[1].tolist()


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (["redvtp", "stride"], "put 'redvtp' last"),
        (["redvtp", "redvtp"], "only one stage of its kind"),
        (["redvtp:keep_ratio=0"], "keep_ratio must be above 0"),
        (["redvtp:keep_ratio=1.5"], "at most 1"),
        (["redvtp:positions=renumber"], "Did you mean 'renumbered'"),
        (["redvtp:keep_ration=0.5"], "Did you mean 'keep_ratio'"),
        (["redvt"], "Did you mean 'redvtp'"),
    ],
)
def test_what_is_refused_before_the_model_runs(vlm, monkeypatch, stages, message):
    monkeypatch.setattr(vlm.model, "encode_prompt", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(InvalidInputError, match=message):
        vlm.generate(QUESTION, images=picture(), stages=stages)


def test_records_and_command_line(vlm, checkpoint, tmp_path, capsys):
    image = tmp_path / "a.png"
    picture().save(image)
    arguments = ["generate", "--model", str(checkpoint), "--prompt", QUESTION, "--no-stop"]
    arguments += ["--image", str(image), "--stage", "redvtp:keep_ratio=0.5", "--json"]
    assert main([*arguments, "--trajectory", str(tmp_path / "t.jsonl")]) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    total = cost["visual_tokens"][0]
    assert cost["kept_visual_tokens"] == [total // 2]
    records = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    options = {"keep_ratio": 0.5, "positions": "renumbered"}
    assert records[0]["stages"] == [{"name": "redvtp", "options": options}]
    assert len(records[1]["rows"][0]["kept_visual"]) == total // 2
    assert records[1]["forwards"][0]["attention_rows"] == [8]
    assert "kept_visual" not in records[2]["rows"][0]
    assert "attention_rows" not in records[2]["forwards"][0]
    assert main(["list", "stages"]) == 0
    assert "redvtp" in capsys.readouterr().out
    out = vlm.generate(QUESTION, images=picture(), stages=["redvtp"], stop=False)
    assert f"{total // 2} of {total} visual tokens kept" in out.cost.summary()
