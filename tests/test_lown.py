"""LOWN: selection on tables, routing on models whose two views are known."""

from __future__ import annotations

import pytest
import torch
from fakes import EOS, MASK, VOCABULARY, FakeModel, run
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_decode.canvas import IMAGE_TOKEN_ID
from dlm_decode.errors import InvalidInputError
from dlm_decode.samplers.lown import Lown, blocked_by_guard, certified_prefix, full_step_commit
from dlm_decode.settings import Settings


def ints(values):
    return torch.tensor([values])


def bools(text):
    return torch.tensor([[char == "1" for char in text]])


@pytest.mark.parametrize(
    ("rank", "agrees", "blocked", "eligible", "expected"),
    [
        ([0, 1, 2, 3], "1111", "0000", "1111", "1111"),
        ([0, 1, 2, 3], "1101", "0000", "1111", "1100"),
        ([3, 2, 1, 0], "1101", "0000", "1111", "0001"),
        ([0, 1, 2, 3], "0111", "0000", "1111", "0000"),
        ([0, 1, 2, 3], "1111", "0010", "1111", "1100"),
        ([0, 1, 2, 3], "1110", "0000", "1110", "1110"),
        ([0, 1, 2, 3], "1111", "0000", "0000", "0000"),
    ],
)
def test_certified_prefix(rank, agrees, blocked, eligible, expected):
    got = certified_prefix(ints(rank), bools(agrees), bools(blocked), bools(eligible))
    assert torch.equal(got, bools(expected))


@pytest.mark.parametrize(
    ("guard", "exempt", "tokens", "rank", "eligible", "committed", "is_committed", "expected"),
    [
        ("scan", (), [3, 4, 3, 5], [0, 1, 2, 3], "1111", [0, 0, 0, 0], "0000", "0010"),
        ("adjacent", (), [3, 4, 3, 5], [0, 1, 2, 3], "1111", [0, 0, 0, 0], "0000", "0000"),
        ("adjacent", (), [3, 3, 4, 5], [0, 1, 2, 3], "1111", [0, 0, 0, 0], "0000", "0100"),
        ("adjacent", (), [3, 3, 4, 5], [1, 0, 2, 3], "1111", [0, 0, 0, 0], "0000", "1000"),
        ("scan", (), [3, 4, 5, 6], [0, 1, 2, 3], "0111", [4, 0, 0, 0], "1000", "0100"),
        ("adjacent", (), [3, 4, 5, 6], [0, 1, 2, 3], "1110", [0, 0, 0, 5], "0001", "0010"),
        ("scan", (8,), [8, 8, 8, 8], [0, 1, 2, 3], "1111", [0, 0, 0, 0], "0000", "0000"),
        ("scan", (), [8, 8, 8, 8], [0, 1, 2, 3], "1111", [0, 0, 0, 0], "0000", "0111"),
        (None, (), [3, 3, 3, 3], [0, 1, 2, 3], "1111", [0, 0, 0, 0], "0000", "0000"),
        ("scan", (), [3, 1, 1, 3], [0, 1, 2, 3], "1001", [0, 0, 0, 0], "0000", "0001"),
    ],
)
def test_guard(guard, exempt, tokens, rank, eligible, committed, is_committed, expected):
    got = blocked_by_guard(
        ints(tokens),
        ints(rank),
        bools(eligible),
        ints(committed),
        bools(is_committed),
        guard,
        exempt,
    )
    assert torch.equal(got, bools(expected))


def two_view_model(
    full: torch.Tensor, text: torch.Tensor, prompt_length: int, num_visual: int
) -> FakeModel:
    """Logits from one table with the picture in the sequence and another without it (packed
    positions)."""
    model = FakeModel(lambda positions, tokens: full[positions], vocab_size=full.shape[1])

    def hidden_states(embeds, positions, key_mask=None):
        model.calls.append(tuple(embeds.shape[:2]))
        has_visual = (embeds[..., 0] == IMAGE_TOKEN_ID).any(dim=1, keepdim=True)
        start = torch.where(has_visual, prompt_length, prompt_length - num_visual)
        index = positions - start + torch.where(has_visual, 0, 1000)
        return torch.stack([index.float(), embeds[..., 0]], dim=-1)

    model.hidden_states = hidden_states
    model.logits_of = lambda index, tokens: torch.where(
        (index >= 500)[:, None], text[(index - 1000) % len(text)], full[index % len(full)]
    )
    return model


def ladder_table(tokens, scale=1.0):
    table = torch.zeros(len(tokens), VOCABULARY)
    for position, token in enumerate(tokens):
        table[position, token] = scale * (1.0 + (len(tokens) - position) / 4)
    return table


def decode(full_tokens, text_tokens, schedule, sampler, num_rows=1, **options):
    model = two_view_model(ladder_table(full_tokens), ladder_table(text_tokens), 5, 3)
    return run(model, [5] * num_rows, schedule, sampler=sampler, num_visual=3, **options)


def test_text_that_always_agrees_needs_one_full_forward():
    tokens = [0, 1, 2, 3, 4, 5]
    done = decode(tokens, tokens, Settings(6, 3, 6), Lown())
    assert done.tokens.tolist() == [tokens]
    assert done.meter.forwards == {("FULL", "full"): 1, ("TEXT_ONLY", "full"): 1}
    one_at_a_time = decode(tokens, tokens, Settings(6, 6, 6), Lown(accept="k"))
    assert one_at_a_time.meter.forwards == {("FULL", "full"): 1, ("TEXT_ONLY", "full"): 5}


@pytest.mark.parametrize(
    "settings", [Settings(6, 6, 6), Settings(6, 3, 6), Settings(6, 6, 2), Settings(6, 6, 1)]
)
def test_text_that_never_agrees_gives_the_baseline(settings):
    full, text = [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]
    done = decode(full, text, settings, Lown())
    baseline = decode(full, text, settings, "baseline")
    assert done.tokens.tolist() == baseline.tokens.tolist()
    assert (
        done.meter.forwards["FULL", "full"]
        == baseline.meter.forwards["FULL", "full"]
        == settings.steps
    )
    assert done.meter.forwards["TEXT_ONLY", "full"] == settings.steps - 1


@pytest.mark.parametrize(
    ("disagrees", "held", "quota", "expected"),
    [
        ("00000", None, 2, "11000"),
        ("00110", None, 2, "00110"),
        ("00010", None, 2, "10010"),
        ("11111", None, 2, "11000"),
        ("00110", "00100", 2, "10010"),
        ("00110", "11111", 2, "00110"),
        ("00110", None, 0, "00000"),
        ("00110", None, 9, "11111"),
    ],
)
def test_disagreeing_positions_go_first(disagrees, held, quota, expected):
    log_prob = torch.tensor([[-0.1, -0.2, -0.3, -0.4, -0.5]])
    got = full_step_commit(
        log_prob,
        bools("11111"),
        bools(disagrees),
        torch.tensor([quota]),
        None if held is None else bools(held),
    )
    assert torch.equal(got, bools(expected))


@pytest.mark.parametrize(("order", "second"), [("disagreement", [3, 4]), ("confidence", [2, 3])])
def test_order_of_a_full_step(order, second):
    full, text = [0, 1, 2, 3, 4, 5], [0, 1, 2, 6, 6, 5]
    sampler = Lown(guard=None, accept="k", order=order)
    done = decode(full, text, Settings(6, 3, 6), sampler)
    steps = [record.commit[0].nonzero()[:, 0].tolist() for record in done.records]
    assert steps[0] == [0, 1]
    # Position 2 is certified and 3 is not, so FULL runs.
    assert steps[1] == second


def test_anchors_age_until_full_runs():
    full, text = [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 5]
    done = decode(full, text, Settings(6, 6, 6), Lown(guard=None, accept="k"))
    ages = [int(r.per_token["anchor_age"][r.commit][0]) for r in done.records]
    assert ages == [0, 1, 2, 3, 0, 1]
    assert [r.to_dict()["rows"][0]["per_token"]["anchor_age"] for r in done.records] == [
        [age] for age in ages
    ]


def test_padding_can_be_held_back():
    tokens = [EOS, 1, EOS, 3]
    done = decode(tokens, tokens, Settings(4, 4, 4), Lown(), last=(EOS,))
    steps = [record.commit[0].nonzero()[:, 0].tolist() for record in done.records]
    assert steps[0] == [1]
    assert sorted(steps[-1])[0] in (0, 2)
    plain = decode(tokens, tokens, Settings(4, 4, 4), Lown())
    assert plain.records[0].commit[0].nonzero()[:, 0].tolist() == [0]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("shape", [(6, 4, 3), (6, 6, 6), (6, 6, 1)])
def test_always_is_the_baseline_at_any_temperature(temperature, shape):
    full, text = [0, 1, 2, 3, 4, 5], [0, 6, 2, 6, 4, 5]
    schedule = Settings(*shape, temperature=temperature, seed=5)
    sampler = Lown(access="always", accept="k", order="confidence")
    ours, baseline = (decode(full, text, schedule, name) for name in (sampler, "baseline"))
    assert ours.tokens.tolist() == baseline.tokens.tolist()
    assert ours.meter.head_flops == baseline.meter.head_flops


def test_a_fast_dllm_rule_adds_commits():
    full, text = [0, 1, 2, 3, 4, 5], [0, 1, 2, 6, 4, 5]
    plain = decode(full, text, Settings(6, 6, 6), Lown(guard=None))
    sampler = Lown(guard=None, parallel="threshold", threshold=0.0)
    eager = decode(full, text, Settings(6, 6, 6), sampler)
    assert len(eager.records) == 1 < len(plain.records)
    assert "parallel" in {commit[-1] for commit in eager.records[0].to_dict()["rows"][0]["commits"]}
    careful = decode(full, text, Settings(6, 6, 6), Lown(guard=None, parallel="factor", factor=0.0))
    assert careful.tokens.tolist() == [full]


def test_always_k_confidence_is_the_baseline():
    full, text = [0, 1, 2, 3, 4, 5], [0, 6, 2, 6, 4, 5]
    sampler = Lown(access="always", accept="k", order="confidence")
    done = decode(full, text, Settings(6, 4, 3), sampler)
    baseline = decode(full, text, Settings(6, 4, 3), "baseline")
    assert done.tokens.tolist() == baseline.tokens.tolist()
    assert done.meter.forwards == baseline.meter.forwards
    for ours, theirs in zip(done.records, baseline.records, strict=True):
        assert torch.equal(ours.commit, theirs.commit)


def test_access_schedules_count_full_forwards():
    full, text = [0, 1, 2, 3, 4, 5, 0, 1], [6] * 8
    settings = Settings(8, 8, 8)
    every = decode(full, text, settings, Lown(access="every", every=4, accept="k"))
    assert every.meter.forwards["FULL", "full"] == 2
    for seed in (0, 1, 2):
        random = decode(
            full,
            text,
            Settings(8, 8, 8, seed=seed),
            Lown(access="random", full_share=0.375, accept="k"),
        )
        assert random.meter.forwards["FULL", "full"] == 3
        assert len(random.records) == 8


def test_padding_may_repeat_unless_told_otherwise():
    tokens = [0, EOS, EOS, EOS, EOS, EOS]
    settings = Settings(6, 6, 6)
    exempt = decode(tokens, tokens, settings, Lown(guard="scan"))
    literal = decode(tokens, tokens, settings, Lown(guard="scan", guard_exempt_special=False))
    assert exempt.meter.forwards["FULL", "full"] == 1
    assert literal.meter.forwards["FULL", "full"] > 3
    assert exempt.tokens.tolist() == literal.tokens.tolist() == [tokens]


def test_prompts_without_a_picture_fall_back_to_the_baseline():
    model = two_view_model(ladder_table([0, 1, 2, 3]), ladder_table([0, 1, 2, 3]), 5, 0)
    done = run(model, [5], Settings(4, 4, 4), sampler=Lown())
    assert done.meter.forwards == {("FULL", "full"): 4}
    assert not done.records[0].info["has_visual"].any()
    assert done.tokens.tolist() == [[0, 1, 2, 3]]


def test_rows_route_on_their_own():
    full, text = [0, 1, 2, 3, 4, 5], [0, 6, 2, 6, 4, 5]
    tokens = torch.tensor([[MASK] * 6, [0, 1, MASK, MASK, MASK, MASK]])
    both = decode(full, text, Settings(6, 6, 6), Lown(), num_rows=2, tokens=tokens)
    for row in range(2):
        alone = decode(full, text, Settings(6, 6, 6), Lown(), tokens=tokens[row : row + 1])
        assert alone.tokens[0].tolist() == both.tokens[row].tolist()
        assert alone.meter.row_flops[0] == both.meter.row_flops[row]


@pytest.mark.parametrize(
    "options",
    [
        {"guard": "scna"},
        {"access": "allways"},
        {"every": 0, "access": "every"},
        {"full_share": 0, "access": "random"},
        {"positions": "old"},
        {"access": "every", "every": "2"},
        {"access": "every", "every": 1.5},
        {"budget": "0.5"},
        {"budget": True},
        {"budget": float("nan")},
        {"factor": -1.0},
        {"factor": "1"},
        {"cache": "prefx"},
        {"cache": "dllm:transfer_ratio='x'"},
    ],
)
def test_bad_options(options):
    with pytest.raises(InvalidInputError):
        Lown(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 3}, "every needs access='every'"),
        ({"full_share": 0.5, "access": "every"}, "full_share needs access='random'"),
        ({"budget": 0.5, "access": "always"}, "budget needs access='certificate'"),
        ({"budget": 1.5}, "budget must be"),
        ({"parallel": "facto"}, "Did you mean 'factor'"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(InvalidInputError, match=message):
        Lown(**options)


def test_oracle_pays_only_where_the_picture_matters():
    full, text = [0, 1, 2, 3], [0, 1, 2, 3]
    same = decode(full, text, Settings(4, 4, 4), Lown(access="oracle", accept="k", guard=None))
    assert same.meter.forwards["FULL", "full"] == 1
    blind = decode(
        full, [6, 6, 6, 6], Settings(4, 4, 4), Lown(access="oracle", accept="k", guard=None)
    )
    # the table does not change with the canvas, so the anchor stays right although the text differs
    assert blind.meter.forwards == {("FULL", "full"): 1, ("TEXT_ONLY", "full"): 3}
    assert blind.tokens.tolist() == [full]


@given(
    seed=st.integers(0, 10**6),
    budget=st.floats(0.26, 1.0),
    shape=st.sampled_from([(12, 12, 12), (12, 8, 4), (9, 9, 3)]),
    guard=st.sampled_from([None, "scan", "adjacent"]),
    num_visual=st.sampled_from([0, 1, 6]),
)
@settings(max_examples=90, deadline=None)
def test_never_above_budget(seed, budget, shape, guard, num_visual):
    numbers = torch.Generator().manual_seed(seed)
    tables = torch.randn(2, shape[0], VOCABULARY, generator=numbers) * 2
    model = two_view_model(tables[0], tables[1], 9, num_visual)
    knobs = Lown(budget=budget, guard=guard)
    rows = torch.full((3, shape[0]), MASK)
    rows[1, ::2] = 1
    rows[2] = 1  # nothing to decode
    done = run(
        model, [9, 9, 9], Settings(*shape), sampler=knobs, num_visual=num_visual, tokens=rows
    )
    assert not done.is_open.any()
    assert MASK not in done.tokens
    for spent, baseline in zip(done.meter.row_flops, done.baseline_flops, strict=True):
        assert spent <= budget * baseline + 1e-6


def test_an_ample_budget_changes_nothing_and_a_tight_one_saves():
    full, text = [0, 1, 2, 3, 4, 5, 6, 0], [0, 6, 2, 6, 4, 6, 6, 6]
    plain = decode(full, text, Settings(8, 8, 8), Lown())
    ample = decode(full, text, Settings(8, 8, 8), Lown(budget=1.0))
    tight = decode(full, text, Settings(8, 8, 8), Lown(budget=0.2))
    assert ample.meter.flops <= plain.meter.flops
    assert tight.meter.flops < plain.meter.flops
    assert tight.tokens.tolist() == [full]


def test_a_budget_below_one_forward_is_refused():
    with pytest.raises(InvalidInputError, match=r"below the cost of one FULL forward \(0\.2500"):
        decode([0, 1, 2, 3], [0, 1, 2, 3], Settings(4, 4, 4), Lown(budget=0.2))


@pytest.mark.parametrize("last", [(), (EOS,)])
def test_a_step_of_which_the_schedule_asks_nothing_commits_one_by_the_rules(last):
    """`dream` rounds its first counts down to 0; text alone must not decide such a step."""
    full, text = [EOS, 1, 2, 3, 4, 5], [6] * 6
    schedule = Settings(6, 6, 6, schedule="dream")
    assert 0 in schedule.quotas.counts(6, 6)
    ours, baseline = (
        decode(full, text, schedule, sampler, last=last)
        for sampler in (Lown(budget=1.0), "baseline")
    )
    for done in (ours, baseline):
        assert done.tokens.tolist() == [full]
        assert not any(record.reasons["forced"].any() for record in done.records)
        assert bool(done.records[0].commit[0, 0]) is not bool(last), "EOS may have to wait"
