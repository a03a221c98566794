"""RedVTP: after the first step, keep the visual tokens that masked response positions look at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlm_decode.canvas import Prompt
from dlm_decode.vision import register_stage
from dlm_decode.vision.base import AttentionRequest, Positions, check_keep_ratio
from dlm_decode.vision.knobs import check_choice

__all__ = ["RedVtp"]


@register_stage("redvtp")
@dataclass(frozen=True)
class RedVtp:
    """Prunes once per response, after the first step that reads the picture.

    A visual token's importance is the attention that it receives in that step's forward, mean over
    all layers and heads and over the response positions that are still masked after the step's
    commits. Each image or video keeps its most important tokens in their order; learned newline
    vectors count as visual tokens, ties go to the lower position. Every later forward with visual
    tokens runs on the shortened prompt. Rows without visual tokens are left as they are (the run's
    notes name them), and so are rows that the first step finishes.

    With a cache, the row's kept keys and values are dropped when it is pruned, and the policy plans
    as for a new response: they were computed among the dropped tokens and rotated for the old
    positions, and no policy promises states that old. `prefix`, `dual`, `vicinity` and `dllm` then
    feed the whole shortened sequence once (`vicinity` warms up and `dllm` counts its intervals from
    there), `prefix_lm` reads the shortened prompt by itself once more. Caches of views without
    visual tokens are not touched.

    Args:
        keep_ratio: share of each image's visual tokens that stays, in (0, 1], rounded down; at
            least one stays. 1 changes nothing and costs nothing.
        positions: `"renumbered"` gives the shortened sequence the rotary positions 0, 1, ...;
            `"original"` leaves prompt and response at their numbers.

    Raises:
        InvalidInputError: a ratio outside (0, 1]; from `generate`, a stage listed behind this one.
        UnknownNameError: another value of `positions`.

    Source: RedVTP's programs for LLaDA-V and LaViDa. Differs from them: several images or videos
    are pruned each by itself (they read one image), caches work, nothing fails without an image or
    without masked positions, and of LaViDa's it is the one that feeds the picture to the model.
    """

    keep_ratio: float = 0.5
    positions: Positions = "renumbered"

    def __post_init__(self) -> None:
        check_keep_ratio(self.keep_ratio)
        check_choice("positions", self.positions, Positions)

    def before_lm(self, prompt: Prompt) -> Prompt:
        """The prompt as it is; the first step reads all of it."""
        return prompt

    def request(self) -> AttentionRequest | None:
        """Rows of all layers."""
        return None if self.keep_ratio == 1 else AttentionRequest()

    def keep(self, prompt: Prompt, attention: Tensor) -> Tensor:
        """See `AttentionStage`."""
        importance = attention.mean(dim=0)
        keep = torch.zeros_like(prompt.is_visual)
        for span in prompt.spans:
            inside = importance[span.start : span.start + span.length]
            num_kept = max(1, int(span.length * self.keep_ratio))
            best = inside.argsort(descending=True, stable=True)[:num_kept]
            keep[span.start + best] = True
        return keep
