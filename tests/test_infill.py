"""Templates for infilling: marks in text, LaViDa's gaps, what is refused, and what is written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlm_decode.errors import InvalidInputError
from dlm_decode.infill import template_ids
from dlm_decode.models.configuration import LlavaLLaDAConfig
from dlm_decode.models.lavida import LavidaLLaDAConfig
from dlm_decode.models.special_ids import OFFICIAL, SpecialIds, special_ids_of

LAVIDA = OFFICIAL["lavida_llada"]
QUESTION = "What colour is the circle?"


def encode(text):
    return [ord(letter) for letter in text]


def test_gaps_as_lavida_was_trained():
    mask, gap, end = 126336, 126085, 126348
    got = template_ids("a <infill:2>b<infill:1>", encode, LAVIDA)
    assert got == [97, 32, mask, mask, gap, 98, mask, gap, end]


def test_holes_are_exact_and_leave_no_other_trace():
    got = template_ids("<mask:3>a<mask>", encode, SpecialIds(mask=7))
    assert got == [7, 7, 7, 97, 7]
    assert template_ids("a < b > c", encode, SpecialIds(mask=7)) == encode("a < b > c")
    assert template_ids("", encode, SpecialIds(mask=7)) == []


def test_a_template_has_one_end():
    given = replace(LAVIDA, infill_end=ord("!"))
    assert template_ids("<infill:1>a!", encode, given)[-2:] == encode("a!")


@pytest.mark.parametrize(
    "text", ["<mask:0>", "<mask:>", "<mask:-1>", "<mask:x>", "<infill>", "<mask:5000>", "<mask:²>"]
)
def test_marks_that_mean_nothing(text):
    with pytest.raises(InvalidInputError, match="cannot read"):
        template_ids(text, encode, LAVIDA)


def test_gaps_need_a_model_with_their_ids(vlm):
    with pytest.raises(InvalidInputError, match="use <mask:N>"):
        vlm.generate(QUESTION, prefill="the circle is <infill:2> .")


def test_ids_come_with_the_checkpoint():
    assert special_ids_of(LavidaLLaDAConfig()).fill == 126086
    assert special_ids_of(LlavaLLaDAConfig()).infill is None
    own = LavidaLLaDAConfig(
        mask_token_id=3, fill_token_id=4, infill_token_id=5, infill_end_token_id=6
    )
    ids = special_ids_of(LavidaLLaDAConfig.from_dict(own.to_dict()))
    assert (ids.fill, ids.infill, ids.infill_end) == (4, 5, 6)
    assert special_ids_of(LavidaLLaDAConfig(mask_token_id=3)).infill is None


def test_marks_equal_mask_tokens(vlm):
    marked = vlm.generate(QUESTION, prefill="the circle is <mask:2> .", stop=False)
    spelled = vlm.generate(
        QUESTION, prefill="the circle is <|mdm_mask|> <|mdm_mask|> .", stop=False
    )
    assert marked.sequences.tolist() == spelled.sequences.tolist()
    assert marked.cost.num_forwards == 2


def test_gaps_are_decoded_and_their_ids_not_written(vlm, monkeypatch):
    plain = vlm.model.special_ids
    fill, gap = vlm.processor.encode("small large")
    own = replace(plain, fill=fill, infill=gap, infill_end=plain.eos)
    monkeypatch.setattr(type(vlm.model), "special_ids", own)
    monkeypatch.setattr(vlm, "special_ids", own)
    vocabulary = range(vlm.model.config.vocab_size)
    others = [token for token in vocabulary if token not in (fill, plain.mask)]
    out = vlm.generate(
        [QUESTION, QUESTION],
        prefill=["the circle is <infill:2> .", "the <infill:1> circle"],
        suppress_token_ids=others,
        stop=False,
    )
    head, dot = vlm.processor.encode("the circle is"), vlm.processor.encode(".")
    assert out.sequences[0].tolist() == [*head, fill, fill, gap, *dot, plain.eos]
    assert out.text[0] == vlm.processor.decode([*head, *dot])
    the, circle = vlm.processor.encode("the circle")
    assert out.sequences[1].tolist() == [the, fill, gap, circle, plain.eos, *[fill] * 3]
    assert out.text[1] == vlm.processor.decode([the, circle])
