"""Every default of decoding, and what `preset="official"` changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dlm_decode import quota
from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.quota import DEFAULT_SCHEDULE, QuotaSchedule
from dlm_decode.schedule import BlockSchedule
from dlm_decode.video import FrameSampling

__all__ = ["DEFAULT_QUIRKS", "OFFICIAL_QUIRKS", "PRESETS", "Quirks", "Settings", "resolve_settings"]

DEFAULT_GEN_LENGTH = 64
# Logits times or over these still differ by finite numbers in float32.
LARGEST_SCALE, LEAST_TEMPERATURE = 1e30, 1e-30
THINK_MODES = ("none", "think", "no_think")


@dataclass(frozen=True)
class Settings:
    """How a response is decoded, whatever the sampler.

    Attributes:
        gen_length: T, canvas length in tokens.
        steps: steps over all blocks.
        block_length: positions per block.
        schedule: how a block's positions are shared out among its steps: name, spec or instance of
            a `QuotaSchedule`.
        temperature: 0 is greedy; above 0 tokens are sampled from softmax(logits / temperature).
        top_k: only that many likeliest tokens take part, in proposals and in their probabilities; 0
            for all, `None` for what the preset says (all, in most).
        top_p: only the likeliest tokens up to this probability take part; `None` for all.
        cfg_scale: classifier-free guidance: logits = u + (cfg_scale + 1)(c - u), u from a view with
            the prompt masked.
        seed: seed of each row's random generator: one number for every row, or one per row.
        eos_last: end-of-sequence ids may be predicted, but are committed only when nothing else is
            left to commit.
        preset: `"official"`, `"lavida"`, `"lavida_dream"` and `"vidlada"` reproduce a model's own
            program with its quirks; `None` has them fixed. The others of `PRESETS` come with
            samplers that reproduce a program.
        max_frames: frames that are taken of a video at most; here and below, see `FrameSampling`.
        fps: frames per second to take of a video; `None` for every frame.
        force_sample: take `max_frames` of every video, at even distances.
        frame_rate: frames per second of folders, lists and arrays of frames.
        time_instruction: tell the model how long each video is and where its frames lie.
        think_mode: `"think"` or `"no_think"` asks a model that knows the words to think aloud or
            not; `"none"` says nothing.
    """

    gen_length: int = DEFAULT_GEN_LENGTH
    steps: int = DEFAULT_GEN_LENGTH
    block_length: int = DEFAULT_GEN_LENGTH
    schedule: QuotaSchedule | str = DEFAULT_SCHEDULE
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    cfg_scale: float = 0.0
    seed: int | tuple[int, ...] = 0
    eos_last: bool = False
    preset: str | None = None
    max_frames: int = FrameSampling.max_frames
    fps: float | None = None
    force_sample: bool = False
    frame_rate: float | None = None
    time_instruction: bool = False
    think_mode: str = "none"

    def __post_init__(self) -> None:
        for name in ("temperature", "cfg_scale"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= LARGEST_SCALE:
                raise InvalidInputError(
                    f"{name} must be a number from 0 to {LARGEST_SCALE:g}, got {_shown(value)}."
                )
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise InvalidInputError(
                f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}, "
                f"got {self.temperature!r}."
            )
        if self.top_k is not None and (not _is_whole(self.top_k) or self.top_k < 0):
            raise InvalidInputError(
                f"top_k must be a whole number of at least 0, got {self.top_k!r}."
            )
        is_share = isinstance(self.top_p, (int, float)) and not isinstance(self.top_p, bool)
        if self.top_p is not None and not (is_share and 0 < self.top_p <= 1):
            raise InvalidInputError(f"top_p must be above 0 and at most 1, got {self.top_p!r}.")
        if self.preset is not None and self.preset not in PRESETS:
            raise UnknownNameError("preset", str(self.preset), PRESETS)
        seeds = self.seed if isinstance(self.seed, tuple) else (self.seed,)
        if not all(_is_whole(seed) and 0 <= seed < 2**63 for seed in seeds):
            raise InvalidInputError(
                f"seed must be whole numbers from 0 to 2**63 - 1, got {self.seed!r}."
            )
        if not isinstance(self.eos_last, bool):
            raise InvalidInputError(f"eos_last must be True or False, got {self.eos_last!r}.")
        if not isinstance(self.time_instruction, bool):
            raise InvalidInputError(
                f"time_instruction must be True or False, got {self.time_instruction!r}."
            )
        if self.think_mode not in THINK_MODES:
            raise UnknownNameError("think_mode", str(self.think_mode), THINK_MODES)
        _ = self.blocks, self.quotas, self.frame_sampling

    @property
    def blocks(self) -> BlockSchedule:
        """Blocks and steps per block."""
        return BlockSchedule(
            self.gen_length,
            self.steps,
            self.block_length,
            is_strict=self.quirks.refuses_remainders,
        )

    @property
    def quotas(self) -> QuotaSchedule:
        """Positions per step."""
        return quota.make(self.schedule)

    @property
    def frame_sampling(self) -> FrameSampling:
        """Which frames of a video are taken."""
        return FrameSampling(
            self.max_frames,
            self.fps,
            self.force_sample,
            self.frame_rate,
            has_drifting_times=self.quirks.has_drifting_times,
        )

    @property
    def num_likeliest(self) -> int | None:
        """Tokens that take part; `None` for all."""
        return (self.quirks.default_top_k if self.top_k is None else self.top_k) or None

    @property
    def quirks(self) -> Quirks:
        """Switches of the preset."""
        return DEFAULT_QUIRKS if self.preset is None else PRESETS[self.preset]


@dataclass(frozen=True)
class Quirks:
    """Behaviour of published programs that the default fixes.

    Attributes:
        may_predict_mask: the mask id is a candidate; a predicted mask id stays open and can survive
            to the output.
        blocks_end_after_steps: a block ends after its steps even with positions left open; they
            compete later.
        fills_prompt_masks: mask ids in the prompt are filled like the response, and take its quota.
        stop_rule: `"earliest"` honours every stop sequence; `"listed"` keeps the first match in
            list order, after which only the first listed sequence can move the stop.
        random_stream: `"rows"` draws noise for the asked positions only, so that a row is
            independent of its batch; `"full"` draws for every position that a forward feeds and
            `"block"` for every position of the block, as the programs of LLaDA-V and of VidLaDA
            consume their generator; `"masked"` one number per eligible position, as Dream's does.
        token_sampling: `"gumbel"` adds noise to the logits and measures confidences without it;
            `"categorical"` draws from the distribution at the temperature, and measures there.
        has_default_stops: the model's own stop ids apply when no stop is given.
        drops_token_after_image: the tokenizer helper loses the first token after each image
            placeholder.
        commits_first_from_prompt: over a cache that reads the prompt by itself, a model with
            shifted logits commits the first position before anything else, by what the prompt says.
        default_top_k: `top_k` where none is given.
        rows_share_blocks: rows of a batch wait until all of them have finished a block.
        refuses_remainders: lengths and steps must divide without a remainder.
        has_drifting_times: see `FrameSampling`.
    """

    may_predict_mask: bool = False
    blocks_end_after_steps: bool = False
    fills_prompt_masks: bool = False
    stop_rule: Literal["earliest", "listed"] = "earliest"
    random_stream: Literal["rows", "full", "block", "masked"] = "rows"
    token_sampling: Literal["gumbel", "categorical"] = "gumbel"
    has_default_stops: bool = True
    drops_token_after_image: bool = False
    commits_first_from_prompt: bool = False
    default_top_k: int | None = None
    rows_share_blocks: bool = False
    refuses_remainders: bool = False
    has_drifting_times: bool = False


DEFAULT_QUIRKS = Quirks()
OFFICIAL_QUIRKS = Quirks(
    may_predict_mask=True,
    blocks_end_after_steps=True,
    fills_prompt_masks=True,
    stop_rule="listed",
    random_stream="full",
    has_default_stops=False,
    drops_token_after_image=True,
    refuses_remainders=True,
)
LAVIDA_QUIRKS = dataclasses.replace(
    OFFICIAL_QUIRKS, fills_prompt_masks=False, stop_rule="earliest", refuses_remainders=False
)
# Its generation reads a top_k of 50 from a default of transformers' model configs.
LAVIDA_DREAM_QUIRKS = dataclasses.replace(
    LAVIDA_QUIRKS,
    random_stream="masked",
    token_sampling="categorical",
    commits_first_from_prompt=True,
    default_top_k=50,
)
# It proposes for the block alone, and otherwise decodes as LLaDA-V does.
VIDLADA_QUIRKS = dataclasses.replace(
    OFFICIAL_QUIRKS, fills_prompt_masks=False, random_stream="block", has_drifting_times=True
)
_FAST_DLLM = Quirks(has_default_stops=False, rows_share_blocks=True)
PRESETS: dict[str, Quirks] = {
    "official": OFFICIAL_QUIRKS,
    "lavida": LAVIDA_QUIRKS,
    "lavida_dream": LAVIDA_DREAM_QUIRKS,
    "vidlada": VIDLADA_QUIRKS,
    "fast_dllm@2025-06": _FAST_DLLM,
    "fast_dllm@2026-04": _FAST_DLLM,
    "fast_dllm@2026-04/dual": dataclasses.replace(_FAST_DLLM, blocks_end_after_steps=True),
}
"""By name, what a preset changes. "official" is the program of LLaDA and LLaDA-V, and in `generate`
that of the model at hand (`DiffusionModel.official_preset`)."""

_STEPS = ("steps", "steps_per_block", "step_ratio")


def resolve_settings(given: Mapping[str, Any], model_defaults: Mapping[str, Any]) -> Settings:
    """Settings from a call's arguments, then the model folder's, then `Settings`' own defaults.

    The first of the three that names a value wins. Lengths that nobody names follow from those that
    somebody does: `steps` and `block_length` default to `gen_length`, and a model's defaults for
    them hold only together with the model's `gen_length`.

    Besides the fields of `Settings`, `steps` may be given in two other ways: `steps_per_block`, of
    which a block takes no more than it has positions, and `step_ratio`, steps per position of a
    block, rounded down.

    Args:
        given: arguments of the call, `None` for those left out.
        model_defaults: the model folder's generation defaults; keys that `Settings` lacks are
            ignored.

    Raises:
        InvalidInputError: values that cannot work, or steps given in two ways.
    """
    names = {field.name for field in dataclasses.fields(Settings)} | set(_STEPS)
    chosen = {key: value for key, value in given.items() if value is not None}
    defaults = {
        key: value for key, value in model_defaults.items() if key in names and value is not None
    }
    if any(key in chosen for key in _STEPS):
        for key in _STEPS:
            defaults.pop(key, None)
    if "gen_length" in chosen and chosen["gen_length"] != defaults.get("gen_length"):
        for key in ("steps", "block_length"):
            defaults.pop(key, None)
    merged = {**defaults, **chosen}
    gen_length = merged.setdefault("gen_length", DEFAULT_GEN_LENGTH)
    merged.setdefault("block_length", gen_length)
    merged = _with_steps(merged)
    if isinstance(merged.get("seed"), list):
        merged["seed"] = tuple(merged["seed"])
    return Settings(**merged)


def _shown(value: Any) -> str:
    """As given; Python writes out no whole number of thousands of digits."""
    is_long = isinstance(value, int) and value.bit_length() > 256
    return f"a number of {value.bit_length()} bits" if is_long else repr(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _with_steps(merged: dict[str, Any]) -> dict[str, Any]:
    """Replaces the ways to give steps by `steps`."""
    named = {key: merged[key] for key in _STEPS if key in merged}
    rest = {key: value for key, value in merged.items() if key not in _STEPS}
    if len(named) > 1:
        given = " and ".join(f"{key} {value!r}" for key, value in named.items())
        raise InvalidInputError(f"{given} exclude each other; give one of them.")
    if not named or "steps" in named:
        return {**rest, "steps": named.get("steps", rest["gen_length"])}
    lengths = BlockSchedule(rest["gen_length"], rest["gen_length"], rest["block_length"])
    length = lengths.block_length
    per_block, ratio = named.get("steps_per_block"), named.get("step_ratio")
    if ratio is not None:
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
            raise InvalidInputError(f"step_ratio must be above 0 and at most 1, got {ratio!r}.")
        per_block = int(length * ratio)
        if per_block < 1:
            raise InvalidInputError(
                f"step_ratio {ratio!r} of a block of {length} positions is no step at all; use at "
                f"least {1 / length:.4g}."
            )
    if isinstance(per_block, bool) or not isinstance(per_block, int) or per_block < 1:
        raise InvalidInputError(
            f"steps_per_block must be a whole number of at least 1, got {per_block!r}."
        )
    return {**rest, "steps": min(per_block, length) * lengths.num_blocks}
