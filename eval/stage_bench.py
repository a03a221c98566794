"""Seconds of a stage before the language model against the prefill that it saves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dlm_decode.canvas import IMAGE_TOKEN_ID, Prompt, VisualSpan
from dlm_decode.errors import InvalidInputError
from dlm_decode.eval.bench import BenchSize, random_vlm
from dlm_decode.vision.base import Stage

__all__ = ["bench_stage"]


@torch.no_grad()
def bench_stage(
    stage: Stage,
    size: BenchSize,
    *,
    rounds: int = 5,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    attn_implementation: str = "sdpa",
) -> dict[str, Any]:
    """Measures the stage, and one decoder layer with all tokens and with those that it leaves.

    Layers of the language model are alike, so one of them with random weights stands for all; the
    picture is random tokens with random attention. Stage and layer take turns.

    Args:
        stage: acts before the language model.
        size: `visual_side` squared visual tokens beside `num_text` others, and `num_layers` layers
            to which the measured one is scaled.
        rounds: measured rounds, after one to warm up.
        dtype: of the layer and the tokens.
        device: where both run.
        attn_implementation: of the layer.

    Returns:
        `visual_tokens` before and after; medians of `stage_seconds`, `layer_seconds` and
        `short_layer_seconds`; `saved_seconds` over all layers, and the stage's `share` of them.

    Raises:
        InvalidInputError: fewer than one round, or a stage that leaves this prompt as it is.
    """
    if rounds < 1:
        raise InvalidInputError(f"rounds must be at least 1, got {rounds}.")
    vlm = random_vlm(
        replace(size, num_layers=1),
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
    )
    prompt = _prompt(size, dtype, vlm.device)
    short = stage.before_lm(prompt)
    if short.length >= prompt.length:
        raise InvalidInputError(
            "the stage leaves all visual tokens before the language model, so there is nothing to "
            "compare; give a smaller keep_ratio, or a stage that acts there."
        )
    runs: list[Callable[[], Any]] = [
        lambda: stage.before_lm(prompt),
        lambda: vlm.model.hidden_states(prompt.embeds[None], prompt.positions()[None]),
        lambda: vlm.model.hidden_states(short.embeds[None], short.positions()[None]),
    ]
    seconds: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for own, run in zip(seconds, runs, strict=True):
            _synchronize(vlm.device)
            began = time.perf_counter()
            run()
            _synchronize(vlm.device)
            if number:
                own.append(time.perf_counter() - began)
    stage_seconds, layer, short_layer = map(statistics.median, seconds)
    saved = size.num_layers * (layer - short_layer)
    return {
        "visual_tokens": [prompt.num_visual, short.num_visual],
        "stage_seconds": stage_seconds,
        "layer_seconds": layer,
        "short_layer_seconds": short_layer,
        "saved_seconds": saved,
        "share": stage_seconds / saved,
    }


def _prompt(size: BenchSize, dtype: torch.dtype, device: torch.device) -> Prompt:
    generator = torch.Generator().manual_seed(0)
    side = size.visual_side
    num_visual = side * side
    length = num_visual + size.num_text
    ids = torch.ones(length, dtype=torch.long)
    ids[:num_visual] = IMAGE_TOKEN_ID
    span = VisualSpan(0, num_visual, 0, sections=((0, side, side, False),))
    salience = torch.rand(length, generator=generator) ** 4
    return Prompt(
        embeds=torch.randn(length, size.hidden_size, generator=generator).to(device, dtype),
        ids=ids.to(device),
        is_visual=(ids == IMAGE_TOKEN_ID).to(device),
        spans=(span,),
        salience=salience.to(device),
        tower_keys=torch.randn(length, 64, generator=generator).to(device),
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
