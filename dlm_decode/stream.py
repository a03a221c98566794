"""Shows the canvas in a terminal while it denoises."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import Any, TextIO

__all__ = ["ConsoleStreamer"]

MASK_CHARACTER = "\u2591"


class ConsoleStreamer:
    """A streamer with the protocol of transformers' `TextDiffusionStreamer`.

    The protocol is `put`, `put_draft` and `end`. On a terminal the draft is redrawn in place;
    elsewhere each draft is a line.

    Args:
        token_text: text of one id.
        decode: text of a finished response.
        mask_id: shown as a block character.
        stream: where to write; standard output when `None`.
    """

    def __init__(
        self,
        token_text: Callable[[int], str],
        decode: Callable[[list[int]], str],
        mask_id: int,
        stream: TextIO | None = None,
    ) -> None:
        self._token_text, self._decode, self._mask_id = token_text, decode, mask_id
        self._stream = stream if stream is not None else sys.stdout
        self._is_terminal = self._stream.isatty()
        self._has_prompt = False
        self._num_lines = 0

    def put(self, value: Any) -> None:
        """The prompt's ids first (not shown), then the final ids."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._erase()
        self._stream.write(self._decode(_ids(value)) + "\n")
        self._stream.flush()

    def put_draft(self, value: Any) -> None:
        """The canvas after a step."""
        pieces = [
            MASK_CHARACTER if token == self._mask_id else self._token_text(token)
            for token in _ids(value)
        ]
        line = " ".join(piece.replace("\n", "\u23ce") for piece in pieces)
        self._erase()
        self._stream.write(line + "\n")
        self._stream.flush()
        width = max(1, shutil.get_terminal_size().columns)
        self._num_lines = -(-max(1, len(line)) // width)

    def end(self) -> None:
        """Ready for the next response."""
        self._has_prompt = False
        self._num_lines = 0

    def _erase(self) -> None:
        if self._is_terminal and self._num_lines:
            self._stream.write(f"\x1b[{self._num_lines}F\x1b[J")
        self._num_lines = 0


def _ids(value: Any) -> list[int]:
    values = value.tolist() if hasattr(value, "tolist") else list(value)
    return (
        [token for row in values for token in row]
        if values and isinstance(values[0], list)
        else values
    )
