"""The shipped video weights answer questions about held-out clips, and only with the clip."""

from __future__ import annotations

import pytest

import dlm_decode
from dlm_decode.eval.run_clips import CLIPS
from dlm_decode.eval.runner import evaluate


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    vlm, folder = dlm_decode.load("tiny-video"), tmp_path_factory.mktemp("clips")
    return {
        is_blind: evaluate(
            vlm,
            CLIPS,
            {},
            output=folder / f"{is_blind}.jsonl",
            limit=30,
            batch=15,
            is_blind=is_blind,
        )
        for is_blind in (False, True)
    }


def test_answers_are_right(reports):
    """95 % of 300 are; of 30 a share below 0.8 has a chance of about 1 in 500."""
    assert reports[False]["accuracy"] >= 0.8
    assert reports[False]["errors"] == 0


def test_answers_come_from_the_clip(reports):
    assert reports[False]["accuracy"] - reports[True]["accuracy"] >= 0.3
