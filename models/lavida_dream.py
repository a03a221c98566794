"""LaViDa on Dream: the same pictures and the same decoder shape, with logits for the next token.

Source: LaViDa (arXiv 2505.16839), Dream 7B (arXiv 2508.15487) and LaViDa's published program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dlm_decode.models import register_model
from dlm_decode.models.lavida import LavidaLLaDAConfig, LavidaLLaDAModelLM
from dlm_decode.models.prompt_rules import PromptRules

__all__ = ["LavidaDreamConfig", "LavidaDreamModelLM"]


class LavidaDreamConfig(LavidaLLaDAConfig):
    """As `LavidaLLaDAConfig`; the language model's fields bear Qwen2's names, and so ours."""

    model_type = "llava_dream"
    has_qkv_bias = True

    @property
    def prompt_rules(self) -> PromptRules:
        """What the processor asks for; Dream's tokenizer brings the same template."""
        return replace(
            super().prompt_rules,
            begin="",
            turn="<|im_start|>{role}\n{content}<|im_end|>\n",
            answer="<|im_start|>assistant\n",
        )


@register_model("llava_dream")
class LavidaDreamModelLM(LavidaLLaDAModelLM):
    """LaViDa-Dream as published. Dream computes as LLaDA does, with biases and shifted logits."""

    config_class = LavidaDreamConfig
    config: LavidaDreamConfig
    shift_logits = True
    official_preset = "lavida_dream"

    @classmethod
    def claims(cls, raw: Mapping[str, Any], name: str = "") -> bool:
        """No: its configs bear its own model type."""
        return False
