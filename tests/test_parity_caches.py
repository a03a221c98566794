"""Fast-dLLM and dLLM-Cache, token for token and forward for forward (golden data), in float32."""

from __future__ import annotations

import pytest
import torch
from golden_models import fastdllm, read_json, tiny56, tiny_prompt
from test_parity_generation import TINY, check, decode, ids

from dlm_decode.cache.dllm import Dllm
from dlm_decode.samplers import make
from dlm_decode.vlm import DiffusionVlm

FAST = read_json("fastdllm", "cases.json")
CASES = [case for case in FAST["cases"] if case["source"] != "llada_official"]
CACHED = [case for case in TINY["cases"] if case["dllm_cache"]]
# With a share between 0 and 1, positions whose input did not change have equal similarities, and
# rounding, thus the CPU, decides among them. Those cases cannot be reproduced everywhere.
EXACT = [case for case in CACHED if case["dllm_cache"]["transfer_ratio"] in (0, 1)]


@pytest.fixture(scope="module")
def llada():
    return DiffusionVlm(fastdllm())


def sampler_of(case: dict, cache: str):
    params = case["params"]
    options = {"cache": cache, "rule": "quota"}
    for rule in ("threshold", "factor"):
        if rule in params:
            options |= {"rule": rule, rule: params[rule]}
    version = case["source"][-7:].replace("_", "-")
    return make(f"fast_dllm@{version}", options)


def test_number_of_cases():
    assert (len(CASES), len(CACHED), len(EXACT)) == (77, 14, 8)


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_fast_dllm(llada, case):
    params, prompt = case["params"], FAST["prompts"][case["prompt"]]
    rows = [torch.tensor(row) for row in (prompt if isinstance(prompt[0], list) else [prompt])]
    cache = {"plain": "none"}.get(case["cache"], case["cache"])
    out = llada.generate(
        input_ids=rows,
        sampler=sampler_of(case, cache),
        gen_length=params["gen_length"],
        steps=params["steps"],
        block_length=params["block_length"],
    )
    start = len(rows[0])
    expected = torch.tensor(case["output"]).reshape(len(rows), -1)[:, start:]
    assert out.sequences.tolist() == expected.tolist()
    assert out.cost.calls == case["nfe"]
    assert (out.sequences == llada.model.special_ids.mask).sum() == case["masks_left"]
    check_trace(out, case, start, len(rows))


def check_trace(out, case, start, num_rows):
    """Every forward's kind and length, and what was revealed after it with which confidence."""
    ours = []
    for record in out.trajectory.steps:
        reveals = [
            [
                [
                    start + place,
                    int(record.tokens[row, place]),
                    float(record.confidence[row, place]),
                ]
                for place in record.commit[row].nonzero()[:, 0].tolist()
            ]
            for row in range(num_rows)
        ]
        for number, forward in enumerate(record.forwards):
            shown = reveals if number == 0 else [[]] * num_rows
            ours.append((forward.kind, forward.queries[0], shown))
    theirs = [(step["kind"], step["n_in"], step["revealed"]) for step in case["steps"]]
    assert [step[:2] for step in ours] == [step[:2] for step in theirs]
    for (*_, mine), (*_, reference) in zip(ours, theirs, strict=True):
        for own, other in zip(mine, reference, strict=True):
            assert [entry[:2] for entry in own] == [entry[:2] for entry in sorted(other)]
            for entry, wanted in zip(own, sorted(other), strict=True):
                assert entry[2] == pytest.approx(wanted[2], abs=1e-4)


@pytest.fixture(scope="module")
def tiny_model():
    return tiny56()


@pytest.mark.parametrize("case", EXACT, ids=ids(EXACT))
def test_dllm_cache(tiny_model, case):
    setting = case["dllm_cache"]
    prompt = TINY["prompts"][case["prompt"]]
    for name in ("image_aspect_ratio", "mm_patch_merge_type", "mm_newline_position"):
        setattr(tiny_model.config, name, prompt[name])
    policy = Dllm(
        prompt_interval=setting["prompt_interval_steps"],
        gen_interval=setting["gen_interval_steps"],
        transfer_ratio=setting["transfer_ratio"],
    )
    vlm = DiffusionVlm(tiny_model)
    check(decode(vlm, case, tiny_prompt(tiny_model, case["prompt"]), cache=policy), case)
