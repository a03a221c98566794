"""VidLaDA, token for token and forward for forward against the official program (golden data)."""

from __future__ import annotations

import pytest
import torch
from golden_models import read_json, vidlada, vidlada_prompt

from dlm_decode.errors import InvalidInputError
from dlm_decode.vlm import DiffusionVlm

CASES = read_json("vidlada", "generation_cases.json")
SUFFIX = [7, 21, 99]
DRAWS = {"gumbel_t0p5_seed123", "random_remask_seed5"}


@pytest.fixture(scope="module")
def model():
    return vidlada()


def decode(model, case: dict, preset: str | None):
    """A case's arguments in our words."""
    stops = None
    if case["stop"]:
        stops = [case["stop_ids"]] if "stop_ids" in case else [model.special_ids.stop]
    return DiffusionVlm(model).generate(
        **vidlada_prompt(has_video=not case.get("text")),
        sampler="baseline:remasking=" + case.get("remasking", "low_confidence"),
        gen_length=case["gen_length"],
        steps=case["steps"],
        block_length=case["block_length"],
        temperature=case["temperature"],
        cfg_scale=case.get("cfg_scale", 0.0),
        seed=case.get("seed"),
        stop=stops or False,
        suffix=SUFFIX if "generation_suffix" in case else None,
        prefill=case.get("ctx"),
        preset=preset,
    )


def check(out, case: dict) -> None:
    assert out.sequences[0].tolist() == case["ids"]
    assert out.cost.calls == case["nfe"]
    steps = out.trajectory.steps
    assert [int(step.commit.sum()) for step in steps] == case["k_per_step"]


@pytest.mark.parametrize("name", CASES)
def test_vidlada_official(model, name):
    out = decode(model, CASES[name], "official")
    assert out.trajectory.run["settings"]["preset"] == "vidlada"
    check(out, CASES[name])


@pytest.mark.parametrize("name", [name for name in CASES if name not in DRAWS])
def test_default_equals_official_without_quirks(model, name):
    check(decode(model, CASES[name], None), CASES[name])


def test_number_of_cases():
    assert len(CASES) == 16
    assert set(CASES) > DRAWS


def test_noise_is_drawn_for_the_block_alone(model):
    """In the second of two blocks: one draw per position of the block and step, nothing more."""
    for sampler, temperature, numbers in (
        ("baseline", 0.5, [192 * 4] * 4),
        ("baseline:remasking=random", 0.0, [4] * 4),
    ):
        out = DiffusionVlm(model).generate(
            **vidlada_prompt(has_video=False),
            sampler=sampler,
            gen_length=8,
            steps=4,
            block_length=4,
            temperature=temperature,
            seed=3,
            stop=False,
            preset="official",
        )
        generator = torch.Generator().manual_seed(3)
        dtype = torch.float64 if temperature else torch.float32
        draws = [torch.rand(count, generator=generator, dtype=dtype) for count in numbers]
        step = out.trajectory.steps[2]
        chosen = step.commit[0, 4:].nonzero()[:, 0]
        if not temperature:
            assert set(draws[2].topk(2).indices.tolist()) == set(chosen.tolist())
        else:
            # The prompt and what is committed give the logits anew.
            shown = torch.full((8,), model.special_ids.mask)
            for before in out.trajectory.steps[:2]:
                shown = torch.where(before.commit[0], before.tokens[0], shown)
            ids = torch.cat([vidlada_prompt(has_video=False)["input_ids"], shown])
            with torch.no_grad():
                logits = model(input_ids=ids[None])[0, -4:].double()
            logits[:, list(model.special_ids.suppress)] = float("-inf")
            noise = draws[2].view(4, 192)
            proposed = (logits / 0.5 - (-noise.log()).log()).argmax(dim=1)
            assert proposed[chosen].tolist() == step.tokens[0, 4:][chosen].tolist()


def test_preset_refuses_remainders_as_the_program_does(model):
    ask = {**vidlada_prompt(has_video=False), "gen_length": 6, "block_length": 4, "stop": False}
    with pytest.raises(InvalidInputError, match="needs block_length to divide gen_length"):
        DiffusionVlm(model).generate(**ask, preset="official")
    assert DiffusionVlm(model).generate(**ask).sequences.shape == (1, 6)
