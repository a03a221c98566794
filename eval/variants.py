"""Decoding settings as they are written on command lines, and named suites of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.settings import Settings

__all__ = [
    "BUDGETS",
    "SUITES",
    "Variant",
    "check_suite",
    "fewer_steps",
    "payable_budgets",
    "suite",
    "suite_names",
]

BUDGETS = (0.6, 0.45, 0.3, 0.2, 0.15, 0.1, 0.07)
"""Relative costs at which budgets of LOWN are tried."""

_OPTIONS = (
    "steps",
    "steps_per_block",
    "step_ratio",
    "schedule",
    "gen_length",
    "block_length",
    "temperature",
    "seed",
    "cfg_scale",
    "cache",
)


@dataclass(frozen=True)
class Variant:
    """One setting, written `SAMPLER[+STAGE...][@key=value,...]`.

    Keys are arguments of `generate`. A spec with several options separates them by semicolons
    behind the last `@`; names of settings such as `lightkv@qwen2.5-vl` have one of their own.

    Examples: `"lown:guard=none+stride:keep_ratio=0.5@steps=16"`,
    `"baseline@cache=dllm:gen_interval=4;transfer_ratio=0.5"`.

    Attributes:
        name: as written.
        options: arguments of `generate`.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Reads the written form.

        Raises:
            UnknownNameError: an unknown sampler, stage or option.
            InvalidInputError: a malformed text.
        """
        from dlm_decode import cache, quota, samplers, vision

        sampler, stages, pairs = _split(text)
        options: dict[str, Any] = {
            "sampler": samplers.make(sampler),
            "stages": [vision.make(stage) for stage in stages],
        }
        for key, value in pairs.items():
            if key == "cache":
                options["cache"] = value if value == "none" else cache.make(value)
                continue
            if key == "schedule":
                options["schedule"] = quota.make(value)
                continue
            try:
                options[key] = json.loads(value)
            except json.JSONDecodeError:
                raise InvalidInputError(
                    f"'{key}={value}' in variant {text!r} is no number."
                ) from None
        return cls(text, options)

    @property
    def sampler_name(self) -> str:
        """Registered name of the sampler, whatever its options."""
        return self.options["sampler"].name

    def arguments(self) -> list[str]:
        """The same setting as options of `dlm-decode generate`."""
        sampler, stages, pairs = _split(self.name)
        parts = ["--sampler", sampler]
        for stage in stages:
            parts += ["--stage", stage]
        for key, value in pairs.items():
            parts += [f"--{key.replace('_', '-')}", value]
        return parts

    def with_random_access(self, full_share: float, seed: int) -> Variant:
        """The same setting of LOWN with FULL steps drawn at random.

        Args:
            full_share: share of the steps that run FULL, in (0, 1].
            seed: of the draw.

        Raises:
            InvalidInputError: the sampler is not LOWN with its certificate.
        """
        from dlm_decode.samplers.lown import Lown

        made = self.options["sampler"]
        if not isinstance(made, Lown) or made.access != "certificate":
            raise InvalidInputError(
                f"random access can be matched to settings of lown with access='certificate' "
                f"only, got {self.name!r}."
            )
        sampler, stages, pairs = _split(self.name)
        own = {"access": "random", "full_share": f"{full_share:.4f}"}
        if made.budget is not None:
            own["budget"] = "none"
        name, _, written = sampler.partition(":")
        kept = [knob for knob in written.split(",") if knob.partition("=")[0].strip() not in own]
        knobs = [*filter(None, kept), *(f"{key}={value}" for key, value in own.items())]
        methods = [f"{name}:{','.join(knobs)}", *stages]
        given = {**pairs, "seed": str(seed)}
        tail = ",".join(f"{key}={value.replace(',', ';')}" for key, value in given.items())
        return Variant.parse(f"{'+'.join(methods)}@{tail}")


def _split(text: str) -> tuple[str, list[str], dict[str, str]]:
    """Sampler, stages and options of a written variant, still as text."""
    from dlm_decode import samplers, vision

    methods, mark, tail, aliases = [], "+", text, samplers.aliases()
    while mark == "+":
        # Names of settings may hold both marks.
        alias = max((name for name in aliases if tail.startswith(name)), key=len, default="")
        end = next((at for at in range(len(alias), len(tail)) if tail[at] in "+@"), len(tail))
        methods.append(tail[:end])
        mark, tail, aliases = tail[end : end + 1], tail[end + 1 :], vision.aliases()
    sampler, *stages = methods
    pairs = {}
    for part in filter(None, tail.split(",")):
        key, equals, value = part.partition("=")
        if key.strip() not in _OPTIONS or not equals:
            raise InvalidInputError(
                f"cannot read {part!r} in variant {text!r}; after @ come key=value pairs of "
                f"{', '.join(_OPTIONS)}."
            )
        if key.strip() in pairs:
            raise InvalidInputError(f"{key.strip()!r} stands twice in variant {text!r}.")
        pairs[key.strip()] = value.strip().replace(";", ",")
    return sampler, stages, pairs


def fewer_steps(settings: Settings, *divisors: int) -> list[str]:
    """The baseline with a part of its steps, as variants; none that leaves all of them."""
    counts = [max(settings.blocks.num_blocks, settings.steps // part) for part in divisors]
    return [f"baseline@steps={count}" for count in counts if count < settings.steps]


def payable_budgets(settings: Settings) -> list[float]:
    """Those of `BUDGETS` that pay at least one FULL forward."""
    return [budget for budget in BUDGETS if budget * settings.blocks.num_steps() >= 1]


def _lown_suite(settings: Settings) -> list[str]:
    """LOWN, the baseline with fewer steps, access without certificates, and the ablation ladder."""
    periods = (2, 4, 8)
    return [
        *fewer_steps(settings, 2, 4),
        "lown",
        *(f"lown:access=every,every={period}" for period in periods),
        *(f"lown:access=random,full_share={1 / period}" for period in periods),
        "lown:accept=k,order=confidence",  # the ladder: routing only,
        "lown:accept=k",  # with disagreements first, and (as "lown") with the whole prefix
    ]


def _choices_suite(settings: Settings) -> list[str]:
    """What the paper leaves open: guard, exemption from it, rotary positions."""
    guards = [
        f"guard={guard},guard_exempt_special={exempt}"
        for guard in ("scan", "adjacent")
        for exempt in ("true", "false")
    ]
    return [
        f"lown:{guard},positions={positions}"
        for positions in ("packed", "original")
        for guard in (*guards, "guard=none")
    ]


def _budget_suite(settings: Settings) -> list[str]:
    """LOWN at set costs, the baseline with fewer steps, and pruning."""
    return [
        *fewer_steps(settings, 2, 4, 8),
        *(f"baseline+stride:keep_ratio={ratio}" for ratio in (0.5, 0.3, 0.2, 0.1, 0.05)),
        "lown",
        *(f"lown:budget={budget}" for budget in payable_budgets(settings)),
    ]


def _cache_suite(settings: Settings) -> list[str]:
    """Every sampler over every cache; caches that work by blocks get four blocks.

    In a single block `dual` is the same as `prefix`, and `vicinity` has no neighbours to feed.
    """
    num_blocks = settings.blocks.num_blocks
    is_blocked = num_blocks > 1
    length = -(-settings.gen_length // min(4, settings.steps, settings.gen_length))
    blocks = [] if is_blocked else [f"block_length={length}"]
    margin = max(1, (settings.block_length if is_blocked else length) // 2)
    whole = [["cache=none"], ["cache=prefix"], ["cache=dllm"]]
    parted = [
        [*blocks, f"cache={policy}"]
        for policy in ("none", "prefix", "dual", f"vicinity:before={margin};after={margin}")
    ]
    names = []
    for sampler in (
        "baseline",
        "fast_dllm:threshold=0.9",
        "fast_dllm:rule=factor,factor=1.0",
        "lown",
        "lown+fast_dllm",
    ):
        has_own_cache = "fast_dllm" in sampler
        for tail in [*whole, *parted]:
            kept = tail if has_own_cache else [part for part in tail if part != "cache=none"]
            names.append("@".join(filter(None, (sampler, ",".join(kept)))))
    return names


def _stage_suite(reference: str) -> list[str]:
    """Every vision stage that keeps a share, and that the model can run, at three shares; LightKV.

    What stays keeps its rotary positions where the stage leaves the choice: small models have seen
    few others.
    """
    from dlm_decode import vision
    from dlm_decode.samplers.autoregressive import Autoregressive
    from dlm_decode.vision.base import AttentionStage
    from dlm_decode.vision.cache_stage import CacheStage

    refused = AttentionStage if reference == Autoregressive.name else CacheStage
    names = []
    for name in vision.names():
        knobs = {field.name for field in fields(vision.get(name))}  # type: ignore[arg-type]
        if "keep_ratio" not in knobs:
            continue
        if not isinstance(vision.make(f"{name}:keep_ratio=0.5"), refused):
            tail = ",positions=original" if "positions" in knobs else ""
            names += [f"{name}:keep_ratio={share}{tail}" for share in STAGE_SHARES]
    names.append("lightkv:windows=1,positions=original")
    return [f"{reference}+{name}" for name in names]


_STAGES = "stages"
STAGE_SHARES = (0.333, 0.222, 0.111)
"""What the suite `stages` keeps: the three budgets of SpecFlow's tables, 192, 128 and 64 of 576."""

SUITES: dict[str, Callable[[Settings], list[str]]] = {
    "lown": _lown_suite,
    "lown-choices": _choices_suite,
    "lown-budget": _budget_suite,
    "caches": _cache_suite,
}
"""Named lists of variants of a diffusion model whose own settings are given."""


def suite(name: str, settings: Settings, reference: str = "baseline") -> list[str]:
    """The variants of a suite, the reference first, each once.

    Args:
        name: key of `SUITES`, or `"stages"`.
        settings: the model's own; step counts and block lengths follow from them.
        reference: the sampler that the model is decoded with where nothing is said.

    Raises:
        UnknownNameError: no such suite.
    """
    check_suite(name)
    made = _stage_suite(reference) if name == _STAGES else SUITES[name](settings)
    return list(dict.fromkeys([reference, *made]))


def check_suite(name: str) -> None:
    """Raises `UnknownNameError` unless there is a suite called `name`."""
    if name not in suite_names():
        raise UnknownNameError("suite", name, suite_names())


def suite_names() -> tuple[str, ...]:
    """Names of all suites."""
    return (*SUITES, _STAGES)
