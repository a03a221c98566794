from __future__ import annotations

import json
import shlex

import pytest

from dlm_decode import cli
from dlm_decode.cli import build_parser, main
from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.eval import run_scenes, runner, tune
from dlm_decode.eval.scene_questions import first_samples, heldout_samples
from dlm_decode.eval.tune import candidates, choose, command
from dlm_decode.eval.variants import Variant, suite
from dlm_decode.settings import Settings

FEW = ["baseline", "baseline@steps=4", "lown", "fast_dllm:threshold=0.5@cache=prefix"]


def _row(name, score, cost, ratio=1.0, errors=0):
    return {
        "name": name,
        "score": score,
        "relative_cost": cost,
        "seconds_ratio": ratio,
        "errors": errors,
    }


def test_the_cheapest_row_that_keeps_the_score_is_chosen():
    rows = [
        _row("baseline", 0.7, 0.5),
        _row("exact", 0.693, 0.4, ratio=0.2),
        _row("lower", 0.69, 0.1, ratio=0.1),
        _row("failing", 0.7, 0.05, ratio=0.05, errors=1),
        _row("untimed", 0.7, 0.3, ratio=None),
        _row("dear", 0.9, 0.6, ratio=1.5),
    ]
    assert choose(rows, 0.99)["name"] == "untimed"
    rounded = [_row("baseline", 0.05, 0.5), _row("exact", 0.045, 0.4)]
    assert choose(rounded, 0.9)["name"] == "exact", "in floats 0.9 * 0.05 is above 0.045"
    assert choose(rows, 0.98)["name"] == "lower"
    assert choose(rows, 0.99, "seconds")["name"] == "exact"
    assert choose([rows[0], rows[5]], 1.0)["name"] == "baseline"
    assert choose([rows[0], rows[5]], 1.0, "seconds")["name"] == "baseline"
    tied = [rows[0], _row("a", 0.7, 0.2), _row("b", 0.8, 0.2), _row("c", 0.8, 0.2)]
    assert choose(tied, 0.9)["name"] == "b"


def test_candidates_can_be_read_and_come_once():
    own = Settings(gen_length=32, steps=32, block_length=32)
    names = candidates(own)
    assert names[0] == "baseline"
    assert len(set(names)) == len(names)
    assert set(suite("caches", own)) < set(names)
    assert {"lown:budget=0.2", "fast_dllm:threshold=0.7@cache=none"} < set(names)
    for name in names:
        line = shlex.split(command(Variant.parse(name), "tiny"))
        parsed = build_parser().parse_args(line[1:])
        options = cli._decoding_options(parsed)
        for key, value in Variant.parse(name).options.items():
            assert options[key] == value, f"{name}: the command says {key}={options[key]}"


def test_calibration_questions_are_no_held_out_ones():
    samples = list(first_samples(30, split="train"))
    assert {sample.scene.split for sample in samples} == {"train"}
    assert min(sample.scene.seed for sample in samples) >= 30_000, "train-tiny draws these"
    assert [sample.id for sample in first_samples(9)] == [s.id for s in heldout_samples(9)]


def test_command_line(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tune, "candidates", lambda settings: FEW)
    where = ["tune", "--model", str(checkpoint), "--limit", "3", "--output", str(tmp_path)]
    monkeypatch.setattr(run_scenes, "score", lambda sample, text: False)
    assert main(where) == 2
    assert "no score to keep" in capsys.readouterr().err
    for path in tmp_path.glob("*"):
        path.unlink()

    monkeypatch.setattr(run_scenes, "score", lambda sample, text: True)
    assert main([*where, "--keep", "0.9"]) == 0
    shown = capsys.readouterr().out
    tuned = json.loads((tmp_path / "tuned.json").read_text())
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["name"] for row in rows] == FEW
    cheapest = min(rows, key=lambda row: row["relative_cost"])
    assert tuned["chosen"] == cheapest
    assert tuned["chosen"]["relative_cost"] < tuned["reference"]["relative_cost"]
    assert tuned["reference"]["name"] == "baseline"
    assert (tuned["keep"], tuned["by"], tuned["questions"]) == (0.9, "flops", 3)
    assert shown.rstrip().endswith(tuned["command"])
    assert tuned["command"].startswith(f"dlm-decode generate --model {checkpoint} --sampler ")
    entries = [
        json.loads(line)
        for path in tmp_path.glob("*.jsonl")
        for line in path.read_text().split("\n")[1:-1]
    ]
    assert {entry["id"] for entry in entries} == {s.id for s in first_samples(3, split="train")}

    def fail(*arguments, **options):
        raise AssertionError("a finished run is read back")

    monkeypatch.setattr(runner, "_ask", fail)
    assert main([*where, "--keep", "0.9", "--by", "seconds"]) == 0
    tuned = json.loads((tmp_path / "tuned.json").read_text())
    assert tuned["chosen"]["seconds_ratio"] == min(row["seconds_ratio"] for row in rows)


def test_mistakes(vlm, tmp_path):
    for keep in (0, 1.1):
        with pytest.raises(InvalidInputError, match="keep must be above 0"):
            tune.tune(vlm, tmp_path, keep=keep)
    with pytest.raises(UnknownNameError, match="Did you mean 'seconds'"):
        tune.tune(vlm, tmp_path, by="second")
    with pytest.raises(InvalidInputError, match="at least 1"):
        tune.tune(vlm, tmp_path, limit=0)
    assert list(tmp_path.iterdir()) == []
