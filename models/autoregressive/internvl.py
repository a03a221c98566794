"""InternVL: an InternViT tower whose patches are joined two by two, tiles and a small view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dlm_decode.cost import VisionGeometry
from dlm_decode.models.autoregressive.base import Architecture, Media, Prepared
from dlm_decode.models.autoregressive.tower import TowerAttention

if TYPE_CHECKING:
    from PIL import Image

    from dlm_decode.video import Clip

__all__ = ["InternVl"]

_VIDEO_MARKER = "<video>"
_BOUNDS = ("<img>", "</img>")


class InternVl(Architecture):
    """The model itself is only told of tiles; those between the same bounds are one image.

    A frame of a video has bounds of its own, so it counts as an image.
    """

    modalities = ("image", "video")
    joins_tiles = True
    turn = "<|im_start|>user\n{content}<|im_end|>\n"
    answer = "<|im_start|>assistant\n"

    @property
    def placeholder_ids(self) -> dict[str, int]:
        """See `Architecture`; frames of videos are images to the model."""
        return {"image": self.config.image_token_id}

    @property
    def _factor(self) -> int:
        """Patches per side that one visual token joins."""
        return round(1 / self.config.downsample_ratio)

    @property
    def _sides(self) -> tuple[int, int]:
        """Rows and columns of patches of a tile."""
        vision = self.config.vision_config
        (height, width), (rows, columns) = _pair(vision.image_size), _pair(vision.patch_size)
        return height // rows, width // columns

    @property
    def tokens_per_tile(self) -> int:
        """Visual tokens of one tile."""
        rows, columns = self._sides
        return (rows // self._factor) * (columns // self._factor)

    @property
    def vision_geometry(self) -> VisionGeometry:
        """See `Architecture`; the projector's share is that of the joined patches."""
        vision, text = self.config.vision_config, self.config.text_config
        rows, columns = self._sides
        height, width = _pair(vision.patch_size)
        return VisionGeometry(
            num_layers=vision.num_hidden_layers,
            hidden_size=vision.hidden_size,
            intermediate_size=vision.intermediate_size,
            num_heads=vision.num_attention_heads,
            tokens_per_tile=rows * columns,
            patch_dim=vision.num_channels * height * width,
            projector_dims=(
                vision.hidden_size * self._factor**2,
                text.hidden_size,
                text.hidden_size,
            ),
            class_tokens=1,
            patches_per_token=self._factor**2,
        )

    def tower_attention(self, model: nn.Module, modality: str) -> Any:
        """See `Architecture`."""
        return self.core(model).vision_tower.encoder.layer[-2].attention

    def media(
        self,
        model: nn.Module,
        modality: str,
        arguments: Mapping[str, Any],
        lengths: Sequence[int],
        tower: TowerAttention | None,
    ) -> list[Media]:
        """One entry per tile; see `Architecture`."""
        found = []
        for tile, length in enumerate(lengths):
            side = isqrt(length)
            salience = keys = None
            if tower is not None:
                salience = self._joined(tower.salience[tile])
                keys = None if tower.keys is None else self._joined(tower.keys[tile])
            sections = ((0, side, length // side, False),)
            found.append(Media(length, sections, salience=salience, tower_keys=keys))
        return found

    def _joined(self, values: Tensor) -> Tensor:
        """`(N, ...)` values of patches, averaged over those that a visual token joins."""
        (rows, columns), factor = self._sides, self._factor
        grid = values.unflatten(0, (rows // factor, factor, columns // factor, factor))
        return grid.mean(dim=(1, 3)).flatten(0, 1)

    def marker(self, modality: str, token: str) -> str:
        """See `Architecture`."""
        return token if modality == "image" else _VIDEO_MARKER

    def prepare(
        self,
        image_processor: Any,
        token_of: Mapping[str, str],
        images: Sequence[Image.Image],
        clips: Sequence[Clip],
    ) -> Prepared:
        """See `Architecture`; images are tiled, frames are not."""
        tile = token_of["image"] * self.tokens_per_tile
        begin, end = _BOUNDS
        pixels, texts = [], []
        for image in images:
            made = image_processor(images=[image], crop_to_patches=True, return_tensors="pt")
            pixels.append(made["pixel_values"])
            texts.append(f"{begin}{tile * len(pixels[-1])}{end}")
        for clip in clips:
            made = image_processor(
                images=list(clip.frames), crop_to_patches=False, return_tensors="pt"
            )
            pixels.append(made["pixel_values"])
            lines = (f"Frame{at + 1}: {begin}{tile}{end}" for at in range(len(clip.frames)))
            texts.append("\n".join(lines))
        return Prepared(texts, {"pixel_values": torch.cat(pixels)})


def _pair(value: Any) -> tuple[int, int]:
    height, width = value if isinstance(value, (list, tuple)) else (value, value)
    return int(height), int(width)
