"""Video-LLaVA: LLaVA with a second tower for the frames of videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from dlm_decode.models.autoregressive.base import Media, Prepared
from dlm_decode.models.autoregressive.llava import Llava, pixels_of
from dlm_decode.models.autoregressive.tower import TowerAttention

if TYPE_CHECKING:
    from PIL import Image

    from dlm_decode.video import Clip

__all__ = ["VideoLlava"]


class VideoLlava(Llava):
    """A video keeps the class token of each frame among its visual tokens; an image does not.

    Class tokens belong to no section of their span.
    """

    modalities = ("image", "video")
    default_settings: ClassVar[Mapping[str, Any]] = {"max_frames": 8, "force_sample": True}
    further_arguments = ("pixel_values_videos",)

    def tower(self, model: nn.Module, modality: str) -> Any:
        """See `Llava`."""
        core = self.core(model)
        return core.image_tower if modality == "image" else core.video_tower

    def media(
        self,
        model: nn.Module,
        modality: str,
        arguments: Mapping[str, Any],
        lengths: Sequence[int],
        tower: TowerAttention | None,
    ) -> list[Media]:
        """One entry per image or video; see `Architecture`."""
        if modality == "image":
            return super().media(model, modality, arguments, lengths, tower)
        num_frames = arguments["pixel_values_videos"].shape[1]
        return [
            self.squares(
                lengths[first : first + num_frames],
                None if tower is None else tower.picked(slice(first, first + num_frames)),
                num_frames,
            )
            for first in range(0, len(lengths), num_frames)
        ]

    def prepare(
        self,
        image_processor: Any,
        token_of: Mapping[str, str],
        images: Sequence[Image.Image],
        clips: Sequence[Clip],
    ) -> Prepared:
        """See `Architecture`."""
        texts = [token_of["image"] * self.tokens_per_tile] * len(images)
        tensors: dict[str, Any] = {}
        if images:
            tensors["pixel_values"] = pixels_of(image_processor, images)
        if clips:
            frames = [pixels_of(image_processor, clip.frames)[None] for clip in clips]
            tensors["pixel_values_videos"] = self.collate("pixel_values_videos", frames)
            per_frame = self.num_patches + int(self.has_class_token)
            texts += [token_of["video"] * (per_frame * len(clip.frames)) for clip in clips]
        return Prepared(texts, tensors)
