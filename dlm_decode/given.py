"""What callers give as text or ids: stops, suffix, prefill and suppressed ids; and the canvas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dlm_decode.canvas import Canvas, Prompt
from dlm_decode.errors import InvalidInputError
from dlm_decode.infill import template_ids
from dlm_decode.models.special_ids import SpecialIds
from dlm_decode.settings import Settings

if TYPE_CHECKING:
    from dlm_decode.models.processing import VlmProcessor

__all__ = ["GivenIds", "Prefill", "start_canvas"]

Prefill = tuple[int, ...] | list[tuple[int, ...] | None] | None


@dataclass(frozen=True)
class GivenIds:
    """Turns texts and ids into checked ids.

    Every method raises `InvalidInputError` for ids outside the vocabulary, for empty sequences, and
    for text without a tokenizer.

    Attributes:
        processor: encodes text; `None` without a tokenizer.
        special_ids: the model's.
        vocab_size: ids lie below it.
        num_valid_tokens: ids from here on are no tokens; `None` where all are.
        name: of the model, for messages.
    """

    processor: VlmProcessor | None
    special_ids: SpecialIds
    vocab_size: int
    num_valid_tokens: int | None
    name: str

    def require_processor(self, what: str) -> VlmProcessor:
        """The processor, for `what`; raises `InvalidInputError` where there is none."""
        if self.processor is None:
            raise InvalidInputError(
                f"{what} needs a tokenizer, and {self.name!r} has none; "
                "put the tokenizer files into the checkpoint folder, "
                "or use input_ids= and id lists."
            )
        return self.processor

    def ids(self, value: str | Sequence[int] | None, name: str) -> tuple[int, ...] | None:
        """Ids of a text or of ids that are ids already; `name` is for messages."""
        if value is None:
            return None
        if not isinstance(value, Iterable):
            raise InvalidInputError(f"{name} must be a text or a sequence of ids, got {value!r}.")
        ids = tuple(
            self.require_processor(f"{name} as text").encode(value)
            if isinstance(value, str)
            else value
        )
        if not ids:
            raise InvalidInputError(f"{name} is empty; leave it out or give at least one token.")
        size = self.vocab_size
        wrong = [token for token in ids if not 0 <= token < size]
        if wrong:
            raise InvalidInputError(
                f"{name} has ids {wrong[:5]}, which are outside the vocabulary of {size}."
            )
        return ids

    def prefill(self, value: Any) -> Prefill:
        """One entry for every row, or a list with one per row; texts may hold marks."""
        is_list = isinstance(value, (list, tuple))
        if is_list and not all(isinstance(entry, int) for entry in value):
            return [self.ids(self._unmarked(entry), "prefill") for entry in value]
        return self.ids(self._unmarked(value), "prefill")

    def _unmarked(self, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        encode = self.require_processor("prefill as text").encode
        return template_ids(value, encode, self.special_ids)

    def template_length(self, prefill: Prefill) -> int | None:
        """Canvas length that a template implies; `None` where nothing given holds a mask id."""
        entries = [ids for ids in (prefill if isinstance(prefill, list) else [prefill]) if ids]
        mask_id = self.special_ids.mask
        has_mask = any(mask_id in ids for ids in entries)
        return max(map(len, entries)) if has_mask else None

    def stop_sequences(self, stop: Any, settings: Settings) -> list[tuple[int, ...]]:
        """What ends a response: what the caller says, and the model's own stops."""
        if stop is True:
            raise InvalidInputError(
                "stop=True means nothing; pass stop strings or ids, None or False."
            )
        if stop is False:
            return []
        is_single = isinstance(stop, str) or not isinstance(stop, Iterable)
        given: list[Any] = [] if stop is None else [stop] if is_single else list(stop)
        sequences = []
        for entry in given:
            ids = self.ids((entry,) if isinstance(entry, int) else entry, "a stop sequence")
            if ids is not None:
                sequences.append(ids)
        if settings.quirks.has_default_stops:
            special = self.special_ids
            sequences += [(token,) for token in special.stop if (token,) not in sequences]
        return sequences

    def suppressed(self, extra: Sequence[int]) -> list[int]:
        """Ids that are never proposed: the model's own and `extra`, sorted."""
        size = self.vocab_size
        wrong = [token for token in extra if not 0 <= token < size]
        if wrong:
            raise InvalidInputError(
                f"suppress_token_ids {wrong} are outside the vocabulary of {size} ids."
            )
        limit = min(size, self.num_valid_tokens or size)
        return sorted(token for token in {*self.special_ids.suppress, *extra} if token < limit)


def start_canvas(
    prompts: Sequence[Prompt],
    settings: Settings,
    prefill: Prefill,
    mask_id: int,
    device: torch.device,
) -> Canvas:
    """The canvas that decoding starts from: masks, with what `prefill` gives.

    Raises:
        InvalidInputError: a prefill that is too long, another number of entries than rows, or a
            preset that cannot take a batch with mask ids in its prompts.
    """
    length = settings.gen_length
    tokens = torch.full((len(prompts), length), mask_id, dtype=torch.long)
    entries = prefill if isinstance(prefill, list) else [prefill] * len(prompts)
    if len(entries) != len(prompts):
        raise InvalidInputError(
            f"prefill has {len(entries)} entries for {len(prompts)} rows; give one per row."
        )
    for row, ids in enumerate(entries):
        if ids is None:
            continue
        if len(ids) > length:
            raise InvalidInputError(
                f"prefill has {len(ids)} tokens and gen_length is {length}; "
                f"use gen_length >= {len(ids)}."
            )
        tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.long)
    is_open = tokens == mask_id
    lead = 0
    if settings.quirks.fills_prompt_masks:
        masked = [(prompt.ids == mask_id).nonzero()[:, 0].tolist() for prompt in prompts]
        if any(masked):
            if len(prompts) > 1:
                raise InvalidInputError(
                    "preset 'official' fills mask ids in the prompt, one row at a time; "
                    "pass one prompt, or preset=None."
                )
            lead = prompts[0].length - masked[0][0]
            head = prompts[0].ids[None, masked[0][0] :].cpu()
            tokens = torch.cat([head, tokens], dim=1)
            is_open = torch.cat([head == mask_id, is_open], dim=1)
    return Canvas.create(tokens.to(device), is_open.to(device), lead)
