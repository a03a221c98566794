"""Measurements on steps counted by hand, and on what was recorded."""

from __future__ import annotations

import json

import pytest
import torch

from dlm_decode.cli import main
from dlm_decode.errors import InvalidInputError
from dlm_decode.eval.analyse import (
    ProbedStep,
    Response,
    agreement,
    disagreement_map,
    draw_map,
    read_responses,
    record_scenes,
    reliability,
    render,
    report_of,
    responses_of,
)
from dlm_decode.eval.scene_questions import heldout_samples

EOS = 9


def step(full, text, commits, is_full=True, eligible=None):
    commits = {position: (token, "quota") for position, token in commits.items()}
    chosen = frozenset(full if eligible is None else eligible)
    return ProbedStep(full, text, commits, chosen, is_full)


def response(*steps):
    return Response(steps, 4, frozenset([EOS]), 10.0, 2.0, 40.0)


AGREEING = response(
    step({0: 1, 1: 2, 2: 3, 3: EOS}, {0: 1, 1: 2, 2: 5, 3: EOS}, {0: 1}),
    step({1: 2, 2: 4, 3: EOS}, {1: 2, 2: 4, 3: EOS}, {3: EOS}),
    step({1: 2, 2: 4}, {1: 6, 2: 4}, {1: 2}),
    step({2: 3}, {2: 3}, {2: 3}),
)


def test_agreement_by_hand():
    found = agreement([AGREEING])
    assert found["agreement"] == 3 / 4
    assert found["agreement_without_padding"] == 2 / 3
    assert found["image_dependent_steps"] == 1 / 4
    assert found["already_top"] == 3 / 3
    assert found["already_top_at_first"] == 3 / 3
    assert found["oracle_cost"] == (10 + 2 + 10 + 2) / 40
    assert (found["tokens"], found["steps"], found["responses"]) == (4, 4, 1)


def test_tokens_that_were_never_top_before():
    late = response(step({0: 1, 1: 2}, {0: 1, 1: 2}, {0: 1}), step({1: 3}, {1: 3}, {1: 3}))
    assert agreement([late])["already_top"] == 0


def test_nothing_to_measure_is_none_not_zero():
    assert agreement([])["agreement"] is None
    assert reliability([])["acceptance_error"] is None
    assert "-" in render(report_of([]))


def test_map_by_hand():
    found = disagreement_map([AGREEING, response(AGREEING.steps[0])])
    assert found["open"] == [[2, 2, 2, 2], [0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 1, 0]]
    assert found["disagreeing"] == [[0, 0, 2, 0], [0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert found["per_step"] == [2 / 8, 0, 1 / 2, 0]


def test_reliability_by_hand():
    routed = response(
        step({0: 1, 1: 2, 2: 3, 3: 4}, {0: 1, 1: 2, 2: 3, 3: 4}, {0: 1}),
        step({1: 2, 2: 3, 3: 5}, {1: 2, 2: 3, 3: 6}, {1: 2}, is_full=False, eligible={1, 2}),
        step({2: 7, 3: 5}, {2: 3, 3: 5}, {2: 3}, is_full=False),
        step({3: 5}, {3: 4}, {3: 5}),
    )
    found = reliability([routed])
    # Steps 1, 2, 3 have anchors of age 1, 2, 3, all of step 0.
    assert found["coverage"] == [1 / 2, 1 / 2, 0, None]
    assert found["certified"] == [2 / 2, 1 / 2, 1 / 1, None]
    # Age 1 compares steps 0-1 (position 3 changed), 1-2 (2 changed), 2-3 (none).
    assert found["epsilon"] == [2 / 6, 2 / 3, 1 / 1, None]
    assert found["epsilon_certified"] == [1 / 4, 1 / 1, 1 / 1, None]
    assert found["acceptance_error"] == 1 / 2
    assert found["accepted_by_age"] == [1 / 2, 1 / 2, 0, 0, 0]
    assert found["accepted"] == 2


@pytest.mark.parametrize("sampler", ["baseline", "lown"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_probes_touch_nothing(vlm, sampler, temperature):
    sample = next(heldout_samples(1))
    ask = {"images": sample.image, "sampler": sampler, "temperature": temperature, "seed": 3}
    plain = vlm.generate(sample.question, **ask)
    probed = vlm.generate(sample.question, probe="packed", **ask)
    assert torch.equal(plain.sequences, probed.sequences)
    assert probed.cost.flops == plain.cost.flops
    assert probed.cost.forwards == plain.cost.forwards
    records = list(probed.trajectory.records())
    (found,) = responses_of(records)
    assert len(found.steps) == len(plain.trajectory)
    assert found.full_flops > found.text_flops
    if sampler == "baseline" and temperature == 0:
        for own in found.steps:
            assert all(own.full[place] == token for place, (token, _) in own.commits.items())
        assert reliability([found])["accepted"] == 0


def test_blocks_bound_what_is_eligible(vlm):
    sample = next(heldout_samples(1))
    out = vlm.generate(
        sample.question, images=sample.image, block_length=4, stop=False, probe="original"
    )
    (found,) = responses_of(list(out.trajectory.records()))
    assert found.steps[0].eligible == {0, 1, 2, 3}
    assert set(found.steps[0].full) == set(range(8))
    assert found.steps[-1].eligible <= {4, 5, 6, 7}


def test_recordings_resume(vlm, tmp_path):
    options = {"sampler": "lown"}
    first = record_scenes(vlm, options, tmp_path, limit=3, batch=2)
    stamps = [path.stat().st_mtime_ns for path in first]
    lines = first[1].read_text().splitlines()
    first[1].write_text("\n".join(lines[:-1]) + "\n")  # as a killed run leaves it
    again = record_scenes(vlm, options, tmp_path, limit=3, batch=2)
    assert again == first
    assert again[0].stat().st_mtime_ns == stamps[0]
    assert len(read_responses(again)) == 3
    more = record_scenes(vlm, options, tmp_path, limit=4, batch=2)
    assert len(read_responses(more)) == 4
    with pytest.raises(InvalidInputError, match="other settings"):
        record_scenes(vlm, options, tmp_path, limit=4, batch=3)
    with pytest.raises(InvalidInputError, match="at least 1"):
        record_scenes(vlm, options, tmp_path, limit=0)


def test_trajectories_that_cannot_be_analysed(vlm, tmp_path):
    plain = vlm.generate("is there a circle ?").trajectory
    with pytest.raises(InvalidInputError, match="holds no probes"):
        read_responses([plain.save(tmp_path / "plain.jsonl")])
    blind = vlm.generate("is there a circle ?", probe="packed").trajectory
    assert read_responses([blind.save(tmp_path / "blind.jsonl")]) == []
    blind.end = {}
    with pytest.raises(InvalidInputError, match="not finished"):
        read_responses([blind.save(tmp_path / "killed.jsonl")])
    with pytest.raises(InvalidInputError, match="Did you mean 'packed'"):
        vlm.generate("is there a circle ?", probe="paked")


def test_command(checkpoint, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    common = ["analyse", "--model", str(checkpoint), "--output", str(tmp_path / "out")]
    assert main([*common, "--limit", "3", "--steps", "4", "--plot"]) == 0
    assert "acceptance_error" in capsys.readouterr().out
    reports = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert set(reports) == {"baseline", "lown"}
    assert reports["baseline"]["agreement"]["responses"] == 3
    assert (tmp_path / "out" / "map0.png").read_bytes().startswith(b"\x89PNG")
    file = tmp_path / "out" / "1" / "00000.jsonl"
    again = ["analyse", "--trajectory", str(file), "--output", str(tmp_path / "again")]
    assert main(again) == 0
    found = json.loads((tmp_path / "again" / "analysis.json").read_text())["trajectories"]
    assert found == reports["lown"]
    assert main(["analyse", "--trajectory", "nowhere.jsonl", "--output", str(tmp_path)]) == 2


def test_a_map_of_nothing_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="no map to draw"):
        draw_map(disagreement_map([]), tmp_path / "map.png")


def test_picture_of_a_map(tmp_path):
    pytest.importorskip("matplotlib")
    found = disagreement_map([AGREEING])
    for suffix, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        assert draw_map(found, tmp_path / f"map.{suffix}").read_bytes().startswith(start)


@pytest.mark.parametrize("left", ["", '{"type": "ru'])
def test_a_run_that_was_killed_in_its_first_line_resumes(vlm, tmp_path, left):
    (path,) = record_scenes(vlm, {"sampler": "baseline"}, tmp_path, limit=1)
    path.write_text(left)
    assert record_scenes(vlm, {"sampler": "baseline"}, tmp_path, limit=1) == [path]
    assert len(read_responses([path])) == 1
