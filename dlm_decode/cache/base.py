"""What a cache policy is: a plan per forward, and a memory that runs the layers accordingly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from dlm_decode.cost import Work

if TYPE_CHECKING:
    from dlm_decode.models.attention import Observe
    from dlm_decode.models.llada import LLaDALayer

__all__ = ["Cache", "CachePolicy", "Clock", "Fed", "Feed", "Memory", "RowShape"]


@dataclass(frozen=True)
class Clock:
    """Where a row is, as one view counts.

    Attributes:
        first: canvas column at which the row's block begins.
        last: canvas column behind the block.
        in_block: forwards that this view has run for the row since it entered the block.
        forwards: forwards that this view has run for the row.
    """

    first: int
    last: int
    in_block: int
    forwards: int


@dataclass(frozen=True)
class RowShape:
    """One row of a forward in numbers, which its work is counted from.

    Attributes:
        num_fed: positions that are fed.
        length: real length of the row's sequence.
        num_prompt: how much of it stands in front of the canvas.
        num_layers: decoder layers.
        num_front: prompt positions that speak for the canvas: 1 if logits belong to the next token.
        frame_sizes: prompt positions of each frame, by frame number; empty without pictures.
    """

    num_fed: int
    length: int
    num_prompt: int
    num_layers: int
    num_front: int = 0
    frame_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Feed:
    """What a forward is given of a row's sequence; rows with equal feeds run together.

    Attributes:
        kind: as costs and trajectories name it: `"full"`, `"suffix"`, `"block"`, `"window"`,
            `"prefill"`.
        first: first canvas column that is fed; negative ones lie in the prompt; `None` for
            everything from the start of the sequence.
        last: canvas column behind the last that is fed; `None` for everything behind `first`.
        is_detached: the position in front of `first` is not fed with it even if the model's logits
            belong to the next token; what a forward over the prompt alone ended with speaks for
            the first column then.
    """

    kind: str
    first: int | None = None
    last: int | None = None
    is_detached: bool = False

    @property
    def is_prompt(self) -> bool:
        """Whether the prompt is fed and nothing else."""
        return self.first is None and self.last == 0

    @property
    def is_whole(self) -> bool:
        """Whether the whole sequence is fed."""
        return self.first is None and self.last is None

    def work(self, row: RowShape) -> tuple[Work, ...]:
        """What each layer does for a row."""
        return (Work(row.num_fed, row.num_fed * self.num_keys(row)),) * row.num_layers

    def num_keys(self, row: RowShape) -> int:
        """Positions that can be attended to."""
        return row.length


FULL_FEED = Feed("full")


@dataclass(frozen=True)
class Fed:
    """The rows of one forward, as a memory needs to know them.

    Attributes:
        feed: the plan that they share.
        rows: `(R,)` rows of the store; guidance doubles them.
        num_rows: rows of the store.
        columns: `(R, n)` sequence columns that are fed, `None` for all.
        num_prompt: sequence columns in front of the canvas, padding included.
        frames: `(R, num_prompt)` long number of the frame that each of these columns belongs to, as
            in `Prompt.frames`; -1 for text and padding. `None` where nobody said.
        padding: columns of padding in front of each of the R rows; empty for none.
        num_front: prompt columns that speak for the canvas, as in `RowShape`.
    """

    feed: Feed
    rows: Tensor
    num_rows: int
    columns: Tensor | None
    num_prompt: int
    frames: Tensor | None = None
    padding: tuple[int, ...] = ()
    num_front: int = 0


class Memory(Protocol):
    """Runs the layers of one forward; handed to the model."""

    def run_layer(
        self,
        index: int,
        layer: LLaDALayer,
        hidden: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        mask: Any,
        observe: Observe | None = None,
    ) -> Tensor:
        """Output `(R, n, D)` of layer `index`, of which `hidden` `(R, n, D)` is the input.

        `observe`, if given, is shown the layer's queries and the keys that they attend to.
        """
        ...


class Cache(Protocol):
    """What one view of one response keeps between its forwards."""

    def memory(self, fed: Fed) -> Memory:
        """The memory of one forward."""
        ...

    def crop(self, count: int) -> None:
        """Forgets the first `count` sequence columns of every row.

        Prompts stand to the right of their padding, so these columns are padding, or belong to
        rows whose prompt was pruned and whose next forward replaces everything.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes kept."""
        ...


@runtime_checkable
class CachePolicy(Protocol):
    """A frozen dataclass of knobs; register it with `@register_cache("name")`.

    A policy sees neither tokens nor confidences. The state lies in the `Cache` that it starts, one
    for each view of each response.
    """

    def plan(self, clock: Clock) -> Feed | tuple[Feed, ...]:
        """What a row's next forward feeds; several feeds are forwards that run one by one."""
        ...

    def start(self) -> Cache:
        """An empty cache."""
        ...
