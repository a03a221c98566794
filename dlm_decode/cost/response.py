"""What an autoregressive response costs, in the conventions of the papers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from dlm_decode.cost.flops import (
    Geometry,
    Work,
    head_flops,
    kv_bytes_per_token,
    layer_flops,
    vision_flops,
)
from dlm_decode.errors import InvalidInputError, UnknownNameError

__all__ = ["CONVENTIONS", "Convention", "ResponseCost", "Schedule", "convention", "response_cost"]

Pairs = Literal["full", "causal"]
ReducedAttention = Literal["everywhere", "stage_layers"]
Head = Literal["every", "last", "none"]
Unit = Literal["flops", "macs"]

_BYTES_PER_NUMBER = 2


@dataclass(frozen=True)
class Convention:
    """What is counted.

    Args:
        attention: pairs of a query and a key of the prompt: `"full"` counts all, `"causal"` those
            in which the key does not lie behind the query.
        reduced_attention: where the products of attention are counted once a stage has shortened
            some layers: `"everywhere"`, or `"stage_layers"`, only in the layers whose attention
            the stage reads (a profiler that does not see fused attention).
        head: prompt positions at which the head is counted; of generated tokens it always is,
            except with `"none"`.
        has_vision: count the tower and the projector.
        mlp_matrices: matrices per MLP of the language model; `None` for those it has.
        unit: `"flops"`, or `"macs"`, half as many.
        text_tokens: text tokens of the prompt that the paper's figures suit.
        new_tokens: generated tokens that are fed back, likewise.

    Raises:
        UnknownNameError: another value of `attention`, `reduced_attention`, `head` or `unit`.
    """

    attention: Pairs = "causal"
    reduced_attention: ReducedAttention = "everywhere"
    head: Head = "last"
    has_vision: bool = True
    mlp_matrices: int | None = None
    unit: Unit = "flops"
    text_tokens: int = 46
    new_tokens: int = 100

    def __post_init__(self) -> None:
        choices = {
            "attention": Pairs,
            "reduced_attention": ReducedAttention,
            "head": Head,
            "unit": Unit,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in get_args(allowed):
                raise UnknownNameError(name, str(getattr(self, name)), get_args(allowed))


CONVENTIONS: dict[str, Convention] = {
    "default": Convention(),
    "lightkv": Convention(attention="full", reduced_attention="stage_layers", head="every"),
    "specflow": Convention(
        attention="full", head="none", has_vision=False, text_tokens=33, new_tokens=0
    ),
    "fastv": Convention(
        attention="full",
        head="none",
        has_vision=False,
        mlp_matrices=2,
        unit="macs",
        text_tokens=0,
        new_tokens=0,
    ),
    "pyramiddrop": Convention(
        attention="full",
        head="none",
        has_vision=False,
        unit="macs",
        text_tokens=0,
        new_tokens=0,
    ),
}
"""By name. None but `"default"` is stated by its paper in full: they are what its figures suit.

`"default"` is what has to be computed: causal attention, the head where a token is chosen.
`"lightkv"`: LightKV's FLOPs and memory. `"specflow"`: SpecFlow's FLOPs of the prefill. `"fastv"`:
FastV's formula, which has two matrices per MLP and visual tokens only. `"pyramiddrop"`: the same
with three, which gives the 3.82 T of 576 tokens that several pruning papers name.
"""


def convention(name: str) -> Convention:
    """The convention called `name`.

    Raises:
        UnknownNameError: no such convention; the message lists them.
    """
    if name not in CONVENTIONS:
        raise UnknownNameError("convention", name, CONVENTIONS)
    return CONVENTIONS[name]


@dataclass(frozen=True)
class Schedule:
    """What each decoder layer reads of a prompt.

    Attributes:
        lengths: prompt positions that each layer computes and keeps.
        read_layers: layers (from 0) whose attention a stage reads.
    """

    lengths: tuple[int, ...]
    read_layers: frozenset[int] = frozenset()

    @property
    def is_reduced(self) -> bool:
        """Whether a stage shortens the prompt between layers."""
        return len(set(self.lengths)) > 1


@dataclass(frozen=True)
class ResponseCost:
    """Cost of one response, in the convention's unit; what a stage computes itself is left out.

    Attributes:
        prefill: decoder layers over the prompt.
        decode: decoder layers over the generated tokens.
        head: the language-model head.
        vision: tower and projector.
        kv_bytes: keys and values of prompt and generated tokens, in 16 bits per number.
    """

    prefill: int
    decode: int
    head: int
    vision: int
    kv_bytes: int

    @property
    def total(self) -> int:
        """All operations."""
        return self.prefill + self.decode + self.head + self.vision

    @property
    def kv_gib(self) -> float:
        """`kv_bytes` in GiB (2^30 bytes), which papers print as GB."""
        return self.kv_bytes / 2**30


def response_cost(
    geometry: Geometry,
    schedule: Schedule,
    convention: Convention,
    *,
    tiles: int = 0,
    new_tokens: int | None = None,
) -> ResponseCost:
    """Cost of a prompt and the generated tokens.

    Args:
        geometry: the model.
        schedule: prompt positions of each of its layers.
        convention: what is counted.
        tiles: image tiles or video frames.
        new_tokens: generated tokens, each of them fed once after the prompt; `None` for the
            convention's.

    Raises:
        InvalidInputError: a schedule of another depth, negative counts, or tiles for a model
            without a vision part.
    """
    if len(schedule.lengths) != geometry.num_layers:
        raise InvalidInputError(
            f"the schedule has {len(schedule.lengths)} layers and the model {geometry.num_layers}; "
            "give one prompt length per layer."
        )
    count = convention.new_tokens if new_tokens is None else new_tokens
    if min(*schedule.lengths, count, tiles) < 0:
        raise InvalidInputError(
            f"prompt lengths, new tokens ({count}) and tiles ({tiles}) must not be negative."
        )
    if tiles and geometry.vision is None:
        raise InvalidInputError(f"{tiles} tiles were given for a model without a vision part.")
    scale = 2 if convention.unit == "macs" else 1
    if convention.mlp_matrices is not None:
        geometry = replace(geometry, mlp_matrices=convention.mlp_matrices)
    prefill = decode = 0
    for layer, length in enumerate(schedule.lengths):
        is_counted = (
            convention.reduced_attention == "everywhere"
            or not schedule.is_reduced
            or layer in schedule.read_layers
        )
        pairs = length * length if convention.attention == "full" else length * (length + 1) // 2
        later = count * length + count * (count + 1) // 2
        prefill += layer_flops(geometry, Work(length, pairs * is_counted))
        decode += layer_flops(geometry, Work(count, later * is_counted))
    heads = {"every": schedule.lengths[-1] + count, "last": 1 + count, "none": 0}[convention.head]
    vision = geometry.vision if convention.has_vision else None
    per_layer = kv_bytes_per_token(replace(geometry, num_layers=1), _BYTES_PER_NUMBER)
    return ResponseCost(
        prefill=prefill // scale,
        decode=decode // scale,
        head=head_flops(geometry, heads) // scale,
        vision=0 if vision is None else vision_flops(vision, tiles) // scale,
        kv_bytes=per_layer * sum(length + count for length in schedule.lengths),
    )
