"""`dlm-decode train-tiny --kind video`: the shipped picture model learns to read clips.

Its tower and projector stay as they are; its language model goes on learning, with some words more.
The result is a folder in VidLaDA's checkpoint format.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_decode
from dlm_decode.eval.clip_questions import clip_vocabulary
from dlm_decode.eval.clips import NUM_FRAMES, NUM_STEPS, Clip, generate_clip
from dlm_decode.training.clip_data import POOLED, ClipDrawer, ClipReader, encode_clips
from dlm_decode.training.data import save_tokenizer
from dlm_decode.training.language import Reader, Stage, train_language
from dlm_decode.training.tiny import (
    TOWER_PREFIX,
    claim,
    from_export,
    read_encoder,
    state_of,
    write_checkpoint,
)

__all__ = ["CANVAS", "ENDING", "export_video", "extended", "train_video"]

CANVAS = 16
ENDING = "/ no _ think"  # VidLaDA's default mode of thinking
WATCHED_CLIPS = 400
FIRST_WATCHED = 100_000
KIND_WEIGHTS = {"movement": 1.0, "order": 1.7, "count": 0.9, "place": 0.3}
SHIPPED = Path(dlm_decode.__file__).parent / "data" / "tiny"
_PART = 500
# VidLaDA's processor puts a long system message first; the words of this model do not hold it.
_CHAT_TEMPLATE = (
    "{{ '<|startoftext|>' }}{% for message in messages if message['role'] != 'system' %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)


def stages(scale: float) -> list[Stage]:
    """The curriculum, with every stage's steps multiplied by `scale`.

    A few tokens of each picture teach what all of them need. The shipped weights went through more
    and shorter runs, see their card; this plan puts what worked into one.
    """
    plan = (
        Stage("few", 4000, 64, 6e-4, patches=1, background=8, full_share=0.4),
        Stage("more", 100, 48, 3.5e-4, patches=4, background=120, full_share=0.35, final_rate=0.05),
    )
    return [Stage(**{**vars(stage), "steps": max(1, round(stage.steps * scale))}) for stage in plan]


def train_video(args: argparse.Namespace) -> int:
    """Trains, resuming where a killed run stopped, and writes the checkpoint folder.

    Args:
        args: of `dlm-decode train-tiny`: `output`, `work`, `seed`, `start`, `clips`, `scale`.

    Raises:
        InvalidInputError: a work folder of other arguments, or no model to start from.
    """
    work = args.work or args.output.with_name(args.output.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    claim(work / "arguments.json", args, ("kind", "seed", "start", "clips", "scale"))
    source: Path = args.start or SHIPPED
    _, start = from_export(source)
    extend_tokenizer(source, work / "tokenizer")
    encoder = read_encoder(work / "tokenizer", CANVAS, ENDING)
    clips = [generate_clip(seed) for seed in range(args.clips)]
    watched = [generate_clip(FIRST_WATCHED + seed, "heldout") for seed in range(WATCHED_CLIPS)]
    torch.manual_seed(args.seed)
    reader = train_language(
        ClipDrawer(clips, _features(work / "clips.npy", source, clips), encoder, KIND_WEIGHTS),
        ClipDrawer(watched, _features(work / "watched.npy", source, watched), encoder),
        stages(args.scale),
        work,
        vocab_size=len(encoder.ids),
        seed=args.seed,
        start=extended(start, len(encoder.ids)),
        reader=ClipReader(encoder),
    )
    export_video(args.output, source, reader, work / "tokenizer")
    print(f"wrote {args.output}")
    return 0


def extended(start: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Weights of a `Reader` with rows for more words: random ones, as long as the others."""
    found = dict(start)
    for name in ("language.model.embed_tokens.weight", "language.lm_head.weight"):
        table = start[name]
        size = (vocab_size - len(table), table.shape[1])
        fresh = table.mean(dim=0) + torch.randn(size) * table.std()
        found[name] = torch.cat([table, fresh])
    return found


def extend_tokenizer(source: Path, folder: Path) -> None:
    """Writes the tokenizer of a tiny model with the words about clips behind its own."""
    known = read_encoder(source).ids
    own = sorted(known, key=known.__getitem__)
    words = [*own, *(word for word in clip_vocabulary() if word not in known)]
    save_tokenizer(folder, words, _CHAT_TEMPLATE)


def _features(path: Path, source: Path, clips: list[Clip]) -> np.ndarray:
    """Tokens of all clips from `encode_clips`, in a file that grows part by part."""
    done = path.with_suffix(".done")
    width = json.loads((source / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    shape = (len(clips), NUM_STEPS, POOLED**2, width)
    first = int(done.read_text()) if done.exists() else 0
    mode = "r+" if first else "w+"
    features = np.lib.format.open_memmap(
        path, mode=mode, dtype=np.float16, shape=None if first else shape
    )
    if first < len(clips):
        model = dlm_decode.load(source).model
        for begin in range(first, len(clips), _PART):
            part = clips[begin : begin + _PART]
            features[begin : begin + len(part)] = encode_clips(model, part)
            features.flush()
            done.write_text(str(begin + len(part)))
    return features


def export_video(folder: Path, source: Path, reader: Reader, tokenizer_folder: Path) -> None:
    """Writes config, weights, tokenizer and generation defaults, as `tiny.export` does.

    Args:
        folder: made if missing.
        source: folder whose tower is kept.
        reader: trained.
        tokenizer_folder: copied from.
    """
    weights = load_file(source / "model.safetensors")
    tower = {key: value for key, value in weights.items() if key.startswith(TOWER_PREFIX)}
    config: dict[str, Any] = {
        "architectures": ["LlavaLLaDAVideoModelLM"],
        "model_type": "llava_llada_video",
        "mm_spatial_pool_mode": "bilinear",
    }
    defaults = {
        "gen_length": CANVAS,
        "steps": CANVAS,
        "block_length": CANVAS,
        "max_frames": NUM_FRAMES,
    }
    write_checkpoint(folder, {**tower, **state_of(reader)}, tokenizer_folder, config, defaults)
