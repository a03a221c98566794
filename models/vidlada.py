"""VidLaDA: LLaDA-V trained on videos, with a prompt and an evaluation of its own.

Source: VidLaDA (arXiv 2601.17868) and its published program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from dlm_decode.errors import CheckpointError
from dlm_decode.models import register_model
from dlm_decode.models.configuration import LlavaLLaDAConfig
from dlm_decode.models.llava_llada import LlavaLLaDAModelLM
from dlm_decode.models.prompt_rules import PromptRules
from dlm_decode.models.visual_layout import NEWLINE_POSITIONS, POOL_MODES

__all__ = ["LlavaLLaDAVideoConfig", "LlavaLLaDAVideoModelLM"]


class LlavaLLaDAVideoConfig(LlavaLLaDAConfig):
    """As `LlavaLLaDAConfig`, with VidLaDA's defaults.

    Fields that the published program does not read change nothing here either:
    `mm_spatial_pool_stride` (the stride is 2), `mm_vision_select_layer`, `add_time_instruction` and
    `force_sample`, which describe the training.

    Args:
        mm_newline_position: `"grid"`, which is meant where nothing is given, `"frame"`,
            `"one_token"` or `"no_token"`; see `video_tokens`.
        mm_spatial_pool_mode: `"bilinear"` (27 x 27 patches become 14 x 14), `"average"` or `"max"`
            (13 x 13).
        kwargs: as in `LlavaLLaDAConfig`.

    Source: differs from the reference where `mm_newline_position` is missing: its model would take
        `"one_token"`, but its training and its evaluation always say `"grid"`.
    """

    model_type = "llava_llada_video"
    has_system_in_template = False

    def __init__(
        self,
        mm_newline_position: str | None = None,
        mm_spatial_pool_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            mm_newline_position=mm_newline_position or "grid",
            mm_spatial_pool_mode=mm_spatial_pool_mode or "bilinear",
            **kwargs,
        )

    def check(self) -> None:
        """Raises `CheckpointError`; see `LLaDAConfig.check`."""
        super().check()
        for name, known in (
            ("mm_newline_position", NEWLINE_POSITIONS),
            ("mm_spatial_pool_mode", POOL_MODES),
        ):
            if getattr(self, name) not in known:
                raise CheckpointError(
                    f"{name} {getattr(self, name)!r} is unknown; use one of {', '.join(known)}."
                )

    @property
    def prompt_rules(self) -> PromptRules:
        """What the processor asks for."""
        return replace(super().prompt_rules, think_modes=("think", "no_think"))


@register_model("llava_llada_video")
class LlavaLLaDAVideoModelLM(LlavaLLaDAModelLM):
    """VidLaDA as published: LLaDA-V's modules and key names.

    A published config may bear LLaDA-V's or LLaDA's model type; `claims` then goes by the class
    name, or by the folder's name as the published loader does, which transformers' Auto classes
    cannot do. Load such folders with `dlm_decode.load`.

    The defaults of `Settings` are those of the published evaluation script. A model trained on
    timed frames may do better with `time_instruction=True` and `force_sample=True`, which its
    training used and that script mostly does not.
    """

    config_class = LlavaLLaDAVideoConfig
    config: LlavaLLaDAVideoConfig
    official_preset = "vidlada"
    default_settings: ClassVar[Mapping[str, Any]] = {
        "max_frames": 64,
        "fps": 1.0,
        "think_mode": "no_think",
    }

    @classmethod
    def claims(cls, raw: Mapping[str, Any], name: str = "") -> bool:
        """Whether a config of another LLaDA type is VidLaDA's: by its class or the folder's name.

        Args:
            raw: the file's content.
            name: of the folder; `vidlada`, `llada_video` and `llada-video` in it count.
        """
        if raw.get("model_type") not in ("llava_llada", "llada") or "mm_projector_type" not in raw:
            return False
        is_named = any(part in name.lower() for part in ("vidlada", "llada_video", "llada-video"))
        return is_named or cls.__name__ in (raw.get("architectures") or ())
