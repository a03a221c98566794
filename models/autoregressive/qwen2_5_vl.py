"""Qwen2.5-VL: any resolution, windows in the tower, rotary positions in time, height and width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_window_index

from dlm_decode.cost import VisionGeometry
from dlm_decode.models.autoregressive.base import Architecture, Media, Prepared
from dlm_decode.models.autoregressive.tower import TowerAttention, received

if TYPE_CHECKING:
    from PIL import Image

    from dlm_decode.video import Clip

__all__ = ["Qwen25Vl"]

_GRID = {"image": "image_grid_thw", "video": "video_grid_thw"}
_BOUNDS = ("<|vision_start|>", "<|vision_end|>")

VIDEO_TOKENS = {"shortest_edge": 128, "longest_edge": 768}
"""Fewest and most visual tokens of a video's frame, as Qwen's own processor of videos has them."""


class Qwen25Vl(Architecture):
    """Two frames of a video share their visual tokens, so a video has half as many sections."""

    modalities = ("image", "video")
    default_settings: ClassVar[Mapping[str, Any]] = {"fps": 2.0, "max_frames": 768}
    further_arguments = (
        *("image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
    )
    turn = "<|im_start|>user\n{content}<|im_end|>\n"
    answer = "<|im_start|>assistant\n"

    @property
    def has_class_token(self) -> bool:
        """See `Architecture`."""
        return False

    @property
    def vision_geometry(self) -> VisionGeometry:
        """See `Architecture`; `tokens_per_tile` is that of a window, sizes of pictures vary."""
        vision, text = self.config.vision_config, self.config.text_config
        unit = vision.spatial_merge_size**2
        return VisionGeometry(
            num_layers=vision.depth,
            hidden_size=vision.hidden_size,
            intermediate_size=vision.intermediate_size,
            num_heads=vision.num_heads,
            tokens_per_tile=(vision.window_size // vision.patch_size) ** 2,
            patch_dim=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
            projector_dims=(
                vision.hidden_size * unit,
                vision.hidden_size * unit,
                text.hidden_size,
            ),
            patches_per_token=unit,
            mlp_matrices=3,
        )

    def tower_attention(self, model: nn.Module, modality: str) -> Any:
        """See `Architecture`; the last block that attends to whole frames."""
        last = max(self.config.vision_config.fullatt_block_indexes)
        return self.core(model).visual.blocks[last].attn

    def probe(
        self, attention: Any, arguments: Mapping[str, Any], needs: frozenset[str]
    ) -> TowerAttention:
        """See `Architecture`; frames of all pictures follow one another, in window order.

        Keys are those before rotation, which compare contents whatever their places.
        """
        hidden = arguments["hidden_states"]
        states = attention.qkv(hidden).unflatten(-1, (3, attention.num_heads, -1))
        queries, keys = states[:, 0], states[:, 1]
        plain = keys.float().mean(dim=1)[None] if "tower_keys" in needs else None
        queries, keys = apply_rotary_pos_emb_vision(
            queries, keys, *arguments["position_embeddings"]
        )
        queries, keys = (part.float().transpose(0, 1)[None] for part in (queries, keys))
        lengths = arguments["cu_seqlens"].diff().tolist()
        parts = zip(queries.split(lengths, dim=2), keys.split(lengths, dim=2), strict=True)
        salience = [received(some, of, from_class=False) for some, of in parts]
        return TowerAttention(torch.cat(salience, dim=1), plain)

    def media(
        self,
        model: nn.Module,
        modality: str,
        arguments: Mapping[str, Any],
        lengths: Sequence[int],
        tower: TowerAttention | None,
    ) -> list[Media]:
        """One entry per image or video; see `Architecture`."""
        grid = torch.as_tensor(arguments[_GRID[modality]])
        salience = keys = [None] * len(grid)
        if tower is not None:
            salience = self._joined(tower.salience[0], grid).split(list(lengths))
            if tower.keys is not None:
                keys = self._joined(tower.keys[0], grid).split(list(lengths))
        merge, found = self.config.vision_config.spatial_merge_size, []
        for at, (frames, height, width) in enumerate(grid.tolist()):
            rows, columns = height // merge, width // merge
            sections = tuple((t * rows * columns, rows, columns, False) for t in range(frames))
            found.append(Media(lengths[at], sections, frames, salience[at], keys[at]))
        return found

    def _joined(self, values: Tensor, grid: Tensor) -> Tensor:
        """`(N, ...)` values of patches in window order, as one mean per visual token in its place.

        Windows are made of whole visual tokens, so the mean comes first and the order after it.
        """
        vision = self.config.vision_config
        window_index, _ = get_vision_window_index(
            grid,
            spatial_merge_size=vision.spatial_merge_size,
            window_size=vision.window_size,
            patch_size=vision.patch_size,
        )
        means = values.unflatten(0, (-1, vision.spatial_merge_size**2)).mean(dim=1)
        return means[window_index.argsort().to(means.device)]

    def position_ids(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """See `Architecture`; `(3, B, S)`."""
        ids = inputs["input_ids"]
        kinds = torch.zeros_like(ids)
        for number, modality in enumerate(self.modalities, start=1):
            kinds = kinds.masked_fill(ids == self.placeholder_ids[modality], number)
        positions, _ = self.core(model).get_rope_index(
            ids,
            kinds,
            image_grid_thw=inputs.get("image_grid_thw"),
            video_grid_thw=inputs.get("video_grid_thw"),
            second_per_grid_ts=inputs.get("second_per_grid_ts"),
            attention_mask=inputs["attention_mask"],
        )
        return positions

    def encoder_flops(self, inputs: Mapping[str, Any]) -> int:
        """See `Architecture`; attention within frames in some blocks, within windows in others."""
        vision, geometry = self.config.vision_config, self.vision_geometry
        width, total = vision.hidden_size, 0
        num_full = len(vision.fullatt_block_indexes)
        for name in _GRID.values():
            for frames, rows, columns in torch.as_tensor(inputs.get(name, [])).tolist():
                tokens = rows * columns
                window = vision.window_size // vision.patch_size
                in_windows = _squares(rows, window) * _squares(columns, window)
                linear = 2 * tokens * (4 * width**2 + 3 * width * vision.intermediate_size)
                pairs = num_full * tokens**2 + (vision.depth - num_full) * in_windows
                embed = 2 * tokens * geometry.patch_dim * width
                joined = tokens // geometry.patches_per_token
                widths = pairwise(geometry.projector_dims)
                project = sum(2 * joined * a * b for a, b in widths)
                total += frames * (embed + vision.depth * linear + 4 * width * pairs + project)
        return total

    def bare_marker(self, modality: str, token: str) -> str:
        """See `Architecture`."""
        return token.join(_BOUNDS)

    def prepare(
        self,
        image_processor: Any,
        token_of: Mapping[str, str],
        images: Sequence[Image.Image],
        clips: Sequence[Clip],
    ) -> Prepared:
        """See `Architecture`."""
        tensors: dict[str, Any] = {}
        texts = []
        if images:
            made = image_processor(images=list(images), return_tensors="pt")
            tensors = {name: made[name] for name in ("pixel_values", "image_grid_thw")}
            texts += self._placeholders(token_of["image"], made["image_grid_thw"])
        if clips:
            videos = [self._video(image_processor, clip) for clip in clips]
            grid = torch.tensor([size for _, size in videos])
            tensors["pixel_values_videos"] = torch.cat([pixels for pixels, _ in videos])
            tensors["video_grid_thw"] = grid
            tensors["second_per_grid_ts"] = [
                self._seconds(clip, image_processor.temporal_patch_size) for clip in clips
            ]
            texts += self._placeholders(token_of["video"], grid)
        return Prepared(texts, tensors)

    def _placeholders(self, token: str, grid: Tensor) -> list[str]:
        unit = self.config.vision_config.spatial_merge_size**2
        return [token * (count // unit) for count in grid.prod(dim=1).tolist()]

    def _video(self, image_processor: Any, clip: Clip) -> tuple[Tensor, list[int]]:
        """`(N, patch_dim)` patches of a video, and its grid.

        The image processor repeats each frame to fill a patch in time; here a patch takes its
        second part from the next frame. The last frame fills up what is missing.
        """
        unit = (image_processor.patch_size * image_processor.merge_size) ** 2
        size = {name: tokens * unit for name, tokens in VIDEO_TOKENS.items()}
        depth = image_processor.temporal_patch_size
        frames = [*clip.frames, *[clip.frames[-1]] * (-len(clip.frames) % depth)]
        made = image_processor(images=frames, size=size, return_tensors="pt")
        _, rows, columns = made["image_grid_thw"][0].tolist()
        patches = made["pixel_values"].unflatten(0, (-1, depth, rows * columns))
        side = image_processor.patch_size
        patches = patches.unflatten(-1, (-1, depth, side, side))
        joined = torch.stack([patches[:, t, :, :, t] for t in range(depth)], dim=3)
        return joined.flatten(2).flatten(0, 1), [len(frames) // depth, rows, columns]

    @staticmethod
    def _seconds(clip: Clip, depth: int) -> float:
        """Seconds from one step in time to the next; 1 where the video's rate is unknown."""
        times = clip.times
        if times is None or len(times) < 2 or times[-1] == times[0]:
            return 1.0
        return depth * (times[-1] - times[0]) / (len(times) - 1)


def _squares(length: int, window: int) -> int:
    """Sum of the squared lengths of the windows that `length` is cut into."""
    whole, rest = divmod(length, window)
    return whole * window**2 + rest**2
