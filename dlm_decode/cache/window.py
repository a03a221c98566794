"""Keys and values of a whole sequence, of which a forward recomputes a window."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from dlm_decode.cache.base import Cache, Fed, Memory

if TYPE_CHECKING:
    from dlm_decode.models.attention import Observe
    from dlm_decode.models.llada import LLaDALayer

__all__ = ["WindowCache", "WindowPolicy", "stored"]


class WindowPolicy:
    """Base of the policies that differ only in the window that they plan."""

    @property
    def windows_lie_in_canvas(self) -> bool:
        """Whether no window reaches into the prompt; stages between layers need that."""
        return True

    def start(self) -> Cache:
        """An empty cache."""
        return WindowCache()


@dataclass
class KeyValues:
    """Keys and values by layer, `(rows, H_kv, n, d)` each, rotated for their positions.

    Base of the caches that keep them; a cache adds its `memory`.
    """

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def crop(self, count: int) -> None:
        """See `Cache`."""
        for store in (self.keys, self.values):
            store[:] = [part[:, :, count:].contiguous() for part in store]

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values of all layers."""
        return sum(part.numel() * part.element_size() for part in (*self.keys, *self.values))


@dataclass
class WindowCache(KeyValues):
    """Keys and values of the whole sequence.

    A forward over the whole sequence replaces them; one over a window overwrites the window's part
    in place, and its queries attend to the whole.
    """

    def memory(self, fed: Fed) -> Memory:
        """The memory of one forward."""
        return _WindowMemory(self, fed)


@dataclass(frozen=True)
class _WindowMemory:
    cache: WindowCache
    fed: Fed

    def run_layer(
        self,
        index: int,
        layer: LLaDALayer,
        hidden: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        mask: Any,
        observe: Observe | None = None,
    ) -> Tensor:
        return layer(hidden, cos_sin, mask, partial(self._keep, index), observe)

    def _keep(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return (
            stored(self.cache.keys, index, key, self.fed),
            stored(self.cache.values, index, value, self.fed),
        )


def stored(store: list[Tensor], index: int, fresh: Tensor, fed: Fed) -> Tensor:
    """Writes what was computed, and returns `(R, H_kv, S, d)` to attend to.

    A layer that works on fewer positions than the first has its store on the right of the sequence,
    as wide as what came in the widest forward.
    """
    is_all = len(fed.rows) == fed.num_rows
    if fed.columns is None:
        if index == len(store):
            store.append(fresh if is_all else fresh.new_zeros(fed.num_rows, *fresh.shape[1:]))
        surplus = store[index].shape[2] - fresh.shape[2]
        if surplus < 0:
            store[index] = functional.pad(store[index], (0, 0, -surplus, 0))
        if is_all and surplus <= 0:
            store[index] = fresh
        else:
            store[index][fed.rows, :, max(surplus, 0) :] = fresh
        return fresh
    columns = fed.columns - (store[0].shape[2] - store[index].shape[2])
    store[index][fed.rows[:, None], :, columns] = fresh.transpose(1, 2)
    return store[index] if is_all else store[index][fed.rows]
