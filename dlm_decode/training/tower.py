"""Stage A: the vision tower learns what each patch shows, from labels."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dlm_decode.eval.scenes import COLOURS, SHAPES, SIZES
from dlm_decode.models.configuration import LlavaLLaDAConfig
from dlm_decode.models.llava_llada import VisionTower
from dlm_decode.training.data import GRID, NAMES, ScenePool, pixels_of

__all__ = [
    "VISION_CONFIG",
    "PatchReader",
    "encode_pool",
    "patch_accuracy",
    "patch_loss",
    "patch_targets",
    "train_tower",
]

VISION_CONFIG: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 5,  # the last one is never used, as in LLaDA-V
    "num_attention_heads": 4,
    "image_size": 96,
    "patch_size": 8,
}
_CELL = GRID // 3  # patches along a cell


class PatchReader(nn.Module):
    """The tower without its last layer, with linear heads on every patch.

    The heads read name, colour and size, whether the patch is an anchor, and its cell.
    """

    tower: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.tower = self._tower()
        width = VISION_CONFIG["hidden_size"]
        sizes = (len(NAMES) + 2, len(COLOURS) + 1, len(SIZES) + 2, 2, 9)
        self.heads = nn.ModuleList([nn.Linear(width, size) for size in sizes])

    def _tower(self) -> nn.Module:
        return VisionTower(LlavaLLaDAConfig(vision_config=VISION_CONFIG).vision)

    def features(self, pixels: Tensor) -> Tensor:
        """`(n, 144, 96)` states that a projector reads, of `(n, 3, 96, 96)` pixels."""
        return self.tower(pixels)

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """Logits `(n, 144, classes)` of each head."""
        return self._patch_logits(self.features(pixels))

    def _patch_logits(self, states: Tensor) -> list[Tensor]:
        return [head(states) for head in self.heads]

    def accuracy(self, pool: ScenePool) -> dict[str, float]:
        """Shares that are logged; see `patch_accuracy`."""
        return patch_accuracy(self, pool)

    def loss(self, pool: ScenePool, rows: np.ndarray) -> Tensor:
        """What is minimised over the scenes `rows` of a pool."""
        return patch_loss(self(pixels_of(pool.images[rows])), patch_targets(pool, rows))


def patch_targets(pool: ScenePool, rows: np.ndarray) -> list[Tensor]:
    """Labels `(n, 144)` for each head of `PatchReader`."""
    labels = [
        labels[rows]
        for labels in (pool.names, pool.colours, pool.sizes, pool.is_anchor.astype(np.int64))
    ]
    cells = np.add.outer(np.arange(GRID) // _CELL * 3, np.arange(GRID) // _CELL).ravel()
    return [torch.from_numpy(array) for array in (*labels, np.tile(cells, (len(rows), 1)))]


def patch_loss(logits: list[Tensor], targets: list[Tensor]) -> Tensor:
    """Cross-entropy in which patches of things weigh as much as all background.

    Among the things, an anchor weighs four times as much as another patch.
    """
    is_thing = (targets[0] < len(NAMES)) * (1.0 + 3.0 * targets[3])
    is_empty = (targets[0] >= len(NAMES)).float()
    weight = is_thing / is_thing.sum().clamp_min(1) + is_empty / is_empty.sum().clamp_min(1)
    losses = [
        functional.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none").view_as(
            weight
        )
        for scores, target in zip(logits, targets, strict=True)
    ]
    return sum(((loss * weight).sum() for loss in losses), torch.zeros(()))


@torch.no_grad()
def patch_accuracy(reader: PatchReader, pool: ScenePool, batch: int = 128) -> dict[str, float]:
    """Share of objects whose anchor patch shows the right name, colour and size.

    Also the share of digits named rightly (`"digit"`), and of objects' patches that are told apart
    rightly into anchors and others (`"anchor"`).
    """
    hits: dict[str, list[np.ndarray]] = {
        name: [] for name in ("name", "colour", "size", "digit", "anchor")
    }
    for start in range(0, len(pool), batch):
        rows = np.arange(start, min(start + batch, len(pool)))
        targets = patch_targets(pool, rows)
        logits = reader(pixels_of(pool.images[rows]))
        name, colour, size, anchor, _ = (
            (scores.argmax(-1) == target).numpy()
            for scores, target in zip(logits, targets, strict=True)
        )
        is_anchor = pool.is_anchor[rows]
        is_digit = is_anchor & (pool.names[rows] >= len(SHAPES))
        for key, hit, where in (
            ("name", name, is_anchor),
            ("colour", colour, is_anchor),
            ("size", size, is_anchor),
            ("digit", name, is_digit),
            ("anchor", anchor, pool.names[rows] < len(NAMES)),
        ):
            hits[key].append(hit[where])
    return {key: round(float(np.concatenate(parts).mean()), 4) for key, parts in hits.items()}


def train_tower(
    pool: ScenePool,
    heldout: ScenePool,
    path: Path,
    *,
    steps: int,
    schedule_steps: int | None = None,
    start: PatchReader | None = None,
    kind: type[PatchReader] = PatchReader,
    seed: int = 0,
    batch: int = 64,
    rate: float = 2e-3,
    save_every: int = 200,
) -> PatchReader:
    """Trains for `steps`, saving to `path` every `save_every` steps and resuming from it.

    Args:
        pool: training scenes.
        heldout: measured at each save.
        path: checkpoint.
        steps: optimizer steps.
        schedule_steps: length of the learning-rate cycle, if longer than `steps`.
        start: weights to begin with; fresh ones otherwise.
        kind: of tower.
        seed: of weights and batches.
        batch: scenes per step.
        rate: peak learning rate.
        save_every: steps between two saves.

    Returns:
        The trained reader; a log line with held-out accuracies is printed at each save.
    """
    torch.manual_seed(seed)
    reader = kind()
    if start is not None:
        reader.load_state_dict(start.state_dict())
    optimizer = torch.optim.AdamW(reader.parameters(), lr=rate, weight_decay=0.02)
    cycle = schedule_steps or steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=cycle, pct_start=0.1
    )
    first = 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        reader.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first = saved["step"]
    began = time.time()
    for step in range(first, steps):
        rows = np.random.default_rng((seed, step)).integers(len(pool), size=batch)
        loss = reader.loss(pool, rows)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % save_every == 0 or step + 1 == steps:
            state = {
                "model": reader.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "step": step + 1,
            }
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)  # a kill leaves no half file
            seconds = time.time() - began
            print(
                f"tower step {step + 1} loss {loss.item():.3f} "
                f"{reader.accuracy(heldout)} {seconds:.0f} s",
                flush=True,
            )
    return reader


@torch.no_grad()
def encode_pool(reader: PatchReader, pool: ScenePool, batch: int = 128) -> np.ndarray:
    """Features `(n, 144, 96)` float16 of every scene."""
    width = VISION_CONFIG["hidden_size"]
    features = np.empty((len(pool), pool.names.shape[1], width), dtype=np.float16)
    for start in range(0, len(pool), batch):
        rows = slice(start, start + batch)
        features[rows] = reader.features(pixels_of(pool.images[rows])).half().numpy()
    return features
