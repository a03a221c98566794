"""The shipped weights answer questions about held-out pictures, and only with the picture."""

from __future__ import annotations

import pytest

import dlm_decode
from dlm_decode.eval.run_scenes import evaluate_scenes


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    vlm, folder = dlm_decode.load("tiny"), tmp_path_factory.mktemp("scenes")
    return {
        is_blind: evaluate_scenes(
            vlm, {}, output=folder / f"{is_blind}.jsonl", limit=96, is_blind=is_blind
        )
        for is_blind in (False, True)
    }


def test_answers_are_right(reports):
    """92.1 % of 1000 questions are; of 96 a share below 0.8 has a chance of less than 1 in 1000."""
    assert reports[False]["accuracy"] >= 0.8


def test_answers_come_from_the_picture(reports):
    assert reports[False]["accuracy"] - reports[True]["accuracy"] >= 0.3
