"""LaViDa-Dream's greedy decoding, token for token against the official program (golden data)."""

from __future__ import annotations

import pytest
import torch
from golden_models import lavida_dream, lavida_prompt, read_json
from test_parity_lavida import prompt_of
from test_quota import schedule_of

from dlm_decode.confidence import drop_unlikely
from dlm_decode.errors import InvalidInputError
from dlm_decode.quota import Dream
from dlm_decode.settings import Settings
from dlm_decode.vlm import DiffusionVlm

GOLDEN_CASES = read_json("lavida", "dream", "generate.json")["cases"]
GREEDY = [case for case in GOLDEN_CASES if case["seed"] is None and "error" not in case]
# Cases with a seed follow torch's generator; one of them is decided by ties at 0.
SAMPLED = [
    case for case in GOLDEN_CASES if case["seed"] is not None and case.get("min_selection_gap") != 0
]
REMASKING = {
    "topk_margin": "margin",
    "entropy": "entropy",
    "maskgit_plus": "low_confidence",
    "origin": "origin",
}


@pytest.fixture(scope="module")
def model():
    return lavida_dream()


def decode(model, case: dict, preset: str | None = "official", **changes):
    """A case's arguments in our words."""
    params = case["kwargs"]
    length, ratio = params["max_new_tokens"], params.get("step_ratio")
    schedule = params.get("schedule")
    # Without a schedule, the time keeps the grid of all steps when a ratio shortens the loop.
    own = Dream(grid=length if ratio else None)
    return DiffusionVlm(model).generate(
        **lavida_prompt(model, prompt_of(case)),
        sampler=f"baseline:remasking={REMASKING[params['alg']]},"
        f"alg_temp={params.get('alg_temp', 0.0)}",
        temperature=params["temperature"],
        top_k=params.get("top_k"),
        seed=case["seed"] or 0,
        cache="prefix_lm" if params["prefix_lm"] else None,
        gen_length=length,
        steps=params.get("steps"),
        step_ratio=ratio,
        schedule=schedule_of(schedule, params.get("schedule_kwargs")) if schedule else own,
        top_p=params["top_p"],
        stop=False,
        preset=preset,
        **changes,
    )


@pytest.mark.parametrize("case", [*GREEDY, *SAMPLED], ids=lambda case: case["name"])
def test_lavida_dream_official(model, case):
    out = decode(model, case)
    assert out.sequences[0].tolist() == case["generated"]
    steps = list(out.trajectory.steps)
    shown = torch.full((case["kwargs"]["max_new_tokens"],), 300)
    if case["kwargs"]["prefix_lm"]:
        first = steps.pop(0)  # committed by the prompt, before the first step
        assert first.commit[0].nonzero().tolist() == [[0]]
        shown[0] = first.tokens[0, 0]
    counts = [int(step.commit.sum()) for step in steps]
    if case["transfer_counts"]:  # empty where chance decides
        assert [count for count in counts if count] == case["transfer_counts"]
    for step, after in zip(steps, case["history"], strict=True):
        shown = torch.where(step.commit[0], step.tokens[0], shown)
        assert shown.tolist() == after[-len(shown) :]
    assert out.cost.calls == case["n_history"] + int(case["kwargs"]["prefix_lm"])


def test_number_of_cases():
    assert (len(GREEDY), len(SAMPLED)) == (18, 4)


def test_the_default_keeps_every_token_and_has_no_hidden_top_k(model):
    case = next(case for case in GREEDY if case["name"] == "prefix_topk_margin")
    out = decode(model, case, preset=None)
    assert model.special_ids.mask not in out.sequences
    assert out.trajectory.run["settings"]["top_k"] is None
    assert Settings().num_likeliest is None
    assert Settings(preset="lavida_dream").num_likeliest == 50
    assert Settings(preset="lavida_dream", top_k=0).num_likeliest is None
    assert Settings(top_k=7).num_likeliest == 7


def test_what_the_official_program_cannot_run(model):
    """More steps than masks: a schedule takes no more steps than there are masks."""
    (case,) = (case for case in GOLDEN_CASES if "error" in case)
    out = decode(model, case, preset=None)
    assert [int(step.commit.sum()) for step in out.trajectory.steps] == [1] * 32


def test_only_the_likeliest_take_part():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 5.0, 5.0, 0.0]])
    kept = logits.clone()
    drop_unlikely(kept, 2, None, 1.0)
    assert kept.isfinite().tolist() == [[False, True, False, True], [True, True, True, False]]
    nucleus = logits.clone()
    probability = logits.softmax(dim=1)[0]
    drop_unlikely(nucleus, None, float(probability[1]) - 1e-4, 1.0)
    assert nucleus.isfinite()[0].tolist() == [False, True, False, False]
    drop_unlikely(wider := logits.clone(), None, float(probability[1]) + 1e-4, 1.0)
    assert wider.isfinite()[0].tolist() == [False, True, False, True]
    drop_unlikely(whole := logits.clone(), 9, 1.0, 1.0)
    assert torch.equal(whole, logits)
    drop_unlikely(hot := logits.clone(), None, float(probability[1]) - 1e-4, 100.0)
    assert hot.isfinite()[0].sum() == 3


@pytest.mark.parametrize(
    "bad", [{"top_k": -1}, {"top_k": 2.0}, {"top_p": 0}, {"top_p": 1.5}, {"top_p": True}]
)
def test_settings_reject(bad):
    with pytest.raises(InvalidInputError, match="top_"):
        Settings(**bad)


@pytest.mark.parametrize("spec", [{"eps": 0.0}, {"eps": 1.0}, {"grid": 0}, {"grid": True}])
def test_bad_time(spec):
    with pytest.raises(InvalidInputError):
        Dream(**spec)
