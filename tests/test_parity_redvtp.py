"""RedVTP on LaViDa, token for token and kept set for kept set (golden data, `repaired` program)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from golden_models import GOLDEN, lavida, lavida_prompt, read_json
from safetensors.torch import load_file
from test_quota import schedule_of
from torch import Tensor

from dlm_decode.vision.redvtp import RedVtp
from dlm_decode.vlm import DiffusionVlm

FOLDER = GOLDEN / "lavida" / "llada"
CASES = [
    case for case in read_json("lavida", "llada", "redvtp_repaired.json") if "error" not in case
]
IMPORTANCE = load_file(FOLDER / "redvtp_repaired_importance.safetensors")


@dataclass(frozen=True)
class Watched(RedVtp):
    """Remembers the importances that it ranks by."""

    seen: list[Tensor] = field(default_factory=list, compare=False)

    def keep(self, prompt, attention):
        self.seen.append(attention.mean(dim=0)[prompt.is_visual])
        return super().keep(prompt, attention)


@pytest.fixture(scope="module")
def model():
    """The reference's newline vector is bfloat16."""
    model = lavida()
    newline = model.model.image_newline
    newline.data = newline.data.bfloat16().float()
    return model


def decode(model, case, stage, preset, **options):
    params = case["kwargs"]
    return DiffusionVlm(model).generate(
        **lavida_prompt(model, "one_image"),
        sampler="baseline:remasking=" + params.get("remasking", "low_confidence"),
        stages=[stage],
        gen_length=params["max_new_tokens"],
        block_length=params["block_length"],
        steps=None if "step_ratio" in params else params["steps"],
        step_ratio=params.get("step_ratio"),
        schedule=schedule_of(params.get("schedule"), params.get("schedule_kwargs")),
        temperature=params["temperature"],
        stop=False,
        preset=preset,
        **options,
    )


def test_number_of_cases():
    assert len(CASES) == 5
    assert min(case["keep_boundary_gap"] for case in CASES) > 1e-6


@pytest.mark.parametrize("preset", ["official", None])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_redvtp_lavida(model, case, preset):
    stage = Watched(keep_ratio=case["keep_ratio"])
    out = decode(model, case, stage, preset)
    assert out.sequences[0].tolist() == case["generated"]
    shown = torch.full((case["kwargs"]["max_new_tokens"],), 300)
    for step, after in zip(out.trajectory.steps, case["history"], strict=True):
        shown = torch.where(step.commit[0], step.tokens[0], shown)
        assert shown.tolist() == after[-len(shown) :]
    first, *later = out.trajectory.steps
    (pruning,) = first.prunings
    assert pruning.kept.tolist() == case["kept_local_indices"]
    assert not any(step.prunings for step in later)
    (importance,) = stage.seen
    assert torch.allclose(importance, IMPORTANCE["importance_" + case["name"]], atol=1e-6)
    forwards = [step.forwards[0] for step in out.trajectory.steps]
    assert forwards[0].queries == (case["len_before"],)
    assert {forward.queries for forward in forwards[1:]} == {(case["len_after"],)}
    assert out.cost.calls == len(case["history"])
    assert out.cost.visual_tokens == (case["n_visual"],)
    assert out.cost.kept_visual_tokens == (case["n_kept"],)


def test_what_the_cases_can_tell_apart(model):
    """Original positions, another ratio or the whole picture do not give the golden ids."""
    case = CASES[0]
    for stage in (
        RedVtp(case["keep_ratio"], positions="original"),
        RedVtp(case["keep_ratio"] / 2),
        RedVtp(1.0),
    ):
        assert decode(model, case, stage, None).sequences[0].tolist() != case["generated"]
