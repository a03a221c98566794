"""LLaVA-NeXT: LLaVA whose images are one small view and tiles of a large one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.models.llava_next.modeling_llava_next import (
    get_anyres_image_grid_shape,
    image_size_to_num_patches,
    unpad_image,
)

from dlm_decode.cost import vision_flops
from dlm_decode.models.autoregressive.base import Media, Prepared, Section
from dlm_decode.models.autoregressive.llava import Llava, square_side
from dlm_decode.models.autoregressive.tower import TowerAttention

if TYPE_CHECKING:
    from PIL import Image

    from dlm_decode.video import Clip

__all__ = ["LlavaNext"]


class LlavaNext(Llava):
    """An image is the small view, then the large one row by row, a newline vector behind each.

    Where the large view was padded to the shape of its tiles, its tokens are cut off again.
    """

    further_arguments = ("image_sizes",)

    def _num_tiles(self, size: Sequence[int]) -> int:
        """Tiles of an image of `(height, width)` pixels, the small view included."""
        config = self.config
        return image_size_to_num_patches(
            list(size), config.image_grid_pinpoints, config.vision_config.image_size
        )

    def _large_grid(self, size: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of patches of the large view, padding included."""
        config = self.config
        tile = config.vision_config.image_size
        rows, columns = get_anyres_image_grid_shape(list(size), config.image_grid_pinpoints, tile)
        side = square_side(self.num_patches)
        return rows * side, columns * side

    def sections(self, size: Sequence[int]) -> tuple[Section, Section]:
        """The small view and the large one, of an image of `(height, width)` pixels."""
        large = torch.empty(1, *self._large_grid(size), device="meta")
        rows, columns = unpad_image(large, list(size)).shape[1:]
        side, first = square_side(self.num_patches), self.tokens_per_tile
        return (first - side * side, side, side, False), (first, rows, columns, True)

    def media(
        self,
        model: nn.Module,
        modality: str,
        arguments: Mapping[str, Any],
        lengths: Sequence[int],
        tower: TowerAttention | None,
    ) -> list[Media]:
        """One entry per image; see `Architecture`."""
        found, first = [], 0
        sizes = torch.as_tensor(arguments["image_sizes"]).tolist()
        for size, length in zip(sizes, lengths, strict=True):
            tiles = slice(first, first + self._num_tiles(size))
            first = tiles.stop
            salience = keys = None
            if tower is not None:
                salience = self._packed(tower.salience[tiles], size)
                keys = None if tower.keys is None else self._packed(tower.keys[tiles], size)
            found.append(Media(length, self.sections(size), salience=salience, tower_keys=keys))
        return found

    def _packed(self, values: Tensor, size: Sequence[int]) -> Tensor:
        """`(tiles, N, ...)` values of patches in the order of the visual tokens.

        Class tokens and newline vectors get zeros.
        """
        is_flat = values.dim() == 2
        values = values[..., None] if is_flat else values
        skipped = self.tokens_per_tile - self.num_patches
        side, (height, width) = square_side(self.num_patches), self._large_grid(size)
        large = values[1:].unflatten(0, (height // side, width // side)).unflatten(2, (side, side))
        large = large.transpose(1, 2).reshape(height, width, -1).permute(2, 0, 1)
        large = nn.functional.pad(unpad_image(large, list(size)), (0, 1))
        small = nn.functional.pad(values[0], (0, 0, skipped, 0))
        packed = torch.cat([small, large.permute(1, 2, 0).flatten(0, 1)])
        return packed[:, 0] if is_flat else packed

    def encoder_flops(self, inputs: Mapping[str, Any]) -> int:
        """See `Architecture`; tiles that only fill a batch are not run."""
        sizes = inputs.get("image_sizes")
        if sizes is None:
            return 0
        tiles = sum(map(self._num_tiles, torch.as_tensor(sizes).tolist()))
        return vision_flops(self.vision_geometry, tiles)

    def prepare(
        self,
        image_processor: Any,
        token_of: Mapping[str, str],
        images: Sequence[Image.Image],
        clips: Sequence[Clip],
    ) -> Prepared:
        """See `Architecture`."""
        prepared = image_processor(images=list(images), return_tensors="pt")
        texts = []
        for size in prepared["image_sizes"].tolist():
            start, rows, columns, _ = self.sections(size)[1]
            texts.append(token_of["image"] * (start + rows * (columns + 1)))
        names = ("pixel_values", "image_sizes")
        return Prepared(texts, {name: prepared[name] for name in names})

    def collate(self, name: str, parts: Sequence[Any]) -> Any:
        """See `Architecture`; images with fewer tiles are filled with zeros."""
        if name == "pixel_values":
            most = max(part.shape[1] for part in parts)
            parts = [
                nn.functional.pad(part, (0, 0) * 3 + (0, most - part.shape[1])) for part in parts
            ]
        return super().collate(name, parts)
