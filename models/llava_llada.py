"""LLaDA-V: LLaDA with a SigLIP tower and an MLP projector.

Source: LLaDA-V (arXiv 2505.16933) and its published checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import SiglipVisionConfig, SiglipVisionModel

from dlm_decode.canvas import IMAGE_TOKEN_ID, Prompt, VisualSpan
from dlm_decode.cost import Geometry, VisionGeometry
from dlm_decode.errors import InvalidInputError
from dlm_decode.models import register_model
from dlm_decode.models.anyres import best_resolution, grid_candidates, max_tiles_of
from dlm_decode.models.configuration import LlavaLLaDAConfig
from dlm_decode.models.llada import LLaDABackbone, LLaDAModelLM
from dlm_decode.models.tower_attention import TowerProbe
from dlm_decode.models.visual_layout import (
    Sections,
    anyres_tokens,
    flat_tokens,
    pool_frames,
    single_tokens,
    video_tokens,
)
from dlm_decode.vision.base import TowerNeed

__all__ = ["LlavaLLaDAModelLM", "VisionTower"]

_TILES_PER_RUN = 16


def _side(size: Any) -> int:
    return int(size if isinstance(size, int) else size[0])


class VisionTower(nn.Module):
    """SigLIP without its last layer; features are taken before the final norm, as in LLaDA-V.

    The final norm stays in the checkpoint and is not run. Two wrappers keep the published key
    names.
    """

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__()
        self.vision_tower = nn.Module()
        siglip = SiglipVisionModel(config)
        # transformers before 5.2 wraps the model once more.
        self.vision_tower.vision_model = getattr(siglip, "vision_model", siglip)

    def forward(self, pixels: Tensor) -> Tensor:
        """`(tiles, 3, h, w)` to `(tiles, N, d)`, a few tiles at a time."""
        siglip: Any = self.vision_tower.vision_model
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
        self.mm_projector = nn.Sequential(
            nn.Linear(vision.hidden_size, width), nn.GELU(), nn.Linear(width, width)
        )
        self.image_newline = nn.Parameter(torch.empty(width)) if config.has_newline else None


@register_model("llava_llada")
class LlavaLLaDAModelLM(LLaDAModelLM):
    """LLaDA-V as published: prompts with images or video frames, decoded by masked diffusion."""

    config_class = LlavaLLaDAConfig
    config: LlavaLLaDAConfig
    _no_split_modules = ["LLaDALayer", "SiglipEncoderLayer"]  # noqa: RUF012

    def _backbone(self, config: Any) -> LLaDABackbone:
        return LlavaLLaDABackbone(config)

    @property
    def _vision(self) -> Any:
        return self.model

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LlavaLLaDABackbone) and module.image_newline is not None:
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
            tokens_per_tile=(config.tile_size // _side(vision.patch_size)) ** 2,
            patch_dim=3 * _side(vision.patch_size) ** 2,
            projector_dims=(vision.hidden_size, config.hidden_size, config.hidden_size),
        )
        return Geometry(**{**vars(text), "vision": vision_geometry})

    def encode_tiles(self, pixels: Tensor) -> Tensor:
        """Projected patches `(tiles, N, D)` of `(tiles, 3, h, w)` pixels.

        Raises:
            InvalidInputError: pixels of another size than the tower reads, or that are not
                normalised floats.
        """
        size = self.config.tile_size
        if pixels.dim() != 4 or tuple(pixels.shape[1:]) != (3, size, size):
            raise InvalidInputError(
                f"pixel tiles must have shape (n, 3, {size}, {size}), got {tuple(pixels.shape)}."
            )
        if not pixels.is_floating_point():
            raise InvalidInputError(
                f"pixels must be floats in [-1, 1] as the processor makes them, got {pixels.dtype}."
            )
        features = self._vision.vision_tower(pixels)
        projector: Any = self._vision.mm_projector
        return projector(features.to(projector[0].weight))

    def encode_prompt(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | Sequence[Tensor] | None = None,
        image_sizes: Sequence[tuple[int, int]] | None = None,
        modalities: Sequence[str] | None = None,
        needs: Collection[TowerNeed] = (),
    ) -> Prompt:
        """One row's prompt with visual tokens in place of the placeholders.

        Args:
            input_ids: `(P0,)` ids, one placeholder per image or video.
            pixel_values: a list with one entry per placeholder: `(3, h, w)` for a padded image (a
                newline vector ends it), `(1 + tiles, 3, h, w)` for an `anyres` image, `(F, 3, h,
                w)` for a video. A 4-D tensor means padded images without newline vectors (or one
                video), a 5-D tensor equals a list of its 4-D parts.
            image_sizes: `(width, height)` of each original image; needed for `anyres` images.
            modalities: `"image"` (default) or `"video"` per entry.
            needs: what of the tower's last layer the prompt carries; see `TowerProbe`. It goes
                through pooling, cropping and shrinking as the features do.

        Raises:
            InvalidInputError: numbers of placeholders, images, sizes or modalities that do not
                match, wrong shapes, or ids outside the vocabulary.
        """
        if (
            isinstance(pixel_values, Tensor)
            and pixel_values.dim() == 4
            and list(modalities or ()) == ["video"]
        ):
            pixel_values = [pixel_values]
        slots = (input_ids == IMAGE_TOKEN_ID).nonzero()[:, 0].tolist()
        has_pixels = pixel_values is not None and len(pixel_values) > 0
        num_images = len(pixel_values) if pixel_values is not None else 0
        if len(slots) != num_images:
            raise InvalidInputError(
                f"the prompt has {len(slots)} image placeholders and {num_images} images or videos "
                "were given; "
                "give one for each placeholder."
            )
        if not has_pixels or pixel_values is None:
            return super().encode_prompt(input_ids)
        self.check_ids(input_ids)
        kinds = list(modalities) if modalities is not None else ["image"] * num_images
        if len(kinds) == 1:
            kinds *= num_images
        sizes = list(image_sizes) if image_sizes is not None else None
        unknown = [kind for kind in kinds if kind not in ("image", "video")]
        if unknown:
            raise InvalidInputError(f"modality {unknown[0]!r} is unknown; use 'image' or 'video'.")
        for name, values in (("modalities", kinds), ("image_sizes", sizes)):
            if values is not None and len(values) != num_images:
                raise InvalidInputError(
                    f"{name} has {len(values)} entries for {num_images} images or videos."
                )
        tiles, newline = torch.cat(self._entries(pixel_values)), self._vision.image_newline
        if not needs:
            features = self.encode_tiles(tiles)
            laid_out = self._lay_out(features, newline, pixel_values, sizes, kinds)
            return self._splice(input_ids, slots, laid_out, kinds, pixel_values)
        with self._tower_probe(needs) as probe:
            plain = self.encode_prompt(input_ids, pixel_values, image_sizes, modalities)
        width = probe.maps.shape[-1]
        maps = plain.embeds.new_zeros(plain.length, width, dtype=torch.float32)
        nothing = None if newline is None else maps.new_zeros(width)
        parts = self._lay_out(probe.maps, nothing, pixel_values, sizes, kinds)
        for span, (part, _) in zip(plain.spans, parts, strict=True):
            maps[span.start : span.start + span.length] = part
        return replace(plain, **probe.split(maps))

    def _entries(self, pixel_values: Tensor | Sequence[Tensor]) -> list[Tensor]:
        """Tiles or frames `(n, 3, h, w)` of each image or video."""
        wrong = [
            entry
            for entry in pixel_values
            if not isinstance(entry, Tensor) or entry.dim() not in (3, 4)
        ]
        if wrong:
            got = tuple(wrong[0].shape) if isinstance(wrong[0], Tensor) else type(wrong[0]).__name__
            raise InvalidInputError(
                "pixel_values must hold tensors (3, h, w) or (tiles or frames, 3, h, w), got "
                f"{got}."
            )
        entries = [entry[None] if entry.dim() == 3 else entry for entry in pixel_values]
        if len({entry.shape[1:] for entry in entries}) > 1:
            raise InvalidInputError(
                f"pixel_values have tiles of different sizes: {[tuple(e.shape) for e in entries]}."
            )
        return entries

    def _lay_out(
        self,
        features: Tensor,
        newline: Tensor | None,
        pixel_values: Tensor | Sequence[Tensor],
        sizes: list[tuple[int, int]] | None,
        kinds: list[str],
    ) -> list[tuple[Tensor, Sections]]:
        """The tokens of each image or video.

        Args:
            features: `(tiles, N, C)` of all of them.
            newline: `(C,)`, or `None` for a model without.
            pixel_values: as `encode_prompt` takes them.
            sizes: likewise.
            kinds: modalities.
        """
        counts = [1 if entry.dim() == 3 else len(entry) for entry in pixel_values]
        parts = features.split(counts)
        if isinstance(pixel_values, Tensor) and pixel_values.dim() == 4:
            return [single_tokens(part[0], None) for part in parts]
        newline = None if newline is None else newline.to(features)
        return [
            self._layout(
                part,
                newline,
                None if sizes is None else sizes[index],
                kinds[index],
                entry.dim() == 4,
            )
            for index, (part, entry) in enumerate(zip(parts, pixel_values, strict=True))
        ]

    def _tower_probe(self, needs: Collection[TowerNeed]) -> TowerProbe:
        layers = self._vision.vision_tower.vision_tower.vision_model.encoder.layers
        if not len(layers):
            raise InvalidInputError(
                f"stages need {' and '.join(needs)} of the vision tower, and this one has no "
                "attention layer."
            )
        return TowerProbe(layers[-1].self_attn, needs)

    def _layout(
        self,
        features: Tensor,
        newline: Tensor | None,
        size: tuple[int, int] | None,
        kind: str,
        has_tiles: bool,
    ) -> tuple[Tensor, Sections]:
        config = self.config
        if kind == "video":
            position, merge = config.mm_newline_position, config.mm_patch_merge_type or ""
            if merge == "flat" or (position == "one_token" and "unpad" not in merge):
                position = "no_token"
            frames = pool_frames(features, config.mm_spatial_pool_mode)
            return video_tokens(frames, newline, position)
        if config.mm_patch_merge_type == "flat":
            return flat_tokens(features)
        if not has_tiles or len(features) == 1:
            return single_tokens(features[0], newline)
        size, grid = self._size_and_grid(size)
        return anyres_tokens(features, newline, grid, size, self._max_tiles)

    @property
    def _max_tiles(self) -> int | None:
        return max_tiles_of(self.config.image_aspect_ratio)

    def _size_and_grid(
        self, size: tuple[int, int] | None
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """An image's `(width, height)`, and its tiles per row and per column."""
        if size is None:
            raise InvalidInputError(
                "tiled images need image_sizes, the (width, height) of each original image."
            )
        size = (int(size[0]), int(size[1]))
        tile = self.config.tile_size
        best = best_resolution(size, grid_candidates(self.config.image_grid_pinpoints, tile))
        return size, (best[0] // tile, best[1] // tile)

    def _splice(
        self,
        input_ids: Tensor,
        slots: list[int],
        laid_out: list[tuple[Tensor, Sections]],
        kinds: list[str],
        pixel_values: Tensor | Sequence[Tensor],
    ) -> Prompt:
        table: Any = self.get_input_embeddings().weight
        embeds, ids, spans, start, length = [], [], [], 0, 0
        for index, (slot, (tokens, sections)) in enumerate(zip(slots, laid_out, strict=True)):
            piece = input_ids[start:slot]
            embeds += [self.embed(piece), tokens.to(table)]
            ids += [piece, torch.full((len(tokens),), IMAGE_TOKEN_ID, device=input_ids.device)]
            length += len(piece)
            frames = len(pixel_values[index]) if kinds[index] == "video" else 1
            spans.append(VisualSpan(length, len(tokens), index, kinds[index], frames, sections))
            length += len(tokens)
            start = slot + 1
        embeds.append(self.embed(input_ids[start:]))
        ids.append(input_ids[start:])
        all_ids = torch.cat(ids)
        return Prompt(
            embeds=torch.cat(embeds),
            ids=all_ids,
            is_visual=all_ids == IMAGE_TOKEN_ID,
            spans=tuple(spans),
        )
