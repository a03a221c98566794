"""What a vision tower without a class token attends to, read beside its forward."""

from __future__ import annotations

from collections.abc import Collection
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from dlm_decode.models.attention import attention_rows
from dlm_decode.vision.base import TowerNeed

__all__ = ["TowerProbe"]


class TowerProbe:
    """While entered, collects what stages need of one attention layer of a tower.

    It listens to the layer's own queries and keys, so that the tower's forward stays as it is,
    whatever its attention backend; attention is computed from them, some rows at a time.

    Args:
        attention: the layer; has `q_proj`, `k_proj` and `num_heads`.
        needs: what is collected.
    """

    def __init__(self, attention: nn.Module, needs: Collection[TowerNeed]) -> None:
        self._attention: Any = attention
        self._needs = needs
        self._queries: Tensor | None = None
        self._seen: list[Tensor] = []

    def __enter__(self) -> TowerProbe:
        self._handles = [
            self._attention.q_proj.register_forward_hook(self._take_queries),
            self._attention.k_proj.register_forward_hook(self._take_keys),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def maps(self) -> Tensor:
        """`(tiles, N, C)` float32, channels as `split` takes them apart."""
        return torch.cat(self._seen)

    def split(self, maps: Tensor) -> dict[TowerNeed, Tensor]:
        """What was needed, from maps `(P, C)`.

        Returns:
            `salience` `(P,)`: attention that a patch receives in the layer, mean over heads and
            queries, which sums to 1 over a tile; `tower_keys` `(P, d)`: keys, mean over heads.
        """
        found: dict[TowerNeed, Tensor] = {}
        if "salience" in self._needs:
            found["salience"], maps = maps[:, 0], maps[:, 1:]
        if "tower_keys" in self._needs:
            found["tower_keys"] = maps
        return found

    def _take_queries(self, module: nn.Module, given: Any, queries: Tensor) -> None:
        self._queries = queries

    def _take_keys(self, module: nn.Module, given: Any, keys: Tensor) -> None:
        if self._queries is None:
            raise AssertionError("keys came before queries")
        query, key = (
            states.detach().unflatten(-1, (self._attention.num_heads, -1)).transpose(1, 2)
            for states in (self._queries, keys)
        )
        self._queries = None
        channels = []
        if "salience" in self._needs:
            received = [
                attention_rows(*tile, None).mean(dim=1)
                for tile in zip(query.split(1), key.split(1), strict=True)
            ]
            channels.append(torch.cat(received)[..., None])
        if "tower_keys" in self._needs:
            channels.append(key.float().mean(dim=1))
        self._seen.append(torch.cat(channels, dim=-1))
