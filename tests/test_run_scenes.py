import json

import pytest

from dlm_decode.errors import InvalidInputError
from dlm_decode.eval.run_scenes import evaluate_scenes
from dlm_decode.eval.runner import report_path, summarise
from dlm_decode.eval.scene_questions import heldout_samples

OPTIONS = {"gen_length": 6, "steps": 3, "block_length": 6}


def test_results_are_appended_and_resumed(vlm, tmp_path):
    path = tmp_path / "out.jsonl"
    first = evaluate_scenes(vlm, OPTIONS, output=path, limit=5, batch=2)
    assert first["questions"] == 5
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], lines[4][:10]]))
    again = evaluate_scenes(vlm, OPTIONS, output=path, limit=5, batch=3)
    assert json.loads(report_path(path).read_text()) == again
    for report in (first, again):
        assert report["machine"].pop("batch") in (2, 3)
        for name in ("seconds_media", "seconds_prefill", "seconds_decode"):
            assert report["cost"].pop(name) > 0
    assert again == first
    entries = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [entry["id"] for entry in entries] == [sample.id for sample in heldout_samples(5)]
    more = evaluate_scenes(vlm, OPTIONS, output=path, limit=6)
    assert more["questions"] == 6


def test_other_settings_do_not_mix(vlm, tmp_path):
    path = tmp_path / "out.jsonl"
    evaluate_scenes(vlm, OPTIONS, output=path, limit=1)
    with pytest.raises(InvalidInputError, match="other settings"):
        evaluate_scenes(vlm, OPTIONS, output=path, limit=1, is_blind=True)
    with pytest.raises(InvalidInputError, match="at least 1"):
        evaluate_scenes(vlm, OPTIONS, output=path, limit=0)


def test_summary_counts_by_kind():
    entries = [
        {"kind": "a", "is_right": True, "flops": 1, "baseline_flops": 4},
        {"kind": "a", "is_right": False, "flops": 1, "baseline_flops": 4},
        {"kind": "b", "is_right": True, "flops": 2, "baseline_flops": 4},
    ]
    report = summarise(entries)
    assert report["accuracy"] == pytest.approx(2 / 3)
    assert report["accuracy_by_kind"] == {"a": 0.5, "b": 1.0}
    assert report["relative_cost"] == pytest.approx(1 / 3)
