"""Quota schedules: exact to the official program, and what every schedule must keep."""

from __future__ import annotations

import pytest
from golden_models import read_json
from hypothesis import given
from hypothesis import strategies as st

from dlm_decode import quota
from dlm_decode.errors import InvalidInputError
from dlm_decode.quota import Dream, Linear, Shift, Uniform

ROWS = read_json("lavida", "schedules.json")


def schedule_of(name: str | None, kwargs: dict | None):
    """The official arguments; `shift` without a value means 3 there."""
    if name == "shift":
        return quota.make("shift", {"shift": 3, **(kwargs or {})})
    return quota.make(name or "uniform")


def test_every_official_row():
    refused = 0
    for row in ROWS:
        got = schedule_of(row["schedule"], row["schedule_kwargs"]).counts(
            row["masks"], row["steps"]
        )
        if row["counts"] == "AssertionError":
            refused += 1
            assert got == (row["masks"],)
            continue
        assert list(got) == row["counts"], row
    assert (len(ROWS), refused) == (378, 4)


EVEN = [name for name in quota.names() if name != "dream"]


@pytest.mark.parametrize("name", EVEN)
@given(st.integers(0, 300), st.integers(1, 300))
def test_everything_is_committed_once(name, num_open, steps):
    counts = quota.make(name).counts(num_open, steps)
    assert sum(counts) == num_open
    assert len(counts) <= steps
    assert all(count >= 0 for count in counts)
    busy = [count for count in counts if count]
    assert list(counts[: len(busy)]) == busy, "zeros at the end only"
    assert len(busy) == min(num_open, steps)


@given(st.integers(0, 300), st.integers(1, 300), st.none() | st.integers(1, 300))
def test_dream_commits_everything(num_open, steps, grid):
    counts = Dream(grid=grid).counts(num_open, steps)
    assert sum(counts) == num_open and len(counts) == steps and min(counts) >= 0


@given(st.floats(1e-3, 1e3), st.integers(1, 64), st.integers(1, 64))
def test_any_shift(shift, num_open, steps):
    assert sum(Shift(shift).counts(num_open, steps)) == num_open


def test_shapes_of_the_schedules():
    assert Uniform().counts(8, 3) == (3, 3, 2)
    assert Uniform().counts(2, 4) == (1, 1, 0, 0)
    early, late = Shift().counts(32, 8), Shift(3.0).counts(32, 8)
    assert early[0] > 2 * early[-1] and late[-1] > 2 * late[0]
    assert Shift(1.0).counts(32, 7) == Linear().counts(32, 7)
    cosine = quota.make("cosine").counts(64, 8)
    assert max(cosine) == max(cosine[2:6])


@pytest.mark.parametrize("spec", ["shift:shift=0", "shift:shift=-1", "shift:shift=yes"])
def test_bad_shift(spec):
    with pytest.raises(InvalidInputError, match="shift must be a finite number above 0"):
        quota.make(spec)


@pytest.mark.parametrize("name", EVEN)
def test_the_loop_follows_the_schedule(vlm, name):
    """Blocks of different lengths, a row that is half given, the same counts as alone."""
    ask = {"gen_length": 14, "block_length": 8, "steps": 8, "schedule": name, "stop": False}
    questions = ["what colour is the circle ?", "where is it ?"]
    prefill = [None, "the circle is red ."]
    out = vlm.generate(questions, prefill=prefill, **ask)
    for row in range(2):
        given = 0 if prefill[row] is None else len(vlm.processor.encode(prefill[row]))
        taken = [int(step.commit[row].sum()) for step in out.trajectory.steps]
        counts = quota.make(name).counts
        expected = [*counts(8 - given, 4), *counts(6, 4)]
        assert [count for count in taken if count] == [count for count in expected if count]
        alone = vlm.generate(questions[row], prefill=prefill[row], **ask)
        assert alone.sequences[0].tolist() == out.sequences[row].tolist()
    assert out.trajectory.run["settings"]["schedule"]["name"] == name


def test_a_schedule_of_ones_own(vlm):
    """An instance that nothing is registered for."""

    class Twice:
        def counts(self, num_open, steps):
            return (2,) * (num_open // 2) + (1,) * (num_open % 2)

    from dataclasses import dataclass

    own = dataclass(frozen=True)(Twice)()
    out = vlm.generate("where is it ?", gen_length=5, schedule=own, stop=False)
    assert [int(step.commit.sum()) for step in out.trajectory.steps] == [2, 2, 1]
