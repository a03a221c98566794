from __future__ import annotations

import csv
import json

import pytest

from dlm_decode.cli import main
from dlm_decode.errors import InvalidInputError
from dlm_decode.eval.compare import Variant, compare, draw, matched, render, sign_test, to_csv

VARIANTS = [
    Variant.parse(text)
    for text in ("baseline", "baseline@steps=4", "lown:guard=none+stride:keep_ratio=0.5@steps=8")
]


def test_variants_are_read():
    variant = VARIANTS[2]
    assert variant.options["steps"] == 8
    assert variant.options["sampler"].guard is None
    assert variant.options["stages"][0].keep_ratio == 0.5
    for text, message in (
        ("basline", "Did you mean 'baseline'"),
        ("baseline@stepz=4", "cannot read 'stepz=4'"),
        ("baseline@steps=four", "is no number"),
        ("baseline+strid", "Did you mean 'stride'"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            Variant.parse(text)


def test_rows_agree_with_what_ran(vlm, tmp_path):
    rows = compare(vlm, VARIANTS, tmp_path, limit=6, batch=4)
    assert [row["name"] for row in rows] == [variant.name for variant in VARIANTS]
    assert rows[0]["relative_cost"] <= 1
    assert rows[1]["relative_cost"] <= rows[0]["relative_cost"]
    assert set(rows[2]["forwards"]) == {"FULL", "TEXT_ONLY"}
    assert rows[0]["worse"] == rows[0]["better"] == 0
    assert rows[0]["p"] == 1
    again = compare(vlm, VARIANTS, tmp_path, limit=6, batch=3)
    assert again == rows, "a finished comparison is read back, not run anew"
    table = list(csv.DictReader(to_csv(rows).splitlines()))
    assert [float(line["relative_cost"]) for line in table] == [r["relative_cost"] for r in rows]
    assert len(render(rows).splitlines()) == 4
    with pytest.raises(InvalidInputError, match="each once"):
        compare(vlm, [VARIANTS[0], VARIANTS[0]], tmp_path, limit=1)
    with pytest.raises(InvalidInputError, match="other settings"):
        compare(vlm, VARIANTS[::-1], tmp_path, limit=1)


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"name": "a", "relative_cost": 1.0, "score": 0.5, "questions": 4}]
    for suffix, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        assert draw(rows, tmp_path / f"plot.{suffix}").read_bytes().startswith(start)


def test_matching_by_cost():
    costs = {"lown": 0.3, "lown@steps=4": 0.35, "baseline@steps=8": 0.25, "baseline@steps=16": 0.5}
    rows = [{"name": name, "relative_cost": cost} for name, cost in costs.items()]
    assert matched(rows, "lown") == rows[3]
    assert matched(rows[:3], "lown") is None
    with pytest.raises(InvalidInputError, match="not among"):
        matched(rows, "other")


def test_sign_test():
    assert sign_test(0, 0) == 1
    assert sign_test(5, 5) == 1
    assert sign_test(0, 6) == pytest.approx(2 / 64)
    assert sign_test(6, 0) == sign_test(0, 6)


def test_command(checkpoint, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    variants = ["--variant", "baseline@steps=4", "--variant", "lown@steps=4"]
    where = ["--model", str(checkpoint), "--output", str(tmp_path), "--limit", "3"]
    assert main(["compare", *where, *variants, "--plot", "--match", "lown@steps=4"]) == 0
    assert "cheapest rival of lown@steps=4" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "table.json").read_text())) == 2
    for name in ("table.csv", "table.md", "plot.png", "plot.svg"):
        assert (tmp_path / name).stat().st_size > 0
    assert main(["compare", *where, *variants, "--match", "other"]) == 2
