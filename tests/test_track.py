import json
import sys
import time
from types import ModuleType

import pytest

from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.eval.run_scenes import SCENES
from dlm_decode.eval.runner import evaluate
from dlm_decode.eval.sample_log import make_sample_log
from dlm_decode.record import read_records
from dlm_decode.track import JsonlTracker, WandbTracker, make_tracker, step_scalars


class Listener:
    def __init__(self):
        self.records = []

    def start(self, run):
        self.records.append(run)

    def step(self, record):
        self.records.append(record)

    def finish(self, record):
        self.records.append(record)


def test_specs(tmp_path):
    assert make_tracker(None) is None
    assert isinstance(make_tracker(f"jsonl:{tmp_path}/x"), JsonlTracker)
    listener = Listener()
    assert make_tracker(listener) is listener
    with pytest.raises(UnknownNameError, match="Did you mean 'wandb:offline'"):
        make_tracker("wandb:ofline")
    with pytest.raises(InvalidInputError, match="lacks a path"):
        make_tracker("jsonl:")
    with pytest.raises(InvalidInputError, match="start, step and finish"):
        make_tracker(3)


class FakeTrackio(ModuleType):
    """Keeps what it is told."""

    def __init__(self):
        super().__init__("trackio")
        self.heard = []

    def init(self, project, config):
        self.heard.append(("init", project, config))

    def log(self, metrics, step=None):
        assert "step" not in metrics, "trackio renames it"
        self.heard.append(("log", metrics, step))

    def finish(self):
        self.heard.append(("finish",))


def test_trackio_hears_a_run_and_an_evaluation(vlm, tmp_path, monkeypatch):
    trackio = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    out = vlm.generate("what is this ?", track="trackio", stop=False)
    opened, *logged, summary, finished = trackio.heard
    assert opened[:2] == ("init", "dlm-decode") and opened[2]["model"] == vlm.name
    assert [(step, metrics["commits"]) for _, metrics, step in logged] == [(i, 1) for i in range(8)]
    assert summary[1]["cost/flops"] == out.cost.flops and "texts" not in summary[1]
    assert finished == ("finish",)

    trackio.heard.clear()
    report = evaluate(
        vlm, SCENES, {"steps": 2}, output=tmp_path / "out.jsonl", limit=2, track="trackio"
    )
    opened, *logged, summary, finished = trackio.heard
    assert opened[2]["task"] == "scenes"
    assert [(step, metrics["eval/questions"]) for _, metrics, step in logged] == [(1, 1), (2, 2)]
    assert summary[1]["report/accuracy"] == report["accuracy"]
    assert all(isinstance(value, (int, float)) for value in summary[1].values())
    assert finished == ("finish",)


def test_services_that_are_missing_or_refuse_are_named(vlm, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    for make in (make_tracker, make_sample_log):
        with pytest.raises(InvalidInputError, match="needs trackio; install it"):
            make("trackio")
        with pytest.raises(UnknownNameError, match="Did you mean 'wandb'"):
            make("wandb:")
    wandb = pytest.importorskip("wandb")

    def init(**options):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(InvalidInputError, match=r"No API key.* wandb:offline"):
        vlm.generate("what is this ?", track="wandb:online")


def test_several_trackers_get_every_record(vlm, tmp_path):
    listener = Listener()
    out = vlm.generate(
        "what is this ?", track=[listener, f"jsonl:{tmp_path}/run.jsonl"], stop=False
    )
    assert json.loads(json.dumps(listener.records)) == read_records(tmp_path / "run.jsonl")
    assert len(listener.records) == len(out.trajectory) + 2
    scalars = step_scalars(listener.records[1])
    assert scalars["commits"] == 1
    assert scalars["forwards/FULL/full"] == 1
    assert scalars["flops"] == out.cost.flops / 8


def test_a_killed_run_leaves_its_lines(vlm, tmp_path):
    class Killed(Exception):
        pass

    class Killer(Listener):
        def step(self, record):
            super().step(record)
            if len(self.records) == 4:
                raise Killed

    with pytest.raises(Killed):
        vlm.generate("what is this ?", track=[f"jsonl:{tmp_path}/run.jsonl", Killer()], stop=False)
    assert [record["type"] for record in read_records(tmp_path / "run.jsonl")] == [
        "run",
        "step",
        "step",
        "step",
    ]


def test_scalars_of_a_routed_step(vlm):
    from PIL import Image

    listener = Listener()
    image = Image.new("RGB", (40, 30), "red")
    vlm.generate("what is this ?", images=image, sampler="lown", track=listener, stop=False)
    first, second = (step_scalars(record) for record in listener.records[1:3])
    assert first["route/FULL"] == 1
    assert first["info/anchor_age"] == 0
    assert first["info/has_visual"] == 1
    assert second["forwards/TEXT_ONLY/full"] == 1
    assert "info/certified" in second


def test_a_failed_run_is_closed(vlm):
    class Aborted(Listener):
        was_aborted = False

        def abort(self):
            self.was_aborted = True

        def step(self, record):
            raise RuntimeError("no more")

    first, second = Aborted(), Aborted()
    with pytest.raises(RuntimeError, match="no more"):
        vlm.generate("what is this ?", track=[first, second])
    assert first.was_aborted
    assert second.was_aborted


def test_wandb_offline_run_can_be_read_back(vlm, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    out = vlm.generate(
        "what colour is the circle ?", track=WandbTracker(folder=tmp_path), stop=False
    )
    runs = list(tmp_path.rglob("run-*.wandb"))
    assert len(runs) == 1
    steps, config, summary, files = _read_wandb(runs[0])
    assert len(steps) >= len(out.trajectory)
    assert [step["commits"] for step in steps[: len(out.trajectory)]] == [1] * len(out.trajectory)
    assert config["sampler"]["name"] == "baseline"
    assert config["settings"]["gen_length"] == 8
    assert summary["cost"]["relative"] == 1.0
    media = list(tmp_path.rglob("*.table.json")) + list(tmp_path.rglob("*.html"))
    assert {path.suffix for path in media} == {".json", ".html"}
    table = json.loads(next(path for path in media if path.suffix == ".json").read_text())
    assert table["columns"][:3] == ["row", "position", "step"]
    assert len(table["data"]) == 8
    assert files


def _read_wandb(path):
    """History, config and summary of a `.wandb` file, once wandb's service has written it out."""
    deadline = time.monotonic() + 60
    records = []
    while not any(kind == "exit" for kind, _ in records) and time.monotonic() < deadline:
        time.sleep(0.2)
        records = list(_records(path))
    steps, config, summary, files = [], {}, {}, 0
    for kind, record in records:
        if kind == "history":
            steps.append(
                {
                    (i.key or "/".join(i.nested_key)): json.loads(i.value_json)
                    for i in record.history.item
                }
            )
        elif kind == "run":
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "summary":
            for item in record.summary.update:
                _put(
                    summary,
                    [item.key] if item.key else list(item.nested_key),
                    json.loads(item.value_json),
                )
        elif kind == "files":
            files += 1
    return steps, config, summary, files


def _records(path):
    from wandb.proto import wandb_internal_pb2

    for data in _log_entries(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record.WhichOneof("record_type"), record


def _log_entries(data):
    """Entries of a LevelDB-style log: blocks of 32 KiB, pieces with a 7-byte head; the file begins
    with 7 bytes."""
    position, entry = 7, b""
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        entry += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or last piece
            yield entry
            entry = b""


def _put(tree, keys, value):
    *parents, last = [part for key in keys for part in key.split("/")]
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[last] = value


def test_an_infinite_number_is_valid_json(vlm, tmp_path):
    """With one token to choose from, its logit stands infinitely far above the next."""
    path = tmp_path / "out.jsonl"
    out = vlm.generate("where is it ?", sampler="prophet", top_k=1, track=f"jsonl:{path}")

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    for line in path.read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=refuse)
    step = out.trajectory.steps[0].to_dict()
    assert step["rows"][0]["info"] == {"logit_margin": None}
    assert "info/logit_margin" not in step_scalars(step)
