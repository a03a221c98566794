"""Samplers that commit many positions at once: selection on tables, then on a model."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from fakes import EOS, MASK, VOCABULARY, FakeModel, run, table_model
from test_vlm import picture

from dlm_decode import cache as caches
from dlm_decode import samplers
from dlm_decode.errors import InvalidInputError
from dlm_decode.predictor import FULL, TEXT_ONLY, Predictor
from dlm_decode.samplers.acceptance import (
    by_entropy_bound,
    by_hierarchy,
    by_stability,
    is_wide,
    mean_over,
)
from dlm_decode.samplers.base import Step
from dlm_decode.samplers.entropy_bound import EntropyBound
from dlm_decode.samplers.hierarchical import Hierarchical
from dlm_decode.samplers.klass import Klass, KlassState
from dlm_decode.samplers.prophet import Prophet
from dlm_decode.settings import Settings

EAGER = {
    "entropy_bound": "entropy_bound:gamma=12.0",
    "klass": "klass:threshold=0.02,kl_threshold=4.0,history=1",
    "hierarchical": "hierarchical:threshold=0.2,low_threshold=0.01",
    "prophet": "prophet:early=1.0,middle=0.6,late=0.3",
}


def bools(*rows):
    return torch.tensor([[char == "1" for char in row] for row in rows])


def logs(*rows):
    return torch.tensor(rows).log()


def committed(records, row=0):
    return [record.commit[row].nonzero()[:, 0].tolist() for record in records]


def reasons(records):
    return [[commit[-1] for commit in record.to_dict()["rows"][0]["commits"]] for record in records]


@pytest.mark.parametrize(
    ("entropy", "eligible", "gamma", "expected"),
    [
        ([0.04, 0.5, 0.05, 0.3], "1111", 0.1, "1011"),  # 0.04 + 0.05 <= 0.1 admits a third
        ([0.04, 0.5, 0.05, 0.3], "1111", 0.08, "1010"),
        ([0.04, 0.5, 0.05, 0.3], "1111", 0.4, "1111"),
        ([0.04, 0.5, 0.05, 0.3], "0101", 0.1, "0001"),  # the lowest always passes
        ([0.04, 0.5, 0.05, 0.3], "0101", 0.3, "0101"),
        ([0.2, 0.2, 0.2, 0.2], "1111", 0.3, "1100"),  # ties: lowest position
        ([0.0, 0.0, 0.0, 0.7], "1111", 0.0, "1111"),
        ([0.1, 0.0, 0.1, 0.7], "1111", 0.0, "1100"),
        ([float("inf"), 0.3, 0.2, 0.1], "0111", 9.0, "0111"),
        ([0.1, 0.1, 0.1, 0.1], "0000", 9.0, "0000"),
    ],
)
def test_entropy_bound_table(entropy, eligible, gamma, expected):
    got = by_entropy_bound(torch.tensor([entropy]), bools(eligible), gamma)
    assert torch.equal(got, bools(expected))


def test_entropy_bound_is_the_largest_set():
    numbers = torch.Generator().manual_seed(0)
    entropy = torch.rand(50, 8, generator=numbers)
    eligible = torch.rand(50, 8, generator=numbers) < 0.8
    got = by_entropy_bound(entropy, eligible, 0.7)
    for row in range(50):
        ascending = sorted(entropy[row][eligible[row]].tolist())
        fits = [n for n in range(1, len(ascending) + 1) if sum(ascending[: n - 1]) <= 0.7]
        assert sorted(entropy[row][got[row]].tolist()) == ascending[: max(fits, default=0)]


@pytest.mark.parametrize(
    ("confidence", "eligible", "num_stable", "expected"),
    [
        ([0.95, 0.95, 0.95, 0.5], "1111", [2, 1, 3, 9], "1010"),
        ([0.95, 0.95, 0.95, 0.5], "0111", [2, 1, 3, 9], "0010"),
        ([0.9, 0.91, 0.1, 0.1], "1111", [5, 5, 5, 5], "0100"),  # to be exceeded, not reached
        ([0.95, 0.95, 0.95, 0.95], "1111", [0, 1, 0, 1], "0000"),
    ],
)
def test_stability_table(confidence, eligible, num_stable, expected):
    got = by_stability(
        logs(confidence),
        bools(eligible),
        torch.tensor([num_stable]),
        threshold=0.9,
        history=2,
    )
    assert torch.equal(got, bools(expected))


def test_steps_without_change_are_counted():
    state = KlassState(torch.zeros(1, 4, dtype=torch.long))
    answered = bools("1110")
    for kl in ([9.0, 0.0, 0.02, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.01, 0.0, 0.0]):
        state.observe(torch.tensor([kl]), answered, 0.01)
    assert state.num_stable.tolist() == [[2, 0, 2, 0]]


@pytest.mark.parametrize(
    ("confidence", "eligible", "masked", "expected"),
    [
        ([0.5, 0.6, 0.1, 0.45, 0.3], "11011", "11011", "01010"),
        ([0.5, 0.6, 0.1, 0.35, 0.3], "11011", "11011", "01000"),  # second run too unsure
        ([0.5, 0.95, 0.92, 0.45, 0.3], "11111", "11111", "01100"),
        ([0.1, 0.2, 0.1, 0.3, 0.1], "11111", "11111", "00010"),  # the best of all
        ([0.5, 0.5, 0.1, 0.5, 0.5], "11011", "11011", "10010"),  # ties: lowest position
        ([0.5, 0.1, 0.6, 0.1, 0.7], "10101", "10101", "10101"),
        ([0.5, 0.6, 0.7, 0.8, 0.6], "11101", "11111", "00100"),  # held back, still masked
        ([0.5, 0.6, 0.7, 0.8, 0.6], "00000", "00000", "00000"),
        ([0.9, 0.4, 0.1, 0.4, 0.1], "11011", "11011", "10000"),  # to be exceeded
    ],
)
def test_hierarchy_table(confidence, eligible, masked, expected):
    got = by_hierarchy(
        logs(confidence), bools(eligible), bools(masked), threshold=0.9, low_threshold=0.4
    )
    assert torch.equal(got, bools(expected))


def test_hierarchy_of_rows_is_that_of_each_row():
    numbers = torch.Generator().manual_seed(1)
    confidence = torch.rand(60, 9, generator=numbers)
    masked = torch.rand(60, 9, generator=numbers) < 0.7
    eligible = masked & (torch.rand(60, 9, generator=numbers) < 0.8)
    got = by_hierarchy(confidence.log(), eligible, masked, threshold=0.9, low_threshold=0.4)
    for row in range(60):
        expected, position = set(), 0
        while position < 9:
            part = []
            while position < 9 and masked[row, position]:
                part += [position] if eligible[row, position] else []
                position += 1
            position += 1
            expected |= {i for i in part if confidence[row, i] > 0.9}
            best = max(part, key=lambda i: confidence[row, i], default=None)
            if best is not None and confidence[row, best] > 0.4:
                expected.add(best)
        candidates = eligible[row].nonzero()[:, 0].tolist()
        if candidates:
            expected.add(max(candidates, key=lambda i: confidence[row, i]))
        assert set(got[row].nonzero()[:, 0].tolist()) == expected


@pytest.mark.parametrize(
    ("gap", "progress", "expected"),
    [
        (7.5, 0.1, True),
        (7.4, 0.1, False),
        (7.4, 0.33, True),
        (5.0, 0.32, False),
        (5.0, 0.5, True),
        (4.9, 0.66, False),
        (4.9, 0.67, True),
        (2.4, 1.0, False),
        (float("inf"), 0.0, True),
    ],
)
def test_gap_table(gap, progress, expected):
    got = is_wide(
        torch.tensor([gap, 0.0]), torch.tensor([progress] * 2), early=7.5, middle=5.0, late=2.5
    )
    assert got.tolist() == [expected, False]


def test_mean_is_over_eligible_positions():
    values = torch.tensor([[1.0, 3.0, float("-inf")], [float("inf"), 3.0, 4.0], [1.0, 1.0, 1.0]])
    got = mean_over(values, bools("110", "011", "000"))
    assert got.tolist() == [2.0, 3.5, 0.0]


def ladder(num_positions, prompt_length=2, scale=1.0):
    """Position i proposes token i % 7, surer with every position."""
    table = torch.zeros(num_positions, VOCABULARY)
    for position in range(num_positions):
        table[position, position % 7] = scale * (1 + position)
    return table_model(table, prompt_length)


def test_entropy_bound_decodes_in_order_of_entropy():
    done = run(ladder(6), [2], Settings(6, 6, 6), sampler=EntropyBound(gamma=0.0))
    assert committed(done.records) == [[5], [4], [3], [2], [1], [0]]
    at_once = run(ladder(6), [2], Settings(6, 6, 6), sampler=EntropyBound(gamma=99.0))
    assert committed(at_once.records) == [[0, 1, 2, 3, 4, 5]]
    assert reasons(at_once.records) == [["entropy_bound"] * 6]


def test_hierarchy_breaks_runs():
    tokens = torch.tensor([[MASK, MASK, 1, MASK, MASK]])
    sampler = Hierarchical(threshold=1.0, low_threshold=0.0)
    done = run(ladder(5), [2], Settings(5, 5, 5), sampler=sampler, tokens=tokens)
    assert committed(done.records) == [[1, 4], [0, 3]]
    assert reasons(done.records)[0] == ["hierarchy", "hierarchy"]
    careful = Hierarchical(threshold=1.0, low_threshold=1.0)
    one_by_one = run(ladder(5), [2], Settings(5, 5, 5), sampler=careful, tokens=tokens)
    assert committed(one_by_one.records) == [[4], [3], [1], [0]]
    assert reasons(one_by_one.records)[0] == ["best"]


def test_klass_waits_for_history():
    """Nothing changes: the first divergence is known at step 1, the second at step 2."""
    settings = Settings(8, 8, 8)
    done = run(ladder(8, scale=3.0), [2], settings, sampler=Klass(history=2))
    assert committed(done.records) == [[7], [6], [1, 2, 3, 4, 5], [0]]
    assert reasons(done.records) == [["quota"], ["quota"], ["stable"] * 5, ["quota"]]
    sooner = run(ladder(8, scale=9.0), [2], settings, sampler=Klass(history=1))
    assert committed(sooner.records) == [[7], [0, 1, 2, 3, 4, 5, 6]]


def test_klass_starts_again_in_every_block():
    done = run(ladder(8, scale=9.0), [2], Settings(8, 8, 4), sampler=Klass(history=1))
    assert committed(done.records) == [[3], [0, 1, 2], [7], [4, 5, 6]]


def test_klass_sees_what_changes():
    """Position 0 changes at every step, the others never."""
    calls = []

    def logits_of(positions, tokens):
        calls.append(len(positions))
        logits = 9.0 * torch.nn.functional.one_hot(positions % 7, VOCABULARY).float()
        turning = 7.0 * torch.nn.functional.one_hot(torch.tensor(len(calls) % 7), VOCABULARY)
        return torch.where((positions == 2)[:, None], 9.0 * turning, logits)

    done = run(FakeModel(logits_of), [2], Settings(5, 5, 5), sampler=Klass(history=1))
    assert committed(done.records) == [[0], [1, 2, 3, 4]]
    slow = run(FakeModel(logits_of), [2], Settings(5, 10, 5), sampler=Klass(threshold=0.999999))
    assert committed(slow.records)[0] == [0], "the surest goes first, stable or not"


def test_klass_may_take_more_steps_than_the_schedule():
    table = torch.zeros(6, VOCABULARY)
    table[:, 1] = torch.tensor([9.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    done = run(table_model(table, 2), [2], Settings(6, 3, 6), sampler=Klass(history=1))
    assert not done.is_open.any()
    assert committed(done.records) == [[0, 1], [2, 3], [4, 5]]
    table[:, 1] = torch.tensor([8.0, 9.0, 10.0, 11.0, 0.1, 0.2])
    odd = run(table_model(table, 2), [2], Settings(6, 2, 6), sampler=Klass(history=1))
    assert committed(odd.records) == [[1, 2, 3], [0], [5], [4]]


def test_prophet_falls_through_its_phases():
    table = torch.zeros(9, VOCABULARY)
    table[:, 1] = 4.0
    settings = Settings(9, 9, 9)
    done = run(table_model(table, 2), [2], settings, sampler=Prophet(early=7.5, middle=5, late=4))
    # progress at step s is (s + 1) / 9; 7 / 9 is the first above 0.67
    assert committed(done.records) == [[0], [1], [2], [3], [4], [5], [6, 7, 8]]
    assert reasons(done.records)[-2:] == [["quota"], ["early_commit"] * 3]
    assert done.records[0].to_dict()["rows"][0]["info"] == {"logit_margin": 4.0}
    middle = run(table_model(table, 2), [2], settings, sampler=Prophet(early=7.5, middle=4, late=9))
    assert committed(middle.records) == [[0], [1], list(range(2, 9))]
    at_once = run(table_model(table, 2), [2], settings, sampler=Prophet(early=4.0))
    assert len(at_once.records) == 1


def test_prophet_counts_what_an_early_commit_has_done():
    table = torch.zeros(8, VOCABULARY)
    table[:, 1] = torch.tensor([8.0] * 4 + [5.0] * 4)
    done = run(table_model(table, 2), [2], Settings(8, 8, 4), sampler=Prophet())
    assert committed(done.records) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    "sampler",
    [
        EntropyBound(gamma=99.0),
        Klass(threshold=0.0, kl_threshold=9.0, history=1),
        Hierarchical(threshold=0.0, low_threshold=0.0),
        Prophet(early=0.0, middle=0.0, late=0.0),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_ids_that_come_last(sampler, temperature):
    table = torch.zeros(6, VOCABULARY)
    table[:, 1] = 3.0
    table[2, EOS] = table[4, EOS] = 9.0
    settings = Settings(6, 6, 6, temperature=temperature)
    done = run(table_model(table, 2), [2], settings, sampler=sampler, last=(EOS,))
    steps = committed(done.records)
    first_held = next(i for i, step in enumerate(steps) if {2, 4} & set(step))
    assert sorted(column for step in steps[:first_held] for column in step) == [0, 1, 3, 5]
    assert done.tokens.tolist() == [[1, 1, EOS, 1, EOS, 1]]


@dataclass(frozen=True)
class Watcher:
    """Commits the leftmost eligible position, and keeps every answer."""

    view: object = FULL
    seen: list = field(default_factory=list)

    def start(self, context: Predictor) -> None:
        pass

    def step(self, context, state) -> Step:
        prediction = context.predict(self.view, context.eligible, ("kl", "logit_margin"))
        probe = context.predict(FULL, context.eligible, ("kl",), is_charged=False)
        assert probe.kl.isinf().all()
        self.seen.append((context.eligible, prediction, context.predictor))
        commit = context.eligible & (context.eligible.cumsum(dim=1) == 1)
        return Step(commit, prediction.tokens, prediction, reasons={})


def changing_model(seed=0):
    """Logits drift with every call of the head, per position alike whatever else is asked."""
    tables = torch.randn(40, 30, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2
    model = FakeModel(lambda positions, tokens: tables[0][positions])
    forward = model.hidden_states

    def hidden_states(*inputs):
        model.logits_of = lambda positions, tokens: tables[len(model.calls) - 1][positions]
        return forward(*inputs)

    model.hidden_states = hidden_states
    return model, tables


def test_divergence_between_steps():
    model, tables = changing_model()
    watcher = Watcher()
    tokens = torch.full((2, 6), MASK)
    tokens[1, :2] = 1
    run(model, [2, 2], Settings(6, 6, 3), sampler=watcher, tokens=tokens)
    log_probs = tables.double().log_softmax(-1)
    last: dict[tuple[int, int], int] = {}
    for step, (eligible, prediction, _) in enumerate(watcher.seen):
        call = 2 * step  # the probe is every second forward
        assert torch.equal(prediction.kl.isfinite() | eligible, eligible)
        for row, column in eligible.nonzero().tolist():
            got, position = prediction.kl[row, column].item(), 2 + column
            top = tables[call, position].clone()
            top[MASK] = float("-inf")
            first, second = top.topk(2).values.tolist()
            assert prediction.logit_margin[row, column].item() == pytest.approx(first - second)
            if (row, column) not in last:
                assert got == float("inf")
            else:
                now, before = log_probs[call, position], log_probs[last[row, column], position]
                expected = (now.exp() * (now - before)).sum().item()
                assert got == pytest.approx(expected, abs=2e-3)
            last[row, column] = call
    store = watcher.seen[-1][2]._log_probs[FULL]._store
    assert store.shape == (5, VOCABULARY), (
        "2 open positions of row 0, 3 of row 1; places serve again"
    )
    assert store.dtype == torch.float16


def test_every_view_has_its_own_history():
    table = torch.randn(4, VOCABULARY)

    @dataclass(frozen=True)
    class Both(Watcher):
        def step(self, context, state) -> Step:
            Watcher(view=TEXT_ONLY, seen=self.seen).step(context, state)
            return Watcher(view=FULL, seen=self.seen).step(context, state)

    model = FakeModel(lambda positions, tokens: table[positions % 4])
    watcher = Both()
    run(model, [4], Settings(4, 4, 4), sampler=watcher, num_visual=4)
    is_new = [bool(prediction.kl.isinf().all()) for _, prediction, _ in watcher.seen]
    assert is_new[:4] == [True, True, False, False]
    assert all(
        (prediction.kl[eligible] < 2e-3).all() for eligible, prediction, _ in watcher.seen[2:]
    )


@pytest.mark.parametrize("name", sorted(EAGER))
@pytest.mark.parametrize(
    ("temperature", "cache"),
    [(0.0, None), (0.5, None), (0.5, "dual"), *((0.0, name) for name in sorted(caches.names()))],
)
def test_on_a_model(vlm, name, temperature, cache):
    questions = ["what colour is the circle ?", "where is the red square ? what is there ?"]
    images, prefill = [picture(seed=0), picture(seed=1)], [None, "the circle is"]
    ask = {"gen_length": 12, "steps": 12, "block_length": 6, "stop": False, "cache": cache}
    ask = {**ask, "temperature": temperature, "seed": 3}
    mask = vlm.model.special_ids.mask
    for spec in (name, EAGER[name]):
        both = vlm.generate(questions, images=images, prefill=prefill, sampler=spec, **ask)
        assert mask not in both.sequences
        assert all(
            bool(step.commit[step.active].any(dim=1).all()) for step in both.trajectory.steps
        )
        for row, question in enumerate(questions):
            alone = vlm.generate(
                question, images=images[row], prefill=prefill[row], sampler=spec, **ask
            )
            assert alone.sequences[0].tolist() == both.sequences[row].tolist()
            assert alone.cost.flops == both.cost.row_flops[row]
        again = vlm.generate(questions, images=images, prefill=prefill, sampler=spec, **ask)
        assert torch.equal(again.sequences, both.sequences)
    assert len(both.trajectory) < 12, "the eager settings commit more than the schedule"


def test_registered():
    assert set(EAGER) <= set(samplers.names())
    assert samplers.make("klass:kl_threshold=0.015,threshold=0.6") == Klass(0.6, 0.015)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("entropy_bound:gamma=-1", "gamma must be a number of at least 0"),
        ("entropy_bound:gamma=much", "gamma must be a number"),
        ("klass:history=0", "history must be a whole number of at least 1"),
        ("klass:threshold=2", "threshold must be from 0 to 1"),
        ("klass:kl_threshold=-0.1", "kl_threshold must be"),
        ("hierarchical:low_threshold=0.95", "low_threshold must be at most threshold"),
        ("hierarchical:threshold=90", "threshold must be from 0 to 1"),
        ("prophet:late=-2", "late must be"),
        ("prophet:mid=2", "Available: early, late, middle"),
    ],
)
def test_bad_options(spec, message):
    with pytest.raises(InvalidInputError, match=message):
        samplers.make(spec)
