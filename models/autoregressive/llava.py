"""LLaVA-1.5: a CLIP or SigLIP tower, an MLP, a causal language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dlm_decode.cost import VisionGeometry
from dlm_decode.errors import InvalidInputError
from dlm_decode.models.autoregressive.base import Architecture, Media, Prepared
from dlm_decode.models.autoregressive.tower import TowerAttention

if TYPE_CHECKING:
    from PIL import Image

    from dlm_decode.video import Clip

__all__ = ["Llava", "square_side"]

_TOWERS = {"clip_vision_model": True, "siglip_vision_model": False}
"""Vision towers that can be asked for attention, and whether they have a class token."""


def square_side(length: int) -> int:
    """Side of the square of patches among `length` tokens, which a class token may precede.

    Raises:
        InvalidInputError: any other length.
    """
    side = isqrt(length)
    if length not in (side * side, side * side + 1):
        raise InvalidInputError(
            f"an image has {length} visual tokens, which is no square of patches; stages cannot "
            "lay them out."
        )
    return side


class Llava(Architecture):
    """See the module."""

    @property
    def vision_geometry(self) -> VisionGeometry:
        """See `Architecture`."""
        vision, text = self.config.vision_config, self.config.text_config
        layers = self.config.vision_feature_layer
        num_features = 1 if isinstance(layers, int) else len(layers)
        return VisionGeometry(
            num_layers=vision.num_hidden_layers,
            hidden_size=vision.hidden_size,
            intermediate_size=vision.intermediate_size,
            num_heads=vision.num_attention_heads,
            tokens_per_tile=self.num_patches,
            patch_dim=getattr(vision, "num_channels", 3) * vision.patch_size**2,
            projector_dims=(
                vision.hidden_size * num_features,
                text.hidden_size,
                text.hidden_size,
            ),
            class_tokens=int(self.has_class_token),
        )

    @property
    def has_class_token(self) -> bool:
        """See `Architecture`."""
        return _TOWERS.get(self.config.vision_config.model_type, False)

    @property
    def num_patches(self) -> int:
        """Patches of one tile."""
        vision = self.config.vision_config
        return (vision.image_size // vision.patch_size) ** 2

    @property
    def tokens_per_tile(self) -> int:
        """Visual tokens of one tile: its patches, and a class token with strategy "full"."""
        is_full = self.config.vision_feature_select_strategy == "full"
        return self.num_patches + int(is_full and self.has_class_token)

    def tower_attention(self, model: nn.Module, modality: str) -> Any:
        """See `Architecture`."""
        kind = self.config.vision_config.model_type
        if kind not in _TOWERS:
            raise InvalidInputError(
                f"the stage reads attention of the vision tower, and one of type {kind!r} cannot "
                f"be asked for it, only {' and '.join(_TOWERS)}; use another stage."
            )
        return self.tower(model, modality).encoder.layers[-2].self_attn

    def tower(self, model: nn.Module, modality: str) -> Any:
        """The vision tower that reads images or videos."""
        return self.core(model).vision_tower

    def media(
        self,
        model: nn.Module,
        modality: str,
        arguments: Mapping[str, Any],
        lengths: Sequence[int],
        tower: TowerAttention | None,
    ) -> list[Media]:
        """One entry per image; see `Architecture`."""
        return [
            self.squares([length], None if tower is None else tower.picked(slice(at, at + 1)))
            for at, length in enumerate(lengths)
        ]

    def squares(
        self, lengths: Sequence[int], tower: TowerAttention | None, frames: int = 1
    ) -> Media:
        """Tiles that follow one another, each a square behind its class token, if it has one.

        Args:
            lengths: visual tokens of each tile.
            tower: attention of these tiles.
            frames: as in `Media`.
        """
        sections, start, parts = [], 0, []
        for length in lengths:
            side = square_side(length)
            parts.append(length - side * side)
            sections.append((start + parts[-1], side, side, False))
            start += length
        salience = keys = None
        if tower is not None:
            salience = _in_order(tower.salience, parts)
            keys = None if tower.keys is None else _in_order(tower.keys, parts)
        return Media(start, tuple(sections), frames, salience, keys)

    def prepare(
        self,
        image_processor: Any,
        token_of: Mapping[str, str],
        images: Sequence[Image.Image],
        clips: Sequence[Clip],
    ) -> Prepared:
        """See `Architecture`."""
        texts = [token_of["image"] * self.tokens_per_tile] * len(images)
        return Prepared(texts, {"pixel_values": pixels_of(image_processor, images)})


def pixels_of(image_processor: Any, images: Sequence[Any]) -> Tensor:
    """`(R, 3, h, w)` float32 pixels of pictures that are one tile each."""
    made = image_processor(images=list(images), return_tensors="pt")
    # Video-LLaVA's gives them this name.
    return made["pixel_values_images"] if "pixel_values_images" in made else made["pixel_values"]


def _in_order(values: Tensor, skipped: Sequence[int]) -> Tensor:
    """`(R, N, ...)` values of patches as one sequence, with zeros where class tokens stand."""
    rows = []
    for value, count in zip(values, skipped, strict=True):
        rows += [value.new_zeros(count, *value.shape[1:]), value]
    return torch.cat(rows)
