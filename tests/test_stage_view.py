"""Pictures of what a stage keeps, and its seconds against the prefill that it saves."""

from __future__ import annotations

import json

import pytest
from PIL import Image
from test_vlm import picture

import dlm_decode
from dlm_decode.cli import main
from dlm_decode.errors import InvalidInputError
from dlm_decode.eval.stage_view import panels_of
from dlm_decode.vision import make

SIZES = "--hidden-size 64 --num-layers 4 --visual-side 8 --num-text 3 --rounds 1"


def test_panels_count_what_is_kept(vlm):
    stage = make("stride:keep_ratio=0.5")
    panels = panels_of(vlm, stage, picture(64, 40))
    kept = sum(len(panel.frames) for panel in panels)
    total = kept + sum(len(panel.shades) for panel in panels)
    assert 0 < kept < total
    energy = panels_of(vlm, make("specflow:keep_ratio=0.5"), picture(64, 40))
    assert len(energy) == 2 * len(panels)
    assert "leaves" in energy[1].title
    with pytest.raises(InvalidInputError, match="acts while the language model runs"):
        panels_of(vlm, make("redvtp"), picture())


def test_panels_of_an_autoregressive_model():
    tiny = dlm_decode.load("tiny-ar")
    panels = panels_of(tiny, make("specflow:keep_ratio=0.25,sinks=none"), picture(96, 96))
    assert len(panels) == 2
    assert len(panels[0].frames) == 144 // 4
    assert len(panels[0].frames) + len(panels[0].shades) == 144


@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_show(checkpoint, tmp_path, capsys, suffix):
    image, page = tmp_path / "a.png", tmp_path / "new" / f"page.{suffix}"
    picture(64, 40).save(image)
    command = ["show", "--model", str(checkpoint), "--stage", "specflow", "--image", str(image)]
    assert main([*command, "--output", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    if suffix == "png":
        assert Image.open(page).width > 320
    else:
        assert "energy" in page.read_text()
        assert "data:image/png;base64," in page.read_text()


def test_mistakes(capsys):
    for arguments, message in (
        (["show"], "a trajectory file or --stage"),
        (["show", "--stage", "specflow"], "--stage and --image go together"),
        (["bench"], "--variant or --stage"),
        (["bench", "--stage", "redvtp", *SIZES.split()], "leaves all visual tokens"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_bench_stage(capsys):
    assert main(["bench", "--stage", "specflow:keep_tokens=8", *SIZES.split()]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["visual_tokens"] == [64, 10]
    difference = report["layer_seconds"] - report["short_layer_seconds"]
    assert report["saved_seconds"] == pytest.approx(4 * difference)
    assert report["share"] == pytest.approx(report["stage_seconds"] / report["saved_seconds"])
