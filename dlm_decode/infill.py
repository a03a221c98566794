"""How a text marks what is to be decoded inside it, and LaViDa's form of it.

`<mask:4>` stands for four mask ids; `<mask>` is one, and the tokenizer's own mask token works too.
`<infill:4>` is a gap of at most four tokens, for LaViDa's infilling (FIM) checkpoint: four mask ids
and the id that ends a gap. That model leaves a place that it does not need by decoding the filler
id there; length never changes while decoding. A template with such gaps ends in the model's end of
turn.

Known of the FIM checkpoint is its program: how it was trained and prompted (with the roles and the
prompt of the other LaViDa models), and that its templates ran with 256 positions, one step each,
`prefix_lm` and `shift:shift=1/3`. Its config was not to be had, so nothing tells it from other
LaViDa checkpoints: gaps are taken by every LaViDa on LLaDA, and only the FIM checkpoint was trained
to fill them. Which ids a FIM model on Dream would use is not known either; its config may name them
(`fill_token_id`, `infill_token_id`, `infill_end_token_id`).

Source: LaViDa (arXiv 2505.16839) and its published program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from dlm_decode.errors import InvalidInputError
from dlm_decode.models.special_ids import SpecialIds

__all__ = ["template_ids"]

_MARK = re.compile(r"<(mask|infill)(?::([^<>]*))?>")
_LONGEST = 4096


def template_ids(
    text: str, encode: Callable[[str], Sequence[int]], special_ids: SpecialIds
) -> list[int]:
    """Ids of a text with marks; the pieces between marks are encoded one by one.

    Args:
        text: as the module says.
        encode: ids of a text without marks.
        special_ids: the model's.

    Raises:
        InvalidInputError: a mark without a sensible number, or a gap for a model without ids for
            it.
    """
    ids: list[int] = []
    place, has_gap = 0, False
    for mark in _MARK.finditer(text):
        ids += encode(text[place : mark.start()]) if mark.start() > place else ()
        place = mark.end()
        ids += [special_ids.mask] * _size(mark)
        if mark[1] == "infill":
            has_gap = True
            ids.append(_required(special_ids.infill, mark[0]))
    ids += encode(text[place:]) if place < len(text) else ()
    if has_gap:
        end = _required(special_ids.infill_end, "the end of a template with gaps")
        ids += [] if ids[-1] == end else [end]
    return ids


def _size(mark: re.Match[str]) -> int:
    number = "1" if mark[0] == "<mask>" else mark[2] or ""
    if not re.fullmatch(r"[0-9]{1,4}", number) or not 1 <= int(number) <= _LONGEST:
        raise InvalidInputError(
            f"cannot read {mark[0]!r} in prefill; write <mask:N> or <infill:N> with N from 1 to "
            f"{_LONGEST}, or pass ids."
        )
    return int(number)


def _required(token: int | None, what: str) -> int:
    if token is None:
        raise InvalidInputError(
            f"{what!r} in prefill needs a model with infilling ids (LaViDa on LLaDA, or "
            "infill_token_id and infill_end_token_id in the config); use <mask:N> for a hole of "
            "exactly N tokens."
        )
    return token
