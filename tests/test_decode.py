"""The loop and the baseline sampler on models whose logits are known."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from fakes import EOS, MASK, VOCABULARY, FakeModel, run, table_model

from dlm_decode.errors import DlmError, NumericalError
from dlm_decode.predictor import FULL
from dlm_decode.samplers.base import Step
from dlm_decode.settings import Settings


def random_model(seed: int = 0, num_positions: int = 64) -> FakeModel:
    table = (
        torch.randn(num_positions, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    )
    return FakeModel(
        lambda positions, tokens: table[positions % num_positions] + tokens[:, None] * 0.01
    )


def ladder(num_positions: int, prompt_length: int = 2) -> FakeModel:
    """Position i proposes token i % 7 with confidence growing in i."""
    table = torch.zeros(num_positions, VOCABULARY)
    for position in range(num_positions):
        table[position, position % 7] = 1.0 + position / 4
    return table_model(table, prompt_length)


def committed(records, row=0):
    return [record.commit[row].nonzero()[:, 0].tolist() for record in records]


def test_most_confident_first_inside_blocks():
    done = run(ladder(8), [2], Settings(8, 4, 4))
    assert committed(done.records) == [[2, 3], [0, 1], [6, 7], [4, 5]]
    assert done.tokens.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0]]
    assert not done.is_open.any()
    assert done.meter.forwards == {("FULL", "full"): 4}


def test_head_sees_eligible_positions_only():
    model = ladder(8)
    run(model, [2], Settings(8, 8, 4))
    assert model.head_calls == [4, 3, 2, 1, 4, 3, 2, 1]
    assert model.calls == [(1, 10)] * 8


def test_more_steps_than_positions_cost_nothing():
    model = ladder(4)
    done = run(model, [2], Settings(4, 16, 2))
    assert len(model.calls) == 4
    assert not done.is_open.any()


def test_partial_last_block_and_uneven_steps():
    done = run(ladder(5), [2], Settings(5, 4, 2))
    assert committed(done.records) == [[1], [0], [2, 3], [4]]


def test_prefilled_positions_are_kept():
    tokens = torch.tensor([[5, MASK, 5, MASK]])
    done = run(ladder(4), [2], Settings(4, 4, 2), tokens=tokens)
    assert done.tokens.tolist() == [[5, 1, 5, 3]]
    assert len(done.records) == 2


@pytest.mark.parametrize("remasking", ["low_confidence", "margin", "entropy", "random"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_batch_equals_singles(remasking, temperature):
    seeds = (3, 1, 4)
    settings = Settings(12, 7, 5, temperature=temperature, seed=seeds, cfg_scale=0.5)
    lengths = [3, 9, 5]
    together = run(
        random_model(), lengths, settings, sampler=f"baseline:remasking={remasking}", stops=[(EOS,)]
    )
    for row, length in enumerate(lengths):
        alone_settings = Settings(
            12, 7, 5, temperature=temperature, seed=(seeds[row],), cfg_scale=0.5
        )
        alone = run(
            random_model(),
            [length],
            alone_settings,
            sampler=f"baseline:remasking={remasking}",
            stops=[(EOS,)],
        )
        assert alone.tokens[0].tolist() == together.tokens[row].tolist()
        assert alone.canvas.stop_position[0] == together.canvas.stop_position[row]
        steps = [step for step in committed(together.records, row) if step]
        assert [step for step in committed(alone.records) if step] == steps


def test_seed_repeats_and_global_state_is_untouched():
    settings = Settings(8, 8, 8, temperature=1.0, seed=5)
    before = torch.random.get_rng_state()
    first, second = (run(random_model(), [3], settings).tokens for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(before, torch.random.get_rng_state())
    other = run(random_model(), [3], Settings(8, 8, 8, temperature=1.0, seed=6)).tokens
    assert not torch.equal(first, other)


def test_finished_rows_take_no_further_part():
    model = ladder(6)
    tokens = torch.tensor([[1, 1, 1, 1, 1, MASK], [MASK] * 6])
    done = run(model, [2, 2], Settings(6, 6, 6), tokens=tokens)
    assert [shape[0] for shape in model.calls] == [2, 1, 1, 1, 1, 1]
    assert done.meter.row_flops[1] == 6 * done.meter.row_flops[0]


def stop_model() -> FakeModel:
    """Confidence falls with the position; EOS is proposed at 2, other positions propose 1."""
    table = torch.zeros(6, VOCABULARY)
    table[:, 1] = torch.arange(6, 0, -1).float()
    table[2] = 0
    table[2, EOS] = 5.5
    return table_model(table, 2)


def test_stop_ends_the_row_and_saves_forwards():
    done = run(stop_model(), [2], Settings(6, 6, 6), stops=[(EOS,)])
    assert done.canvas.stop_position.tolist() == [2]
    assert committed(done.records) == [[0], [2], [1]]
    assert done.is_open.tolist() == [[False, False, False, True, True, True]]


def test_stop_freezes_only_its_row():
    table = torch.zeros(4, VOCABULARY)
    table[:, 1] = 1.0
    eos_first = FakeModel(
        lambda positions, tokens: (
            torch.nn.functional.one_hot(torch.where(positions == 2, EOS, 1), VOCABULARY).float()
            * (10.0 - positions[:, None])
        )
    )
    done = run(eos_first, [2, 3], Settings(4, 4, 2), stops=[(EOS,)])
    assert done.tokens[0].tolist() == [EOS, MASK, MASK, MASK]
    assert done.tokens[1].tolist() == [1, 1, 1, 1]


def test_eos_last_holds_at_every_temperature():
    table = torch.zeros(4, VOCABULARY)
    table[:, 1] = 2.0
    table[1, EOS] = table[3, EOS] = 9.0
    for temperature in (0.0, 0.01):
        settings = Settings(4, 4, 4, temperature=temperature, eos_last=True)
        done = run(table_model(table, 2), [2], settings, last=(EOS,))
        assert sorted(committed(done.records)[:2]) == [[0], [2]]
        assert done.tokens.tolist() == [[1, EOS, 1, EOS]]


def test_mask_id_is_never_committed():
    table = torch.zeros(4, VOCABULARY)
    table[:, MASK] = 9.0
    table[:, 3] = 1.0
    assert run(table_model(table, 2), [2], Settings(4, 4, 4)).tokens.tolist() == [[3, 3, 3, 3]]


def test_official_preset_leaves_predicted_masks():
    table = torch.zeros(4, VOCABULARY)
    table[:, MASK] = 9.0
    model = table_model(table, 2)
    done = run(model, [2], Settings(4, 4, 4, preset="official"))
    assert done.tokens.tolist() == [[MASK] * 4]
    assert len(model.calls) == 4


def test_nan_is_an_error():
    table = torch.full((4, VOCABULARY), float("nan"))
    with pytest.raises(NumericalError, match="NaN at step 0"):
        run(table_model(table, 2), [2], Settings(4, 4, 4))


@dataclass(frozen=True)
class Scripted:
    """Commits what `mode` says, right or wrong."""

    mode: str

    def start(self, context):
        return None

    def step(self, context, state):
        prediction = context.predict(FULL, context.eligible)
        commit = torch.zeros_like(context.eligible)
        tokens = prediction.tokens
        if self.mode == "outside":
            commit = ~context.eligible
        elif self.mode == "mask":
            commit, tokens = context.eligible, torch.full_like(tokens, MASK)
        elif self.mode == "all":
            commit = context.eligible
        return Step(commit, tokens, prediction, {"quota": commit})


@pytest.mark.parametrize("mode", ["outside", "mask"])
def test_a_wrong_sampler_is_stopped(mode):
    with pytest.raises(DlmError, match="outside the eligible positions, or the mask id"):
        run(ladder(4), [2], Settings(4, 4, 2), sampler=Scripted(mode))


def test_an_idle_sampler_still_advances_one_position_per_step():
    done = run(ladder(4), [2], Settings(4, 4, 4), sampler=Scripted("nothing"))
    assert committed(done.records) == [[3], [2], [1], [0]]
    assert all(record.reasons["forced"].any() for record in done.records)


def test_greedy_blocks_end_early():
    done = run(ladder(6), [2], Settings(6, 6, 3), sampler=Scripted("all"))
    assert committed(done.records) == [[0, 1, 2], [3, 4, 5]]
