"""Practice in looking options up: which letter stands in front of this option?

Models learn quickly what is in a picture, and late to find its letter in the question: with the
whole answer masked, the loss of a letter says little. Here the option is given and its letter is
not; without a picture, all options are, and as many letters are learned at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dlm_decode.eval.kinds import LETTERS

__all__ = ["ask_for_letters"]


class _Words(Protocol):
    canvas: int
    pad: int
    mask: int

    def words(self, text: str) -> list[int]: ...


def ask_for_letters(
    encoder: _Words,
    response: Tensor,
    tokens: Tensor,
    is_masked: Tensor,
    options: Sequence[str],
    numbers: np.random.Generator,
    *,
    is_blind: bool,
) -> None:
    """Turns one row of a batch into practice, in place; its answer begins with the letter.

    Args:
        encoder: text to ids.
        response: `(c,)` the answer; without a picture all options take its place, in another order.
        tokens: `(n,)` prompt and masked response.
        is_masked: `(c,)` bool, where the loss is taken.
        options: of the question; the first is a.
        numbers: draws the order.
        is_blind: the row has no picture.
    """
    places = [0]
    if is_blind:
        ids: list[int] = []
        places = []
        for number in numbers.permutation(len(options)):
            option = encoder.words(f"{LETTERS[number]} ) {options[number]}")
            if len(ids) + len(option) <= encoder.canvas:
                places.append(len(ids))
                ids += option
        response[:] = torch.tensor(ids + [encoder.pad] * (encoder.canvas - len(ids)))
    is_masked[:] = torch.isin(torch.arange(len(response)), torch.tensor(places))
    tokens[-len(response) :] = torch.where(is_masked, encoder.mask, response)
