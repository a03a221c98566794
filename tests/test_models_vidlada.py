"""VidLaDA against the official classes; loading, prompts, frame numbers, samplers and caches."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from golden_models import (
    GOLDEN,
    lavida_raw,
    read_json,
    tiny56,
    vidlada,
    vidlada_prompt,
    vidlada_raw,
    vidlada_tensors,
)
from test_models_lladav import published_layout
from test_models_loading import same_weights
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import dlm_decode
from dlm_decode import cache as caches
from dlm_decode import models, samplers
from dlm_decode.cache.dual import Dual
from dlm_decode.canvas import IMAGE_TOKEN_ID, Prompt, VisualSpan
from dlm_decode.errors import CheckpointError, InvalidInputError, MediaError, UnknownNameError
from dlm_decode.models.lavida import LavidaLLaDAModelLM
from dlm_decode.models.llava_llada import LlavaLLaDAModelLM
from dlm_decode.models.processing import VlmProcessor
from dlm_decode.models.vidlada import LlavaLLaDAVideoConfig, LlavaLLaDAVideoModelLM
from dlm_decode.models.visual_layout import pool_frames
from dlm_decode.vision.base import keep_positions
from dlm_decode.vlm import DiffusionVlm

TENSORS = vidlada_tensors()
PROMPTS = read_json("vidlada", "prompts.json")
LENGTHS = {"grid": 210, "frame": 197, "one_token": 196, "no_token": 196}


@pytest.fixture(scope="module")
def model():
    return vidlada()


@pytest.mark.parametrize(("backend", "limit"), [("eager", 1e-5), ("sdpa", 2e-5)])
def test_tower(backend, limit):
    """The reference's tower knows eager attention only. The largest numbers are 9."""
    model = vidlada()
    model.set_attn_implementation(backend)
    with torch.no_grad():
        features = model._vision.vision_tower(TENSORS["frames"])
        projected = model.encode_tiles(TENSORS["frames"])[:1]
        prompt = model.encode_prompt(**vidlada_prompt())
    assert (features - TENSORS["vision_features"]).abs().max() < limit
    assert (projected - TENSORS["projected_features"]).abs().max() < limit
    assert (prompt.embeds - TENSORS["merged_embeds"][0]).abs().max() < limit


def test_pooling(model):
    with torch.no_grad():
        projected = model.encode_tiles(TENSORS["frames"])
    for mode, stored, count in (
        ("bilinear", "pooled_features", 2),
        ("average", "pooled_average_frame0", 1),
        ("max", "pooled_max_frame0", 1),
    ):
        pooled = pool_frames(projected[:count], mode).flatten(1, 2)
        assert pooled.shape == TENSORS[stored].shape
        assert torch.allclose(pooled, TENSORS[stored], atol=1e-5)


def test_merged_embeddings(model):
    with torch.no_grad():
        prompt = model.encode_prompt(**vidlada_prompt())
    assert torch.allclose(prompt.embeds, TENSORS["merged_embeds"][0], atol=1e-5)
    assert prompt.num_visual == 2 * 210 == int(prompt.is_visual.sum())
    assert torch.equal(prompt.frames(), TENSORS["frame_index_map"][0])


@pytest.mark.parametrize("mode", LENGTHS)
def test_newline_modes(mode):
    with torch.no_grad():
        prompt = vidlada(mm_newline_position=mode).encode_prompt(**vidlada_prompt())
    assert prompt.length == int(TENSORS[f"merged_2f_newline_{mode}_len"])
    expected = TENSORS[f"merged_2f_newline_{mode}_strided"]
    assert prompt.embeds[::7].shape == expected.shape
    assert torch.allclose(prompt.embeds[::7], expected, atol=1e-5)
    counts = [int((prompt.frames() == frame).sum()) for frame in range(2)]
    assert counts == [LENGTHS[mode], LENGTHS[mode] + (mode == "one_token")]


@pytest.mark.parametrize(("mode", "count"), [("bilinear", 196), ("average", 169), ("max", 169)])
def test_pool_modes_reach_the_prompt(mode, count):
    changed = vidlada(mm_spatial_pool_mode=mode, mm_newline_position="no_token")
    with torch.no_grad():
        prompt = changed.encode_prompt(**vidlada_prompt())
    assert prompt.num_visual == 2 * count


def test_merge_type_decides_about_the_newlines():
    flat = vidlada(mm_patch_merge_type="flat")
    with torch.no_grad():
        assert flat.encode_prompt(**vidlada_prompt()).num_visual == 2 * 196


def test_logits_and_states(model):
    embeds = TENSORS["merged_embeds"]
    masks = model.embed(torch.full((1, 8), model.special_ids.mask))
    states = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: states.append(args[0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        whole = torch.cat([embeds, masks], dim=1)
        hidden = model.hidden_states(whole, torch.arange(whole.shape[1])[None])
        logits = model(inputs_embeds=whole)[0, -8:]
        first = model(inputs_embeds=torch.cat([embeds, masks[:, :2]], dim=1))[0, -2:]
    for hook in hooks:
        hook.remove()
    assert torch.allclose(logits, TENSORS["fwd8_logits_tail"][0], atol=1e-4)
    assert torch.allclose(first, TENSORS["default_step0_logits_raw"][0], atol=1e-4)
    assert torch.allclose(hidden[0, -16:], TENSORS["fwd8_last_hidden_tail"][0], atol=1e-4)
    layers = torch.stack([state[0] for state in [*states[:4], hidden]])
    assert torch.allclose(layers[:, -16:], TENSORS["fwd8_layer_hidden_tail"], atol=1e-4)
    strided = layers[:, ::29]
    assert strided.shape == TENSORS["fwd8_layer_hidden_strided"].shape
    assert torch.allclose(strided, TENSORS["fwd8_layer_hidden_strided"], atol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, checkpoint):
    """A checkpoint folder with VidLaDA's config and a word tokenizer."""
    path = tmp_path_factory.mktemp("published")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / file, path / file)
    architectures = ["LlavaLLaDAVideoModelLM"]
    raw = vidlada_raw(architectures=architectures, eos_token_id=191, bos_token_id=180)
    (path / "config.json").write_text(json.dumps(raw))
    shutil.copy(GOLDEN / "vidlada" / "model.safetensors", path / "model.safetensors")
    return path


def test_folder_and_round_trip(model, folder, tmp_path):
    loaded = models.load_model(folder)
    assert type(loaded) is LlavaLLaDAVideoModelLM
    assert same_weights(model, loaded)
    loaded.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "llava_llada_video"
    assert saved["architectures"] == ["LlavaLLaDAVideoModelLM"]
    assert same_weights(model, models.load_model(tmp_path))


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
def test_auto_classes(model, folder, auto):
    assert type(AutoConfig.from_pretrained(folder)) is LlavaLLaDAVideoConfig
    loaded = auto.from_pretrained(folder)
    assert type(loaded) is LlavaLLaDAVideoModelLM and same_weights(model, loaded)


def test_configs_that_say_otherwise(folder, tmp_path):
    """By class, by the folder's name as in the published loader, or because the caller says so."""
    v = {"model_type": "llava_llada", "mm_projector_type": "mlp2x_gelu", "hidden_size": 8}
    named = {**v, "architectures": ["LlavaLLaDAVideoModelLM"]}
    other = {**v, "architectures": ["LlavaLLaDAModelLM"]}
    for raw, path, expected in (
        (named, "", LlavaLLaDAVideoModelLM),
        ({**named, "model_type": "llada"}, "", LlavaLLaDAVideoModelLM),
        (other, "ziHoHe/VidLaDA-8B", LlavaLLaDAVideoModelLM),
        (other, "runs/vidlada/checkpoint-2000", LlavaLLaDAVideoModelLM),
        (other, "runs/llada_video-ft/", LlavaLLaDAVideoModelLM),
        (other, "GSAI-ML/LLaDA-V", LlavaLLaDAModelLM),
        (other, "vidlada/LLaDA-V", LlavaLLaDAModelLM),
        (lavida_raw(), "vidlada-or-lavida", LavidaLLaDAModelLM),
        ({"model_type": "llada", "hidden_size": 8}, "vidlada-text", models.get("llada")),
    ):
        assert models.class_for(raw, path) is expected, (raw, path)
    raw = vidlada_raw(model_type="llava_llada", architectures=["LlavaLLaDAModelLM"])
    for name, options, expected in (
        ("plain", {}, LlavaLLaDAModelLM),
        ("plain", {"model_type": "llava_llada_video"}, LlavaLLaDAVideoModelLM),
        ("VidLaDA-8B", {}, LlavaLLaDAVideoModelLM),
        ("VidLaDA-8B", {"model_type": "llava_llada"}, LlavaLLaDAModelLM),
    ):
        copy = tmp_path / name
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        (copy / "config.json").write_text(json.dumps(raw))
        vlm = dlm_decode.load(copy, **options)
        assert type(vlm.model) is expected
        assert type(vlm.processor.config) is expected.config_class
        assert type(vlm.model.config) is expected.config_class
    with pytest.raises(UnknownNameError, match="Did you mean 'llava_llada_video'"):
        dlm_decode.load(folder, model_type="llava_lada_video")


def test_config():
    raw = vidlada_raw()
    for name in ("mm_newline_position", "mm_spatial_pool_mode"):
        raw.pop(name)
    config = LlavaLLaDAVideoConfig.from_dict(raw)
    config.check()
    assert (config.mm_newline_position, config.mm_spatial_pool_mode) == ("grid", "bilinear")
    for changes, message in (
        ({"mm_newline_position": "line"}, "'line' is unknown; use one of grid, frame"),
        ({"mm_spatial_pool_mode": "mean"}, "'mean' is unknown; use one of bilinear, average, max"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ):
        with pytest.raises(CheckpointError, match=message):
            LlavaLLaDAVideoConfig.from_dict({**raw, **changes}).check()


def test_published_layout():
    """The 8B model on the meta device: LLaDA-V's names and shapes, the official ids and sizes."""
    raw = {
        key: value
        for key, value in vidlada_raw().items()
        if key not in ("vision_config", "mask_token_id", "stop_token_ids", "suppress_token_ids")
    }
    raw |= {
        "vocab_size": 126464,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 16384,
        "bos_token_id": 128000,
        "eos_token_id": 126081,
        "mm_hidden_size": 1152,
        "mm_vision_tower": "google/siglip2-so400m-patch14-384",
    }
    with torch.device("meta"):
        model = LlavaLLaDAVideoModelLM(LlavaLLaDAVideoConfig.from_dict(raw))
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert shapes == published_layout()
    assert shapes["model.image_newline"] == (4096,)
    ids = model.special_ids
    assert (ids.mask, ids.bos, ids.eos, ids.stop) == (126336, 126080, 126081, (126348,))
    assert ids.suppress == (126081, 126080, 126346, 126347)
    assert model.geometry.vision.tokens_per_tile == 729
    assert model.config.tile_size == 384
    frames = torch.empty(64, 729, 4096, device="meta")
    newline = torch.empty(4096, device="meta")
    tokens, sections = models.visual_layout.video_tokens(
        pool_frames(frames, model.config.mm_spatial_pool_mode),
        newline,
        model.config.mm_newline_position,
    )
    assert tokens.shape == (13440, 4096) and len(sections) == 64


def ask(text: str, think_mode: str = "no_think", notes=(), num_videos: int = 1) -> str:
    """The prompt as text; ids are the characters' codes, the placeholder becomes its tag."""
    tokenizer = SimpleNamespace(chat_template=None, bos_token_id=None)
    processor = VlmProcessor(tokenizer, LlavaLLaDAVideoConfig.from_dict(vidlada_raw()))
    processor.encode = lambda chunk: [ord(letter) for letter in chunk]
    frames = [[np.zeros((2, 2, 3), np.uint8)]] * num_videos
    processor.video_pixels = lambda frames: torch.zeros(len(frames), 3, 55, 55)
    videos = [[SimpleNamespace(size=(2, 2))] for _ in frames]
    inputs = processor(text, videos=videos, think_mode=think_mode, video_notes=notes)
    return "".join(
        "<image>" if token == IMAGE_TOKEN_ID else chr(token) for token in inputs.input_ids.tolist()
    )


@pytest.mark.parametrize("task", PROMPTS["task_prompts"])
def test_chat_prompts(task):
    text = PROMPTS["task_prompts"][task]
    assert ask(text) == PROMPTS["chat_prompts"][task]
    assert ask(f"<image>\n{text}") == PROMPTS["chat_prompts"][task]


def test_system_message_is_there_with_the_tokenizers_template():
    """The tokenizer that VidLaDA is trained from has a template without one."""

    def render(messages, **_):
        return " | ".join(f"{message['role']}: {message['content']}" for message in messages)

    tokenizer = SimpleNamespace(chat_template="{{ messages }}", apply_chat_template=render)
    processor = VlmProcessor(tokenizer, LlavaLLaDAVideoConfig.from_dict(vidlada_raw()))
    text = processor.render([{"role": "user", "content": "what ?"}])
    assert text.startswith("system: You are a helpful language and vision assistant.")
    assert text.endswith("| user: what ?")


def test_think_modes_and_time_instruction():
    text, expected = PROMPTS["task_prompts"]["egoschema"], PROMPTS["chat_prompts"]
    assert ask(text, "none") == expected["no_think_mode_absent"]
    assert ask(text, "think") == expected["egoschema"].replace("/no_think", "/think")
    timed = expected["mvbench_with_time"]
    note = next(line for line in timed.splitlines() if line.startswith("The video lasts"))
    assert ask(PROMPTS["task_prompts"]["mvbench"], notes=[note]) == timed
    assert ask("<image>\n" + PROMPTS["task_prompts"]["mvbench"], notes=[note]) == timed
    two = ask("<image> then <image> what ?", notes=["A", "B"], num_videos=2)
    assert "\n\n<image>\nA\nthen <image>\nB\nwhat ?/no_think<|eot_id|>" in two
    with pytest.raises(InvalidInputError, match="video_notes has 1 entries for 2 videos"):
        ask("what ?", notes=["A"], num_videos=2)
    with pytest.raises(InvalidInputError, match="think_mode 'maybe'; use 'none' or 'think' or"):
        ask("what ?", "maybe")


def test_frames_are_counted_through_all_pictures():
    """An image is one frame, whatever its tiles; text has none; a pruned prompt keeps numbers."""
    model = tiny56(mm_newline_position="frame")
    ids = torch.tensor([1, IMAGE_TOKEN_ID, 5, IMAGE_TOKEN_ID, IMAGE_TOKEN_ID, 2])
    pixels = list(torch.rand(3, 2, 3, 56, 56))
    kinds = ["video", "image", "video"]
    with torch.no_grad():
        prompt = model.encode_prompt(ids, pixels, [(56, 56)] * 3, kinds)
    numbers = prompt.frames()
    assert (numbers >= 0).equal(prompt.is_visual)
    assert numbers.unique_consecutive().tolist() == [-1, 0, 1, -1, 2, 3, 4, -1]
    keep = torch.zeros(prompt.length, dtype=torch.bool)
    keep[prompt.is_visual.nonzero()[::3, 0]] = True
    once = keep_positions(prompt, keep)
    kept = numbers[keep | ~prompt.is_visual]
    assert once.frames().equal(kept)
    again = keep_positions(once, torch.ones(once.length, dtype=torch.bool))
    assert again.frames().equal(kept)
    bare = Prompt(torch.zeros(4, 2), torch.zeros(4).long(), torch.ones(4).bool())
    assert bare.frames().tolist() == [-1] * 4
    span = VisualSpan(1, 2, 0, "video", frames=1)
    spanned = Prompt(torch.zeros(4, 2), torch.zeros(4).long(), torch.ones(4).bool(), (span,))
    assert spanned.frames().tolist() == [-1, 0, 0, -1]


def test_caches_know_each_tokens_frame(model):
    """In every view, with padding and with guidance's twins."""
    seen = []

    class Watching(Dual):
        def start(self):
            cache = super().start()
            memory = cache.memory

            def watch(fed):
                seen.append(fed)
                return memory(fed)

            cache.memory = watch
            return cache

    row = vidlada_prompt()
    text = row["input_ids"][row["input_ids"] >= 0]
    DiffusionVlm(model).generate(
        input_ids=[row["input_ids"], text],
        pixel_values=[row["pixel_values"], None],
        modalities=[row["modalities"], None],
        sampler="lown",
        cache=Watching(),
        cfg_scale=0.5,
        gen_length=4,
        steps=2,
        stop=False,
    )
    expected = TENSORS["frame_index_map"][0]
    full = next(fed for fed in seen if fed.num_prompt == 445 and len(fed.rows) == 4)
    assert full.frames[0].equal(expected)
    assert (full.frames[1:] == -1).all() and full.frames.shape == (4, 445)
    others = [fed for fed in seen if fed.num_prompt == len(text)]
    assert others and all((fed.frames == -1).all() for fed in others)


SAMPLERS = ["baseline", "lown", "fast_dllm", "lown+fast_dllm"]


@pytest.mark.parametrize("policy", [None, *caches.names()])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_and_caches(model, sampler, policy):
    """A batch of a video and a text prompt gives what its rows give alone."""
    assert set(SAMPLERS) <= {*samplers.names(), *samplers.aliases()}
    vlm, row = DiffusionVlm(model), vidlada_prompt()
    settings = {
        "sampler": sampler,
        "cache": policy or "none",
        "gen_length": 8,
        "steps": 8,
        "block_length": 4,
        "stop": False,
    }
    text = row["input_ids"][row["input_ids"] >= 0]
    alone = [vlm.generate(**row, **settings), vlm.generate(input_ids=text, **settings)]
    both = vlm.generate(
        input_ids=[row["input_ids"], text],
        pixel_values=[row["pixel_values"], None],
        modalities=[row["modalities"], None],
        **settings,
    )
    assert both.sequences.tolist() == [out.sequences[0].tolist() for out in alone]
    assert model.special_ids.mask not in both.sequences
    if policy is None and sampler == "baseline":
        assert alone[0].cost.calls == 8
    if policy is not None:
        assert both.cost.kv_bytes > 0


@pytest.fixture(scope="module")
def vlm(folder):
    return dlm_decode.load(folder)


def clip_frames(count=10):
    return [np.full((20, 30, 3), 20 * index, np.uint8) for index in range(count)]


def test_generate_takes_and_records_frames(vlm):
    options = {"gen_length": 2, "stop": False}
    out = vlm.generate("what is this ?", videos=[clip_frames()], max_frames=3, **options)
    run = out.trajectory.run
    assert run["rows"][0]["videos"][0]["indices"] == [0, 4, 9]
    assert out.cost.visual_tokens == (3 * 210,)
    settings = run["settings"]
    assert (settings["max_frames"], settings["fps"]) == (3, 1.0)
    assert (settings["force_sample"], settings["think_mode"]) == (False, "no_think")
    json.dumps(run)
    own = vlm.generate("what is this ?", videos=[clip_frames(2)], **options)
    assert own.trajectory.run["settings"]["max_frames"] == 64
    assert own.trajectory.run["rows"][0]["videos"][0]["indices"] == [0, 1]
    timed = {"frame_rate": 2, "fps": 1, "time_instruction": True}
    told = vlm.generate("what is this ?", videos=[clip_frames()], **timed, **options)
    assert told.trajectory.run["rows"][0]["videos"][0]["times"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    added = told.cost.prompt_lengths[0] - told.cost.visual_tokens[0]
    assert added > own.cost.prompt_lengths[0] - own.cost.visual_tokens[0]


def test_official_times_drift_with_the_preset_only(vlm):
    options = {"gen_length": 2, "stop": False, "fps": 1, "frame_rate": 2.4, "max_frames": 9}
    times = [
        vlm.generate("what ?", videos=[clip_frames(5)], preset=preset, **options).trajectory.run[
            "rows"
        ][0]["videos"][0]["times"]
        for preset in (None, "official")
    ]
    assert times[0] == pytest.approx([0.0, 2 / 2.4, 4 / 2.4])
    assert times[1] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"videos": None, "fps": 2}, InvalidInputError, "fps goes with videos=, and there is none"),
        ({"videos": [], "max_frames": 2}, InvalidInputError, "max_frames goes with videos="),
        ({"fps": 0}, InvalidInputError, "fps must be a finite number above 0"),
        ({"max_frames": 0}, InvalidInputError, "max_frames must be a whole number"),
        ({"fps": 2}, InvalidInputError, "pass frame_rate="),
        ({"time_instruction": True}, MediaError, "has no frame rate"),
        ({"time_instruction": 1}, InvalidInputError, "time_instruction must be True or False"),
        ({"think_mode": "nothink"}, UnknownNameError, "Did you mean 'no_think'"),
        ({"videos": ["none.mp4"]}, MediaError, "no video at 'none.mp4'"),
    ],
)
def test_bad_input(vlm, options, error, message):
    with pytest.raises(error, match=message):
        vlm.generate("what is this ?", **{"videos": [clip_frames()], **options}, gen_length=2)


def test_other_models_do_not_know_think_modes(checkpoint):
    other = dlm_decode.load(checkpoint)
    with pytest.raises(InvalidInputError, match="not trained with think_mode 'think'; use 'none'"):
        other.generate("what is this ?", think_mode="think")
    with pytest.raises(InvalidInputError, match="think_mode goes with prompt="):
        other.generate(input_ids=[1, 2], think_mode="think")
