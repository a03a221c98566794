"""What prompts carry of the tower's attention: against whole maps, laid out as the features."""

from __future__ import annotations

import pytest
import torch
from golden_models import (
    lavida,
    lavida_prompt,
    tiny56,
    tiny_prompt,
    vidlada,
    vidlada_prompt,
)
from test_vlm import QUESTION, picture

from dlm_decode.errors import InvalidInputError
from dlm_decode.models.visual_layout import pool_frames
from dlm_decode.vision.stride import Stride

NEEDS = ("salience", "tower_keys")
CASES = {
    "single": (tiny56, lambda model: tiny_prompt(model, "single_list")),
    "tiles": (tiny56, lambda model: tiny_prompt(model, "anyres4_w100x70")),
    "pooled": (lavida, lambda model: lavida_prompt(model, "one_image")),
    "stacked": (lavida, lambda model: lavida_prompt(model, "two_images_stacked")),
    "video": (vidlada, lambda model: vidlada_prompt()),
}


@torch.no_grad()
def tower_maps(model, pixels):
    """Attention received `(tiles, N)` and mean keys `(tiles, N, d)`, with whole maps."""
    siglip = model.model.vision_tower.vision_tower.vision_model
    hidden = siglip.embeddings(pixels)
    *before, last = siglip.encoder.layers
    for layer in before:
        hidden = layer(hidden, None)
    normed, module = last.layer_norm1(hidden), last.self_attn
    query, key = (
        project(normed).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        for project in (module.q_proj, module.k_proj)
    )
    weights = (query @ key.transpose(-1, -2) * module.scale).softmax(-1)
    return weights.mean(dim=(1, 2)), key.mean(dim=1)


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_the_same_but_for_the_maps(name):
    make, ask = CASES[name]
    model = make()
    inputs = ask(model)
    with torch.no_grad():
        plain, full = model.encode_prompt(**inputs), model.encode_prompt(**inputs, needs=NEEDS)
        only = model.encode_prompt(**inputs, needs=("salience",))
    assert plain.salience is plain.tower_keys is None
    assert full.embeds.equal(plain.embeds)
    assert full.spans == plain.spans
    assert full.salience.shape == (plain.length,)
    assert full.tower_keys.shape[0] == plain.length
    assert torch.allclose(only.salience, full.salience, rtol=1e-5, atol=1e-9)
    assert only.tower_keys is None
    for found in (full.salience, full.tower_keys.abs().sum(-1)):
        assert found.dtype == torch.float32
        assert (found[~plain.is_visual] == 0).all()
    for span in plain.spans:
        inside = torch.zeros(span.length, dtype=torch.bool)
        for start, rows, columns, has_newline in span.sections:
            grid = torch.arange(rows * (columns + has_newline))
            inside[start + grid[grid % (columns + has_newline) < columns]] = True
        salience = full.salience[span.start : span.start + span.length]
        assert (salience[inside] > 0).all()
        assert (salience[~inside] == 0).all()


def test_one_tile():
    model = tiny56()
    inputs = tiny_prompt(model, "single_list")
    with torch.no_grad():
        prompt = model.encode_prompt(**inputs, needs=NEEDS)
    received, keys = tower_maps(model, inputs["pixel_values"][0][None])
    (span,) = prompt.spans
    inside = slice(span.start, span.start + received.shape[1])
    assert torch.allclose(prompt.salience[inside], received[0], atol=1e-7)
    assert torch.allclose(prompt.tower_keys[inside], keys[0], atol=1e-6)
    assert float(prompt.salience.sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("make", "ask"),
    [
        (lavida, lambda model: lavida_prompt(model, "one_image")),
        (vidlada, lambda m: vidlada_prompt()),
    ],
)
def test_pooled_as_the_features_are(make, ask):
    model = make()
    inputs = ask(model)
    with torch.no_grad():
        prompt = model.encode_prompt(**inputs, needs=("salience",))
    received, _ = tower_maps(model, inputs["pixel_values"][0])
    pooled = pool_frames(received[..., None], model.config.mm_spatial_pool_mode)
    (span,) = prompt.spans
    start, rows, columns, has_newline = span.sections[0]
    part = prompt.salience[span.start + start :][: rows * (columns + has_newline)]
    part = part.reshape(rows, columns + has_newline)[:, :columns]
    assert torch.allclose(part, pooled[0, ..., 0], atol=1e-7)


def test_tiles_run_in_parts(monkeypatch):
    from dlm_decode.models import attention, llava_llada

    model = vidlada()
    with torch.no_grad():
        whole = model.encode_prompt(**vidlada_prompt(), needs=NEEDS)
        monkeypatch.setattr(llava_llada, "_TILES_PER_RUN", 1)
        monkeypatch.setattr(attention, "_SCORES_AT_ONCE", 5000)
        parts = model.encode_prompt(**vidlada_prompt(), needs=NEEDS)
    assert torch.allclose(whole.salience, parts.salience, atol=1e-7)
    assert torch.allclose(whole.tower_keys, parts.tower_keys, atol=1e-6)


def test_only_where_a_stage_asks(vlm, monkeypatch):
    asked = []
    encode = vlm.model.encode_prompt

    def watched(*given, **knobs):
        asked.append(frozenset(knobs.pop("needs")))
        return encode(*given, **knobs)

    monkeypatch.setattr(vlm.model, "encode_prompt", watched)
    for stages in ([], [Stride()], ["specflow:keep_ratio=1"], ["specflow:seed=norm"]):
        vlm.generate(QUESTION, images=picture(), stages=stages, stop=False)
    with pytest.raises(InvalidInputError, match="reads salience"):
        vlm.generate(QUESTION, images=picture(), stages=["specflow"], stop=False)
    assert asked == [frozenset()] * 4 + [frozenset({"salience"})]


def test_hooks_are_gone_after_a_failure(vlm):
    layer = vlm.model.model.vision_tower.vision_tower.vision_model.encoder.layers[-1].self_attn
    with pytest.raises(InvalidInputError):
        vlm.model.encode_prompt(
            torch.tensor([1, -200]), torch.zeros(1, 3, 5, 5), needs=("salience",)
        )
    assert not layer.q_proj._forward_hooks
    assert not layer.k_proj._forward_hooks
