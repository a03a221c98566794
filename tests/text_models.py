"""Small random language models of transformers' own classes, and what their rows look like."""

from __future__ import annotations

from typing import Any

import torch

from dlm_decode.vision.inside import RowLayout

KINDS = ("llama", "qwen2", "qwen3")


def causal_lm(kind: str, *, num_layers=4, num_heads=4, num_kv_heads=2, seed=0, **changes: Any):
    """A model with random weights in float32."""
    import transformers

    config, model = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    }[kind]
    options = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 50, **changes}
    if kind == "qwen3":
        options = {"head_dim": 8, **options}
    torch.manual_seed(seed)
    built = getattr(transformers, model)(
        getattr(transformers, config)(
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            **options,
        )
    )
    for parameter in built.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return built.eval()


def layout(*segments: int) -> RowLayout:
    """A row of alternating lengths: text, image, text, image, ...; images have no grid."""
    lengths = torch.tensor(segments)
    segment = torch.arange(len(segments)).repeat_interleave(lengths)
    is_visual = segment % 2 == 1
    image_ids = torch.where(is_visual, segment // 2, -1)
    none = torch.full_like(image_ids, -1)
    return RowLayout(is_visual, image_ids, none, none[:, None].expand(-1, 2))


def cache_of(out) -> dict[str, Any]:
    """The cache of an output, as the argument that the next forward takes."""
    name = "cache" if hasattr(out, "cache") else "past_key_values"
    return {name: getattr(out, name)}
