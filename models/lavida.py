"""LaViDa on LLaDA: the picture's views are pooled two by two before the language model reads them.

Source: LaViDa (arXiv 2505.16839) and its published program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dlm_decode.errors import CheckpointError
from dlm_decode.models import register_model
from dlm_decode.models.configuration import LlavaLLaDAConfig
from dlm_decode.models.key_names import register_renames
from dlm_decode.models.llava_llada import LlavaLLaDAModelLM
from dlm_decode.models.visual_layout import (
    POOL_MODES,
    Sections,
    anyres_tokens,
    flat_tokens,
    pool_frames,
    single_tokens,
)

__all__ = ["LavidaLLaDAConfig", "LavidaLLaDAModelLM"]


class LavidaLLaDAConfig(LlavaLLaDAConfig):
    """As `LlavaLLaDAConfig`, with LaViDa's defaults and its further modes.

    Args:
        mm_patch_merge_type: `"spatial_unpad"`, `"spatial"` (neither cropped nor with newline
            vectors) or `"flat"`, which is meant where nothing is given.
        mm_spatial_pool_mode: pooling of every view: `"bilinear"`, `"average"` or `"max"`; it has no
            default, as in the published program.
        image_aspect_ratio: as in LLaDA-V, or `"square"`, which is meant where nothing is given.
        kwargs: as in `LlavaLLaDAConfig`.
    """

    model_type = "lavida_llada"
    merge_types = ("spatial_unpad", "spatial", "flat")
    image_modes = ("pad", "square", "anyres", "anyres_max_N")
    has_system_in_template = False

    def __init__(
        self,
        mm_patch_merge_type: str | None = None,
        mm_spatial_pool_mode: str | None = None,
        image_aspect_ratio: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            mm_patch_merge_type=mm_patch_merge_type or "flat",
            mm_spatial_pool_mode=mm_spatial_pool_mode or "",
            image_aspect_ratio=image_aspect_ratio or "square",
            **kwargs,
        )

    def _required(self) -> tuple[str, ...]:
        return (*super()._required(), "mm_spatial_pool_mode")

    def check(self) -> None:
        """Raises `CheckpointError`; see `LLaDAConfig.check`."""
        super().check()
        if self.mm_spatial_pool_mode not in POOL_MODES:
            raise CheckpointError(
                f"mm_spatial_pool_mode {self.mm_spatial_pool_mode!r} is unknown; use one of "
                f"{', '.join(POOL_MODES)}."
            )

    @property
    def has_newline(self) -> bool:
        """Whether the checkpoint holds a newline vector."""
        return "unpad" in (self.mm_patch_merge_type or "")


register_renames("lavida_llada")


@register_model("lavida_llada")
class LavidaLLaDAModelLM(LlavaLLaDAModelLM):
    """LaViDa-LLaDA as published: LLaDA's own key names, pooled views.

    The published configs bear LLaDA-V's model type; `claims` tells them apart, which transformers'
    Auto classes cannot do. Load them with `dlm_decode.load`.
    """

    config_class = LavidaLLaDAConfig
    config: LavidaLLaDAConfig
    official_preset = "lavida"

    @classmethod
    def claims(cls, raw: Mapping[str, Any], name: str = "") -> bool:
        """Whether a config of type `llava_llada` is LaViDa's: by its class or LLaDA's own names."""
        if raw.get("model_type") != "llava_llada":
            return False
        names = raw.get("architectures") or ()
        return "LlavaLladaForMaskedDiffusion" in names or {"d_model", "n_layers"} <= set(raw)

    def _layout(
        self,
        features: Tensor,
        newline: Tensor | None,
        size: tuple[int, int] | None,
        kind: str,
        has_tiles: bool,
    ) -> tuple[Tensor, Sections]:
        if kind == "video":
            return super()._layout(features, newline, size, kind, has_tiles)
        merge = self.config.mm_patch_merge_type
        pooled = pool_frames(features, self.config.mm_spatial_pool_mode).flatten(1, 2)
        if merge == "flat":
            return flat_tokens(pooled)
        if not has_tiles or len(pooled) == 1:
            return single_tokens(pooled[0], newline)
        size, grid = self._size_and_grid(size)
        return anyres_tokens(pooled, newline, grid, size, self._max_tiles)
