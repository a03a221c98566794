"""LaViDa-Dream against the official classes: embeddings, logits, shifted prefix, key names."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from golden_models import (
    GOLDEN,
    lavida_dream,
    lavida_prompt,
    lavida_raw,
    lavida_tensors,
    read_json,
)
from test_models_loading import same_weights

from dlm_decode import models
from dlm_decode.cache.base import Clock, Fed
from dlm_decode.cache.prefix_lm import PrefixLm
from dlm_decode.canvas import Canvas
from dlm_decode.cost import CostMeter
from dlm_decode.models.lavida_dream import LavidaDreamConfig, LavidaDreamModelLM
from dlm_decode.models.processing import VlmProcessor
from dlm_decode.predictor import FULL, Predictor
from dlm_decode.settings import Settings

TENSORS = lavida_tensors("dream")


@pytest.fixture(scope="module")
def model():
    return lavida_dream()


def test_published_folder_and_round_trip(model, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(lavida_raw("dream")))
    shutil.copy(GOLDEN / "lavida" / "dream" / "model.safetensors", tmp_path / "model.safetensors")
    loaded = models.load_model(tmp_path)
    assert type(loaded) is LavidaDreamModelLM and same_weights(model, loaded)
    assert loaded.shift_logits
    loaded.save_pretrained(tmp_path / "again")
    assert same_weights(model, models.load_model(tmp_path / "again"))
    shapes = read_json("lavida", "dream", "state_dict_shapes.json")
    assert {key: tuple(shape) for key, shape in shapes.items()} == {
        key: tuple(value.shape) for key, value in model.state_dict().items()
    }


def test_tower_and_embeddings(model):
    pixels = lavida_prompt(model, "one_image")["pixel_values"][0]
    with torch.no_grad():
        assert torch.allclose(
            model.model.vision_tower(pixels)[0], TENSORS["tower_view0"], atol=1e-5
        )
        for name, stored, every in (
            ("one_image", "merged_one_image", 1),
            ("image_1", "merged_image_1_every7th", 7),
            ("two_images", "merged_two_images_pad", 1),
            ("two_images_stacked", "merged_two_images_4d_every50th", 50),
        ):
            prompt = model.encode_prompt(**lavida_prompt(model, name))
            assert torch.allclose(prompt.embeds[::every], TENSORS[stored], atol=1e-5)


def response(name):
    masks = torch.full((16,), 300)
    return masks if name == "allmask" else TENSORS["partial_response_ids"]


@pytest.mark.parametrize("name", ["allmask", "partial"])
def test_logits(model, name):
    with torch.no_grad():
        prompt = model.encode_prompt(**lavida_prompt(model, "one_image"))
        embeds = torch.cat([prompt.embeds, model.embed(response(name))])
        full = model(inputs_embeds=embeds[None])[0, -20:]
        policy, length = PrefixLm(), prompt.length
        cache, states, positions = policy.start(), [], torch.arange(len(embeds))[None]
        for feed in policy.plan(Clock(0, 16, 0, 0)):
            part = slice(0, length) if feed.is_prompt else slice(length, None)
            columns = positions[:, part]
            memory = cache.memory(Fed(feed, torch.tensor([0]), 1, columns, length))
            states.append(model.hidden_states(embeds[None, part], columns, None, memory)[0])
        last, prefix = model.lm_head(states[0][-1]), model.lm_head(states[1])
    assert torch.allclose(full, TENSORS[f"logits_full_{name}"], atol=1e-4)
    assert torch.allclose(prefix, TENSORS[f"logits_prefix_{name}"], atol=1e-4)
    assert torch.allclose(last, TENSORS["prefill_last_logits"], atol=1e-4)
    assert torch.allclose(cache.keys[0][0, :, :3], TENSORS["cache_layer0_key_first3"], atol=1e-4)


def test_logits_of_a_text_prompt(model):
    with torch.no_grad():
        logits = model(input_ids=TENSORS["input_ids_text_only"])[0]
    assert torch.allclose(logits, TENSORS["logits_text_only_prompt"], atol=1e-4)


@pytest.mark.parametrize("cache", [None, PrefixLm()])
@pytest.mark.parametrize("name", ["allmask", "partial"])
def test_proposals_are_shifted(model, cache, name):
    """Position j reads row j - 1; the first one reads the prompt's last row, in every forward."""
    ids = response(name)
    canvas = Canvas.create(ids[None].clone(), ids[None] == 300)
    with torch.no_grad():
        prompt = model.encode_prompt(**lavida_prompt(model, "one_image"))
    predictor = Predictor(
        model,
        [prompt],
        canvas,
        settings=Settings(16, 16, 16, preset="lavida"),
        generators=[torch.Generator()],
        meter=CostMeter(model.geometry, 1),
        cache=cache,
    )
    if cache is None:
        rows = TENSORS[f"logits_full_{name}"][3:-1]
    else:
        rows = torch.cat(
            [TENSORS["prefill_last_logits"][None], TENSORS[f"logits_prefix_{name}"][:-1]]
        )
    everywhere = torch.ones(1, 16, dtype=torch.bool)
    for _ in range(2):
        prediction = predictor(FULL, everywhere, blocks=torch.tensor([0]))
        assert prediction.tokens[0].tolist() == rows.argmax(dim=1).tolist()
        expected = rows.log_softmax(dim=1).max(dim=1).values
        assert torch.allclose(prediction.log_prob[0], expected, atol=1e-4)


def test_only_the_first_position_needs_the_prefill_alone(model):
    ids = torch.full((1, 8), 300)
    with torch.no_grad():
        prompt = model.encode_prompt(TENSORS["input_ids_text_only"][0])
    meter = CostMeter(model.geometry, 1)
    predictor = Predictor(
        model,
        [prompt],
        Canvas.create(ids, ids == 300),
        settings=Settings(8, 8, 8),
        generators=[torch.Generator()],
        meter=meter,
        cache=PrefixLm(),
    )
    first = torch.arange(8)[None] == 0
    one = predictor(FULL, first, blocks=torch.tensor([0]))
    assert meter.forwards == {("FULL", "prefill"): 1} and meter.calls == 1
    every = predictor(FULL, ~first | first, blocks=torch.tensor([0]))
    assert meter.forwards == {("FULL", "prefill"): 1, ("FULL", "suffix"): 1}
    assert one.tokens[0, 0] == every.tokens[0, 0] and bool(every.is_answered.all())


def test_template_and_special_ids():
    config = LavidaDreamConfig.from_dict(lavida_raw("dream"))
    ask = [{"role": "user", "content": "<image>\nwhat is {this} ?"}]
    text = VlmProcessor(SimpleNamespace(chat_template=None), config).render(ask)
    assert text.startswith("<|im_start|>system\nYou are a helpful language and vision assistant.")
    assert text.endswith(
        "<|im_end|>\n<|im_start|>user\n<image>\nwhat is {this} ?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_published_layout():
    """The 7B model on the meta device."""
    raw = {
        key: value
        for key, value in lavida_raw("dream").items()
        if key not in ("vision_config", "mask_token_id", "eos_token_id", "pad_token_id")
    }
    raw |= {
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 28,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "rope_theta": 1000000.0,
        "mm_vision_tower": "google/siglip-so400m-patch14-384",
    }
    assert models.class_for(raw) is LavidaDreamModelLM
    with torch.device("meta"):
        model = LavidaDreamModelLM(LavidaDreamConfig.from_dict(raw))
    state = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    prefix = "model.layers.27.self_attn."
    assert {key: shape for key, shape in state.items() if key.startswith(prefix)} == {
        f"{prefix}q_proj.weight": (3584, 3584),
        f"{prefix}q_proj.bias": (3584,),
        f"{prefix}k_proj.weight": (512, 3584),
        f"{prefix}k_proj.bias": (512,),
        f"{prefix}v_proj.weight": (512, 3584),
        f"{prefix}v_proj.bias": (512,),
        f"{prefix}o_proj.weight": (3584, 3584),
    }
    assert state["lm_head.weight"] == (152064, 3584)
    assert model.special_ids.mask == 151666
