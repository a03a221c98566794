"""How vision stages shorten a published model's prompt, layer by layer, without running it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dlm_decode.canvas import IMAGE_TOKEN_ID, Prompt, VisualSpan
from dlm_decode.cost.geometries import Published
from dlm_decode.cost.response import Schedule
from dlm_decode.errors import InvalidInputError
from dlm_decode.registry import describe
from dlm_decode.vision.base import AttentionStage, Stage
from dlm_decode.vision.cache_stage import refuse_cache_stages
from dlm_decode.vision.inside import InsideStage

__all__ = ["schedule_of"]

_WIDTH = 16
_SEEDS = (0, 1)


def schedule_of(stages: Sequence[Stage], model: Published, text_tokens: int) -> Schedule:
    """What each layer reads of one image or video and `text_tokens` text tokens.

    Stages in front of the language model are run on random vectors in the place of an image;
    stages between layers are asked how many tokens they keep.

    Args:
        stages: in the order in which they act; none for the unreduced model.
        model: the model and its input.
        text_tokens: text tokens of the prompt.

    Raises:
        InvalidInputError: a negative number of text tokens, a stage that waits for a diffusion
            model's response or shortens the cache, or one that keeps a number of tokens that
            depends on the image.
    """
    if text_tokens < 0:
        raise InvalidInputError(f"text tokens must be at least 0, got {text_tokens}.")
    refuse_cache_stages(
        stages,
        "the formulas here know prompts that are cached as they were read; run it, and read the "
        "cost of the output",
    )
    for stage in stages:
        if isinstance(stage, AttentionStage):
            raise InvalidInputError(
                f"stage {_name(stage)!r} prunes by the response of a diffusion model, and the "
                "model here is autoregressive; use another stage."
            )
    inside = [stage for stage in stages if isinstance(stage, InsideStage)]
    num_visual = _visual_tokens_in_front(stages, model, text_tokens)
    num_layers = model.geometry.num_layers
    acting = [(stage, frozenset(stage.layers(num_layers))) for stage in inside]
    lengths, read_layers = [], set()
    for layer in range(num_layers):
        lengths.append(num_visual + text_tokens)
        for stage, layers in acting:
            if layer not in layers:
                continue
            if stage.reads_attention(layer):
                read_layers.add(layer)
            kept = stage.keeps(layer, num_visual, 1, num_layers)
            if kept is None:
                raise _depends(stage)
            num_visual = kept
    return Schedule(tuple(lengths), frozenset(read_layers))


def _visual_tokens_in_front(stages: Sequence[Stage], model: Published, text_tokens: int) -> int:
    prompts = [_random_prompt(model, text_tokens, seed) for seed in _SEEDS]
    for stage in stages:
        prompts = [stage.before_lm(prompt) for prompt in prompts]
        if len({prompt.num_visual for prompt in prompts}) > 1:
            raise _depends(stage)
    return prompts[0].num_visual


def _depends(stage: Stage) -> InvalidInputError:
    return InvalidInputError(
        f"how many tokens stage {_name(stage)!r} keeps depends on the image, so that it has no "
        "cost by formula; run it, and read the cost of the output."
    )


def _name(stage: Stage) -> str:
    return describe(stage)["name"]


def _random_prompt(model: Published, text_tokens: int, seed: int) -> Prompt:
    generator = torch.Generator().manual_seed(seed)
    front, num_visual = text_tokens // 2, model.visual_tokens
    length = text_tokens + num_visual
    is_visual = torch.zeros(length, dtype=torch.bool)
    is_visual[front : front + num_visual] = True
    starts = [0]
    for rows, columns, newline in model.sections:
        starts.append(starts[-1] + rows * (columns + newline))
    sections = tuple(
        (start, *section) for start, section in zip(starts, model.sections, strict=False)
    )
    span = VisualSpan(
        start=front,
        length=num_visual,
        image_index=0,
        modality="video" if model.is_video else "image",
        frames=len(sections) if model.is_video else 1,
        sections=sections,
    )
    return Prompt(
        embeds=torch.randn(length, _WIDTH, generator=generator),
        ids=torch.where(is_visual, IMAGE_TOKEN_ID, 0),
        is_visual=is_visual,
        spans=(span,),
        salience=torch.rand(length, generator=generator) * is_visual,
        tower_keys=torch.randn(length, _WIDTH, generator=generator),
    )
