"""LLaDA-V: LLaDA with a SigLIP tower and an MLP projector.

Source: LLaDA-V (arXiv 2505.16933) and its published checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import SiglipVisionConfig, SiglipVisionModel

from dlm_decode.canvas import IMAGE_TOKEN_ID, Prompt, VisualSpan
from dlm_decode.cost import Geometry, VisionGeometry
from dlm_decode.errors import CheckpointError, InvalidInputError
from dlm_decode.models import register_model
from dlm_decode.models.anyres import best_resolution, grid_candidates, max_tiles_of
from dlm_decode.models.configuration import LlavaLLaDAConfig
from dlm_decode.models.llada import LLaDABackbone, LLaDAModelLM
from dlm_decode.models.visual_layout import (
    Sections,
    anyres_tokens,
    flat_tokens,
    pool_frames,
    single_tokens,
    video_tokens,
)

__all__ = ["LlavaLLaDAModelLM", "VisionTower"]

_TILES_PER_RUN = 16


class VisionTower(nn.Module):
    """SigLIP without its last layer; features are taken before the final norm, as LLaDA-V's tower does.

    The final norm stays in the checkpoint and is not run. Two wrappers keep the published key names.
    """

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__()
        self.vision_tower = nn.Module()
        self.vision_tower.vision_model = SiglipVisionModel(config)

    @property
    def encoder(self) -> SiglipVisionModel:
        """The SigLIP model."""
        model = self.vision_tower.vision_model
        if not isinstance(model, SiglipVisionModel):
            raise AssertionError("the tower was replaced")
        return model

    def forward(self, pixels: Tensor) -> Tensor:
        """`(tiles, 3, h, w)` to `(tiles, N, d)`, a few tiles at a time."""
        siglip = self.encoder
        pixels = pixels.to(siglip.embeddings.patch_embedding.weight)
        parts = [
            siglip.encoder(inputs_embeds=siglip.embeddings(part)).last_hidden_state
            for part in pixels.split(_TILES_PER_RUN)
        ]
        return torch.cat(parts)


class LlavaLLaDABackbone(LLaDABackbone):
    """The language model's backbone with the vision part beside it."""

    def __init__(self, config: LlavaLLaDAConfig) -> None:
        super().__init__(config)
        vision = config.vision
        self.vision_tower = VisionTower(vision)
        width = config.hidden_size
        if config.mm_projector_type != "mlp2x_gelu":
            raise CheckpointError(f"mm_projector_type {config.mm_projector_type!r} is not LLaDA-V's; use mlp2x_gelu.")
        self.mm_projector = nn.Sequential(nn.Linear(vision.hidden_size, width), nn.GELU(), nn.Linear(width, width))
        self.image_newline = nn.Parameter(torch.empty(width))


@register_model("llava_llada")
class LlavaLLaDAModelLM(LLaDAModelLM):
    """LLaDA-V as published: prompts with images or video frames, decoded by masked diffusion."""

    config_class = LlavaLLaDAConfig
    config: LlavaLLaDAConfig
    _no_split_modules = ["LLaDALayer", "SiglipEncoderLayer"]  # noqa: RUF012

    def _backbone(self, config: Any) -> LLaDABackbone:
        return LlavaLLaDABackbone(config)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LlavaLLaDABackbone):
            nn.init.normal_(module.image_newline, std=0.02)

    @property
    def geometry(self) -> Geometry:
        """Sizes for the cost model, the vision part included."""
        config, vision = self.config, self.config.vision
        text = super().geometry
        vision_geometry = VisionGeometry(
            num_layers=vision.num_hidden_layers,
            hidden_size=vision.hidden_size,
            intermediate_size=vision.intermediate_size,
            num_heads=vision.num_attention_heads,
            tokens_per_tile=(vision.image_size // vision.patch_size) ** 2,
            patch_dim=3 * vision.patch_size**2,
            projector_dims=(vision.hidden_size, config.hidden_size, config.hidden_size),
        )
        return Geometry(**{**vars(text), "vision": vision_geometry})

    def encode_tiles(self, pixels: Tensor) -> Tensor:
        """Projected patches `(tiles, N, D)` of `(tiles, 3, h, w)` pixels.

        Raises:
            InvalidInputError: pixels of another size than the tower reads.
        """
        size = self.config.vision.image_size
        if pixels.dim() != 4 or tuple(pixels.shape[1:]) != (3, size, size):
            raise InvalidInputError(f"pixel tiles must have shape (n, 3, {size}, {size}), got {tuple(pixels.shape)}.")
        backbone = self.model
        device = backbone.image_newline.device
        features = backbone.vision_tower(pixels.to(device))
        projector = backbone.mm_projector
        return projector(features.to(projector[0].weight))

    def encode_prompt(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | Sequence[Tensor] | None = None,
        image_sizes: Sequence[tuple[int, int]] | None = None,
        modalities: Sequence[str] | None = None,
    ) -> Prompt:
        """One row's prompt with visual tokens in place of the placeholders.

        Args:
            input_ids: `(P0,)` ids, one placeholder per image or video.
            pixel_values: a list with one entry per placeholder: `(3, h, w)` for a padded image (a newline vector ends it),
                `(1 + tiles, 3, h, w)` for an `anyres` image, `(F, 3, h, w)` for a video. A 4-D tensor means padded images
                without newline vectors, a 5-D tensor equals a list of its 4-D parts.
            image_sizes: `(width, height)` of each original image; needed for `anyres` images.
            modalities: `"image"` (default) or `"video"` per entry.

        Raises:
            InvalidInputError: numbers of placeholders, images, sizes or modalities that do not match, wrong shapes, or ids
                outside the vocabulary.
        """
        slots = (input_ids == IMAGE_TOKEN_ID).nonzero()[:, 0].tolist()
        has_pixels = pixel_values is not None and len(pixel_values) > 0
        num_images = len(pixel_values) if pixel_values is not None else 0
        if len(slots) != num_images:
            raise InvalidInputError(
                f"the prompt has {len(slots)} image placeholders and {num_images} images or videos were given; "
                "give one for each placeholder."
            )
        if not has_pixels or pixel_values is None:
            return super().encode_prompt(input_ids)
        self.check_ids(input_ids)
        kinds = list(modalities) if modalities is not None else ["image"] * num_images
        if len(kinds) == 1:
            kinds *= num_images
        sizes = list(image_sizes) if image_sizes is not None else None
        for name, values in (("modalities", kinds), ("image_sizes", sizes)):
            if values is not None and len(values) != num_images:
                raise InvalidInputError(f"{name} has {len(values)} entries for {num_images} images or videos.")
        laid_out = self._visual_tokens(pixel_values, sizes, kinds)
        return self._splice(input_ids, slots, laid_out, kinds, pixel_values)

    def _visual_tokens(
        self, pixel_values: Tensor | Sequence[Tensor], sizes: list[tuple[int, int]] | None, kinds: list[str]
    ) -> list[tuple[Tensor, Sections]]:
        is_plain_batch = isinstance(pixel_values, Tensor) and pixel_values.dim() == 4
        entries = [entry[None] if entry.dim() == 3 else entry for entry in pixel_values]
        features = self.encode_tiles(torch.cat(entries)).split([len(entry) for entry in entries])
        newline = None if is_plain_batch else self.model.image_newline
        return [
            self._layout(part, newline, None if sizes is None else sizes[index], kinds[index], entry.dim() == 4)
            for index, (part, entry) in enumerate(zip(features, pixel_values, strict=True))
        ]

    def _layout(
        self, features: Tensor, newline: Tensor | None, size: tuple[int, int] | None, kind: str, has_tiles: bool
    ) -> tuple[Tensor, Sections]:
        config = self.config
        if kind == "video":
            frames = pool_frames(features, config.mm_spatial_pool_mode)
            return video_tokens(frames, self.model.image_newline, config.mm_newline_position)
        if kind != "image":
            raise InvalidInputError(f"modality {kind!r} is unknown; use 'image' or 'video'.")
        if not has_tiles or newline is None or features.shape[0] == 1:
            return single_tokens(features[0], newline)
        if config.mm_patch_merge_type == "flat":
            return flat_tokens(features)
        if not config.mm_patch_merge_type.startswith("spatial") or "unpad" not in config.mm_patch_merge_type:
            raise CheckpointError(f"mm_patch_merge_type {config.mm_patch_merge_type!r} is unknown; use spatial_unpad or flat.")
        if size is None:
            raise InvalidInputError("tiled images need image_sizes, the (width, height) of each original image.")
        tile = config.vision.image_size
        best = best_resolution(tuple(size), grid_candidates(config.image_grid_pinpoints, tile))
        grid = (best[0] // tile, best[1] // tile)
        return anyres_tokens(features, newline, grid, tuple(size), max_tiles_of(config.image_aspect_ratio))

    def _splice(
        self,
        input_ids: Tensor,
        slots: list[int],
        laid_out: list[tuple[Tensor, Sections]],
        kinds: list[str],
        pixel_values: Tensor | Sequence[Tensor],
    ) -> Prompt:
        device = self.get_input_embeddings().weight.device
        embeds, ids, spans, start, length = [], [], [], 0, 0
        for index, (slot, (tokens, sections)) in enumerate(zip(slots, laid_out, strict=True)):
            piece = input_ids[start:slot]
            embeds += [self.embed(piece), tokens.to(device)]
            ids += [piece, torch.full((len(tokens),), IMAGE_TOKEN_ID, device=input_ids.device)]
            length += len(piece)
            frames = len(pixel_values[index]) if kinds[index] == "video" else 1
            spans.append(VisualSpan(length, len(tokens), index, kinds[index], frames, sections))
            length += len(tokens)
            start = slot + 1
        embeds.append(self.embed(input_ids[start:]))
        ids.append(input_ids[start:])
        dtype = self.get_input_embeddings().weight.dtype
        all_ids = torch.cat(ids)
        return Prompt(
            embeds=torch.cat([part.to(dtype) for part in embeds]),
            ids=all_ids,
            is_visual=all_ids == IMAGE_TOKEN_ID,
            spans=tuple(spans),
        )
