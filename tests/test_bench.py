from __future__ import annotations

import json

import pytest

from dlm_decode.cli import main
from dlm_decode.errors import InvalidInputError
from dlm_decode.eval.bench import BenchSize, bench, machine, random_vlm, render
from dlm_decode.eval.variants import Variant

SIZE = BenchSize(hidden_size=64, num_layers=2, visual_side=3, num_text=5, gen_length=8, steps=4)


def test_rows_say_what_ran():
    vlm = random_vlm(SIZE)
    names = ("baseline", "baseline@cache=dual", "lown:access=every,every=2,accept=k")
    rows = bench(vlm, [Variant.parse(name) for name in names], SIZE, rounds=2)
    assert [row["name"] for row in rows] == list(names)
    assert rows[0]["time_ratio"] == rows[0]["flops_ratio"] == 1
    assert rows[0]["forwards"] == {"FULL/full": 4}
    assert rows[1]["forwards"] == {"FULL/full": 1, "FULL/block": 3}
    assert rows[2]["forwards"] == {"FULL/full": 2, "TEXT_ONLY/full": 3}
    assert rows[1]["kv_bytes"] > 0
    for row in rows:
        assert row["time_over_flops"] == pytest.approx(row["time_ratio"] / row["flops_ratio"])
    assert len(render(rows).splitlines()) == 5
    assert machine(vlm)["dtype"] == "float32"


def test_the_picture_has_the_visual_tokens_asked_for():
    rows = random_vlm(SIZE)
    out = bench(rows, [Variant.parse("baseline")], SIZE, rounds=1)
    assert out[0]["seconds"] > 0
    assert rows.geometry.vision.tokens_per_tile == 9


def test_command(tmp_path, capsys):
    sizes = "--hidden-size 64 --num-layers 1 --visual-side 2 --num-text 3 --gen-length 4 --steps 2"
    where = ["--output", str(tmp_path / "new" / "bench.json"), "--rounds", "1"]
    assert main(["bench", "--variant", "baseline", *sizes.split(), *where]) == 0
    assert "| baseline |" in capsys.readouterr().out
    report = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert report["rows"][0]["forwards"] == {"FULL/full": 2}
    assert main(["bench", "--variant", "baseline", "--dtype", "int8"]) == 2


def test_bad_sizes():
    with pytest.raises(InvalidInputError, match="multiple of 64"):
        BenchSize(hidden_size=100)
    with pytest.raises(InvalidInputError, match="visual_side must be at least 1"):
        BenchSize(visual_side=0)
    with pytest.raises(InvalidInputError, match="at least one variant"):
        bench(random_vlm(SIZE), [], SIZE)


def test_steps_may_be_given_in_every_way():
    names = ("baseline", "baseline@step_ratio=0.25", "baseline@steps_per_block=3")
    rows = bench(random_vlm(SIZE), [Variant.parse(name) for name in names], SIZE, rounds=1)
    assert [row["forwards"]["FULL/full"] for row in rows] == [4, 2, 3]
