"""The models behind the golden data, with the reference implementation's weights, in float32."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from dlm_decode.models.anyres import pad_to_square, pixels_of
from dlm_decode.models.configuration import LLaDAConfig, LlavaLLaDAConfig
from dlm_decode.models.key_names import renamed
from dlm_decode.models.lavida import LavidaLLaDAConfig, LavidaLLaDAModelLM
from dlm_decode.models.lavida_dream import LavidaDreamConfig, LavidaDreamModelLM
from dlm_decode.models.llada import LLaDAModelLM
from dlm_decode.models.llava_llada import LlavaLLaDAModelLM
from dlm_decode.models.processing import VlmProcessor
from dlm_decode.models.vidlada import LlavaLLaDAVideoConfig, LlavaLLaDAVideoModelLM

GOLDEN = Path(__file__).parent / "golden"


def read_json(*parts: str) -> Any:
    return json.loads(GOLDEN.joinpath(*parts).read_text())


def _fill(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    model.load_state_dict({renamed(key): value for key, value in state.items()}, strict=True)
    model.eval()


def tiny56_config(**changes: Any) -> LlavaLLaDAConfig:
    raw = read_json("lladav", "tiny56", "config.json")
    ids = raw["special_ids"]
    fields = {
        **raw["lm"],
        "mask_token_id": ids["mask"],
        "pad_token_id": ids["eos"],
        "stop_token_ids": [ids["eot"]],
        "suppress_token_ids": raw["suppressed_ids"],
        "mm_projector_type": raw["mm_projector_type"],
        "mm_patch_merge_type": raw["mm_patch_merge_type"],
        "mm_newline_position": "grid",
        "image_aspect_ratio": "anyres_max_4",
        "image_grid_pinpoints": raw["image_grid_pinpoints"],
        "vision_config": _vision(raw["vision"]),
    }
    return LlavaLLaDAConfig(**{**fields, **changes})


def _vision(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key != "layers_used"}


@cache
def tiny56_state() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "lladav" / "tiny56" / "model.safetensors")


def tiny56(**changes: Any) -> LlavaLLaDAModelLM:
    model = LlavaLLaDAModelLM(tiny56_config(**changes))
    _fill(model, tiny56_state())
    return model


@cache
def tiny56_inputs() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "lladav" / "tiny56" / "inputs.safetensors")


def realvocab() -> LlavaLLaDAModelLM:
    raw = read_json("lladav", "realvocab", "config.json")
    config = LlavaLLaDAConfig(
        **raw["lm"],
        mm_vision_tower="siglip",
        mm_projector_type=raw["mm_projector_type"],
        mm_patch_merge_type=raw["mm_patch_merge_type"],
        mm_newline_position="grid",
        image_aspect_ratio=raw["image_aspect_ratio"],
        image_grid_pinpoints=raw["image_grid_pinpoints"],
        vision_config=_vision(raw["vision"]),
    )
    model = LlavaLLaDAModelLM(config)
    state = load_file(GOLDEN / "lladav" / "realvocab" / "model_small.safetensors")
    tables = {}
    for name in ("embed", "lm_head"):
        base = state.pop(f"__base_{name}_f16").float()
        rows = [
            base.roll(shift, dims=1) for shift in range(-(-raw["lm"]["vocab_size"] // len(base)))
        ]
        tables[name] = torch.cat(rows)[: raw["lm"]["vocab_size"]].contiguous()
    tables["embed"][raw["mask_id"]] *= 0.1
    state["model.embed_tokens.weight"], state["lm_head.weight"] = tables["embed"], tables["lm_head"]
    _fill(model, state)
    return model


def lavida_raw(language: str = "llada") -> dict[str, Any]:
    """The tiny LaViDa's config.json, completed by the tower that the original has hard-coded."""
    raw = read_json("lavida", language, "config.json")
    tower = raw.pop("vision_config_for_this_tiny_model")
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "image_size", "patch_size")
    layers = {"num_hidden_layers": tower["num_hidden_layers_of_source_tower"]}
    return {**raw, "vision_config": {**{name: tower[name] for name in names}, **layers}}


def lavida(**changes: Any) -> LavidaLLaDAModelLM:
    raw = {**lavida_raw(), **changes, "model_type": "lavida_llada"}
    model = LavidaLLaDAModelLM(LavidaLLaDAConfig.from_dict(raw))
    _fill(model, load_file(GOLDEN / "lavida" / "llada" / "model.safetensors"))
    return model


def lavida_dream() -> LavidaDreamModelLM:
    model = LavidaDreamModelLM(LavidaDreamConfig.from_dict(lavida_raw("dream")))
    _fill(model, load_file(GOLDEN / "lavida" / "dream" / "model.safetensors"))
    return model


@cache
def lavida_tensors(language: str = "llada") -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "lavida" / language / "tensors.safetensors")


def lavida_prompt(model, name: str) -> dict:
    """Ids, and pixels made by our own preprocessing.

    Names are `"text"`, `"one_image"`, `"image_1"`, `"single_view"`, `"two_images"` (padded) and
    `"two_images_stacked"` (the same as one tensor).
    """
    stored = lavida_tensors("dream" if model.shift_logits else "llada")
    if name == "text":
        return {"input_ids": stored["input_ids_text_only"][0]}
    paths = [GOLDEN / "lavida" / f"image_{index}.png" for index in range(2)]
    images = [Image.open(path).convert("RGB") for path in paths]
    processor = VlmProcessor(None, model.config)
    if name.startswith("two_images"):
        ids = stored["input_ids_two_images"][0]
        pixels = [processor.image_pixels(image, num_images=2) for image in images]
    else:
        ids = stored["input_ids_one_image"][0]
        images = images[1:] if name == "image_1" else images[:1]
        pixels = [processor.image_pixels(images[0])]
    if name == "single_view":
        pixels = [pixels[0][0]]
    return {
        "input_ids": ids,
        "pixel_values": torch.stack(pixels) if name == "two_images_stacked" else pixels,
        "image_sizes": [image.size for image in images],
    }


def vidlada_raw(**changes: Any) -> dict[str, Any]:
    """The tiny VidLaDA's config.json, completed by what the original has hard-coded."""
    raw = read_json("vidlada", "config.json")
    tower, ids = raw.pop("vision_config"), raw.pop("golden_token_ids")
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "image_size", "patch_size")
    layers = {"num_hidden_layers": tower["num_hidden_layers_before_removal"]}
    special = {
        "mask_token_id": ids["mask"],
        "stop_token_ids": [ids["eot"]],
        "suppress_token_ids": ids["never_generated"],
    }
    vision = {**{name: tower[name] for name in names}, **layers}
    grids = {"image_grid_pinpoints": "(1x1),...,(6x6)"}
    return {**raw, **special, **grids, "vision_config": vision, **changes}


def vidlada(**changes: Any) -> LlavaLLaDAVideoModelLM:
    model = LlavaLLaDAVideoModelLM(LlavaLLaDAVideoConfig.from_dict(vidlada_raw(**changes)))
    _fill(model, load_file(GOLDEN / "vidlada" / "model.safetensors"))
    return model


@cache
def vidlada_tensors() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "vidlada" / "tensors.safetensors")


def vidlada_prompt(has_video: bool = True) -> dict:
    """Ids, and the two stored frames."""
    stored = vidlada_tensors()
    ids = stored["input_ids"][0]
    if not has_video:
        return {"input_ids": ids[ids >= 0]}
    return {"input_ids": ids, "pixel_values": [stored["frames"]], "modalities": ["video"]}


def fastdllm() -> LLaDAModelLM:
    raw = read_json("fastdllm", "config.json")
    model = LLaDAModelLM(LLaDAConfig(**raw["model"]))
    _fill(model, load_file(GOLDEN / "fastdllm" / "weights.safetensors"))
    return model


def formula_image(width: int, height: int, seed: int) -> Image.Image:
    """The picture that lladav/realvocab/cases.json defines by a formula."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    channels = (7 * x + 3 * y + seed, x * y // 16 + seed, ((x // 8) ^ (y // 8)) * 5 + seed)
    return Image.fromarray(
        np.stack([channel % 256 for channel in channels], axis=-1).astype(np.uint8)
    )


def tiny_prompt(model, name: str) -> dict:
    """Ids and pixels of a prompt; pixels come from the stored images through our own
    preprocessing."""
    prompt, stored = read_json("lladav", "tiny56", "cases.json")["prompts"][name], tiny56_inputs()
    inputs = {"input_ids": stored[f"{name}.input_ids"].flatten()}
    if not prompt["images"]:
        return inputs
    folder = GOLDEN / "lladav" / "tiny56" / "images"
    images = [Image.open(folder / f"{file}.png").convert("RGB") for file in prompt["images"]]
    processor = VlmProcessor(None, model.config)
    if prompt["modalities"] == ["video"]:
        pixels = [processor.video_pixels(images)]
    elif prompt["image_aspect_ratio"] == "pad":
        pixels = [pixels_of(pad_to_square(image), 56) for image in images]
    else:
        pixels = [processor.image_pixels(image) for image in images]
    if prompt["images_container"] == "Tensor":
        pixels = torch.stack(pixels)
    return {
        **inputs,
        "pixel_values": pixels,
        "image_sizes": prompt["image_sizes"],
        "modalities": prompt["modalities"],
    }
