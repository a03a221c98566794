"""LaViDa-LLaDA, token for token and step for step against the official program (golden data)."""

from __future__ import annotations

import pytest
import torch
from golden_models import lavida, lavida_prompt, lavida_tensors, read_json
from test_quota import schedule_of

from dlm_decode.cache.base import Clock, Fed
from dlm_decode.cache.prefix_lm import PrefixLm
from dlm_decode.errors import InvalidInputError
from dlm_decode.vlm import DiffusionVlm

GOLDEN_CASES = read_json("lavida", "llada", "generate.json")["cases"]
CASES = [case for case in GOLDEN_CASES if "error" not in case]
PLAIN = [case for case in CASES if case["seed"] is None]
TENSORS = lavida_tensors()


@pytest.fixture(scope="module")
def model():
    return lavida()


def prompt_of(case: dict) -> str:
    if not case["has_image"]:
        return "text"
    prompts = {
        "two_images_pad_prefix": "two_images",
        "two_images_tensor4d_prefix": "two_images_stacked",
        "image1_prefix": "image_1",
        "prefix_square_single_view": "single_view",
    }
    return prompts.get(case["name"], "one_image")


def decode(model, case: dict, preset: str | None):
    """A case's arguments in our words."""
    params = dict(case["kwargs"])
    remasking = params.get("remasking", "low_confidence").replace("entrophy", "entropy")
    assert params["mask_id"] == model.special_ids.mask
    draft = params.get("draft_tokens")
    return DiffusionVlm(model).generate(
        **lavida_prompt(model, prompt_of(case)),
        sampler=f"baseline:remasking={remasking}",
        cache="prefix_lm" if params["prefix_lm"] else None,
        gen_length=params["max_new_tokens"],
        block_length=params["block_length"],
        step_ratio=params.get("step_ratio"),
        steps_per_block=params.get("step_per_block"),
        schedule=schedule_of(params.get("schedule"), params.get("schedule_kwargs")),
        temperature=params["temperature"],
        seed=case["seed"],
        prefill=draft[0] if draft else None,
        stop=False,
        preset=preset,
    )


def check(out, case: dict) -> None:
    assert out.sequences[0].tolist() == case["generated"]
    steps = out.trajectory.steps
    assert [int(step.commit.sum()) for step in steps] == case["transfer_counts"]
    ids = torch.tensor(case["kwargs"].get("draft_tokens", [[]])[0], dtype=torch.long)
    shown = torch.full((case["kwargs"]["max_new_tokens"],), case["kwargs"]["mask_id"])
    shown[: len(ids)] = ids
    for step, after in zip(steps, case["history"], strict=True):
        shown = torch.where(step.commit[0], step.tokens[0], shown)
        assert shown.tolist() == after[-len(shown) :]
    prefills = int(case["kwargs"]["prefix_lm"])
    assert out.cost.calls == case["n_history"] + prefills
    kind = "suffix" if prefills else "full"
    assert out.cost.forwards == {
        ("FULL", kind): case["n_history"],
        **({("FULL", "prefill"): 1} if prefills else {}),
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_lavida_official(model, case):
    out = decode(model, case, "official")
    assert out.trajectory.run["settings"]["preset"] == "lavida"
    check(out, case)


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case["name"])
def test_default_equals_official_without_quirks(model, case):
    check(decode(model, case, None), case)


def test_number_of_cases():
    assert (len(CASES), len(PLAIN)) == (28, 25)


def test_what_the_official_program_refuses(model):
    """A schedule that float32 leaves below 1 is completed instead."""
    (case,) = (case for case in GOLDEN_CASES if "error" in case)
    assert case["error"] == "AssertionError: "
    out = decode(model, case, None)
    assert out.cost.calls == 2
    assert model.special_ids.mask not in out.sequences


@pytest.mark.parametrize("name", ["allmask", "partial"])
def test_logits_against_the_prompt_alone(model, name):
    ids = torch.full((16,), 300) if name == "allmask" else TENSORS["partial_response_ids"]
    policy = PrefixLm()
    cache = policy.start()
    with torch.no_grad():
        prompt = model.encode_prompt(**lavida_prompt(model, "one_image"))
        length, hidden = prompt.length, None
        embeds = torch.cat([prompt.embeds, model.embed(ids)])[None]
        positions = torch.arange(length + 16)[None]
        for feed in policy.plan(Clock(0, 16, 0, 0)):
            part = slice(0, length) if feed.last == 0 else slice(length, None)
            columns = positions[:, part]
            memory = cache.memory(Fed(feed, torch.tensor([0]), 1, columns, length))
            hidden = model.hidden_states(embeds[:, part], columns, None, memory)
        logits = model.lm_head(hidden[0])
    assert torch.allclose(logits, TENSORS[f"logits_prefix_{name}"], atol=1e-4)
    last = cache.values[-1][0, :, -3:]
    assert torch.allclose(last, TENSORS["cache_layerlast_value_last3"], atol=1e-4)


def test_prompt_masks_are_left_alone_by_the_preset(model):
    """The official program reads the prompt's own embeddings, mask ids included."""
    ids = torch.tensor([1, 300, 5])
    out = DiffusionVlm(model).generate(input_ids=ids, gen_length=4, preset="official", stop=False)
    assert out.sequences.shape == (1, 4)
    assert out.cost.calls == 4


def test_presets_go_by_name_as_well(model):
    ask = {"input_ids": torch.tensor([1, 5]), "gen_length": 4, "stop": False}
    own = DiffusionVlm(model).generate(**ask, preset="lavida")
    assert own.trajectory.run["settings"]["preset"] == "lavida"
    with pytest.raises(InvalidInputError, match="Did you mean 'lavida'"):
        DiffusionVlm(model).generate(**ask, preset="lavda")
