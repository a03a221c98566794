"""Wall-clock time against counted FLOPs, on a model of any size with random weights.

The settings take turns in every round, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from dlm_decode.canvas import IMAGE_TOKEN_ID
from dlm_decode.errors import InvalidInputError
from dlm_decode.models.configuration import LlavaLLaDAConfig
from dlm_decode.models.llava_llada import LlavaLLaDAModelLM
from dlm_decode.vlm import DiffusionVlm

if TYPE_CHECKING:
    from dlm_decode.eval.variants import Variant

__all__ = ["BenchSize", "bench", "machine", "random_vlm", "render"]

_VOCABULARY = 4096
_PATCH = 14
_MASK, _EOS = _VOCABULARY - 1, _VOCABULARY - 2


@dataclass(frozen=True)
class BenchSize:
    """Sizes of the measured model and its prompt.

    Attributes:
        hidden_size: width of the language model; a multiple of 64.
        num_layers: its layers.
        visual_side: the picture has `visual_side` x `visual_side` patches, each a visual token.
        num_text: text tokens of the prompt.
        gen_length: canvas length.
        steps: steps of the schedule.

    Raises:
        InvalidInputError: sizes that no model can have.
    """

    hidden_size: int = 512
    num_layers: int = 8
    visual_side: int = 27
    num_text: int = 32
    gen_length: int = 64
    steps: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise InvalidInputError(f"{name} must be at least 1, got {value}.")
        if self.hidden_size % 64:
            raise InvalidInputError(
                f"hidden_size must be a multiple of 64, got {self.hidden_size}."
            )


def random_vlm(
    size: BenchSize,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    attn_implementation: str = "sdpa",
) -> DiffusionVlm:
    """A LLaDA-V of the given size with random weights and a very small tower."""
    config = LlavaLLaDAConfig(
        vocab_size=_VOCABULARY,
        hidden_size=size.hidden_size,
        intermediate_size=3 * size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.hidden_size // 64,
        num_key_value_heads=size.hidden_size // 64,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        max_position_embeddings=1 << 16,
        mask_token_id=_MASK,
        eos_token_id=_EOS,
        pad_token_id=_EOS,
        stop_token_ids=[_EOS],
        mm_projector_type="mlp2x_gelu",
        mm_patch_merge_type="flat",
        image_aspect_ratio="pad",
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": size.visual_side * _PATCH,
            "patch_size": _PATCH,
        },
        attn_implementation=attn_implementation,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlavaLLaDAModelLM(config)
    return DiffusionVlm(model.to(device=device, dtype=dtype), name="random weights")


def bench(
    vlm: DiffusionVlm, variants: Sequence[Variant], size: BenchSize, *, rounds: int = 5
) -> list[dict[str, Any]]:
    """Measures every variant in every round; the first is what the others are relative to.

    Args:
        vlm: from `random_vlm`.
        variants: at least one.
        size: that of `vlm`.
        rounds: measured rounds, after one to warm up.

    Returns:
        One row per variant: median `seconds` of the steps, `time_ratio` (median over rounds of the
        ratio to the first variant in the same round), `flops_ratio`, `time_over_flops` (their
        quotient: 1 where time follows FLOPs), `forwards` by view and kind, `kv_bytes`.

    Raises:
        InvalidInputError: no variant, or fewer than one round.
    """
    if not variants or rounds < 1:
        raise InvalidInputError("bench needs at least one variant and one round.")
    ids = torch.arange(1, size.num_text + 1)
    ids = torch.cat([ids[:1], torch.tensor([IMAGE_TOKEN_ID]), ids[1:]])
    side = size.visual_side * _PATCH
    pixels = torch.linspace(-1, 1, 3 * side * side).reshape(1, 3, side, side)
    ask = {
        "input_ids": ids,
        "pixel_values": [pixels],
        "image_sizes": [(side, side)],
        "stop": False,
    }
    lengths = {"gen_length": size.gen_length, "steps": size.steps}
    asks = [
        {**ask, **{k: v for k, v in lengths.items() if k != "steps" or not _names_steps(variant)}}
        for variant in variants
    ]
    seconds: list[list[float]] = [[] for _ in variants]
    costs: list[Any] = [None] * len(variants)
    for number in tqdm(range(rounds + 1), desc="rounds"):
        order = [(place + number) % len(variants) for place in range(len(variants))]
        for place in order:
            _synchronize(vlm.device)
            began = time.perf_counter()
            out = vlm.generate(**{**asks[place], **variants[place].options})
            _synchronize(vlm.device)
            if number:
                seconds[place].append(time.perf_counter() - began - out.cost.seconds_prefill)
            costs[place] = out.cost
    first = costs[0].flops
    rows = []
    for variant, own, cost in zip(variants, seconds, costs, strict=True):
        ratios = [mine / theirs for mine, theirs in zip(own, seconds[0], strict=True)]
        time_ratio, flops_ratio = statistics.median(ratios), cost.flops / first
        rows.append(
            {
                "name": variant.name,
                "seconds": statistics.median(own),
                "time_ratio": time_ratio,
                "flops_ratio": flops_ratio,
                "time_over_flops": time_ratio / flops_ratio,
                "forwards": {f"{view}/{kind}": n for (view, kind), n in cost.forwards.items()},
                "kv_bytes": cost.kv_bytes,
            }
        )
    return rows


def _names_steps(variant: Variant) -> bool:
    return any(key in variant.options for key in ("steps_per_block", "step_ratio"))


def render(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = [
        "| setting | seconds | time | FLOPs | time / FLOPs | forwards | kept MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        forwards = ", ".join(f"{count} {name}" for name, count in row["forwards"].items())
        lines.append(
            f"| {row['name']} | {row['seconds']:.2f} | {row['time_ratio']:.3f} | "
            f"{row['flops_ratio']:.3f} | {row['time_over_flops']:.2f} | {forwards} | "
            f"{row['kv_bytes'] / 1e6:.1f} |"
        )
    return "\n".join(lines)


def machine(vlm: DiffusionVlm) -> dict[str, Any]:
    """What the figures were measured on."""
    import platform

    is_cuda = vlm.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(vlm.device) if is_cuda else platform.machine(),
        "threads": torch.get_num_threads(),
        "dtype": str(vlm.model.dtype).removeprefix("torch."),
        "attn_implementation": vlm.model.config._attn_implementation,
        "torch": torch.__version__,
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
