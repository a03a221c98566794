"""Stages before the language model: every one on every model, and what each method keeps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from golden_models import lavida, lavida_prompt, tiny56, tiny_prompt, vidlada, vidlada_prompt
from test_specflow import generator, image, kept_of, prompt_of
from torch.nn import functional

from dlm_decode import stages
from dlm_decode.errors import InvalidInputError
from dlm_decode.vision import make
from dlm_decode.vision.base import tower_needs
from dlm_decode.vision.divprune import farthest_first
from dlm_decode.vision.merging import merge_to
from dlm_decode.vision.picture import PictureStage
from dlm_decode.vlm import DiffusionVlm

MODELS = {
    "LLaDA-V": (tiny56, lambda model: tiny_prompt(model, "anyres4_w100x70")),
    "LaViDa": (lavida, lambda model: lavida_prompt(model, "two_images")),
    "VidLaDA": (vidlada, lambda model: vidlada_prompt()),
}
LENGTHS = {"gen_length": 4, "steps": 2, "stop": False}
NAMES = [name for name in stages.names() if issubclass(stages.get(name), PictureStage)]
CHANGES_TOKENS = {"tome", "pitome", "visionzip", "specflow"}


@cache
def encoded(name):
    make_model, ask = MODELS[name]
    model = make_model()
    inputs = ask(model)
    with torch.no_grad():
        prompt = model.encode_prompt(**inputs, needs=("salience", "tower_keys"))
    return model, inputs, prompt


def test_all_are_here():
    assert set(NAMES) == {
        "divprune", "holov", "pitome", "random", "specflow", "tome", "visionzip",
    }  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_matrix(name, model):
    _, _, prompt = encoded(model)
    assert make(f"{name}:keep_ratio=1").before_lm(prompt) is prompt
    many = {"keep_tokens": 10**6}
    assert make(name, many).before_lm(prompt) is prompt
    for options in ({"keep_ratio": 0.3}, {"keep_tokens": 5}, {"newlines": "keep"}):
        stage = make(name, {**options, "positions": "original"})
        out = stage.before_lm(prompt)
        kept = kept_of(prompt, out)
        assert len(out.spans) == len(prompt.spans)
        for before, after in zip(prompt.spans, out.spans, strict=True):
            inside = slice(after.start, after.start + after.length)
            assert out.is_visual[inside].all()
            own = out.positions()[inside]
            num_sinks = 2 if name == "specflow" else 0
            patches = sum(rows * columns for _, rows, columns, _ in before.sections)
            count = stage.budget(patches)
            if "newlines" not in options:
                assert after.length == count + num_sinks
            num_last = {"specflow": 2, "visionzip": min(round(count * 10 / 64), count - 1)}
            main = own[: after.length - num_last.get(name, 0)]
            assert (main.diff() > 0).all()
            assert ((own >= before.start) & (own < before.start + before.length)).all()
            if name == "visionzip":
                assert len(own.unique()) == len(own)
        if name not in CHANGES_TOKENS:
            assert out.embeds[out.is_visual].equal(prompt.embeds[kept])
        assert out.salience.shape == out.ids.shape
        packed = make(name, options).before_lm(prompt)
        assert packed.embeds.equal(out.embeds)
        assert packed.position_ids is None
        assert packed.next_position == packed.length


@pytest.mark.parametrize("name", [*NAMES, "stride"])
def test_batch_equals_singles_and_full_equals_none(vlm, name):
    from test_vlm import picture

    questions = ["what colour is the circle ?", "where is the red square ? what is it ?"]
    images = [picture(), picture(64, 32, seed=3)]
    ask = {"stages": [f"{name}:keep_ratio=0.4"], **LENGTHS}
    both = vlm.generate(questions, images=images, **ask)
    for row in range(2):
        alone = vlm.generate(questions[row], images=images[row], **ask)
        assert alone.sequences[0].tolist() == both.sequences[row].tolist()
        assert alone.cost.visual_tokens[0] == both.cost.visual_tokens[row]
    plain = vlm.generate(questions, images=images, **LENGTHS)
    whole = vlm.generate(questions, images=images, stages=[f"{name}:keep_ratio=1"], **LENGTHS)
    assert whole.sequences.equal(plain.sequences)
    assert whole.cost.flops == plain.cost.flops > both.cost.flops


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampler", ["baseline", "lown"])
@pytest.mark.parametrize("cache", ["none", "prefix:refresh_interval=1"])
def test_samplers_and_caches(name, sampler, cache):
    model, inputs, _ = encoded("LLaDA-V")
    ask = {"sampler": sampler, "stages": [f"{name}:keep_tokens=6"], **inputs, **LENGTHS}
    out = DiffusionVlm(model).generate(cache=cache, **ask)
    assert model.special_ids.mask not in out.sequences
    assert out.sequences.equal(DiffusionVlm(model).generate(cache="none", **ask).sequences)


def kept_by(spec, prompt):
    return kept_of(prompt, make(spec + ",positions=original").before_lm(prompt))


def test_random_follows_seed_and_prompt():
    prompt = prompt_of(image(6, 6), image(6, 6))
    first = kept_by("random:keep_tokens=9", prompt)
    assert first.equal(kept_by("random:keep_tokens=9,seed=0", prompt))
    assert not first.equal(kept_by("random:keep_tokens=9,seed=1", prompt))
    assert not (first[:9] - 2).equal(first[9:] - 40)
    other = replace(prompt, ids=prompt.ids + (prompt.ids == 0))
    assert not first.equal(kept_by("random:keep_tokens=9", other))


def test_divprune_is_max_min():
    tokens = torch.randn(30, 6, generator=generator(0))
    unit = functional.normalize(tokens, dim=-1)
    distance = 1 - unit @ unit.T
    distance.fill_diagonal_(float("inf"))
    chosen = [int(distance.min(-1).values.argmax())]
    distance.fill_diagonal_(0)
    while len(chosen) < 8:
        chosen.append(int(distance[chosen].min(0).values.argmax()))
    assert farthest_first(tokens, 8).tolist() == chosen
    twins = torch.ones(5, 3)
    assert sorted(farthest_first(twins, 5).tolist()) == list(range(5))


def test_merging_keeps_the_weighted_sum():
    tokens = torch.randn(21, 6, generator=generator(0))

    def halves(cosines, num_merged):
        places = torch.arange(len(cosines))
        return places[::2], places[1::2]

    for count in (20, 11, 7, 1):
        merged = merge_to(tokens, count, halves)
        assert len(merged.index) == count
        assert float(merged.sizes.sum()) == 21
        total = (merged.tokens * merged.sizes[:, None]).sum(0)
        assert torch.allclose(total, tokens.sum(0), atol=1e-4)
        alone = merged.sizes == 1
        assert merged.tokens[alone].equal(tokens[merged.index[alone]])


def test_tome_merges_the_most_similar_pair():
    prompt = prompt_of(image(3, 4))
    unit = functional.normalize(prompt.embeds[2:14], dim=-1)
    cosines = unit[::2] @ unit[1::2].T
    source, destination = divmod(int(cosines.argmax()), 6)
    out = make("tome:keep_tokens=11,positions=original").before_lm(prompt)
    assert 2 + 2 * source not in out.positions()
    at = (out.positions() == 3 + 2 * destination).nonzero().item()
    pair = prompt.embeds[[2 + 2 * source, 3 + 2 * destination]]
    assert torch.allclose(out.embeds[at], pair.mean(0))


def test_pitome_protects_tokens_that_stand_alone():
    prompt = prompt_of(image(4, 4), width=32)
    common = torch.randn(32, generator=generator(5))
    crowd = 2 + torch.tensor([0, 3, 5, 6, 9, 10])
    prompt.embeds[crowd] = common + 0.1 * torch.randn(6, 32, generator=generator(6))
    out = make("pitome:keep_tokens=13,positions=original").before_lm(prompt)
    gone = set(range(2, 18)) - set(out.positions().tolist())
    assert len(gone) == 3
    assert gone < set(crowd.tolist())


def test_visionzip():
    prompt = prompt_of(image(8, 8))
    out = make("visionzip:keep_tokens=20,contextual=0.2,positions=original").before_lm(prompt)
    positions = kept_of(prompt, out)
    order = prompt.salience.argsort(descending=True, stable=True)
    assert positions[:16].equal(order[:16].sort().values)
    rest = order[16:64].sort().values
    assert positions[16:].equal(rest[::12])
    keys = functional.normalize(prompt.tower_keys, dim=-1)
    others = torch.tensor([place for place in rest.tolist() if place not in positions[16:]])
    nearest = (keys[others] @ keys[positions[16:]].T).argmax(-1)
    for number, target in enumerate(positions[16:].tolist()):
        mean = prompt.embeds[others[nearest == number]].mean(0)
        expected = prompt.embeds[target] + mean
        assert torch.allclose(out.embeds[out.is_visual][16 + number], expected, atol=1e-5)
    bare = make("visionzip:keep_tokens=20,contextual=0").before_lm(prompt)
    assert bare.num_visual == 20


def test_holov_budgets_every_run():
    prompt = prompt_of(image(8, 8))
    salience = torch.ones(prompt.length)
    salience[2:18] = 3.0
    flat = replace(prompt, salience=salience)
    kept = kept_by("holov:keep_tokens=12,num_crops=4,variety=0", flat) - 2
    assert torch.bincount(kept // 16, minlength=4).tolist() == [6, 2, 2, 2]
    with_variety = kept_by("holov:keep_tokens=12,num_crops=4,variety=50", flat) - 2
    assert not with_variety.equal(kept)
    assert len(kept_by("holov:keep_tokens=63,num_crops=100", prompt)) == 63


def test_needs_and_mistakes():
    needs = {name: set(tower_needs([make(name)])) for name in NAMES}
    assert {name for name, own in needs.items() if "salience" in own} == {
        "specflow", "holov", "visionzip",
    }  # fmt: skip
    assert {name for name, own in needs.items() if "tower_keys" in own} == {"visionzip"}
    assert not tower_needs([make("visionzip:keep_ratio=1"), make("stride")])
    for spec, message in (
        ("random:seed=-1", "seed must be a whole number of at least 0"),
        ("pitome:margin=2", "margin must lie in"),
        ("visionzip:contextual=1", "contextual must lie in"),
        ("holov:num_crops=0", "num_crops must be a whole number"),
        ("holov:variety=-1", "variety must be at least 0"),
        ("divprune:keep_ratio=2", "keep_ratio must be above 0"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            make(spec)
