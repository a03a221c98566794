import pytest

from dlm_decode import quota
from dlm_decode.errors import InvalidInputError
from dlm_decode.schedule import MOST_STEPS, BlockSchedule
from dlm_decode.settings import Settings, resolve_settings


@pytest.mark.parametrize(
    ("gen_length", "steps", "block_length", "per_block", "bounds"),
    [
        (8, 8, 4, (4, 4), ((0, 4), (4, 8))),
        (8, 5, 4, (3, 2), ((0, 4), (4, 8))),
        (5, 4, 2, (2, 1, 1), ((0, 2), (2, 4), (4, 5))),
        (4, 5, 2, (3, 2), ((0, 2), (2, 4))),
        (3, 1, 3, (1,), ((0, 3),)),
    ],
)
def test_blocks_and_steps(gen_length, steps, block_length, per_block, bounds):
    schedule = BlockSchedule(gen_length, steps, block_length)
    assert schedule.steps_per_block == per_block
    assert schedule.bounds == bounds


def test_fewer_steps_than_blocks_names_all_three_numbers():
    with pytest.raises(
        InvalidInputError,
        match=r"gen_length 4, block_length 2, steps 1.*steps >= 2.*block_length >= 4",
    ):
        BlockSchedule(4, 1, 2)


@pytest.mark.parametrize(
    "triple", [(0, 1, 1), (4, 0, 2), (4, 4, -1), (4, 4, 8), (4, 2.0, 2), (True, 1, 1)]
)
def test_impossible_lengths(triple):
    with pytest.raises(InvalidInputError):
        BlockSchedule(*triple)


@pytest.mark.parametrize("triple", [(5, 4, 2), (4, 5, 2)])
def test_strict_rejects_remainders(triple):
    with pytest.raises(InvalidInputError, match="preset 'official'"):
        BlockSchedule(*triple, is_strict=True)
    BlockSchedule(*triple)


def test_num_steps_counts_only_steps_that_commit():
    assert BlockSchedule(16, 32, 8).num_steps() == 16
    assert BlockSchedule(16, 8, 8).num_steps() == 8
    assert BlockSchedule(4, 4, 2).num_steps([True, False, False, False]) == 1


def test_lengths_follow_the_ones_that_are_named():
    model = {"gen_length": 32, "steps": 32, "block_length": 32, "other": 1}
    assert resolve_settings({}, model) == Settings(32, 32, 32)
    assert resolve_settings({"steps": 8}, model) == Settings(32, 8, 32)
    assert resolve_settings({"gen_length": 10}, model) == Settings(10, 10, 10)
    assert resolve_settings({"gen_length": None}, {}) == Settings(64, 64, 64)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"cfg_scale": float("nan")},
        {"preset": "offical"},
        {"seed": -1},
        {"seed": True},
        {"eos_last": "yes"},
    ],
)
def test_settings_reject(bad):
    with pytest.raises(InvalidInputError):
        Settings(**bad)


def test_three_ways_to_give_steps():
    lengths = {"gen_length": 32, "block_length": 16}
    for given, steps in (
        ({"step_ratio": 0.5}, 16),
        ({"step_ratio": 0.4}, 12),  # 16 * 0.4 is rounded down
        ({"step_ratio": 1}, 32),
        ({"steps_per_block": 5}, 10),
        ({"steps_per_block": 99}, 32),
        ({}, 32),
    ):
        assert resolve_settings({**lengths, **given}, {}).steps == steps
    assert resolve_settings({"step_ratio": 0.5}, {"gen_length": 20, "block_length": 8}).steps == 12
    assert resolve_settings({"step_ratio": 0.5}, {"gen_length": 8, "steps": 2}).steps == 4
    assert resolve_settings({}, {"gen_length": 8, "step_ratio": 0.5}).steps == 4
    assert resolve_settings({"steps": 3}, {"gen_length": 8, "step_ratio": 0.5}).steps == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 4, "step_ratio": 0.5}, "steps 4 and step_ratio 0.5 exclude each other"),
        ({"steps_per_block": 4, "step_ratio": 0.5}, "exclude each other"),
        ({"step_ratio": 0.01}, r"is no step at all; use at least 0.03125"),
        ({"step_ratio": 1.5}, "above 0 and at most 1"),
        ({"step_ratio": "half"}, "above 0 and at most 1"),
        ({"steps_per_block": 0}, "steps_per_block must be"),
        ({"schedule": "shfit"}, "Did you mean 'shift'"),
    ],
)
def test_steps_that_cannot_work(given, message):
    with pytest.raises(InvalidInputError, match=message):
        resolve_settings({"gen_length": 32, **given}, {})


def test_more_steps_than_a_list_can_hold_are_refused():
    for steps in (MOST_STEPS + 1, 10**9, 10**30):
        with pytest.raises(InvalidInputError, match=f"steps must be at most {MOST_STEPS}"):
            resolve_settings({"steps": steps}, {})
        assert resolve_settings({"gen_length": 8, "steps_per_block": steps}, {}).steps == 8
    assert BlockSchedule(8, MOST_STEPS, 4).num_steps() == 8
    assert BlockSchedule(2 * MOST_STEPS, 2 * MOST_STEPS, 2 * MOST_STEPS).num_blocks == 1
    with pytest.raises(InvalidInputError, match="grid must be a whole number from 1"):
        quota.make(f"dream:grid={10**9}")
