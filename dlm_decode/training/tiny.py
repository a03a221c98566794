"""`dlm-decode train-tiny`: makes scenes, trains the tower and then the language model on them.

The result is a folder in LLaDA-V's checkpoint format, or in LLaVA-1.5's with `--kind ar`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from dlm_decode.errors import InvalidInputError
from dlm_decode.training.data import ScenePool, build_pool, build_tokenizer
from dlm_decode.training.language import (
    CANVAS,
    LANGUAGE_CONFIG,
    Drawer,
    Encoder,
    Reader,
    Stage,
    train_language,
)
from dlm_decode.training.recipe import Lesson, Recipe
from dlm_decode.training.tower import VISION_CONFIG, PatchReader, encode_pool, train_tower

__all__ = [
    "KIND_WEIGHTS",
    "TOWER_PREFIX",
    "add_arguments",
    "claim",
    "export",
    "from_export",
    "read_encoder",
    "run",
    "state_of",
    "write_checkpoint",
]

# What training watches is not what evaluation asks: held-out scenes from here on.
WATCHED_SCENES = 400
FIRST_WATCHED = 100_000
TOWER_PREFIX = "model.vision_tower."
_SCENE_KINDS = ("picture", "ar")
# By option: what it counts, the kinds of models that have it, and its default.
_NUMBERS = {
    "scenes": ("training scenes", _SCENE_KINDS, 30_000),
    "dense_scenes": ("full scenes for the tower only", _SCENE_KINDS, 30_000),
    "tower_steps": ("steps of the tower's training", _SCENE_KINDS, 2000),
    "clips": ("training clips", ("video",), 8000),
}
KIND_WEIGHTS = {
    "describe": 1.6,
    "colour": 0.8,
    "where": 1.0,
    "cell": 0.8,
    "digit": 0.6,
    "count": 1.5,
    "exists": 1.5,
    "choice": 4.0,
    "list": 3.0,
}


def stages(scale: float) -> list[Stage]:
    """The curriculum, with every stage's steps multiplied by `scale`.

    Few visual tokens make the first stages about three times as cheap per question as the last;
    what they teach (binding of name, colour and place, counting, option lookup) carries over. The
    shipped weights went through more and shorter runs, see their card; this plan puts what worked
    into one.
    """
    plan = (
        Stage("few", 6000, 128, 1.2e-3, patches=8, background=6, full_share=0.5),
        Stage("all", 850, 64, 7e-4, final_rate=0.05, full_share=0.5),
        Stage("flat", 200, 64, 3e-4, final_rate=0.02, full_share=0.4, is_flat=True),
    )
    return [Stage(**{**vars(stage), "steps": max(1, round(stage.steps * scale))}) for stage in plan]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `dlm-decode train-tiny`."""
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of the finished checkpoint"
    )
    parser.add_argument(
        "--work",
        type=Path,
        help="folder for intermediate state; a run resumes from it (default OUTPUT.work)",
    )
    parser.add_argument(
        "--kind",
        choices=("picture", "ar", "video"),
        default="picture",
        help="picture: a LLaDA-V that answers about scenes; ar: its autoregressive twin, a "
        "LLaVA-1.5; video: a VidLaDA that answers about clips, made from the shipped picture "
        "model (default picture)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--start",
        type=Path,
        help="exported folder to continue from, tower included (default: anew; for videos tiny); "
        "with --kind ar also a picture model, whose tower is then trained further",
    )
    for name, (text, kinds, default) in _NUMBERS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            help=f"{text}; kind {' and '.join(kinds)} (default {default})",
        )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="multiplies the language-model steps (default 1)"
    )
    parser.add_argument("--threads", type=int, help="CPU threads")


def run(args: argparse.Namespace) -> int:
    """Trains, resuming where a killed run stopped, and writes the checkpoint folder.

    Raises:
        InvalidInputError: numbers below what can be trained, options of another kind of model, or
            a work folder of other arguments.
    """
    _fill_in(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.kind == "video":
        from dlm_decode.training.video import train_video

        return train_video(args)
    recipe = _recipe(args.kind)
    work = args.work or args.output.with_name(args.output.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    claim(
        work / "arguments.json",
        args,
        ("kind", "seed", "start", "scenes", "dense_scenes", "tower_steps", "scale"),
    )
    tokenizer_folder = work / "tokenizer"
    recipe.build_tokenizer(tokenizer_folder)
    pool = build_pool(args.scenes, "train")
    heldout = build_pool(WATCHED_SCENES, "heldout", FIRST_WATCHED)
    tower, start = (None, None) if args.start is None else recipe.read(args.start, pool)
    if tower is None or start is None:
        dense = build_pool(args.dense_scenes, "train", is_dense=True)
        tower = train_tower(
            pool.joined(dense),
            heldout,
            work / "tower.pt",
            steps=args.tower_steps,
            start=tower,
            kind=recipe.tower_kind,
            seed=args.seed,
        )
    reader = recipe.train(
        Lesson(
            pool,
            _features(work / "features.npy", tower, pool),
            heldout,
            encode_pool(tower, heldout),
            tokenizer_folder,
            work,
            args.scale,
            args.seed,
            start,
        )
    )
    recipe.export(args.output, tower, reader, tokenizer_folder)
    print(f"wrote {args.output}")
    return 0


def _fill_in(args: argparse.Namespace) -> None:
    """Defaults of the kind's own numbers; refuses those of other kinds, and what is below 1."""
    for name, (_, kinds, default) in _NUMBERS.items():
        value, option = getattr(args, name), "--" + name.replace("_", "-")
        if args.kind not in kinds:
            if value is not None:
                raise InvalidInputError(
                    f"{option} is for --kind {' and '.join(kinds)}; leave it out with --kind "
                    f"{args.kind}."
                )
        elif value is None:
            setattr(args, name, default)
        elif value < 1:
            raise InvalidInputError(f"{option} must be at least 1, got {value}.")
    if args.scale <= 0:
        raise InvalidInputError(f"--scale must be above 0, got {args.scale}.")


def _recipe(kind: str) -> Recipe:
    if kind == "ar":
        from dlm_decode.training.tiny_ar import ArRecipe

        return ArRecipe()
    return PictureRecipe()


class PictureRecipe(Recipe):
    """`tiny`: a LLaDA-V."""

    def build_tokenizer(self, folder: Path) -> None:
        """See `Recipe`."""
        build_tokenizer(folder)

    def read(self, folder: Path, pool: ScenePool) -> tuple[PatchReader, dict[str, torch.Tensor]]:
        """See `Recipe`."""
        return from_export(folder)

    def train(self, lesson: Lesson) -> Reader:
        """See `Recipe`."""
        encoder = read_encoder(lesson.tokenizer)
        return train_language(
            Drawer(lesson.pool, lesson.features, encoder, KIND_WEIGHTS, practises=True),
            Drawer(lesson.heldout, lesson.heldout_features, encoder),
            stages(lesson.scale),
            lesson.work,
            vocab_size=len(encoder.ids),
            seed=lesson.seed,
            start=lesson.start,
        )

    def export(
        self, folder: Path, tower: PatchReader, reader: Reader, tokenizer_folder: Path
    ) -> None:
        """See `Recipe`."""
        export(folder, tower, reader, tokenizer_folder)


def _features(path: Path, tower: PatchReader, pool: Any) -> np.ndarray:
    if not path.exists():
        part = path.with_name("part-" + path.name)
        np.save(part, encode_pool(tower, pool))
        part.replace(path)  # in one piece: a kill leaves no half file to resume from
    return np.load(path, mmap_mode="r")


def claim(path: Path, args: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuses to resume what other arguments began.

    Args:
        path: file of the arguments, in the work folder; written if missing.
        args: of the command.
        names: those that the result depends on.

    Raises:
        InvalidInputError: the work folder belongs to other arguments.
    """
    own = {name: str(getattr(args, name)) for name in names}
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != own:
        raise InvalidInputError(
            f"{str(path.parent)!r} was begun with other arguments ({path.name}); "
            "choose another --work or remove it."
        )
    path.write_text(json.dumps(own, indent=2) + "\n", encoding="utf-8")


def from_export(folder: Path) -> tuple[PatchReader, dict[str, torch.Tensor]]:
    """The tower and the weights of a `Reader` in an exported folder.

    Raises:
        InvalidInputError: no such folder.
    """
    path = folder / "model.safetensors"
    if not path.exists():
        raise InvalidInputError(f"--start {str(folder)!r} holds no model.safetensors.")
    state = {key: value.float() for key, value in load_file(path).items()}
    tower = PatchReader()
    keys = {key: TOWER_PREFIX + key for key in tower.tower.state_dict()}
    tower.tower.load_state_dict({key: state.pop(name) for key, name in keys.items()})
    names = {"model.image_newline": "newline"}
    names |= {
        key: key.replace("model.mm_projector", "projector") for key in state if "mm_proj" in key
    }
    return tower, {names.get(key, f"language.{key}"): value for key, value in state.items()}


def read_encoder(folder: Path, *options: Any) -> Encoder:
    """The encoder of a saved tokenizer; further arguments are those of `Encoder`."""
    from transformers import PreTrainedTokenizerFast

    return Encoder(PreTrainedTokenizerFast.from_pretrained(folder), *options)


def export(folder: Path, tower: PatchReader, reader: Reader, tokenizer_folder: Path) -> None:
    """Writes config, weights, tokenizer and generation defaults.

    Weights are float16, under the official key names.

    Args:
        folder: made if missing.
        tower: trained vision part.
        reader: trained projector and language model.
        tokenizer_folder: copied from.
    """
    state = {TOWER_PREFIX + key: value for key, value in tower.tower.state_dict().items()}
    config = {"architectures": ["LlavaLLaDAModelLM"], "model_type": "llava_llada"}
    defaults = {"gen_length": CANVAS, "steps": CANVAS, "block_length": CANVAS}
    write_checkpoint(folder, {**state, **state_of(reader)}, tokenizer_folder, config, defaults)


def state_of(reader: Reader) -> dict[str, torch.Tensor]:
    """Projector, newline vector and language model under the official key names."""
    state = {
        f"model.mm_projector.{key}": value for key, value in reader.projector.state_dict().items()
    }
    state["model.image_newline"] = reader.newline.detach()
    return state | reader.language.state_dict()


def write_checkpoint(
    folder: Path,
    state: dict[str, torch.Tensor],
    tokenizer_folder: Path,
    config: dict[str, Any],
    defaults: dict[str, Any],
) -> None:
    """Writes a checkpoint folder; weights become float16.

    Args:
        folder: made if missing.
        state: weights under the official key names.
        tokenizer_folder: copied from.
        config: what `config.json` says about the kind of model, beside the sizes.
        defaults: generation defaults.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: value.half().contiguous() for key, value in state.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer_folder / file).exists():
            shutil.copy(tokenizer_folder / file, folder / file)
    ids = read_encoder(tokenizer_folder).ids
    config = {
        **config,
        "dtype": "float32",
        **LANGUAGE_CONFIG,
        "vocab_size": len(ids),
        "num_key_value_heads": LANGUAGE_CONFIG["num_attention_heads"],
        "mask_token_id": ids["<|mdm_mask|>"],
        "bos_token_id": ids["<|startoftext|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "stop_token_ids": [ids["<|endoftext|>"], ids["<|eot_id|>"]],
        "suppress_token_ids": [
            ids[name]
            for name in ("<|startoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<unk>")
        ],
        "mm_vision_tower": "tiny-siglip",
        "mm_hidden_size": VISION_CONFIG["hidden_size"],
        "mm_projector_type": "mlp2x_gelu",
        "mm_patch_merge_type": "spatial_unpad",
        "mm_newline_position": "grid",
        "image_aspect_ratio": "pad",
        "vision_config": VISION_CONFIG,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(defaults, indent=2) + "\n")
