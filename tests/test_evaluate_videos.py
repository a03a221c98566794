import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from clips import write_clip, write_frames

import dlm_decode
from dlm_decode.cli import main
from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.eval import egoschema, mlvu
from dlm_decode.eval.runner import evaluate, report_path
from dlm_decode.eval.sample_log import WandbSampleLog, make_sample_log

ROOT = Path(__file__).resolve().parent.parent
ANNOTATIONS = Path(__file__).parent / "annotations"
EGO = ["--data", str(ANNOTATIONS / "egoschema_hf")]
EGO_IDS = [f"11111111-aaaa-4bbb-8ccc-00000000000{number}" for number in (1, 2, 3)]
MLVU_NAMES = ["test_surveil_x1", "test_tutorial_x1", "test_sports_x1"]
SHORT = {"gen_length": 4, "steps": 2, "block_length": 4}
SHORT_FLAGS = ["--gen-length", "4", "--steps", "2", "--block-length", "4"]


@pytest.fixture(scope="session")
def roomy(checkpoint, tmp_path_factory):
    """The checkpoint, with room for 32 frames and a canvas of 128."""
    folder = tmp_path_factory.mktemp("roomy") / "model"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    return folder


@pytest.fixture(scope="session")
def roomy_vlm(roomy):
    return dlm_decode.load(roomy)


@pytest.fixture(scope="session")
def ego_videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ego")
    for seed, name in enumerate(EGO_IDS):
        write_frames(folder / name, 5, seed)
    return folder


def ego_task(videos, **options):
    return egoschema.load_task(str(ANNOTATIONS / "egoschema_hf"), videos=videos, **options)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def say(vlm, monkeypatch, answers):
    """Lets the model answer each question by what `answers` has for a word in it."""
    plain, prompts = type(vlm).generate.__get__(vlm), []

    def generate(prompt, **options):
        prompts.extend(prompt)
        out = plain(prompt, **options)
        texts = [next(text for word, text in answers.items() if word in one) for one in prompt]
        return dataclasses.replace(out, text=texts)

    monkeypatch.setattr(vlm, "generate", generate)
    return prompts


def test_egoschema_on_generated_clips(roomy_vlm, tmp_path, monkeypatch):
    pytest.importorskip("av")
    for seed, name in enumerate(EGO_IDS):
        write_clip(tmp_path / "videos" / f"{name}.mp4", 7, seed)
    answers = {"workbench": "The answer is (C).", "dough": "E.", "mowing": "C drinks tea"}
    prompts = say(roomy_vlm, monkeypatch, answers)
    path = tmp_path / "out.jsonl"
    task = ego_task(tmp_path / "videos")
    options = {**SHORT, "sampler": "lown", "max_frames": 4}
    report = evaluate(roomy_vlm, task, options, output=path)
    assert report["score"] == report["accuracy"] == pytest.approx(1 / 3)
    assert (report["questions"], report["errors"], report["unparsed"]) == (3, 0, 1)
    assert prompts == [sample.question for sample in task.samples()]
    entries = lines_of(path)[1:]
    assert [(e["id"], e["choice"], e["is_right"]) for e in entries] == [
        (EGO_IDS[0], "C", True),
        (EGO_IDS[1], "E", False),
        (EGO_IDS[2], None, False),
    ]
    assert entries[0]["expected"] == ["C"]
    assert {e["frames"] for e in entries} == {4}
    assert {e["visual_tokens"] for e in entries} == {4 * 2 * 3}, "four frames of 2 x 2 and newlines"
    assert json.loads(report_path(path).read_text()) == report


def test_the_report_says_what_was_run_and_what_it_cost(roomy_vlm, ego_videos, tmp_path):
    task = ego_task(ego_videos)
    options = {**SHORT, "sampler": "lown", "seed": 5, "max_frames": 3}
    report = evaluate(roomy_vlm, task, options, output=tmp_path / "out.jsonl", batch=2)
    assert report["task"] == "egoschema"
    assert report["settings"]["options"]["max_frames"] == 3
    assert report["settings"]["data"]["instruction"] == egoschema.INSTRUCTION
    assert report["settings"]["dtype"] == "float32"
    assert report["settings"]["sampler"]["name"] == "lown"
    assert "guard" in report["settings"]["sampler"]["options"]
    assert report["settings"]["options"]["gen_length"] == 4
    assert report["settings"]["options"]["seed"] == 5
    assert {"python", "torch", "transformers", "dlm-decode", "av"} <= {*report["versions"]}
    assert report["machine"]["device"] == "cpu"
    total = dict.fromkeys(("flops", "head_flops", "vision_flops", "baseline_flops"), 0)
    forwards: dict[str, int] = {}
    for sample in task.samples():
        out = roomy_vlm.generate(sample.question, **task.media(sample), **options)
        for name in total:
            total[name] += getattr(out.cost, name)
        for (view, _), count in out.cost.forwards.items():
            forwards[view] = forwards.get(view, 0) + count
    cost = report["cost"]
    assert {name: cost[name] for name in total} == total
    assert cost["vision_flops"] > 0
    assert cost["forwards_by_view"] == forwards
    assert sum(cost["forwards"].values()) == sum(forwards.values())
    assert (cost["answered"], cost["baseline_forwards"], cost["steps"]) == (3, 3 * 2, 3 * 2)
    assert cost["seconds_prefill"] > 0
    assert report["relative_cost"] == total["flops"] / total["baseline_flops"]


def test_a_missing_and_a_broken_video_are_error_records(
    roomy_vlm, ego_videos, tmp_path, monkeypatch
):
    pytest.importorskip("av")
    videos = tmp_path / "videos"
    shutil.copytree(ego_videos / EGO_IDS[1], videos / EGO_IDS[1])
    (videos / f"{EGO_IDS[2]}.mp4").write_bytes(b"no video at all")
    say(roomy_vlm, monkeypatch, {"dough": "A"})
    path = tmp_path / "out.jsonl"
    task = ego_task(videos)
    report = evaluate(roomy_vlm, task, SHORT, output=path, batch=3)
    assert (report["questions"], report["errors"], report["unparsed"]) == (3, 2, 0)
    assert report["score"] == pytest.approx(1 / 3)
    assert report["accuracy_of_answered"] == 1
    assert report["cost"]["answered"] == 1
    entries = {entry["id"]: entry for entry in lines_of(path)[1:]}
    assert entries[EGO_IDS[0]]["answer"] is None
    assert f"no video '{EGO_IDS[0]}'" in entries[EGO_IDS[0]]["error"]
    assert str(videos) in entries[EGO_IDS[0]]["error"]
    assert f"{EGO_IDS[2]}.mp4" in entries[EGO_IDS[2]]["error"]
    assert "cannot decode" in entries[EGO_IDS[2]]["error"]
    assert report["first_error"] == entries[EGO_IDS[0]]["error"]

    # Where a video turns up its question is asked; one that has an answer is not asked again.
    write_frames(videos / EGO_IDS[0], 5)
    prompts = say(roomy_vlm, monkeypatch, {"workbench": "C"})
    again = evaluate(roomy_vlm, task, SHORT, output=path, batch=3)
    assert again["errors"] == 1
    assert task.samples()[0].question in prompts
    assert task.samples()[1].question not in prompts
    assert again["score"] == pytest.approx(2 / 3)


def test_answers_are_appended_one_by_one_and_a_run_resumes(
    roomy_vlm, ego_videos, tmp_path, monkeypatch
):
    path, task = tmp_path / "out.jsonl", ego_task(ego_videos)
    plain, seen = roomy_vlm.generate, []

    def interrupted(prompt, **options):
        seen.append(len(lines_of(path)))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return plain(prompt, **options)

    monkeypatch.setattr(roomy_vlm, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(roomy_vlm, task, SHORT, output=path)
    assert seen == [1, 2, 3], "each answer is in the file before the next question"
    assert not report_path(path).exists()
    path.write_bytes(path.read_bytes()[:-20])  # as if it had died in the middle of the second
    monkeypatch.setattr(roomy_vlm, "generate", plain)
    resumed = evaluate(roomy_vlm, task, SHORT, output=path)
    whole = evaluate(roomy_vlm, task, SHORT, output=tmp_path / "whole.jsonl")
    for mine, theirs in zip(
        lines_of(path)[1:], lines_of(tmp_path / "whole.jsonl")[1:], strict=True
    ):
        for name in ("id", "answer", "flops", "forwards", "seed"):
            assert mine[name] == theirs[name]
    assert resumed["settings"] == whole["settings"]


def test_questions_of_a_batch_that_fails_are_written_one_by_one(
    roomy_vlm, ego_videos, tmp_path, monkeypatch
):
    path, plain, seen = tmp_path / "out.jsonl", roomy_vlm.generate, []

    def generate(prompt, **options):
        seen.append((len(prompt), len(lines_of(path))))
        if len(prompt) > 1:
            raise RuntimeError("out of memory")
        return plain(prompt, **options)

    monkeypatch.setattr(roomy_vlm, "generate", generate)
    report = evaluate(roomy_vlm, ego_task(ego_videos), SHORT, output=path, batch=3)
    assert seen == [(3, 1), (1, 1), (1, 2), (1, 3)]
    assert report["errors"] == 0


def test_other_frames_or_questions_do_not_mix(roomy_vlm, ego_videos, tmp_path):
    path = tmp_path / "out.jsonl"
    evaluate(roomy_vlm, ego_task(ego_videos), SHORT, output=path, limit=1)
    for asked, options in (({}, {"max_frames": 2}), ({"instruction": "Which?"}, {})):
        with pytest.raises(InvalidInputError, match="other settings"):
            evaluate(roomy_vlm, ego_task(ego_videos, **asked), {**SHORT, **options}, output=path)


def test_the_batch_changes_no_answer(roomy_vlm, ego_videos, tmp_path):
    answers = []
    for batch in (1, 3):
        path = tmp_path / f"{batch}.jsonl"
        evaluate(roomy_vlm, ego_task(ego_videos), SHORT, output=path, batch=batch)
        answers.append([(e["answer"], e["flops"], e["head_flops"]) for e in lines_of(path)[1:]])
    assert answers[0] == answers[1]


def test_mlvu_on_generated_clips(roomy_vlm, tmp_path, monkeypatch):
    pytest.importorskip("av")
    data = tmp_path / "data"
    shutil.copytree(ANNOTATIONS / "mlvu_test_official", data)
    for seed, name in enumerate(MLVU_NAMES):
        write_clip(data / "video" / f"{name}.mp4", 6, seed)
    answers = {"surveillance": "Vandalism", "panel": "(F) Sawing", "corner": "(A)"}
    say(roomy_vlm, monkeypatch, answers)
    task = mlvu.load_task(str(data))
    report = evaluate(roomy_vlm, task, {**SHORT, "max_frames": 4}, output=tmp_path / "out.jsonl")
    assert report["accuracy_by_kind"] == {"anomaly_reco": 1, "sportsQA": 0, "tutorialQA": 1}
    assert report["score"] == pytest.approx(2 / 3)
    assert (report["errors"], report["unparsed"]) == (0, 0)


@pytest.mark.parametrize("task", ["egoschema", "mlvu"])
def test_the_paper_s_preset(task, roomy, tmp_path, capsys):
    pytest.importorskip("av")
    data = "egoschema_hf" if task == "egoschema" else "mlvu_test_mirror"
    for name in (EGO_IDS[0], MLVU_NAMES[0]):
        write_clip(tmp_path / f"{name}.mp4", 40)
    where = ["--model", str(roomy), "--data", str(ANNOTATIONS / data), "--videos", str(tmp_path)]
    out = tmp_path / "out.jsonl"
    command = ["eval", task, *where, "--sampler", "lown", "--limit", "1", "--output", str(out)]
    assert main([*command, "--preset", "lown-paper"]) == 0
    report = json.loads(capsys.readouterr().out)
    options = report["settings"]["options"]
    assert (options["gen_length"], options["steps"], options["block_length"]) == (128, 128, 32)
    assert (options["temperature"], options["preset"]) == (0, None)
    assert report["settings"]["options"]["max_frames"] == 32
    assert report["machine"]["batch"] == 1
    (entry,) = lines_of(out)[1:]
    assert entry["visual_tokens"] == 32 * 2 * 3
    assert report["cost"]["baseline_forwards"] == 128

    other = ["--output", str(tmp_path / "other.jsonl"), "--preset", "lown-paper"]
    assert main([*command, *other, "--frames", "3", "--steps-per-block", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["settings"]["options"]["max_frames"] == 3
    assert report["settings"]["options"]["steps"] == 8


def test_command_line_without_one_video(roomy, tmp_path, capsys):
    where = [*EGO, "--videos", str(tmp_path), "--output", str(tmp_path / "out.jsonl")]
    assert main(["eval", "egoschema", "--model", str(roomy), *where, *SHORT_FLAGS]) == 1
    shown = capsys.readouterr()
    assert "3 of 3 questions could not be answered" in shown.err
    assert json.loads(shown.out)["errors"] == 3


def test_blind_needs_no_videos(roomy, tmp_path, capsys):
    where = ["--model", str(roomy), *EGO, "--output", str(tmp_path / "out.jsonl"), *SHORT_FLAGS]
    assert main(["eval", "egoschema", "--blind", *where]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["settings"]["is_blind"] is True
    assert report["errors"] == 0
    assert [entry["visual_tokens"] for entry in lines_of(tmp_path / "out.jsonl")[1:]] == [0] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["egoschema", "--data", "nobody/nothing"], "cannot fetch the data set"),
        (["egoschema", *EGO, "--videos", "/nowhere"], "no folder '/nowhere'"),
        (["egoschema", *EGO, "--blind", "--frames", "0"], "max_frames must be"),
        (["egoschema", *EGO, "--blind", "--preset", "lown-papre"], "Did you mean 'lown-paper'"),
        (["egoschema", *EGO, "--blind", "--sampler", "lwn"], "Did you mean 'lown'"),
        (["egoschema", *EGO, "--blind", "--stage", "strid"], "Did you mean 'stride'"),
        (["egoschema", *EGO, "--blind", "--track", "wanbd"], "Did you mean 'wandb'"),
        (["egoschema", *EGO, "--blind", "--limit", "0"], "at least 1"),
        (["egoschema", *EGO, "--blind", "--temperature", "-1"], "temperature must be"),
        (
            ["egoschema", *EGO, "--blind", "--gen-length", "8", "--block-length", "0"],
            "block_length",
        ),
        (["mlvu", *EGO, "--blind"], "no questions of the split 'test'"),
        (["mlvu", *EGO, "--blind", "--split", "val"], "unknown split 'val'"),
        (["scenes", "--preset", "lown-paper"], "use it with clips, egoschema or mlvu"),
    ],
)
def test_mistakes_are_found_before_weights_load(arguments, message, tmp_path, capsys, monkeypatch):
    def load(*_, **__):
        raise AssertionError("weights were asked for")

    monkeypatch.setattr(dlm_decode, "load", load)
    assert main(["eval", *arguments, "--output", str(tmp_path / "out.jsonl")]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert len(shown.err.strip().splitlines()) == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_frames_are_no_option_of_scenes(tmp_path):
    with pytest.raises(SystemExit):
        main(["eval", "scenes", "--frames", "3", "--output", str(tmp_path / "x")])


@pytest.mark.parametrize("task", ["egoschema", "mlvu"])
def test_the_files_are_scripts(task, tmp_path):
    """They do what the command line does; mistakes included, so that no model is needed."""
    where = ["--data", str(tmp_path), "--output", str(tmp_path / "out.jsonl")]
    run = [sys.executable, str(ROOT / "eval" / f"{task}.py"), *where]
    code = "import sys; sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[2:]; "
    code += "import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), *run[1:]], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"dlm-decode: {str(tmp_path)!r} holds ")


class Listener:
    def __init__(self):
        self.heard = []

    def start(self, settings):
        self.heard.append(("start", settings))

    def sample(self, entry):
        self.heard.append(("sample", entry["id"]))

    def finish(self, report):
        self.heard.append(("finish", report))

    def abort(self):
        self.heard.append(("abort",))


def test_a_log_hears_everything(roomy_vlm, ego_videos, tmp_path, monkeypatch):
    path, task = tmp_path / "out.jsonl", ego_task(ego_videos)
    evaluate(roomy_vlm, task, SHORT, output=path, limit=2)
    log = Listener()
    report = evaluate(roomy_vlm, task, SHORT, output=path, track=[log])
    assert [event[0] for event in log.heard] == ["start", *["sample"] * 3, "finish"]
    assert [event[1] for event in log.heard[1:4]] == EGO_IDS, "earlier answers come first"
    assert log.heard[0][1]["data"] == task.data
    assert log.heard[-1][1] == report

    def generate(prompt, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(roomy_vlm, "generate", generate)
    log = Listener()
    with pytest.raises(KeyboardInterrupt):
        evaluate(roomy_vlm, task, SHORT, output=tmp_path / "other.jsonl", track=log)
    assert [event[0] for event in log.heard] == ["start", "abort"]
    with pytest.raises(InvalidInputError, match="start, sample, finish and abort"):
        make_sample_log(3)
    with pytest.raises(UnknownNameError, match="wandb:offline"):
        make_sample_log("jsonl:x")


def test_what_wandb_refuses_is_one_line(monkeypatch):
    wandb = pytest.importorskip("wandb")

    def init(**options):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(InvalidInputError, match=r"No API key.* wandb:offline"):
        WandbSampleLog(mode="online").start({})


def test_wandb_offline(roomy_vlm, ego_videos, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from test_track import _read_wandb

    # wandb reads its environment once per process, so every test that uses it says the same.
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    say(roomy_vlm, monkeypatch, {"workbench": "C", "dough": "no idea", "mowing": "E"})
    log = WandbSampleLog(mode="offline", folder=tmp_path)
    task = ego_task(ego_videos)
    report = evaluate(roomy_vlm, task, SHORT, output=tmp_path / "out.jsonl", track=log)
    (path,) = tmp_path.rglob("run-*.wandb")
    steps, config, summary, _ = _read_wandb(path)
    running = [step["eval/accuracy"] for step in steps if "eval/accuracy" in step]
    assert running == pytest.approx([1, 1 / 2, 2 / 3])
    assert [step["eval/unparsed"] for step in steps if "eval/unparsed" in step] == [0, 1, 1]
    assert config["task"] == "egoschema"
    assert config["options"]["gen_length"] == 4
    assert summary["report"]["score"] == pytest.approx(report["score"])
    assert summary["report"]["cost"]["flops"] == report["cost"]["flops"]
    table = json.loads(next(tmp_path.rglob("*.table.json")).read_text())
    assert [row[table["columns"].index("id")] for row in table["data"]] == EGO_IDS
    assert [row[table["columns"].index("choice")] for row in table["data"]] == ["C", None, "E"]
