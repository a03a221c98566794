"""The curriculum: stretches of training that are run in order, saved, and resumed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dlm_decode.eval.runner import Sample
from dlm_decode.training.muon import Muon

__all__ = ["TrainingStage", "accuracy_by_kind", "run_stages"]

_MUON_RATE = 10.0  # Muon's learning rate, in units of AdamW's


@dataclass(frozen=True)
class TrainingStage:
    """One stretch of training.

    Attributes:
        name: for logs and checkpoints.
        steps: optimizer steps.
        batch: questions per step.
        rate: peak learning rate.
        patches: patches shown for the objects, their anchors first; `None` shows every patch.
        background: further patches shown, drawn from what is left.
        final_rate: rate at the end, as a share of `rate`.
        is_flat: every word weighs the same. Weights teach faster, but bias answers towards words
            that weigh more; a flat stage at the end takes that out.
    """

    name: str
    steps: int
    batch: int
    rate: float
    patches: int | None = None
    background: int = 0
    final_rate: float = 0.1
    is_flat: bool = False


StageT = TypeVar("StageT", bound=TrainingStage)


def run_stages(
    model: nn.Module,
    stages: Sequence[StageT],
    folder: Path,
    loss_of: Callable[[StageT, int], Tensor],
    evaluate: Callable[[StageT], dict[str, float]],
    *,
    every: int = 500,
) -> None:
    """Trains `model` in place.

    State is saved to `folder/language.pt` at every evaluation, and a run resumes from it. Held-out
    accuracies are appended to `folder/log.jsonl`.

    Args:
        model: with its starting weights; a saved state replaces them.
        stages: the curriculum.
        folder: checkpoint and log.
        loss_of: the loss of a step, a function of stage and step, so that a run that was killed and
            resumed ends with the same weights.
        evaluate: held-out accuracies, logged.
        every: steps between two evaluations.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "language.pt"
    saved = torch.load(path, weights_only=True) if path.exists() else None
    if saved:
        model.load_state_dict(saved["model"])
    for number, stage in enumerate(stages):
        if saved and saved["stage"] > number:
            continue
        optimizers = _optimizers(model)
        first = 0
        if saved and saved["stage"] == number:
            for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            first = saved["step"]
        began, total = time.time(), 0.0
        for step in range(first, stage.steps):
            loss = loss_of(stage, step)
            model.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, factor in zip(optimizers, (1.0, _MUON_RATE), strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = factor * _rate(stage, step)
                optimizer.step()
            total += loss.item()
            if (step + 1) % every == 0 or step + 1 == stage.steps:
                states = [optimizer.state_dict() for optimizer in optimizers]
                state = {"model": model.state_dict(), "optimizers": states}
                torch.save({**state, "stage": number, "step": step + 1}, path.with_suffix(".tmp"))
                path.with_suffix(".tmp").replace(path)
                mean_loss = total / (step + 1 - first)
                first, total = step + 1, 0.0
                model.eval()
                entry = {
                    "stage": asdict(stage),
                    "step": step + 1,
                    "seconds": round(time.time() - began, 1),
                    "loss": round(mean_loss, 4),
                    "heldout": evaluate(stage),
                }
                model.train()
                with (folder / "log.jsonl").open("a") as file:
                    file.write(json.dumps(entry) + "\n")
                print(
                    stage.name,
                    {key: entry[key] for key in ("step", "seconds", "loss", "heldout")},
                    flush=True,
                )
        saved = None


def _optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """AdamW for embeddings, heads, projector and norms; Muon for the hidden matrices."""
    named = dict(model.named_parameters())
    hidden = {name for name, value in named.items() if ".layers." in name and value.ndim == 2}
    others = [value for name, value in named.items() if name not in hidden]
    adam = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.98), weight_decay=0.02)
    return adam, Muon([value for name, value in named.items() if name in hidden], lr=0.0)


def _rate(stage: TrainingStage, step: int) -> float:
    """Warm-up over 3 % of the steps, then a cosine down to `final_rate`."""
    warm = max(1, int(0.03 * stage.steps))
    progress = min(1.0, max(0, step - warm) / max(1, stage.steps - warm))
    cosine = 0.5 * (1 + np.cos(np.pi * progress))
    return float(
        stage.rate
        * min(1.0, (step + 1) / warm)
        * (stage.final_rate + (1 - stage.final_rate) * cosine)
    )


def accuracy_by_kind(samples: Sequence[Sample], hits: Sequence[bool]) -> dict[str, float]:
    """Shares of right answers: `"all"`, then those of each kind."""
    by_kind: dict[str, list[bool]] = {}
    for sample, hit in zip(samples, hits, strict=True):
        by_kind.setdefault(sample.kind, []).append(hit)
    shares = {kind: round(float(np.mean(own)), 3) for kind, own in sorted(by_kind.items())}
    return {"all": round(float(np.mean(list(hits))), 3), **shares}
