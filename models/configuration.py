"""Configurations of LLaDA and LLaDA-V as their published `config.json` files have them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, SiglipVisionConfig

from dlm_decode.errors import CheckpointError

__all__ = ["LLaDAConfig", "LlavaLLaDAConfig"]

# The text-only LLaDA-8B names its sizes as OLMo does.
_ORIGINAL_NAMES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
_SIGLIP2_SO400M_384 = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}


class LLaDAConfig(PreTrainedConfig):
    """LLaDA language model.

    Sizes have no defaults: a size that the file lacks is an error when the model is built, never a guess. The names of
    the original text-only checkpoints (`d_model`, `n_layers`, ...) are understood.
    """

    model_type = "llada"
    has_no_defaults_at_init = True

    vocab_size: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    rms_norm_eps: float | None = None
    rope_theta: float | None = None
    max_position_embeddings: int | None = None
    attention_bias: bool = False
    use_cache: bool = False
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    mask_token_id: int | None = None
    stop_token_ids: list[int] | None = None
    suppress_token_ids: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Translates original names and newer rotary fields."""
        for old, new in _ORIGINAL_NAMES.items():
            value = kwargs.pop(old, None)
            if value is not None:
                setattr(self, new, value)
        table_rows = kwargs.pop("embedding_size", None)
        if table_rows:
            self.vocab_size = table_rows
        rope = kwargs.pop("rope_parameters", None) or kwargs.pop("rope_scaling", None) or {}
        kwargs.pop("rope_scaling", None)
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise CheckpointError(f"rotary scaling {rope!r} is not used by any published LLaDA and is not supported.")
        self.rope_theta = self.rope_theta or rope.get("rope_theta")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Raises `CheckpointError` for sizes that are missing or do not fit each other."""
        missing = [name for name in (*_REQUIRED, "rope_theta") if getattr(self, name) is None]
        if missing:
            raise CheckpointError(f"config of type {self.model_type!r} lacks {', '.join(missing)}; add them to config.json.")
        if self.hidden_size % self.num_attention_heads or self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"hidden_size {self.hidden_size}, num_attention_heads {self.num_attention_heads} and num_key_value_heads "
                f"{self.num_key_value_heads} do not divide each other."
            )
        if self.attention_bias:
            raise CheckpointError("attention_bias is true, and no published LLaDA has attention biases.")

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden_size // self.num_attention_heads


class LlavaLLaDAConfig(LLaDAConfig):
    """LLaDA-V: LLaDA with a SigLIP tower, a projector and a layout of visual tokens.

    `vision_config` describes the tower before its last layer is removed. Published configs name the tower only
    (`mm_vision_tower`), which means SigLIP2 so400m with 14-pixel patches at 384 pixels.
    """

    model_type = "llava_llada"

    mm_vision_tower: str | None = None
    mm_hidden_size: int | None = None
    mm_projector_type: str = "mlp2x_gelu"
    mm_patch_merge_type: str = "spatial_unpad"
    mm_newline_position: str = "one_token"
    mm_spatial_pool_mode: str = "bilinear"
    image_aspect_ratio: str = "anyres_max_4"
    image_grid_pinpoints: list | str | None = None
    tokenizer_model_max_length: int | None = None
    vision_config: dict | None = None

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
                    f"vision tower {self.mm_vision_tower!r} is not a SigLIP; LLaDA-V's tower is. Add vision_config to "
                    "config.json to describe another SigLIP geometry."
                )
            sizes = _SIGLIP2_SO400M_384
        known = {key: value for key, value in sizes.items() if key != "model_type"}
        config = SiglipVisionConfig(**known, vision_use_head=False)
        config.num_hidden_layers -= 1
        return config
