"""Small random checkpoints of the autoregressive architectures, in stock classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

ARCHITECTURES = ("llava", "llava_next", "qwen2_5_vl", "internvl", "video_llava")

_SPECIAL = (
    *("<unk>", "<s>", "</s>", "<pad>", "<image>", "<video>", "<img>", "</img>"),
    *("<|vision_start|>", "<|vision_end|>"),
)
_WORDS = ("user", "assistant", ":", "what", "is", "this", "?", "frame", "a", "red", "box", "\n")
_DIGITS = tuple("0123456789")
_LETTERS = tuple(f"w{number}" for number in range(40))
VOCABULARY = {word: at for at, word in enumerate((*_SPECIAL, *_WORDS, *_DIGITS, *_LETTERS))}

_PART = {
    "llava": "<image>\n",
    "llava_next": "<image>\n",
    "video_llava": "<image>\n",
    "internvl": "<image>\n",
    "qwen2_5_vl": "<|vision_start|><image><|vision_end|>",
}
_TEMPLATE = (
    "{% for message in messages %}USER: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'video' %}VIDEO"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %} {% endfor %}ASSISTANT:"
)

_TEXT = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": VOCABULARY["<s>"],
    "eos_token_id": VOCABULARY["</s>"],
    "pad_token_id": VOCABULARY["<pad>"],
}
_CLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_PIXELS = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
_PREPROCESSORS: dict[str, dict[str, Any]] = {
    "llava": {"image_processor_type": "CLIPImageProcessor", **_PIXELS},
    "llava_next": {
        "image_processor_type": "LlavaNextImageProcessor",
        "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
        **_PIXELS,
    },
    "video_llava": {"image_processor_type": "VideoLlavaImageProcessor", **_PIXELS},
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 32, "width": 32},
        "max_patches": 3,
    },
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "min_pixels": 16 * 16,
        "max_pixels": 48 * 48,
    },
}


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """Noise in large squares."""
    numbers = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(numbers).resize((width, height), Image.Resampling.NEAREST)


def build_model(architecture: str) -> Any:
    """A random model, float32, with weights large enough that tokens depend on pictures."""
    import transformers as hf

    llava: dict[str, Any] = {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "clip_vision_model", **_CLIP},
        "image_token_index": VOCABULARY["<image>"],
        "projector_hidden_act": "gelu",
    }
    if architecture == "llava":
        config: Any = hf.LlavaConfig(**llava)
        cls: Any = hf.LlavaForConditionalGeneration
    elif architecture == "llava_next":
        pinpoints = _PREPROCESSORS["llava_next"]["image_grid_pinpoints"]
        config = hf.LlavaNextConfig(**llava, image_grid_pinpoints=pinpoints)
        cls = hf.LlavaNextForConditionalGeneration
    elif architecture == "video_llava":
        config = hf.VideoLlavaConfig(**llava, video_token_index=VOCABULARY["<video>"])
        cls = hf.VideoLlavaForConditionalGeneration
    elif architecture == "internvl":
        vision = {**_CLIP, "image_size": [32, 32], "patch_size": [8, 8]}
        config = hf.InternVLConfig(
            text_config={"model_type": "qwen2", **_TEXT},
            vision_config={"model_type": "internvl_vision", **vision},
            image_token_id=VOCABULARY["<image>"],
            image_seq_length=4,
        )
        cls = hf.InternVLForConditionalGeneration
    else:
        config = hf.Qwen2_5_VLConfig(
            text_config={
                **_TEXT,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [1, 1, 2],
                },
            },
            vision_config={
                "depth": 3,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "patch_size": 4,
                "window_size": 16,
                "fullatt_block_indexes": [1],
                "out_hidden_size": 32,
                "tokens_per_second": 2,
            },
            image_token_id=VOCABULARY["<image>"],
            video_token_id=VOCABULARY["<video>"],
            vision_start_token_id=VOCABULARY["<|vision_start|>"],
            vision_end_token_id=VOCABULARY["<|vision_end|>"],
        )
        cls = hf.Qwen2_5_VLForConditionalGeneration
    torch.manual_seed(0)
    model = cls(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.35 if "lm_head" in name else 0.25)
        elif "lambda" in name:
            torch.nn.init.ones_(parameter)
    return model


def build_folder(architecture: str, folder: Path) -> Path:
    """A checkpoint folder: weights, tokenizer, chat template, preprocessor."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"\n|w[0-9]+|[a-z]+|[0-9]|[^\sa-z0-9]"), behavior="removed", invert=True
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", VOCABULARY["<s>"])]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL])
    image = _PART[architecture]
    video = "<video>\n" if architecture == "internvl" else image.replace("<image>", "<video>")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=_TEMPLATE.replace("IMAGE", image).replace("VIDEO", video),
    ).save_pretrained(folder)
    build_model(architecture).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSORS[architecture]))
    return folder
