"""LaViDa-LLaDA against the official classes: tower, pooling, layout, pixels, prompts, key names."""

from __future__ import annotations

import hashlib
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from golden_models import (
    GOLDEN,
    lavida,
    lavida_prompt,
    lavida_raw,
    lavida_tensors,
    read_json,
    tiny56,
    tiny56_config,
)
from PIL import Image
from test_models_lladav import published_layout
from test_models_loading import same_weights

from dlm_decode import models
from dlm_decode.canvas import IMAGE_TOKEN_ID
from dlm_decode.errors import CheckpointError
from dlm_decode.models.anyres import best_resolution, tiles_of
from dlm_decode.models.key_names import renamed
from dlm_decode.models.lavida import LavidaLLaDAConfig, LavidaLLaDAModelLM
from dlm_decode.models.llada import LLaDAModelLM
from dlm_decode.models.llava_llada import LlavaLLaDAModelLM
from dlm_decode.models.processing import VlmProcessor, join_chunks
from dlm_decode.models.visual_layout import anyres_tokens, flat_tokens, pool_frames

GRIDS = [(384, 768), (768, 384), (768, 768), (1152, 384), (384, 1152)]
TOKEN_COUNTS = read_json("lavida", "visual_token_counts.json")
TENSORS = lavida_tensors()


@pytest.fixture(scope="module")
def model():
    return lavida()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint folder as LaViDa was published: LLaDA-V's model type, LLaDA's own names."""
    path = tmp_path_factory.mktemp("lavida")
    (path / "config.json").write_text(json.dumps(lavida_raw()))
    shutil.copy(GOLDEN / "lavida" / "llada" / "model.safetensors", path / "model.safetensors")
    return path


def test_published_folder_and_round_trip(model, folder, tmp_path):
    loaded = models.load_model(folder)
    assert type(loaded) is LavidaLLaDAModelLM
    assert same_weights(model, loaded)
    assert (loaded.special_ids.mask, loaded.special_ids.eos, loaded.special_ids.bos) == (
        300,
        299,
        None,
    )
    assert loaded.config.tie_word_embeddings is False
    loaded.save_pretrained(tmp_path)
    again = models.load_model(tmp_path)
    assert type(again) is LavidaLLaDAModelLM
    assert again.config.model_type == "lavida_llada"
    assert same_weights(model, again)


def test_lavida_and_llada_v_are_told_apart(tmp_path):
    shared = {"model_type": "llava_llada"}
    for raw, expected in (
        ({**shared, "architectures": ["LlavaLladaForMaskedDiffusion"]}, LavidaLLaDAModelLM),
        ({**shared, "d_model": 4096, "n_layers": 32}, LavidaLLaDAModelLM),
        ({**shared, "architectures": ["LlavaLLaDAModelLM"], "hidden_size": 8}, LlavaLLaDAModelLM),
        (shared, LlavaLLaDAModelLM),
        ({"model_type": "llada", "d_model": 4096, "n_layers": 32}, LLaDAModelLM),
    ):
        assert models.class_for(raw) is expected
    tiny56().save_pretrained(tmp_path)
    assert type(models.load_model(tmp_path)) is LlavaLLaDAModelLM


def test_config_must_say_its_pooling():
    raw = {**lavida_raw(), "model_type": "lavida_llada"}
    for changes, message in (
        ({"mm_spatial_pool_mode": None}, "lacks mm_spatial_pool_mode"),
        ({"mm_spatial_pool_mode": "mean"}, "'mean' is unknown; use one of bilinear, average, max"),
        ({"mm_patch_merge_type": "spatial_nobase"}, "'spatial_unpad', 'spatial' or 'flat'"),
        ({"image_aspect_ratio": "tall"}, "'pad', 'square', 'anyres' or 'anyres_max_N'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            LavidaLLaDAConfig.from_dict({**raw, **changes}).check()
    plain = LavidaLLaDAConfig(mm_spatial_pool_mode="max")
    assert (plain.mm_patch_merge_type, plain.image_aspect_ratio) == ("flat", "square")


def test_tower_projector_and_pooling(model):
    pixels = lavida_prompt(model, "one_image")["pixel_values"][0]
    with torch.no_grad():
        features = model.model.vision_tower(pixels)
        assert torch.allclose(features[0], TENSORS["tower_view0"], atol=1e-5)
        assert torch.allclose(features[:, 0], TENSORS["tower_all_views_row0"], atol=1e-5)
        projected = model.encode_tiles(pixels[:1])
        assert torch.allclose(projected[0, :32], TENSORS["projected_view0_first32"], atol=1e-5)
        pooled = pool_frames(projected, "average").flatten(1, 2)
        assert torch.allclose(pooled[0], TENSORS["pooled_view0"], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "stored", "every"),
    [
        ("one_image", "merged_one_image", 1),
        ("image_1", "merged_image_1_every7th", 7),
        ("two_images", "merged_two_images_pad", 1),
        ("two_images_stacked", "merged_two_images_4d_every50th", 50),
    ],
)
def test_merged_embeddings(model, name, stored, every):
    with torch.no_grad():
        prompt = model.encode_prompt(**lavida_prompt(model, name))
    expected = TENSORS[stored]
    assert prompt.embeds[::every].shape == expected.shape
    assert torch.allclose(prompt.embeds[::every], expected, atol=1e-5)
    assert prompt.num_visual == int(prompt.is_visual.sum())


def response(name):
    masks = torch.full((16,), 300)
    return masks if name == "allmask" else TENSORS["partial_response_ids"]


@pytest.mark.parametrize("name", ["allmask", "partial"])
def test_logits(model, name):
    with torch.no_grad():
        prompt = model.encode_prompt(**lavida_prompt(model, "one_image"))
        embeds = torch.cat([prompt.embeds, model.embed(response(name))])
        logits = model(inputs_embeds=embeds[None])[0, -20:]
    assert torch.allclose(logits, TENSORS[f"logits_full_{name}"], atol=1e-4)


def test_logits_of_a_text_prompt(model):
    with torch.no_grad():
        logits = model(input_ids=TENSORS["input_ids_text_only"])[0]
    assert torch.allclose(logits, TENSORS["logits_text_only_prompt"], atol=1e-4)


def digest(pixels):
    return hashlib.sha256(pixels.numpy().tobytes()).hexdigest()


def test_pixels_bit_for_bit(model):
    expected = read_json("lavida", "preprocess.json")
    for name, image in (("image_0", "one_image"), ("image_1", "image_1")):
        inputs = lavida_prompt(model, image)
        pixels, size = inputs["pixel_values"][0], inputs["image_sizes"][0]
        assert list(size) == expected[name]["size_wh"]
        assert list(best_resolution(size, GRIDS)) == expected[name]["best_resolution_wh"]
        assert list(pixels.shape) == expected[name]["shape"]
        assert digest(pixels) == expected[name]["sha256_float32_bytes"]
    padded = lavida_prompt(model, "two_images_stacked")["pixel_values"]
    assert digest(padded) == expected["pad_mode"]["sha256_float32_bytes"]
    config = LavidaLLaDAConfig.from_dict({**lavida_raw(), "image_aspect_ratio": "square"})
    image = Image.open(GOLDEN / "lavida" / "image_0.png").convert("RGB")
    square = VlmProcessor(None, config).image_pixels(image)
    assert digest(square) == expected["default_square_mode_image_0"]["sha256_float32_bytes"]


@pytest.mark.parametrize("mode", ["bilinear", "average"])
@pytest.mark.parametrize(
    "entry", TOKEN_COUNTS, ids=lambda entry: "x".join(map(str, entry["size_wh"]))
)
def test_token_counts_of_real_images(entry, mode):
    size = tuple(entry["size_wh"])
    best = best_resolution(size, GRIDS)
    assert list(best) == entry["best_wh"]
    grid = (best[0] // 384, best[1] // 384)
    views = 1 + grid[0] * grid[1]
    assert views == entry["views"]
    pooled = pool_frames(torch.zeros(views, 729, 1), mode).flatten(1, 2)
    assert len(anyres_tokens(pooled, torch.zeros(1), grid, size, None)[0]) == entry[mode]
    if mode == "bilinear":
        assert len(flat_tokens(pooled)[0]) == entry["bilinear_flat"]
        plain, sections = anyres_tokens(pooled, None, grid, size, None)
        assert len(plain) == entry["bilinear_spatial_nounpad"]
        assert not any(has_newline for *_, has_newline in sections)


def test_number_of_views_is_what_the_processor_makes():
    for entry in TOKEN_COUNTS:
        tiles = tiles_of(Image.new("RGB", tuple(entry["size_wh"])), GRIDS, 384)
        assert len(tiles) == entry["views"]


@pytest.mark.parametrize(
    ("merge", "one", "tiles"),
    [("spatial_unpad", 170, 281), ("spatial", 169, 507), ("flat", 169, 507)],
)
def test_merge_types(merge, one, tiles):
    """Newline vectors go with `spatial_unpad` only, and so does the vector in the checkpoint."""
    raw = {**lavida_raw(), "model_type": "lavida_llada", "mm_patch_merge_type": merge}
    torch.manual_seed(0)
    model = LavidaLLaDAModelLM(LavidaLLaDAConfig.from_dict(raw)).eval()
    assert ("model.image_newline" in model.state_dict()) == (merge == "spatial_unpad")
    ids = torch.tensor([1, IMAGE_TOKEN_ID, 2])
    with torch.no_grad():
        single = model.encode_prompt(ids, [torch.zeros(3, 384, 384)])
        whole = model.encode_prompt(ids, [torch.zeros(3, 3, 384, 384)], [(300, 180)])
    assert (single.num_visual, whole.num_visual) == (one, tiles)
    for start, rows, columns, has_newline in whole.spans[0].sections:
        assert start + rows * (columns + has_newline) <= whole.num_visual


@pytest.mark.parametrize("mode", ["bilinear", "max"])
def test_other_poolings(mode):
    model = lavida(mm_spatial_pool_mode=mode)
    pixels = lavida_prompt(model, "single_view")["pixel_values"]
    side = 14 if mode == "bilinear" else 13
    with torch.no_grad():
        prompt = model.encode_prompt(torch.tensor([IMAGE_TOKEN_ID]), pixels)
        maps = model.encode_tiles(pixels[0][None])[0].T.reshape(-1, 27, 27)
    assert prompt.num_visual == side**2 + 1
    if mode == "max":
        expected = maps[:, :26, :26].reshape(-1, 13, 2, 13, 2).amax(dim=(2, 4))
        assert torch.equal(prompt.embeds[:-1], expected.flatten(1).T)
    else:  # the centre of the map stays where it is
        assert torch.allclose(prompt.embeds[0], maps[:, :2, :2].mean(dim=(1, 2)), atol=0.5)


def toy_chunks(entry):
    """The toy tokenizer: `^` is 1, other characters their code; it may begin each text with 1."""
    first = [1] if entry["tokenizer_adds_bos_itself"] else []
    chunks = entry["prompt"].split("<image>")
    return [first + [1 if letter == "^" else ord(letter) for letter in chunk] for chunk in chunks]


@pytest.mark.parametrize("entry", read_json("lavida", "image_token_split.json"))
def test_token_drop_after_images(entry):
    assert join_chunks(toy_chunks(entry), entry["bos_id"], official_drop=True) == entry["ids"]


def test_system_message_is_there_with_any_template():
    """LLaDA's own chat template has none, LLaDA-V's brings it."""

    def render(messages, **_):
        return " | ".join(f"{message['role']}: {message['content']}" for message in messages)

    tokenizer = SimpleNamespace(chat_template="{{ messages }}", apply_chat_template=render)
    ask = [{"role": "user", "content": "<image>\nwhat ?"}]
    text = VlmProcessor(tokenizer, LavidaLLaDAConfig.from_dict(lavida_raw())).render(ask)
    assert text.startswith("system: You are a helpful language and vision assistant. ")
    assert text.endswith("using natural language. | user: <image>\nwhat ?")
    assert VlmProcessor(tokenizer, tiny56_config()).render(ask) == "user: <image>\nwhat ?"
    own = [{"role": "system", "content": "be brief"}, *ask]
    assert "helpful" not in VlmProcessor(
        tokenizer, LavidaLLaDAConfig.from_dict(lavida_raw())
    ).render(own)
    plain = VlmProcessor(
        SimpleNamespace(chat_template=None), LavidaLLaDAConfig.from_dict(lavida_raw())
    ).render(ask)
    assert plain.startswith("<|startoftext|><|start_header_id|>system<|end_header_id|>\n\nYou are")


def native_names(key: str) -> str:
    """A key of the published LLaDA-V under the names that LaViDa keeps."""
    names = {
        "model.embed_tokens.": "model.transformer.wte.",
        "model.norm.": "model.transformer.ln_f.",
        "lm_head.": "model.transformer.ff_out.",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm",
        "self_attn.o_proj": "attn_out",
        "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
    }
    if "vision_tower" in key:
        return key
    for ours, theirs in names.items():
        key = key.replace(ours, theirs)
    return key.replace("model.layers.", "model.transformer.blocks.").replace("self_attn.", "")


def test_published_layout():
    """The 8B model on the meta device: published names and shapes, and no others."""
    raw = {
        key: value
        for key, value in lavida_raw().items()
        if key not in ("vision_config", "mask_token_id", "eos_token_id", "pad_token_id")
    }
    raw |= {
        "d_model": 4096,
        "n_heads": 32,
        "n_kv_heads": 32,
        "n_layers": 32,
        "mlp_hidden_size": 12288,
        "vocab_size": 126464,
        "embedding_size": 126349,  # the loader cuts it to the tokenizer
        "rope_theta": 500000.0,
        "mm_vision_tower": "google/siglip-so400m-patch14-384",
        "mm_spatial_pool_mode": "bilinear",
    }
    assert models.class_for(raw) is LavidaLLaDAModelLM
    config = LavidaLLaDAConfig.from_dict({**raw, "model_type": "lavida_llada"})
    with torch.device("meta"):
        model = LavidaLLaDAModelLM(config)
    published = {
        native_names(key): (126349, 4096) if shape[0] == 126464 else shape
        for key, shape in published_layout().items()
    }
    assert "model.transformer.blocks.31.ff_out.weight" in published
    assert {renamed(key): shape for key, shape in published.items()} == {
        key: tuple(value.shape) for key, value in model.state_dict().items()
    }
    assert (model.special_ids.mask, model.special_ids.stop) == (126336, (126081, 126348))
    assert model.special_ids.suppress == ()
    assert model.geometry.vision.tokens_per_tile == 729


def test_native_names_of_the_golden_checkpoint(model):
    shapes = read_json("lavida", "llada", "state_dict_shapes.json")
    assert {renamed(key): tuple(shape) for key, shape in shapes.items()} == {
        key: tuple(value.shape) for key, value in model.state_dict().items()
    }
