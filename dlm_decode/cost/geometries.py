"""Sizes of published models and the visual tokens of their typical inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dlm_decode.cost.flops import Geometry, VisionGeometry
from dlm_decode.errors import UnknownNameError

__all__ = ["AUTOREGRESSIVE", "DIFFUSION", "LLADA_8B", "Published", "published"]

LLADA_8B = Geometry(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=126464,
)
"""The language model of LLaDA-V, LaViDa-LLaDA and VidLaDA."""

DIFFUSION: dict[str, tuple[Geometry, int]] = {
    "LLaDA-V, 384 x 384 image": (LLADA_8B, 1485),
    "LLaDA-V, 640 x 480 photo": (LLADA_8B, 2929),
    "LLaDA-V, 1024 x 768 photo": (LLADA_8B, 3627),
    "LLaDA-V, video of 32 frames": (LLADA_8B, 6720),
    "LaViDa-LLaDA, 768 x 768 image": (LLADA_8B, 1008),
    "VidLaDA, 32 frames": (LLADA_8B, 6720),
}
"""Language model and visual tokens of typical inputs, for analytic costs."""

VICUNA_7B = Geometry(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    intermediate_size=11008,
    vocab_size=32000,
)
VICUNA_13B = Geometry(
    num_layers=40,
    hidden_size=5120,
    num_heads=40,
    num_kv_heads=40,
    head_dim=128,
    intermediate_size=13824,
    vocab_size=32000,
)
INTERNLM2_8B = Geometry(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=92553,
)
QWEN2_5_7B = Geometry(
    num_layers=28,
    hidden_size=3584,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=18944,
    vocab_size=152064,
)

CLIP_L_336 = VisionGeometry(
    num_layers=24,
    hidden_size=1024,
    intermediate_size=4096,
    num_heads=16,
    tokens_per_tile=24 * 24,
    patch_dim=3 * 14 * 14,
    class_tokens=1,
)
"""CLIP ViT-L/14 at 336 pixels; at 224 pixels it has 16 x 16 patches."""

INTERN_VIT_300M = VisionGeometry(
    num_layers=24,
    hidden_size=1024,
    intermediate_size=4096,
    num_heads=16,
    tokens_per_tile=32 * 32,
    patch_dim=3 * 14 * 14,
    class_tokens=1,
    patches_per_token=4,
)

QWEN2_5_VIT_672 = VisionGeometry(
    num_layers=32,
    hidden_size=1280,
    intermediate_size=3420,
    num_heads=16,
    tokens_per_tile=48 * 48,
    patch_dim=3 * 2 * 14 * 14,
    patches_per_token=4,
    mlp_matrices=3,
    window=8 * 8,
    windowed_layers=28,
)
"""Qwen2.5-VL's tower on an image of 672 x 672 pixels."""


@dataclass(frozen=True)
class Published:
    """An autoregressive model with a typical input.

    Attributes:
        geometry: the model, vision part included.
        about: the input, in words.
        tiles: image tiles or video frames that the tower encodes.
        sections: rectangles of visual tokens that the language model reads, in order: rows,
            columns, and whether a newline vector follows each row.
        is_video: whether each section is a frame.
    """

    geometry: Geometry
    about: str
    tiles: int
    sections: tuple[tuple[int, int, bool], ...]
    is_video: bool = False

    @property
    def visual_tokens(self) -> int:
        """Visual tokens of the input."""
        return sum(rows * (columns + newline) for rows, columns, newline in self.sections)


def _model(language: Geometry, vision: VisionGeometry) -> Geometry:
    joined, width = vision.patches_per_token * vision.hidden_size, language.hidden_size
    # A merger of patches first maps onto what it has joined; LLaVA's projector and InternVL's go
    # straight to the language model's width.
    middle = joined if vision is QWEN2_5_VIT_672 else width
    return replace(language, vision=replace(vision, projector_dims=(joined, middle, width)))


_SQUARE = ((24, 24, False),)
# The whole image, then 2 x 2 tiles, of which the padding above and below is cut away.
_PHOTO = ((24, 24, False), (32, 48, True))

AUTOREGRESSIVE: dict[str, Published] = {
    "llava-1.5-7b": Published(_model(VICUNA_7B, CLIP_L_336), "one image", 1, _SQUARE),
    "llava-1.5-13b": Published(_model(VICUNA_13B, CLIP_L_336), "one image", 1, _SQUARE),
    "llava-next-7b": Published(_model(VICUNA_7B, CLIP_L_336), "640 x 427 photo", 5, _PHOTO),
    "llava-next-13b": Published(_model(VICUNA_13B, CLIP_L_336), "640 x 427 photo", 5, _PHOTO),
    "internvl2-8b": Published(
        _model(INTERNLM2_8B, INTERN_VIT_300M), "image of 6 tiles", 7, ((16, 16, False),) * 7
    ),
    "qwen2.5-vl-7b": Published(_model(QWEN2_5_7B, QWEN2_5_VIT_672), "672 x 672 image", 1, _SQUARE),
    "video-llava-7b": Published(
        _model(VICUNA_7B, replace(CLIP_L_336, tokens_per_tile=16 * 16)),
        "video of 8 frames",
        8,
        ((16, 16, False),) * 8,
        is_video=True,
    ),
}
"""By name. LLaVA-NeXT is the Vicuna variant. Video-LLaVA's tower is taken as CLIP per frame; the
class token of each frame, which its program hands on to the language model, is left out, as papers
count."""


def published(name: str) -> Published:
    """The model called `name`.

    Raises:
        UnknownNameError: no such model; the message lists them.
    """
    if name not in AUTOREGRESSIVE:
        raise UnknownNameError("published model", name, AUTOREGRESSIVE)
    return AUTOREGRESSIVE[name]
