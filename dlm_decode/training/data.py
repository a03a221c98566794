"""Scenes in arrays, and the word tokenizer of the tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dlm_decode.eval.scene_questions import vocabulary
from dlm_decode.eval.scenes import COLOURS, IMAGE_SIZE, SHAPES, SIZES, Scene, Split, generate_scene

__all__ = [
    "AR_SPECIAL_TOKENS",
    "GRID",
    "PATCH_SIZE",
    "SPECIAL_TOKENS",
    "ScenePool",
    "build_ar_tokenizer",
    "build_pool",
    "build_tokenizer",
    "pixels_of",
    "save_tokenizer",
]

PATCH_SIZE = 8
GRID = IMAGE_SIZE // PATCH_SIZE
NAMES = (*SHAPES, *map(str, range(10)))
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|startoftext|>",
    "<|mdm_mask|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<unk>",
)
CHAT_TEMPLATE = (
    "{{ '<|startoftext|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)

AR_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>", "<image>")
AR_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] | trim }}"
    "{% endfor %}{% endif %}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


@dataclass(frozen=True)
class ScenePool:
    """Many scenes of one split.

    Attributes:
        scenes: without their pictures' identity: what is in them.
        images: `(n, 96, 96, 3)` uint8.
        names: `(n, 144)` what each patch shows: index into `NAMES`, `len(NAMES)` for background,
            one more for a texture.
        colours: `(n, 144)` index into `COLOURS`, `len(COLOURS)` for none.
        sizes: `(n, 144)` index into `SIZES`, then a digit, then none.
        is_anchor: `(n, 144)` bool, the patch in which an object's centre lies; one per object.
    """

    scenes: Sequence[Scene]
    images: np.ndarray
    names: np.ndarray
    colours: np.ndarray
    sizes: np.ndarray
    is_anchor: np.ndarray

    def __len__(self) -> int:
        return len(self.scenes)

    def joined(self, other: ScenePool) -> ScenePool:
        """Both pools in one."""
        arrays = ("images", "names", "colours", "sizes", "is_anchor")
        return ScenePool(
            [*self.scenes, *other.scenes],
            *(np.concatenate([getattr(self, name), getattr(other, name)]) for name in arrays),
        )


def build_pool(
    count: int,
    split: Split,
    first_seed: int = 0,
    *,
    photo_share: float = 0.06,
    is_dense: bool = False,
) -> ScenePool:
    """Renders scenes `first_seed` to `first_seed + count - 1` of a split, with labels per patch."""
    num_patches = GRID * GRID
    images = np.empty((count, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    names = np.full((count, num_patches), len(NAMES), dtype=np.int64)
    colours = np.full((count, num_patches), len(COLOURS), dtype=np.int64)
    sizes = np.full((count, num_patches), len(SIZES) + 1, dtype=np.int64)
    is_anchor = np.zeros((count, num_patches), dtype=bool)
    scenes = []
    for index in tqdm(range(count), desc=f"{split} scenes", mininterval=5):
        scene = generate_scene(
            first_seed + index, split, photo_share=photo_share, is_dense=is_dense
        )
        images[index] = np.asarray(scene.image)
        if scene.is_photo:
            names[index] = len(NAMES) + 1
        for item, box in zip(scene.objects, scene.boxes, strict=True):
            patches = _covered(box)
            names[index, patches] = NAMES.index(item.name)
            colours[index, patches] = list(COLOURS).index(item.colour)
            sizes[index, patches] = list(SIZES).index(item.size) if item.size else len(SIZES)
            is_anchor[index, _centre(box)] = True
        scenes.append(scene)
    return ScenePool(scenes, images, names, colours, sizes, is_anchor)


def _centre(box: tuple[float, float, float, float]) -> int:
    left, top, right, bottom = box
    return int((top + bottom) / 2 // PATCH_SIZE) * GRID + int((left + right) / 2 // PATCH_SIZE)


def _covered(box: tuple[float, float, float, float], share: float = 0.3) -> np.ndarray:
    """Indices of the patches of which a box covers more than `share`."""
    edges = np.arange(GRID) * PATCH_SIZE
    left, top, right, bottom = box
    width = np.clip(np.minimum(edges + PATCH_SIZE, right) - np.maximum(edges, left), 0, None)
    height = np.clip(np.minimum(edges + PATCH_SIZE, bottom) - np.maximum(edges, top), 0, None)
    return np.flatnonzero((height[:, None] * width[None, :]).ravel() > share * PATCH_SIZE**2)


def pixels_of(images: np.ndarray) -> Tensor:
    """`(n, 3, 96, 96)` float32 in [-1, 1] from `(n, 96, 96, 3)` uint8."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)


def build_tokenizer(folder: Path) -> None:
    """Writes a word-level tokenizer with LLaDA's special tokens.

    Its chat template has no system prompt.
    """
    words = ("\n", "\n\n", "user", "assistant", *vocabulary())
    save_tokenizer(folder, [*SPECIAL_TOKENS, *words], CHAT_TEMPLATE)


def save_tokenizer(folder: Path, words: Sequence[str], chat_template: str) -> None:
    """Writes a word-level tokenizer; `words` begin with `SPECIAL_TOKENS`, ids are their places."""
    _save(
        _word_tokenizer(words, SPECIAL_TOKENS),
        folder,
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        mask_token="<|mdm_mask|>",
        unk_token="<unk>",
        chat_template=chat_template,
    )


def build_ar_tokenizer(folder: Path) -> None:
    """Writes a word-level tokenizer with LLaVA-1.5's special tokens.

    As there, `<s>` is put before every text, and the chat template leaves it out.
    """
    from tokenizers import processors

    words = [*AR_SPECIAL_TOKENS, "\n", "user", "assistant", ":", *vocabulary()]
    tokenizer = _word_tokenizer(words, AR_SPECIAL_TOKENS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A",
        pair="<s> $A $B",
        special_tokens=[("<s>", AR_SPECIAL_TOKENS.index("<s>"))],
    )
    _save(
        tokenizer,
        folder,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=AR_CHAT_TEMPLATE,
        extra_special_tokens={"image_token": "<image>"},
        padding_side="left",
    )


def _word_tokenizer(words: Sequence[str], special: Sequence[str]) -> Any:
    """A tokenizer of words, single digits and signs; ids are the places of the words."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace("centre", "center")]
    )
    pattern = Regex(r"\n\n|\n|[a-z]+|[0-9]|[^\sa-z0-9]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="removed", invert=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return tokenizer


def _save(tokenizer: Any, folder: Path, **settings: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=True, **settings
    ).save_pretrained(folder)
