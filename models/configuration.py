"""Configurations of LLaDA and LLaDA-V as their published `config.json` files have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedConfig, SiglipVisionConfig

from dlm_decode.errors import CheckpointError
from dlm_decode.models.prompt_rules import PromptRules

__all__ = ["LLaDAConfig", "LlavaLLaDAConfig", "rope_theta_of"]

# The text-only LLaDA-8B names its sizes as OLMo does.
_ORIGINAL_NAMES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "embedding_size": "vocab_size",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
}
_LANGUAGE_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "rope_theta",
)
# Fields that would change the computation. A config that says something else describes another
# model.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "activation_type": ("silu",),
    "block_type": ("llama",),
    "layer_norm_type": ("rms",),
    "rope": (True,),
    "alibi": (False,),
    "attention_bias": (False,),
    "include_bias": (False,),
    "include_qkv_bias": (False,),
    "attention_layer_norm": (False,),
    "input_emb_norm": (False,),
    "scale_logits": (False,),
}
# The published system message of LLaDA-V and LaViDa.
_SYSTEM = (
    "You are a helpful language and vision assistant. You are able to understand the visual "
    "content that the user provides, and assist the user with a variety of tasks using natural "
    "language."
)
_SO400M_384 = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}


def rope_theta_of(theta: float | None, *descriptions: dict[str, Any] | None) -> float | None:
    """Base of the rotary frequencies, from either of the ways that configs write it.

    Args:
        theta: the plain field `rope_theta`.
        descriptions: `rope_scaling` (older files, usually null) and `rope_parameters` (newer ones,
            always filled).

    Raises:
        CheckpointError: scaled frequencies, which no published LLaDA has.
    """
    for rope in filter(None, descriptions):
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise CheckpointError(
                f"rotary scaling {rope!r} is not used by any published LLaDA and is not supported."
            )
        theta = theta if theta is not None else rope.get("rope_theta")
    return theta


class LLaDAConfig(PreTrainedConfig):
    """LLaDA language model.

    Sizes have no defaults: a size that the file lacks is an error when the model is built, never a
    guess. The names of the original text-only checkpoints (`d_model`, `n_layers`, ...) are
    understood.

    Args:
        vocab_size: rows of the embedding table and of the head.
        hidden_size: D.
        intermediate_size: inner width of the MLP.
        num_hidden_layers: L.
        num_attention_heads: H.
        num_key_value_heads: heads of keys and values; H when not given.
        rms_norm_eps: added to the mean square.
        rope_theta: base of the rotary frequencies; also read from `rope_parameters` or
            `rope_scaling`.
        max_position_embeddings: longest sequence.
        mask_token_id: here and below, replace the official ids of the model type; see
            `special_ids_of`.
        stop_token_ids: ids that end a response.
        suppress_token_ids: ids that are never proposed.
        kwargs: fields that every transformers config has, and fields that are kept but not used.

    Raises:
        CheckpointError: rotary scaling.
    """

    model_type = "llada"
    has_no_defaults_at_init = True
    has_qkv_bias = False

    if TYPE_CHECKING:  # as they are once `check` has passed
        vocab_size: int
        hidden_size: int
        intermediate_size: int
        num_hidden_layers: int
        num_attention_heads: int
        num_key_value_heads: int
        rms_norm_eps: float
        rope_theta: float

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keeps an inherited `__init__`, which transformers' dataclass would replace."""
        if "__init__" not in cls.__dict__:
            cls.__init__ = cls.__init__
        super().__init_subclass__(**kwargs)

    def __init__(
        self,
        vocab_size: int | None = None,
        hidden_size: int | None = None,
        intermediate_size: int | None = None,
        num_hidden_layers: int | None = None,
        num_attention_heads: int | None = None,
        num_key_value_heads: int | None = None,
        rms_norm_eps: float | None = None,
        rope_theta: float | None = None,
        max_position_embeddings: int | None = None,
        mask_token_id: int | None = None,
        stop_token_ids: list[int] | None = None,
        suppress_token_ids: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        sizes = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": num_attention_heads,
            "num_key_value_heads": num_key_value_heads,
            "rms_norm_eps": rms_norm_eps,
        }
        for name, value in sizes.items():
            if value is not None:
                setattr(self, name, value)
        self.max_position_embeddings = max_position_embeddings
        self.mask_token_id = mask_token_id
        self.stop_token_ids = stop_token_ids
        self.suppress_token_ids = suppress_token_ids
        for name in ("tie_word_embeddings", "use_cache"):
            kwargs.setdefault(name, False)
        for old, new in _ORIGINAL_NAMES.items():
            value = kwargs.pop(old, None)
            if value is None:
                continue
            if new in kwargs:
                kwargs[new] = value
            else:
                setattr(self, new, value)
        if not hasattr(self, "num_key_value_heads") and hasattr(self, "num_attention_heads"):
            self.num_key_value_heads = self.num_attention_heads
        descriptions = kwargs.pop("rope_scaling", None), kwargs.pop("rope_parameters", None)
        theta = rope_theta_of(rope_theta, *descriptions)
        if theta is not None:
            self.rope_theta = theta
        super().__init__(**kwargs)

    def check(self) -> None:
        """Refuses fields that are missing, do not fit each other, or describe another model.

        Raises:
            CheckpointError: names the fields.
        """
        missing = [name for name in self._required() if getattr(self, name, None) in (None, "")]
        if missing:
            raise CheckpointError(
                f"config of type {self.model_type!r} lacks {', '.join(missing)}; add them to "
                "config.json."
            )
        if (
            self.hidden_size % self.num_attention_heads
            or self.num_attention_heads % self.num_key_value_heads
        ):
            raise CheckpointError(
                f"hidden_size {self.hidden_size}, num_attention_heads {self.num_attention_heads} "
                "and "
                f"num_key_value_heads {self.num_key_value_heads} do not divide each other."
            )
        for name, allowed in _FIXED.items():
            value = getattr(self, name, None)
            if value is not None and value not in allowed:
                raise CheckpointError(
                    f"config of type {self.model_type!r} has {name} {value!r}; LLaDA computes with "
                    f"{allowed[0]!r}, so this "
                    "is another model."
                )

    def _required(self) -> tuple[str, ...]:
        return _LANGUAGE_SIZES

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden_size // self.num_attention_heads


class LlavaLLaDAConfig(LLaDAConfig):
    """LLaDA-V: LLaDA with a SigLIP tower, a projector and a layout of visual tokens.

    Args:
        mm_vision_tower: name of the tower. Published configs give nothing else, and mean SigLIP2
            so400m with 14-pixel patches at 384 pixels.
        vision_config: sizes of the tower before its last layer is removed, as `SiglipVisionConfig`
            takes them; instead of the sizes that the name means.
        mm_projector_type: must be `"mlp2x_gelu"`.
        mm_patch_merge_type: `"spatial_unpad"` or `"flat"`.
        mm_newline_position: newline vectors of videos; see `video_tokens`. `"one_token"` when not
            given, as in the official code.
        mm_spatial_pool_mode: pooling of video frames; see `pool_frames`.
        image_aspect_ratio: `"anyres"`, `"anyres_max_N"` or `"pad"`.
        image_grid_pinpoints: grids for `anyres`; see `grid_candidates`.
        multi_image_aspect_ratio: replaces `image_aspect_ratio` when a prompt has several images;
            the official evaluation pads them. `None` keeps `image_aspect_ratio`.
        tokenizer_model_max_length: longest prompt of training; the shorter of this and
            `max_position_embeddings` counts.
        kwargs: as in `LLaDAConfig`.
    """

    model_type = "llava_llada"
    merge_types: ClassVar[tuple[str, ...]] = ("spatial_unpad", "flat")
    image_modes: ClassVar[tuple[str, ...]] = ("pad", "anyres", "anyres_max_N")
    has_system_in_template = True

    def __init__(
        self,
        mm_vision_tower: str | None = None,
        vision_config: dict[str, Any] | None = None,
        mm_projector_type: str | None = None,
        mm_patch_merge_type: str | None = None,
        mm_newline_position: str = "one_token",
        mm_spatial_pool_mode: str = "bilinear",
        image_aspect_ratio: str | None = None,
        image_grid_pinpoints: list[list[int]] | str | None = None,
        multi_image_aspect_ratio: str | None = "pad",
        tokenizer_model_max_length: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.mm_vision_tower = mm_vision_tower
        self.vision_config = vision_config
        self.mm_projector_type = mm_projector_type
        self.mm_patch_merge_type = mm_patch_merge_type
        self.mm_newline_position = mm_newline_position
        self.mm_spatial_pool_mode = mm_spatial_pool_mode
        self.image_aspect_ratio = image_aspect_ratio or ""
        self.image_grid_pinpoints = image_grid_pinpoints
        self.multi_image_aspect_ratio = multi_image_aspect_ratio
        self.tokenizer_model_max_length = tokenizer_model_max_length
        super().__init__(**kwargs)

    def _required(self) -> tuple[str, ...]:
        return (*_LANGUAGE_SIZES, "mm_projector_type", "mm_patch_merge_type", "image_aspect_ratio")

    def check(self) -> None:
        """Raises `CheckpointError`; see `LLaDAConfig.check`."""
        super().check()
        if self.mm_projector_type != "mlp2x_gelu":
            raise CheckpointError(
                f"mm_projector_type {self.mm_projector_type!r} is unknown; the published models "
                "have 'mlp2x_gelu'."
            )
        if self.mm_patch_merge_type not in self.merge_types:
            raise CheckpointError(
                f"mm_patch_merge_type {self.mm_patch_merge_type!r} is unknown; use "
                f"{_listed(self.merge_types)}."
            )
        for name in ("image_aspect_ratio", "multi_image_aspect_ratio"):
            mode = getattr(self, name)
            if mode not in (None, *self.image_modes) and not mode.startswith("anyres"):
                raise CheckpointError(
                    f"{name} {mode!r} is unknown; use {_listed(self.image_modes)}."
                )

    @property
    def has_newline(self) -> bool:
        """Whether the checkpoint holds a newline vector."""
        return True

    @property
    def tile_size(self) -> int:
        """Pixels per side of what the tower reads."""
        size = self.vision.image_size
        return size if isinstance(size, int) else size[0]

    @property
    def prompt_rules(self) -> PromptRules:
        """What the processor asks for."""
        return PromptRules(
            reads_media=True,
            tile_size=self.tile_size,
            image_mode=self.image_aspect_ratio,
            multi_image_mode=self.multi_image_aspect_ratio,
            grids=self.image_grid_pinpoints,
            system=_SYSTEM,
            has_system_in_template=self.has_system_in_template,
        )

    @property
    def vision(self) -> SiglipVisionConfig:
        """The tower as it runs: one layer fewer than it was trained with, and no pooling head.

        Raises:
            CheckpointError: the tower is not a SigLIP and no `vision_config` describes it.
        """
        sizes = self.vision_config
        if sizes is None:
            name = (self.mm_vision_tower or "").lower()
            if "siglip" not in name:
                raise CheckpointError(
                    f"vision tower {self.mm_vision_tower!r} is not a SigLIP; the published towers "
                    "are. Add vision_config to config.json to describe another SigLIP geometry."
                )
            sizes = _SO400M_384
        known: dict[str, Any] = {
            key: value
            for key, value in sizes.items()
            if key not in ("model_type", "vision_use_head")
        }
        config = SiglipVisionConfig(**known, vision_use_head=False)
        config.num_hidden_layers -= 1
        return config


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"
