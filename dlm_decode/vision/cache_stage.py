"""Stages that shorten what an autoregressive model cached of its prompt, once it has been read.

The prefill costs what it costs without them; every step of decoding reads fewer keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from dlm_decode.canvas import Prompt
from dlm_decode.errors import InvalidInputError
from dlm_decode.registry import describe
from dlm_decode.vision.base import Stage
from dlm_decode.vision.inside import RowLayout

__all__ = ["CacheBase", "CacheStage", "CacheView", "Eviction", "refuse_cache_stages"]


@dataclass(frozen=True)
class CacheView:
    """One row's prompt in the cache of one decoder layer.

    Attributes:
        layer: counted from 0.
        ids: `(P,)` the prompt as the language model read it; placeholders at visual tokens.
        layout: what its positions are.
        received: `(P,)` float32 attention that each position received in this layer's prefill,
            summed over the queries, mean over heads; `None` unless the stage asked.
    """

    layer: int
    ids: Tensor
    layout: RowLayout
    received: Tensor | None = None


@dataclass(frozen=True)
class Eviction:
    """What stays in the cache of one layer.

    Attributes:
        index: `(K,)` positions, ascending, K >= 1.
        groups: `(P,)` which of them each position is averaged into; `None` where the others are
            dropped.
    """

    index: Tensor
    groups: Tensor | None = None


@runtime_checkable
class CacheStage(Stage, Protocol):
    """A stage that takes keys and values of the prompt out of the cache, behind the prefill.

    What stays keeps the rotation that it was cached with, and generated tokens keep the rotary
    positions of the whole prompt. Only `AutoregressiveVlm.generate` can run it.
    """

    def reads_attention(self) -> bool:
        """Whether it needs `CacheView.received`."""
        ...

    def evict(self, view: CacheView) -> Eviction | None:
        """What stays of one row in one layer; `None` for everything.

        A row keeps equally many positions in every layer: transformers makes one mask for all.
        """
        ...


@dataclass(frozen=True)
class CacheBase:
    """Base of the stages that shorten the cache: the prefill reads the whole prompt."""

    def before_lm(self, prompt: Prompt) -> Prompt:
        """The prompt as it is."""
        return prompt


def refuse_cache_stages(stages: Sequence[Stage], reason: str) -> None:
    """Raises `InvalidInputError` if any of the stages shortens the cache behind the prefill.

    Args:
        stages: instances.
        reason: why that cannot work, and what to do instead; ends the message.
    """
    names = [describe(stage)["name"] for stage in stages if isinstance(stage, CacheStage)]
    if names:
        raise InvalidInputError(
            f"stage {', '.join(map(repr, names))} takes keys and values out of the cache behind "
            f"the prefill of an autoregressive model, and {reason}."
        )
