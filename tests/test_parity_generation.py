"""Token for token and forward for forward against the official programs (golden data), in float32
on CPU."""

from __future__ import annotations

import re

import pytest
import torch
from golden_models import (
    fastdllm,
    formula_image,
    read_json,
    realvocab,
    tiny56,
    tiny_prompt,
)

from dlm_decode.cache import CachePolicy
from dlm_decode.models.anyres import pad_to_square, pixels_of
from dlm_decode.vlm import DiffusionVlm, Output

TINY = read_json("lladav", "tiny56", "cases.json")
REAL = read_json("lladav", "realvocab", "cases.json")
FAST = read_json("fastdllm", "cases.json")
TINY_CASES = [case for case in TINY["cases"] if case["dllm_cache"] is None]
FAST_CASES = [case for case in FAST["cases"] if case["source"] == "llada_official"]


def ids(cases):
    return [case["id"] for case in cases]


def decode(
    vlm: DiffusionVlm,
    case: dict,
    inputs: dict,
    preset: str | None = "official",
    cache: CachePolicy | None = None,
) -> Output:
    """Runs a case of golden/lladav; strings are looked up in its stub tokenizer's table."""
    params, table = case["params"], case["stub_tokenizer"] or {}
    stops = params.get("stopping_criteria")
    suffix = params.get("generation_suffix")
    return vlm.generate(
        **inputs,
        sampler="baseline:remasking=" + params.get("remasking", "low_confidence"),
        gen_length=params["gen_length"],
        steps=params["steps"],
        block_length=params["block_length"],
        temperature=params.get("temperature", 0.0),
        cfg_scale=params.get("cfg_scale", 0.0),
        seed=case["torch_manual_seed"],
        stop=[table[stop] for stop in stops] if stops else False,
        suffix=table[suffix] if suffix else None,
        preset=preset,
        cache=cache,
    )


def check(out: Output, case: dict) -> None:
    assert out.sequences.tolist() == torch.tensor(case["output_ids"]).reshape(1, -1).tolist()
    assert out.cost.calls == case["num_forwards"]


def edited(model, case: dict, mask: int):
    """Applies the case's edit of head rows; right-hand sides use the rows as they were."""
    text = case.get("modify")
    if not text:
        return
    head = model.lm_head.weight.data
    before = head.clone()
    if found := re.fullmatch(
        r"lm_head\.weight\[mask_id\] = ([\d.]+) \* lm_head\.weight\[(\d+)\]", text
    ):
        head[mask] = float(found[1]) * before[int(found[2])]
        return
    many, one = text.split(";")
    targets, factor, sources = re.fullmatch(
        r"lm_head rows ([\d,]+) = ([\d.]+)\*rows \[([\d, ]+)\]", many
    ).groups()
    for target, source in zip(targets.split(","), sources.split(","), strict=True):
        head[int(target)] = float(factor) * before[int(source)]
    target, factor, source = re.fullmatch(r" row (\d+) = ([\d.]+)\*row (\d+)", one).groups()
    head[int(target)] = float(factor) * before[int(source)]


@pytest.fixture(scope="module")
def tiny_model():
    return tiny56()


@pytest.fixture
def tiny_vlm(tiny_model, request):
    case = request.param
    head = tiny_model.lm_head.weight.data.clone()
    edited(tiny_model, case, tiny_model.special_ids.mask)
    prompt = TINY["prompts"][case["prompt"]]
    for name in ("image_aspect_ratio", "mm_patch_merge_type", "mm_newline_position"):
        setattr(tiny_model.config, name, prompt[name])
    yield DiffusionVlm(tiny_model), case, tiny_prompt(tiny_model, case["prompt"])
    tiny_model.lm_head.weight.data.copy_(head)


@pytest.mark.parametrize("tiny_vlm", TINY_CASES, ids=ids(TINY_CASES), indirect=True)
def test_lladav_tiny56(tiny_vlm):
    vlm, case, inputs = tiny_vlm
    check(decode(vlm, case, inputs), case)


def touches_a_quirk(case: dict) -> bool:
    """Random streams, several stop strings, predicted or prompted mask ids: what the default does
    otherwise."""
    params = case["params"]
    return bool(
        params.get("temperature")
        or params.get("remasking") == "random"
        or len(params.get("stopping_criteria") or ()) > 1
        or case["id"].startswith("quirk_")
        or 500 in torch.tensor(case["output_ids"]).flatten().tolist()
    )


PLAIN_CASES = [case for case in TINY_CASES if not touches_a_quirk(case)]


@pytest.mark.parametrize("tiny_vlm", PLAIN_CASES, ids=ids(PLAIN_CASES), indirect=True)
def test_default_equals_official_without_quirks(tiny_vlm):
    vlm, case, inputs = tiny_vlm
    check(decode(vlm, case, inputs, preset=None), case)


QUIRK_CASES = [case for case in TINY_CASES if case["id"].startswith("quirk_")]


@pytest.mark.parametrize("tiny_vlm", QUIRK_CASES, ids=ids(QUIRK_CASES), indirect=True)
def test_default_never_returns_a_mask(tiny_vlm):
    vlm, case, inputs = tiny_vlm
    out = decode(vlm, case, inputs, preset=None)
    assert vlm.model.special_ids.mask not in out.sequences
    assert out.sequences.shape[1] == case["params"]["gen_length"]


@pytest.fixture(scope="module")
def real_model():
    return realvocab()


@pytest.mark.parametrize("case", REAL["cases"], ids=ids(REAL["cases"]))
def test_lladav_real_vocabulary(real_model, case):
    head = real_model.lm_head.weight.data
    touched = [126081, 126080, 126346, 126347, 126348]
    before = head[touched].clone()
    edited(real_model, case, real_model.special_ids.mask)
    inputs: dict = {"input_ids": torch.tensor(case["input_ids"])}
    if case["image"]:
        image = formula_image(*case["image"]["formula"])
        inputs |= {
            "pixel_values": [pixels_of(pad_to_square(image), 384)],
            "image_sizes": [image.size],
        }
    try:
        check(decode(DiffusionVlm(real_model), case, inputs), case)
    finally:
        head[touched] = before


@pytest.fixture(scope="module")
def llada():
    return fastdllm()


@pytest.mark.parametrize("case", FAST_CASES, ids=ids(FAST_CASES))
def test_llada_official(llada, case):
    params = case["params"]
    prompt = FAST["prompts"][case["prompt"]]
    rows = [torch.tensor(row) for row in (prompt if isinstance(prompt[0], list) else [prompt])]
    seed = 1234 if params.get("temperature") else None
    out = DiffusionVlm(llada).generate(
        input_ids=rows,
        gen_length=params.get("gen_length", 32),
        steps=params["steps"],
        block_length=params["block_length"],
        temperature=params.get("temperature", 0.0),
        cfg_scale=params.get("cfg_scale", 0.0),
        seed=seed,
        stop=False,
        preset="official",
    )
    expected = torch.tensor(case["output"]).reshape(len(rows), -1)[:, len(rows[0]) :]
    assert out.sequences.tolist() == expected.tolist()
    assert out.cost.calls == case["nfe"]
