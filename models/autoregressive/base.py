"""What decoding and vision stages ask about a stock vision-language model of transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from dlm_decode.cost import Geometry, VisionGeometry, vision_flops
from dlm_decode.errors import InvalidInputError
from dlm_decode.models.autoregressive.tower import TowerAttention, queries_and_keys, received

if TYPE_CHECKING:
    from PIL import Image

    from dlm_decode.video import Clip

__all__ = ["Architecture", "Media", "Prepared", "Section"]

Section = tuple[int, int, int, bool]
"""`(start, rows, columns, has_newline)`, see `VisualSpan.sections`."""


@dataclass(frozen=True)
class Media:
    """One image or video (or one tile, see `Architecture.joins_tiles`) as it reaches the text.

    Attributes:
        length: visual tokens.
        sections: as in `VisualSpan`.
        frames: video frames; 1 for an image.
        salience: `(length,)` float32, see `Prompt`; `None` where nobody asked.
        tower_keys: `(length, d)` float32, likewise.
    """

    length: int
    sections: tuple[Section, ...]
    frames: int = 1
    salience: Tensor | None = None
    tower_keys: Tensor | None = None


@dataclass(frozen=True)
class Prepared:
    """The pictures of one prompt, ready for the model.

    Attributes:
        texts: what replaces the marker of each image, then of each video.
        tensors: further arguments of the model's forward.
    """

    texts: list[str]
    tensors: dict[str, Any] = field(default_factory=dict)


class Architecture(ABC):
    """What is known about one `model_type`.

    N visual tokens, R tiles or frames, H heads, d head width, D hidden size.

    Args:
        config: the model's config.
    """

    default_settings: ClassVar[Mapping[str, Any]] = {}
    """What `Settings` the model was made for where they are not the usual ones."""

    modalities: ClassVar[tuple[str, ...]] = ("image",)
    """What prompts may hold: `"image"`, `"video"`."""

    joins_tiles: ClassVar[bool] = False
    """Whether neighbours among what the encoder returns are tiles of one image."""

    turn: ClassVar[str] = "USER: {content} "
    """The question where no chat template is found."""

    answer: ClassVar[str] = "ASSISTANT:"
    """What the response follows on, likewise."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def placeholder_ids(self) -> dict[str, int]:
        """The id that stands for each visual token, by modality."""
        ids = {name: getattr(self.config, f"{name}_token_id", None) for name in self.modalities}
        return {name: token for name, token in ids.items() if token is not None}

    @property
    def geometry(self) -> Geometry:
        """Sizes for the cost model."""
        text = self.config.text_config
        heads = text.num_attention_heads
        return Geometry(
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            num_heads=heads,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            intermediate_size=text.intermediate_size,
            vocab_size=text.vocab_size,
            vision=self.vision_geometry,
        )

    @property
    @abstractmethod
    def vision_geometry(self) -> VisionGeometry:
        """Sizes of the vision part for the cost model."""

    def core(self, model: nn.Module) -> Any:
        """The multimodal model without its head: encoders, and the text model behind them."""
        return model.get_submodule("model")

    def text_model(self, model: nn.Module) -> Any:
        """The decoder layers with their final norm."""
        return self.core(model).language_model

    def encoder_name(self, modality: str) -> str:
        """The method of `core` that turns pixels into visual tokens."""
        return f"get_{modality}_features"

    @abstractmethod
    def media(
        self,
        model: nn.Module,
        modality: str,
        arguments: Mapping[str, Any],
        lengths: Sequence[int],
        tower: TowerAttention | None,
    ) -> list[Media]:
        """What one call of an encoder has returned, in order.

        Args:
            model: the model.
            modality: which encoder.
            arguments: of the call, by name.
            lengths: visual tokens of each entry that it returned.
            tower: the tower's attention in that call, if it was asked for.
        """

    @abstractmethod
    def tower_attention(self, model: nn.Module, modality: str) -> Any:
        """The attention module of the vision tower that stages may ask for; see `Prompt.salience`.

        It belongs to the layer that features come from, in published models the last but one.
        """

    def probe(self, attention: Any, arguments: Mapping[str, Any], needs: frozenset[str]) -> Any:
        """What `tower_attention` did in one run, as a `TowerAttention`.

        Args:
            attention: that module.
            arguments: of its forward, by name.
            needs: fields of `Prompt` that a stage reads.
        """
        queries, keys = queries_and_keys(attention, arguments["hidden_states"])
        skip = int(self.has_class_token)
        salience = received(queries, keys, from_class=self.has_class_token)
        return TowerAttention(
            salience[:, skip:], keys.mean(dim=1)[:, skip:] if "tower_keys" in needs else None
        )

    @property
    def has_class_token(self) -> bool:
        """Whether the vision tower has one."""
        return True

    def position_ids(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Rotary positions `(B, S)`, or `(3, B, S)`, of a left-padded prompt; 0 at padding.

        Args:
            model: the model.
            inputs: arguments of its forward; `input_ids` and `attention_mask`, both `(B, S)`, and
                what goes with the pictures.
        """
        return (inputs["attention_mask"].long().cumsum(dim=-1) - 1).clamp_min(0)

    def forward_arguments(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The part of `inputs` that goes with pictures and that the model's forward takes."""
        known = ("pixel_values", *self.further_arguments)
        return {name: inputs[name] for name in known if inputs.get(name) is not None}

    further_arguments: ClassVar[tuple[str, ...]] = ()
    """Arguments of the model's forward that go with pictures, beside `pixel_values`."""

    def encoder_flops(self, inputs: Mapping[str, Any]) -> int:
        """FLOPs of the vision tower and the projector for these inputs."""
        tiles = 0
        for name in ("pixel_values", "pixel_values_videos"):
            pixels = inputs.get(name)
            tiles += 0 if pixels is None else pixels.shape[:-3].numel()
        return vision_flops(self.vision_geometry, tiles) if tiles else 0

    @abstractmethod
    def prepare(
        self,
        image_processor: Any,
        token_of: Mapping[str, str],
        images: Sequence[Image.Image],
        clips: Sequence[Clip],
    ) -> Prepared:
        """The pictures of one prompt.

        Args:
            image_processor: transformers' image processor of the checkpoint, on PIL.
            token_of: the text of each modality's placeholder.
            images: RGB.
            clips: frames of each video.
        """

    def marker(self, modality: str, token: str) -> str:
        """What stands for one image or video in the chat template's output."""
        return token

    def bare_marker(self, modality: str, token: str) -> str:
        """What is put in front of a question for one image or video without a chat template."""
        return f"{token}\n"

    def collate(self, name: str, parts: Sequence[Any]) -> Any:
        """One argument of the model's forward from those of several rows."""
        if all(isinstance(part, Tensor) for part in parts):
            if len({part.shape[1:] for part in parts}) > 1:
                raise InvalidInputError(
                    f"{name} of the rows have shapes {[tuple(part.shape) for part in parts]} and "
                    "cannot be stacked; ask for the same number of frames of every video "
                    "(max_frames= with force_sample=True), or decode the rows one by one."
                )
            return torch.cat(list(parts))
        return [entry for part in parts for entry in part]
