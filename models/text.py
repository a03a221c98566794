"""Text to ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["TextCodec"]


class TextCodec:
    """A tokenizer, asked the few things that decoding wants to know.

    Args:
        tokenizer: a fast tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._text_by_id: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a response, without special tokens."""
        return self.tokenizer.decode(
            [token for token in ids if token >= 0], skip_special_tokens=True
        ).strip()

    def token_text(self, token: int) -> str:
        """Text of a single id, special tokens included."""
        if token not in self._text_by_id:
            self._text_by_id[token] = self.tokenizer.decode([token])
        return self._text_by_id[token]

    @property
    def num_tokens(self) -> int:
        """Ids that the tokenizer knows."""
        return len(self.tokenizer)

    def save_pretrained(self, folder: Any) -> None:
        """Writes the tokenizer files; everything else is in the model's config."""
        self.tokenizer.save_pretrained(folder)
