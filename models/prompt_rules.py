"""What a model wants its prompts and pictures to look like; the processor asks for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["PromptRules", "rules_of"]


@dataclass(frozen=True)
class PromptRules:
    """A config says them in its property `prompt_rules`; without it a model reads text only.

    Attributes:
        reads_media: whether prompts may hold images and videos.
        tile_size: pixels per side of what the vision tower reads.
        image_mode: `"anyres"` (tiles), `"anyres_max_N"`, `"pad"` (a grey square) or `"square"`
            (squashed).
        multi_image_mode: replaces `image_mode` where a prompt has several images; `None` keeps it.
        grids: canvas sizes for tiles, as `grid_candidates` takes them.
        system: text of a system message that is put in front of a conversation without one.
        think_modes: values of `Settings.think_mode` beside `"none"` that the model was trained
            with; `/` and the word end the question then.
        has_system_in_template: a chat template of the tokenizer brings the system message itself.
        begin: what a prompt begins with where the tokenizer has no chat template.
        turn: one message, with `{role}` and `{content}`.
        answer: what the response follows on.
    """

    reads_media: bool = False
    tile_size: int = 0
    image_mode: str = ""
    multi_image_mode: str | None = None
    grids: Sequence[Sequence[int]] | str | None = None
    system: str | None = None
    think_modes: tuple[str, ...] = ()
    has_system_in_template: bool = True
    begin: str = "<|startoftext|>"
    turn: str = "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"
    answer: str = "<|start_header_id|>assistant<|end_header_id|>\n\n"


def rules_of(config: Any) -> PromptRules:
    """The rules that a config states, as its fields are now."""
    return getattr(config, "prompt_rules", None) or PromptRules()
