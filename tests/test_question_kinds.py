"""`--kind`: only some kinds of questions about scenes are asked."""

from __future__ import annotations

import json

import pytest

from dlm_decode.cli import main
from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.eval import run_scenes, tune
from dlm_decode.eval.run_scenes import SCENES, Scenes, question_batches
from dlm_decode.eval.runner import report_path
from dlm_decode.eval.scene_questions import EXTRA_KINDS, KINDS, first_samples

SHORT = ["--limit", "3", "--batch", "3"]


def kinds_in(folder):
    """Kinds that the results files of a folder hold."""
    lines = [
        json.loads(line)
        for path in folder.glob("*.jsonl")
        for line in path.read_text().split("\n")[1:-1]
    ]
    return {line["kind"] for line in lines}


def test_only_the_named_kinds_are_asked():
    task = Scenes(kinds=["list", "count"])
    samples = task.samples(6)
    assert {sample.kind for sample in samples} == {"count", "list"}
    assert task == Scenes(kinds=("count", "list", "count")), "order and repeats say nothing"
    everything = {sample.id: sample.question for sample in SCENES.samples(60)}
    assert all(
        everything[sample.id] == sample.question for sample in samples if sample.kind == "count"
    )
    photos = Scenes(kinds=["photo"]).samples(2)
    assert all(sample.scene.is_photo for sample in photos)
    assert [part[0].kind for part in question_batches(2, 1, task)] == [s.kind for s in samples[:2]]


def test_a_list_counts_in_any_order():
    task = Scenes(kinds=["list"])
    sample = next(s for s in task.samples(20) if len(s.scene.objects) > 2)
    items = sample.answer.removesuffix(" .").split(" , ")
    for given, is_right in (
        (items, True),
        (items[::-1], True),
        (items[1:], False),
        ([*items, items[0]], False),
    ):
        assert task.judge(sample, " , ".join(given) + " .") == {"is_right": is_right}


def test_unknown_kinds_are_refused():
    with pytest.raises(UnknownNameError, match=r"kind of question 'lists'\. Did you mean 'list'"):
        Scenes(kinds=["count", "lists"])
    with pytest.raises(UnknownNameError, match="Did you mean 'colour'"):
        next(first_samples(1, ["color"]))
    with pytest.raises(InvalidInputError, match="name at least one of describe"):
        Scenes(kinds=[])


def test_a_file_of_other_kinds_is_not_resumed(checkpoint, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    where = ["--model", str(checkpoint), "--steps", "2", *SHORT, "--output", str(output)]
    assert main(["eval", "scenes", *where, "--kind", "list"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["questions_by_kind"] == {"list": 3}
    assert report["settings"]["data"]["kinds"] == ["list"]
    assert json.loads(report_path(output).read_text()) == report
    before = output.read_bytes()
    for kinds in ([], ["--kind", "count"], ["--kind", "list", "--kind", "count"]):
        assert main(["eval", "scenes", *where, *kinds]) == 2
        assert "other settings" in capsys.readouterr().err
    assert output.read_bytes() == before


def test_compare_and_analyse_ask_the_kinds_that_are_named(checkpoint, tmp_path, capsys):
    model = ["--model", str(checkpoint), *SHORT]
    folder = ["--output", str(tmp_path / "compare")]
    command = ["compare", *model, *folder, "--variant", "baseline@steps=2"]
    assert main([*command, "--kind", "list"]) == 0
    assert kinds_in(tmp_path / "compare") == {"list"}
    assert main([*command, "--kind", "count"]) == 2
    assert "other settings" in capsys.readouterr().err

    folder = ["--output", str(tmp_path / "analysis")]
    assert main(["analyse", *model, *folder, "--steps", "2", "--kind", "list"]) == 0
    wanted = [sample.question for sample in Scenes(kinds=["list"]).samples(3)]
    (path,) = (tmp_path / "analysis" / "0").glob("*.jsonl")
    run = json.loads(path.read_text().split("\n")[0])
    assert [row["question"] for row in run["rows"]] == wanted
    assert main(["analyse", *model, *folder, "--steps", "2"]) == 2
    assert "other settings" in capsys.readouterr().err
    assert main(["analyse", "--trajectory", str(path), "--kind", "list", *folder]) == 2
    assert "--trajectory files hold their own" in capsys.readouterr().err


def test_tune_asks_the_kinds_that_are_named(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "candidates", lambda settings: ["baseline@steps=2"])
    monkeypatch.setattr(run_scenes, "score", lambda sample, text: True)
    command = ["tune", "--model", str(checkpoint), *SHORT, "--output", str(tmp_path)]
    assert main([*command, "--kind", "exists"]) == 0
    assert kinds_in(tmp_path) == {"exists"}
    assert json.loads((tmp_path / "tuned.json").read_text())["kinds"] == ["exists"]


@pytest.mark.parametrize(
    "command", ["eval scenes", "compare --variant baseline", "tune", "analyse"]
)
def test_kinds_are_checked_before_the_model_is_loaded(tmp_path, capsys, command):
    where = ["--model", str(tmp_path / "none"), "--output", str(tmp_path / "out")]
    assert main([*command.split(), *where, "--kind", "lists"]) == 2
    assert "Did you mean 'list'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command.split(" --")[0].split(), "--help"])
    shown = capsys.readouterr().out
    for kind in (*KINDS, *EXTRA_KINDS, "photo"):
        assert kind in shown
