"""LLaDA-V against the official classes: tower, projector, layout, pixels, prompts, key names."""

from __future__ import annotations

import hashlib
import math
from types import SimpleNamespace

import pytest
import torch
from golden_models import (
    GOLDEN,
    formula_image,
    read_json,
    realvocab,
    tiny56,
    tiny56_config,
    tiny56_inputs,
    tiny_prompt,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from dlm_decode.canvas import IMAGE_TOKEN_ID
from dlm_decode.errors import CheckpointError, InvalidInputError
from dlm_decode.models.anyres import best_resolution, grid_candidates, tiles_of, unpadded_box
from dlm_decode.models.configuration import LlavaLLaDAConfig
from dlm_decode.models.llava_llada import LlavaLLaDAModelLM
from dlm_decode.models.processing import VlmProcessor, join_chunks
from dlm_decode.models.visual_layout import anyres_tokens, pool_frames, video_tokens

CASES = read_json("lladav", "tiny56", "cases.json")
MISC = read_json("lladav", "misc.json")
REAL = read_json("lladav", "realvocab", "cases.json")


@pytest.fixture(scope="module")
def model():
    return tiny56()


def test_state_dict_has_the_published_keys(model):
    expected = {
        key: tuple(shape)
        for key, shape in dict(read_json("lladav", "tiny56", "state_dict_keys.json")).items()
    }
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == expected


def test_tower_and_projector(model):
    stored = tiny56_inputs()
    with torch.no_grad():
        features = model.model.vision_tower(stored["piece.pixels"])
        assert torch.allclose(features, stored["piece.tower_out"], atol=1e-5)
        assert torch.allclose(
            model.encode_tiles(stored["piece.pixels"]), stored["piece.projector_out"], atol=1e-5
        )


@pytest.mark.parametrize("name", CASES["prompts"])
def test_merged_embeddings(model, name):
    prompt, stored = CASES["prompts"][name], tiny56_inputs()
    for field in ("image_aspect_ratio", "mm_patch_merge_type", "mm_newline_position"):
        setattr(model.config, field, prompt[field])
    inputs = tiny_prompt(model, name)
    pixels = inputs.get("pixel_values")
    for index in range(len(prompt["pixel_shapes"] or [])):
        key = f"{name}.pixels.{index}"
        if key in stored:
            assert torch.equal(pixels[index], stored[key])
        assert list(pixels[index].shape) == prompt["pixel_shapes"][index]
    with torch.no_grad():
        encoded = model.encode_prompt(inputs.pop("input_ids"), **inputs)
    assert encoded.num_visual == prompt["visual_tokens"] == int(encoded.is_visual.sum())
    assert encoded.length == prompt["length"]
    if f"{name}.inputs_embeds" in stored:
        assert torch.allclose(encoded.embeds, stored[f"{name}.inputs_embeds"][0], atol=1e-4)
    else:
        expected = stored[f"{name}.inputs_embeds_every7"].reshape(-1, encoded.embeds.shape[1])
        assert torch.allclose(encoded.embeds[::7], expected, atol=1e-4)
    for span in encoded.spans:
        assert encoded.is_visual[span.start : span.start + span.length].all()
        for start, rows, columns, has_newline in span.sections:
            assert start + rows * (columns + has_newline) <= span.length


def test_logits(model):
    stored = load_file(GOLDEN / "lladav" / "tiny56" / "logits.safetensors")
    cases = {case["id"]: case for case in CASES["cases"]}
    checked = 0
    for key, expected in stored.items():
        name, step = key.rsplit(".step", 1)
        if step != "0" or cases[name]["modify"] or cases[name]["params"].get("generation_suffix"):
            continue
        case = cases[name]
        prompt = CASES["prompts"][case["prompt"]]
        for field in ("image_aspect_ratio", "mm_patch_merge_type", "mm_newline_position"):
            setattr(model.config, field, prompt[field])
        inputs = tiny_prompt(model, case["prompt"])
        with torch.no_grad():
            encoded = model.encode_prompt(inputs.pop("input_ids"), **inputs)
            masks = model.embed(torch.full((case["params"]["gen_length"],), model.special_ids.mask))
            got = model(inputs_embeds=torch.cat([encoded.embeds, masks])[None])[0, encoded.length :]
        assert torch.allclose(got, expected.reshape(got.shape), atol=1e-4), key
        checked += 1
    assert checked >= 2


@pytest.fixture(scope="module")
def real():
    return realvocab()


@pytest.mark.parametrize("name", REAL["visual"])
def test_real_geometry_pixels_and_tokens(real, name):
    expected = REAL["visual"][name]
    size, seed = name.split("_s")
    width, height = map(int, size.split("x"))
    image = formula_image(width, height, int(seed))
    pixels = VlmProcessor(None, real.config).image_pixels(image)
    assert list(pixels.shape) == expected["tiles"]
    assert hashlib.sha256(pixels.numpy().tobytes()).hexdigest() == expected["pixels_sha256"]
    stored = load_file(GOLDEN / "lladav" / "realvocab" / "visual.safetensors")
    rows = stored[f"vis.{name}.rows"]
    with torch.no_grad():
        encoded = real.encode_prompt(torch.tensor([1, IMAGE_TOKEN_ID, 2]), [pixels], [image.size])
    assert encoded.num_visual == expected["visual_tokens"]
    visual = encoded.embeds[encoded.is_visual][::41]
    assert torch.allclose(visual, rows.reshape(visual.shape), atol=1e-4)


@pytest.mark.parametrize(
    "entry", MISC["anyres_max_4"], ids=lambda entry: "x".join(map(str, entry["size_wh"]))
)
def test_token_counts_of_real_images(entry):
    size = tuple(entry["size_wh"])
    width, height = best_resolution(size, grid_candidates("(1x1),...,(6x6)", 384))
    grid = (width // 384, height // 384)
    assert list(grid) == entry["grid_wh"]
    rows, columns = unpadded_box(grid[1] * 27, grid[0] * 27, size)
    assert [len(range(*rows.indices(10**6))), len(range(*columns.indices(10**6)))] == entry[
        "unpadded_hw"
    ]
    features = torch.zeros(1 + grid[0] * grid[1], 729, 1)
    tokens, sections = anyres_tokens(features, torch.zeros(1), grid, size, 4)
    assert len(tokens) == entry["tokens"]
    assert list(sections[1][1:3]) == entry["merged_hw"]
    assert (
        len(anyres_tokens(features, torch.zeros(1), grid, size, None)[0]) == entry["tokens_no_max"]
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 600), st.integers(4, 600))
def test_any_size_gives_a_consistent_layout(width, height):
    config = tiny56_config()
    image = Image.new("RGB", (width, height))
    candidates = grid_candidates(config.image_grid_pinpoints, 56)
    tiles = tiles_of(image, candidates, 56)
    best = best_resolution(image.size, candidates)
    grid = (best[0] // 56, best[1] // 56)
    features = torch.zeros(len(tiles), 16, 2)
    tokens, sections = anyres_tokens(features, torch.ones(2), grid, image.size, 4)
    (_, base, _, _), (start, rows, columns, _) = sections
    assert len(tokens) == base**2 + rows * (columns + 1)
    newlines = tokens[start:].reshape(rows, columns + 1, 2)[:, -1]
    assert (newlines == 1).all()


@pytest.mark.parametrize("rule", MISC["image_token_rule"], ids=lambda rule: rule["text"][:12])
def test_token_drop_after_images(rule):
    assert (
        join_chunks(rule["chunks"], MISC["bos_id_of_fake_tokenizer"], official_drop=True)
        == rule["ids"]
    )
    kept = join_chunks(rule["chunks"], MISC["bos_id_of_fake_tokenizer"], official_drop=False)
    assert [token for token in kept if token != IMAGE_TOKEN_ID] == [
        token for chunk in rule["chunks"] for token in chunk
    ]


@pytest.mark.parametrize("entry", MISC["chat_prompts"])
def test_chat_prompts(entry):
    processor = VlmProcessor(SimpleNamespace(chat_template=None), tiny56_config())
    assert processor.render(entry["messages"]) == entry["text"]


@pytest.mark.parametrize(
    ("position", "count"), [("grid", 210), ("frame", 197), ("one_token", 196), ("no_token", 196)]
)
def test_video_tokens_at_real_size(position, count):
    frames = pool_frames(torch.randn(3, 729, 2), "bilinear")
    tokens, sections = video_tokens(frames, torch.zeros(2), position)
    assert len(tokens) == 3 * count + (position == "one_token")
    assert [section[0] for section in sections] == [0, count, 2 * count]


def published_layout() -> dict[str, tuple[int, ...]]:
    """Key names and shapes of the published LLaDA-V checkpoint."""
    width, inner, seen, tower = 4096, 12288, 1152, 4304
    keys = {
        "model.embed_tokens.weight": (126464, width),
        "lm_head.weight": (126464, width),
        "model.norm.weight": (width,),
        "model.image_newline": (width,),
        "model.mm_projector.0.weight": (width, seen),
        "model.mm_projector.0.bias": (width,),
        "model.mm_projector.2.weight": (width, width),
        "model.mm_projector.2.bias": (width,),
    }
    for layer in range(32):
        prefix = f"model.layers.{layer}."
        keys |= {f"{prefix}self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        keys |= {f"{prefix}mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        keys[f"{prefix}mlp.down_proj.weight"] = (width, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            keys[f"{prefix}{norm}.weight"] = (width,)
    prefix = "model.vision_tower.vision_tower.vision_model."
    keys |= {
        f"{prefix}embeddings.patch_embedding.weight": (seen, 3, 14, 14),
        f"{prefix}embeddings.patch_embedding.bias": (seen,),
        f"{prefix}embeddings.position_embedding.weight": (729, seen),
        f"{prefix}post_layernorm.weight": (seen,),
        f"{prefix}post_layernorm.bias": (seen,),
    }
    shapes = {"self_attn.q_proj": (seen, seen), "mlp.fc1": (tower, seen), "mlp.fc2": (seen, tower)}
    for name in ("k_proj", "v_proj", "out_proj"):
        shapes[f"self_attn.{name}"] = (seen, seen)
    for layer in range(26):
        for name, shape in shapes.items():
            keys[f"{prefix}encoder.layers.{layer}.{name}.weight"] = shape
            keys[f"{prefix}encoder.layers.{layer}.{name}.bias"] = shape[:1]
        for norm in ("layer_norm1", "layer_norm2"):
            for part in ("weight", "bias"):
                keys[f"{prefix}encoder.layers.{layer}.{norm}.{part}"] = (seen,)
    return keys


def test_published_layout_and_parameter_counts():
    config = LlavaLLaDAConfig(
        vocab_size=126464,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=None,
        max_position_embeddings=16384,
        mm_vision_tower="google/siglip2-so400m-patch14-384",
        mm_projector_type="mlp2x_gelu",
        mm_patch_merge_type="spatial_unpad",
        image_aspect_ratio="anyres_max_4",
    )
    with torch.device("meta"):
        model = LlavaLLaDAModelLM(config)
    state = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert state == published_layout()
    sizes = {"vision_tower": 0, "mm_projector": 0, "image_newline": 0, "language": 0}
    for key, shape in state.items():
        part = next((name for name in sizes if name in key), "language")
        sizes[part] += math.prod(shape)
    assert sizes == {
        "vision_tower": 397_747_744,
        "mm_projector": 21_504_000,
        "image_newline": 4_096,
        "language": 8_015_581_184,
    }
    geometry = model.geometry
    assert (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim) == (32, 32, 128)
    assert (geometry.vision.tokens_per_tile, geometry.vision.num_layers) == (729, 26)
    assert (model.special_ids.mask, model.special_ids.stop) == (126336, (126348,))


def test_mismatched_media_are_named(model):
    ids = torch.tensor([1, IMAGE_TOKEN_ID, IMAGE_TOKEN_ID, 2])
    pixels = torch.zeros(3, 56, 56)
    with pytest.raises(InvalidInputError, match="2 image placeholders and 1 images"):
        model.encode_prompt(ids, [pixels])
    with pytest.raises(InvalidInputError, match=r"shape \(n, 3, 56, 56\)"):
        model.encode_prompt(ids[[0, 1, 3]], [torch.zeros(3, 28, 28)])
    with pytest.raises(InvalidInputError, match="need image_sizes"):
        model.config.image_aspect_ratio = "anyres_max_4"
        model.encode_prompt(ids[[0, 1, 3]], [torch.zeros(2, 3, 56, 56)])
    with pytest.raises(InvalidInputError, match="do not belong together"):
        model.encode_prompt(ids[[0, 1, 3]], [torch.zeros(2, 3, 56, 56)], [(300, 240)])
    with pytest.raises(InvalidInputError, match="floats in"):
        model.encode_prompt(ids[[0, 1, 3]], [pixels.to(torch.uint8)])
    with pytest.raises(InvalidInputError, match="different sizes"):
        model.encode_prompt(ids, [pixels, torch.zeros(3, 28, 28)])
    with pytest.raises(InvalidInputError, match="must hold tensors"):
        model.encode_prompt(ids, [pixels, pixels[0]])
    with pytest.raises(InvalidInputError, match="'audio' is unknown"):
        model.encode_prompt(ids[[0, 1, 3]], [pixels], modalities=["audio"])
    with pytest.raises(InvalidInputError, match="image_sizes has 2 entries for 1"):
        model.encode_prompt(ids[[0, 1, 3]], [pixels], [(5, 5), (5, 5)])
    with pytest.raises(InvalidInputError, match="outside the vocabulary of 512"):
        model.encode_prompt(torch.tensor([1, 512]))


def test_containers_of_pixels(model):
    """One 4-D tensor has no newline vectors, a list has; a lone video may come as a tensor."""
    pixels = torch.rand(3, 3, 56, 56) - 0.5
    ids = torch.tensor([1, *[IMAGE_TOKEN_ID] * 3, 2])
    model.config.mm_patch_merge_type, model.config.mm_newline_position = "spatial_unpad", "grid"
    with torch.no_grad():
        assert model.encode_prompt(ids, pixels).num_visual == 3 * 16
        assert model.encode_prompt(ids, list(pixels)).num_visual == 3 * 17
        as_list = model.encode_prompt(ids[[0, 1, 4]], [pixels], modalities=["video"])
        as_tensor = model.encode_prompt(ids[[0, 1, 4]], pixels, modalities=["video"])
        assert as_list.num_visual == 3 * 2 * 3 and as_list.spans[0].frames == 3
        assert torch.equal(as_list.embeds, as_tensor.embeds)
        model.config.mm_patch_merge_type = "flat"
        assert model.encode_prompt(ids, list(pixels)).num_visual == 3 * 16
        flat = model.encode_prompt(ids[[0, 1, 4]], [pixels], [(90, 50)])
        assert flat.num_visual == 3 * 16 and len(flat.spans[0].sections) == 3
        model.config.mm_patch_merge_type = "spatial_unpad"


@pytest.mark.parametrize("size", [(1, 1), (10000, 1), (1, 10000), (3, 700)])
def test_extreme_sizes(model, size):
    """Thin images keep at least the middle of their feature map."""
    model.config.image_aspect_ratio = "anyres_max_4"
    pixels = VlmProcessor(None, model.config).image_pixels(Image.new("RGB", size))
    with torch.no_grad():
        prompt = model.encode_prompt(torch.tensor([1, IMAGE_TOKEN_ID]), [pixels], [size])
    (_, side, _, _), (_, rows, columns, has_newline) = prompt.spans[0].sections
    assert rows >= 1 and columns >= 1 and has_newline
    assert prompt.num_visual == side**2 + rows * (columns + 1)


def test_config_must_say_its_sizes():
    with pytest.raises(CheckpointError, match=r"lacks .*hidden_size"):
        LlavaLLaDAModelLM(LlavaLLaDAConfig(vocab_size=10))
    with pytest.raises(CheckpointError, match="is not a SigLIP"):
        _ = LlavaLLaDAConfig(mm_vision_tower="clip").vision
    for changes, message in (
        ({"mm_projector_type": "linear"}, "mm_projector_type 'linear'"),
        ({"mm_patch_merge_type": "spatial"}, "mm_patch_merge_type 'spatial'"),
        ({"image_aspect_ratio": "square"}, "image_aspect_ratio 'square'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"num_key_value_heads": 3}, "do not divide each other"),
    ):
        with pytest.raises(CheckpointError, match=message):
            LlavaLLaDAModelLM(tiny56_config(**changes))
