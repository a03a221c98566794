"""Attention masks of stock models, cut to the columns that a layer still works on.

B rows, S columns of the unreduced batch, n of the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dlm_decode.errors import InvalidInputError

__all__ = ["Columns", "decode_mask", "prefill_mask"]


@dataclass(frozen=True)
class Columns:
    """Where a layer's positions stand in the unreduced batch.

    Attributes:
        index: `(B, n)`; anything at padding.
        padding: columns of padding in front of each row.
    """

    index: Tensor
    padding: tuple[int, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Real positions of each row."""
        return tuple(self.index.shape[1] - padding for padding in self.padding)

    @cached_property
    def is_real(self) -> Tensor:
        """`(B, n)` bool."""
        places = torch.arange(self.index.shape[1], device=self.index.device)
        return places >= torch.tensor(self.padding, device=places.device)[:, None]


def prefill_mask(mask: Any, columns: Columns, implementation: str, dtype: torch.dtype) -> Any:
    """The mask of a prefill, in the form that the attention implementation takes.

    Args:
        mask: the model's own for S columns: `(B, 1, S, S)`, `(B, S)` for flash attention, or `None`
            for causal attention without padding.
        columns: of the layer.
        implementation: name of the attention implementation.
        dtype: of additive masks.

    Raises:
        InvalidInputError: a mask of another form.
    """
    is_padded = any(columns.padding)
    if "flash" in implementation:
        return columns.is_real if is_padded else None
    if mask is None and not is_padded:
        return None
    is_real = columns.is_real
    if mask is None:
        count = is_real.shape[1]
        cut = torch.ones(count, count, dtype=torch.bool, device=is_real.device).tril()
        cut = _in_form(cut[None, None], implementation, dtype)
    else:
        _check(mask, implementation)
        index = columns.index.to(mask.device)
        rows = torch.arange(len(index), device=mask.device)[:, None, None]
        mask = mask.expand(len(index), -1, -1, -1)
        cut = mask[rows, :, index[:, :, None], index[:, None, :]].permute(0, 3, 1, 2)
    return _without_padding(cut, is_real.to(cut.device))


def decode_mask(
    mask: Any,
    columns: Columns,
    num_before: int,
    total: int,
    implementation: str,
    dtype: torch.dtype,
) -> Any:
    """The mask of a step of decoding with one query; arguments as for `prefill_mask`.

    Args:
        mask: the model's own, whose last axis has `total` columns; or `None`.
        columns: of the layer in the prefill.
        num_before: S.
        total: S and what has been generated, this step's token included.
        implementation: see there.
        dtype: see there.
    """
    is_padded = any(columns.padding)
    if mask is None and not is_padded:
        return None
    num_rows = len(columns.index)
    new = torch.arange(num_before, total, device=columns.index.device).expand(num_rows, -1)
    is_real = torch.cat([columns.is_real, torch.ones_like(new, dtype=torch.bool)], dim=1)
    if "flash" in implementation:
        return is_real if is_padded else None
    if mask is None:
        return _in_form(is_real[:, None, None], implementation, dtype)
    _check(mask, implementation)
    index = torch.cat([columns.index, new], dim=1).to(mask.device)
    cut = mask.expand(num_rows, -1, -1, -1).gather(3, index[:, None, None])
    is_real = is_real.to(cut.device)[:, None, None]
    return cut & is_real if cut.dtype == torch.bool else cut.masked_fill(~is_real, _least(cut))


def _without_padding(mask: Tensor, is_real: Tensor) -> Tensor:
    """Nothing attends to padding; padding attends to everything, so that it stays finite."""
    allowed = is_real[:, None, None, :] | ~is_real[:, None, :, None]
    is_padding = ~is_real[:, None, :, None]
    if mask.dtype == torch.bool:
        return (mask & allowed) | is_padding
    return mask.masked_fill(~allowed, _least(mask)).masked_fill(is_padding, 0.0)


def _in_form(allowed: Tensor, implementation: str, dtype: torch.dtype) -> Tensor:
    """A bool mask as the attention implementation takes it."""
    if implementation != "eager":
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(
        ~allowed, torch.finfo(dtype).min
    )


def _least(mask: Tensor) -> float:
    return torch.finfo(mask.dtype).min


def _check(mask: Any, implementation: str) -> None:
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise InvalidInputError(
            f"attention masks of {implementation!r} cannot be cut to the tokens that are left; "
            "load the model with attn_implementation='sdpa'."
        )
