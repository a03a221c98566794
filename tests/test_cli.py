from __future__ import annotations

import json
import subprocess
import sys

import pytest
from PIL import Image

from dlm_decode.cli import main


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "scene.png"
    Image.new("RGB", (40, 30), (200, 30, 30)).save(path)
    return str(path)


def test_generate_prints_text_and_writes_a_trajectory(checkpoint, image, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    command = [
        "generate",
        "--model",
        str(checkpoint),
        "--image",
        image,
        "--prompt",
        "what is this ?",
        "--no-stop",
    ]
    assert (
        main(
            [
                *command,
                "--trajectory",
                str(out),
                "--sampler",
                "baseline",
                "--set",
                "remasking=margin",
            ]
        )
        == 0
    )
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) >= 1
    assert "8 FULL full" in shown.err
    run = json.loads(out.read_text().splitlines()[0])
    assert run["sampler"] == {
        "name": "baseline",
        "options": {"remasking": "margin", "alg_temp": 0.0},
    }
    assert main(["show", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out.html")
    assert "<script>" in (tmp_path / "out.html").read_text()


def test_generate_json(checkpoint, image, capsys):
    arguments = [
        "--prompt",
        "what is this ?",
        "--json",
        "--no-stop",
        "--gen-length",
        "5",
        "--steps",
        "5",
    ]
    assert (
        main(
            [
                "generate",
                "--model",
                str(checkpoint),
                "--image",
                image,
                *arguments,
                "--stage",
                "stride:keep_ratio=0.5",
            ]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert len(result["tokens"]) == 5
    assert result["cost"]["calls"] == 5
    assert result["run"]["stages"][0]["options"] == {"keep_ratio": 0.5}
    assert result["run"]["settings"]["block_length"] == 5


def test_generate_takes_frames_of_a_video(checkpoint, tmp_path, capsys):
    from test_video import write_video

    write_video(tmp_path / "clip.mp4", 10)
    command = ["generate", "--model", str(checkpoint), "--prompt", "what is this ?", "--json"]
    command += ["--gen-length", "2", "--no-stop"]
    video = ["--video", str(tmp_path / "clip.mp4")]
    assert main([*command, *video, "--frames", "3"]) == 0
    run = json.loads(capsys.readouterr().out)["run"]
    (taken,) = run["rows"][0]["videos"]
    assert (taken["indices"], taken["total_frames"], taken["rate"]) == ([0, 4, 9], 10, 5.0)
    assert str(tmp_path / "clip.mp4") in taken["name"]
    assert run["settings"]["max_frames"] == 3
    assert main([*command, *video, "--fps", "2.5", "--frames", "4", "--force-sample"]) == 0
    run = json.loads(capsys.readouterr().out)["run"]
    assert run["rows"][0]["videos"][0]["indices"] == [0, 3, 6, 9]
    assert (run["settings"]["fps"], run["settings"]["force_sample"]) == (2.5, True)
    for arguments, message in (
        ([*video, "--fps", "0"], "fps must be a finite number above 0"),
        (["--fps", "2"], "fps goes with videos="),
        (["--video", str(tmp_path)], "holds 'clip.mp4', which is no image"),
        ([*video, "--think-mode", "think"], "was not trained with think_mode 'think'"),
    ):
        assert main([*command, *arguments]) == 2
        assert message in capsys.readouterr().err


def test_generate_stream(checkpoint, capsys):
    assert (
        main(
            [
                "generate",
                "--model",
                str(checkpoint),
                "--prompt",
                "what is this ?",
                "--stream",
                "--no-stop",
            ]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].count("░") == 7
    assert "░" not in lines[7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", "a", "--sampler", "basline"], "Did you mean 'baseline'"),
        (["generate", "--prompt", "a", "--set", "remasking"], "is not KEY=VALUE"),
        (["generate", "--prompt", "a", "--track", "wanbd"], "Did you mean 'wandb'"),
        (["generate", "--prompt", "a", "--model", "./none"], "no folder './none'"),
        (["generate", "--prompt", "a", "--json", "--stream"], "use one of them"),
        (["generate", "--prompt", "a", "--stop", "x", "--no-stop"], "exclude each other"),
        (["generate", "--prompt", "a", "--attn", "sdp"], "attn_implementation 'sdp' is unknown"),
        (["generate", "--prompt", "a", "--dtype", "int8"], "dtype 'int8' is unknown"),
        (["show", "none.jsonl"], "no trajectory file"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(checkpoint, arguments, message, capsys):
    if arguments[0] == "generate" and "--model" not in arguments:
        arguments = [*arguments, "--model", str(checkpoint)]
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert len(shown.err.strip().splitlines()) == 1
    assert shown.out == ""


def test_unknown_options_are_refused(capsys):
    for arguments in (
        ["generate", "--prompt", "a", "--thresold", "1"],
        ["generate"],
        ["nothing"],
        [],
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_list(capsys):
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    for name in ("baseline", "lown", "stride", "llava_llada"):
        assert name in shown
    assert main(["list", "samplers", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["samplers"]


def test_training_options_are_shown(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train-tiny", "--help"])
    assert caught.value.code == 0
    assert "--output" in capsys.readouterr().out


def test_evaluation(checkpoint, tmp_path, capsys):
    out = str(tmp_path / "scenes.jsonl")
    arguments = [
        "--model",
        str(checkpoint),
        "--limit",
        "3",
        "--output",
        out,
        "--gen-length",
        "4",
        "--steps",
        "2",
    ]
    assert main(["eval", "scenes", *arguments, "--blind"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["questions"] == 3
    assert report["settings"]["is_blind"] is True


def test_demo_answers_about_three_pictures(capsys):
    assert main(["demo", "--steps", "8"]) == 0
    shown = capsys.readouterr().out
    assert sum(line.endswith(".png") for line in shown.splitlines()) == 3
    assert "picked because the shipped model answers" in shown
    assert shown.count("GFLOPs]") == shown.count("expected: ") >= 3


def test_a_closed_pipe_is_no_error():
    command = [sys.executable, "-c", "from dlm_decode.cli import main; raise SystemExit(main())"]
    with subprocess.Popen(
        [*command, "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # as `head` does once it has seen enough
        errors = process.stderr.read().decode()
    assert "Traceback" not in errors and "BrokenPipe" not in errors
    assert process.returncode == 141


@pytest.mark.parametrize("command", ["eval scenes", "compare --variant baseline", "analyse"])
def test_a_folder_that_cannot_be_written_is_one_line(checkpoint, tmp_path, capsys, command):
    (tmp_path / "file").write_text("")
    where = ["--limit", "1", "--output", str(tmp_path / "file" / "below")]
    assert main([*command.split(), "--model", str(checkpoint), *where]) == 2
    (line,) = (text for text in capsys.readouterr().err.splitlines() if "dlm-decode:" in text)
    assert str(tmp_path / "file") in line


@pytest.mark.parametrize("mistake", [("--stage", "strid"), ("--schedule", "lineer")])
def test_names_are_checked_before_the_model_is_loaded(tmp_path, capsys, mistake):
    none = str(tmp_path / "none")
    assert main(["generate", "--model", none, "--prompt", "what ?", *mistake]) == 2
    assert "Did you mean" in capsys.readouterr().err
