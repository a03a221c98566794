"""`dlm-decode train-tiny --kind ar`: the autoregressive twin of `tiny`.

The result is a folder in the format of LLaVA-1.5, which transformers loads by itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlavaForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor

from dlm_decode.errors import InvalidInputError
from dlm_decode.eval.scenes import IMAGE_SIZE
from dlm_decode.training.autoregressive import (
    ArDrawer,
    ArEncoder,
    ArReader,
    model_config,
    train_ar,
)
from dlm_decode.training.clip_tower import ClipPatchReader
from dlm_decode.training.data import PATCH_SIZE, ScenePool, build_ar_tokenizer
from dlm_decode.training.recipe import Lesson, Recipe
from dlm_decode.training.stages import TrainingStage
from dlm_decode.training.tiny import KIND_WEIGHTS, from_export

__all__ = ["ArRecipe", "ar_stages", "export_ar", "from_ar_export"]

AR_KIND_WEIGHTS = {**KIND_WEIGHTS, "choice": 3.0}

_LONGEST_ANSWER = 48  # a description of five objects has 25 words, a list of what is seen as many


def ar_stages(scale: float) -> list[TrainingStage]:
    """The curriculum, with every stage's steps multiplied by `scale`.

    What is learned from few visual tokens holds with all of them: accuracy is the same before the
    second stage has begun. So that one is short.
    """
    plan = (
        TrainingStage("few", 4500, 64, 1.2e-3, patches=8, background=6),
        TrainingStage("all", 300, 48, 3e-4, final_rate=0.02, is_flat=True),
    )
    return [
        TrainingStage(**{**vars(stage), "steps": max(1, round(stage.steps * scale))})
        for stage in plan
    ]


class ArRecipe(Recipe):
    """`tiny-ar`: a LLaVA-1.5."""

    tower_kind = ClipPatchReader

    def build_tokenizer(self, folder: Path) -> None:
        """See `Recipe`."""
        build_ar_tokenizer(folder)

    def read(
        self, folder: Path, pool: ScenePool
    ) -> tuple[ClipPatchReader, dict[str, torch.Tensor] | None]:
        """See `Recipe`; of a `tiny`, the tower is taken over."""
        path = folder / "config.json"
        if not path.exists():
            raise InvalidInputError(f"--start {str(folder)!r} holds no config.json.")
        kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
        if kind == "llava":
            return from_ar_export(folder)
        if kind != "llava_llada":
            raise InvalidInputError(
                f"--start {str(folder)!r} is of model type {kind!r}; --kind ar starts from "
                "'llava' (its own kind) or from the tower of 'llava_llada'."
            )
        tower = ClipPatchReader()
        tower.take_over(from_export(folder)[0], pool)
        return tower, None

    def train(self, lesson: Lesson) -> ArReader:
        """See `Recipe`."""
        encoder = ArEncoder(PreTrainedTokenizerFast.from_pretrained(lesson.tokenizer))
        return train_ar(
            ArDrawer(lesson.pool, lesson.features, encoder, AR_KIND_WEIGHTS, practises=True),
            ArDrawer(lesson.heldout, lesson.heldout_features, encoder),
            ar_stages(lesson.scale),
            lesson.work,
            seed=lesson.seed,
            start=lesson.start,
        )

    def export(
        self, folder: Path, tower: ClipPatchReader, reader: ArReader, tokenizer_folder: Path
    ) -> None:
        """See `Recipe`."""
        export_ar(folder, tower, reader, tokenizer_folder)


def export_ar(
    folder: Path, tower: ClipPatchReader, reader: ArReader, tokenizer_folder: Path
) -> None:
    """Writes config, weights, tokenizer, image processor and generation defaults.

    Weights are float16 and are loaded as float32. The last layer of the tower, which no feature
    passes and which is not trained, is written as a copy of the one before: what reads its
    attention finds the same.

    Args:
        folder: made if missing.
        tower: trained vision part.
        reader: trained projector and language model.
        tokenizer_folder: read from.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    model: Any = LlavaForConditionalGeneration(model_config(tokenizer.get_vocab()))
    for whole, part in _parts(model, tower, reader):
        whole.load_state_dict(part.state_dict())
    layers = model.model.vision_tower.encoder.layers
    layers[-1].load_state_dict(layers[-2].state_dict())
    ids = tokenizer.get_vocab()
    model.generation_config = GenerationConfig(
        bos_token_id=ids["<s>"],
        eos_token_id=ids["</s>"],
        pad_token_id=ids["<pad>"],
        max_new_tokens=_LONGEST_ANSWER,
    )
    model.half().save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n", encoding="utf-8")
    side = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    pixels = CLIPImageProcessorPil(
        size=side, do_center_crop=False, crop_size=side, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    pixels.save_pretrained(folder)
    LlavaProcessor(
        image_processor=pixels,
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        chat_template=tokenizer.chat_template,
        num_additional_image_tokens=1,  # the class token, which the strategy takes off again
    ).save_pretrained(folder)


def from_ar_export(folder: Path) -> tuple[ClipPatchReader, dict[str, torch.Tensor]]:
    """The tower and the weights of an `ArReader` in an exported folder.

    The head that tells what is in the picture is not exported; it begins anew.
    """
    model: Any = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    tower, reader = ClipPatchReader(), ArReader(model.config)
    for whole, part in _parts(model, tower, reader):
        part.load_state_dict(whole.state_dict())
    return tower, reader.state_dict()


def _parts(model: Any, tower: ClipPatchReader, reader: ArReader) -> list[tuple[Any, Any]]:
    """Modules of the whole model, each with the one that is trained in its place."""
    return [
        (model.model.vision_tower, tower.tower),
        (model.model.multi_modal_projector, reader.projector),
        (model.model.language_model, reader.language.model),
        (model.lm_head, reader.language.lm_head),
    ]
