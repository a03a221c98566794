from __future__ import annotations

import csv
import json
from collections import Counter

import pytest

from dlm_decode import vision
from dlm_decode.cli import main
from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.eval import run_scenes, runner
from dlm_decode.eval.compare import compare, paired_seconds, share_to_draw, sign_test
from dlm_decode.eval.matches import matched, matched_score, random_access
from dlm_decode.eval.run_scenes import SCENES, Scenes, evaluate_scenes
from dlm_decode.eval.runner import Results
from dlm_decode.eval.tables import draw, render, to_csv
from dlm_decode.eval.variants import Variant, suite, suite_names
from dlm_decode.settings import Settings, resolve_settings

VARIANTS = [
    Variant.parse(text)
    for text in ("baseline", "baseline@steps=4", "lown:guard=none+stride:keep_ratio=0.5@steps=6")
]


def test_variants_are_read():
    variant = VARIANTS[2]
    assert variant.options["steps"] == 6
    assert variant.options["sampler"].guard is None
    assert variant.options["stages"][0].keep_ratio == 0.5
    for text, message in (
        ("basline", "Did you mean 'baseline'"),
        ("baseline@stepz=4", "cannot read 'stepz=4'"),
        ("baseline@steps=4,steps=8", "'steps' stands twice"),
        ("baseline@steps=four", "is no number"),
        ("baseline+strid", "Did you mean 'stride'"),
        ("lown:cache=prefx", "Did you mean 'prefix'"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            Variant.parse(text)


def test_variants_as_command_line_options():
    text = "lown:guard=none+stride:keep_ratio=0.5@steps=8,cache=dllm:gen_interval=4;ties=rounding"
    assert Variant.parse(text).arguments() == [
        *("--sampler", "lown:guard=none", "--stage", "stride:keep_ratio=0.5", "--steps", "8"),
        *("--cache", "dllm:gen_interval=4,ties=rounding"),
    ]
    assert Variant.parse("lown+fast_dllm").arguments() == ["--sampler", "lown+fast_dllm"]


def test_named_settings_of_stages_are_read():
    name = "lightkv@llava-1.5-13b"
    variant = Variant.parse(f"fast_dllm@2025-06+{name}+stride@steps=8")
    assert variant.options["stages"] == [vision.make(name), vision.make("stride")]
    assert variant.arguments() == [
        *("--sampler", "fast_dllm@2025-06", "--stage", name, "--stage", "stride", "--steps", "8")
    ]
    assert Variant.parse(f"baseline+{name}").options["stages"] == [vision.make(name)]


def test_rows_agree_with_what_ran(vlm, tmp_path):
    rows = compare(vlm, VARIANTS, tmp_path, limit=6, batch=4)
    assert [row["name"] for row in rows] == [variant.name for variant in VARIANTS]
    assert [row["sampler"] for row in rows] == ["baseline", "baseline", "lown"]
    assert rows[0]["relative_cost"] <= 1
    assert rows[1]["relative_cost"] <= rows[0]["relative_cost"]
    assert set(rows[2]["forwards"]) == {"FULL/full", "TEXT_ONLY/full"}
    for row in rows:  # the baseline's schedule has 8 forwards
        assert row["f"] == pytest.approx(row["forwards"]["FULL/full"] / 8)
        assert row["sigma"] == pytest.approx(row["forwards"].get("TEXT_ONLY/full", 0) / 8)
        assert row["errors"] == 0
    assert rows[0]["full_share"] == rows[1]["full_share"] == 1
    assert rows[1]["f"] <= 0.5
    assert 0 < rows[2]["full_share"] <= 1
    assert rows[0]["seconds_ratio"] == 1
    assert all(row["seconds_ratio"] > 0 for row in rows)
    assert rows[0]["worse"] == rows[0]["better"] == 0
    assert rows[0]["p"] == 1
    again = compare(vlm, VARIANTS, tmp_path, limit=6, batch=3)
    assert again == rows, "a finished comparison is read back, not run anew"
    table = list(csv.DictReader(to_csv(rows).splitlines()))
    for key in ("relative_cost", "f", "sigma", "seconds_ratio"):
        assert [float(line[key]) for line in table] == [row[key] for row in rows]
    assert len(render(rows).splitlines()) == 4
    with pytest.raises(InvalidInputError, match="each once"):
        compare(vlm, [VARIANTS[0], VARIANTS[0]], tmp_path, limit=1)
    with pytest.raises(InvalidInputError, match="other settings"):
        compare(vlm, VARIANTS, tmp_path, limit=1, task=Scenes("train"))
    for sizes in ({"limit": 0}, {"limit": 4, "batch": 0}):
        with pytest.raises(InvalidInputError, match="at least 1"):
            compare(vlm, VARIANTS, tmp_path / "none", **sizes)
    assert not (tmp_path / "none").exists()


def test_each_forward_and_step_of_a_question_is_counted(vlm, tmp_path):
    variant = Variant.parse("lown@cache=prefix:refresh_interval=3")
    compare(vlm, [variant], tmp_path, limit=3, batch=3)
    (path,) = tmp_path.glob("*.jsonl")
    entries = [json.loads(line) for line in path.read_text().split("\n")[1:-1]]
    samples = run_scenes.question_batches(3, 3)[0]
    for entry, sample in zip(entries, samples, strict=True):
        out = vlm.generate(sample.question, images=[sample.image], **variant.options)
        assert entry["flops"] == out.cost.flops
        kinds = {f"{view}/{kind}": n for (view, kind), n in out.cost.forwards.items()}
        assert entry["forwards"] == kinds
        assert entry["steps"] == len(out.trajectory.steps)


def test_variants_take_turns_and_later_ones_resume(vlm, tmp_path, monkeypatch):
    asked = []
    plain = Results.answer

    def answer(self, vlm, samples, options, is_blind=False, batch=None):
        asked.append(self.settings["variant"])
        plain(self, vlm, samples, options, is_blind, batch)

    monkeypatch.setattr(Results, "answer", answer)
    names = [variant.name for variant in VARIANTS]
    compare(vlm, VARIANTS[:2], tmp_path, limit=6, batch=2)
    assert asked == [names[0], names[1], names[1], names[0], names[0], names[1]]
    # A variant in front of finished ones is added to them; it was never timed beside them.
    rows = compare(vlm, [VARIANTS[2], *VARIANTS[:2]], tmp_path, limit=6, batch=2)
    assert [row["name"] for row in rows] == [names[2], names[0], names[1]]
    assert [row["seconds_ratio"] for row in rows] == [1, None, None]


def test_seconds_are_paired_by_batch():
    def entries(**batches):
        return [{"batch": name, "batch_seconds": value} for name, value in batches.items()]

    first = entries(a=1.0, b=2.0, c=10.0, only=1.0)
    assert paired_seconds(entries(a=0.5, b=3.0, c=2.0, other=9.0), first) == 0.5
    assert paired_seconds(entries(other=9.0), first) is None
    assert paired_seconds([{"batch": None, "seconds": 1.0}], first) is None


def test_only_whole_batches_are_timed(vlm, tmp_path):
    rows = compare(vlm, VARIANTS[:2], tmp_path, limit=4, batch=2)
    files = {
        json.loads(p.read_text().split("\n")[0])["settings"]["variant"]: p
        for p in tmp_path.glob("*.jsonl")
    }
    path = files[VARIANTS[1].name]
    lines = path.read_text().split("\n")
    path.write_text("\n".join(lines[:2]) + "\n")  # one answer of the first batch is left
    again = compare(vlm, VARIANTS[:2], tmp_path, limit=4, batch=2)
    assert again[1]["score"] == rows[1]["score"]
    assert again[1]["relative_cost"] == rows[1]["relative_cost"]
    entries = [json.loads(line) for line in path.read_text().split("\n")[1:-1]]
    assert len(entries) == 4
    assert entries[0]["batch"].endswith("/0")
    assert entries[1]["batch"] is None, "half a batch is no match for a whole one"
    assert entries[2]["batch"].endswith("/1")


def test_a_failing_question_costs_no_other(vlm, tmp_path, monkeypatch):
    plain, broken, calls = vlm.generate, [], []
    bad = run_scenes.question_batches(4, 4)[0][2]
    broken.append(bad.question)

    def generate(prompt, **options):
        calls.append(len(prompt))
        if options["steps"] == 4 and any(question in broken for question in prompt):
            raise RuntimeError("out of\u2028memory")
        return plain(prompt, **options)

    monkeypatch.setattr(vlm, "generate", generate)
    path = tmp_path / "out.jsonl"
    options = {"steps": 4}
    report = evaluate_scenes(vlm, options, output=path, limit=4, batch=4)
    assert calls == [4, 1, 1, 1, 1]
    assert report["questions"] == 4
    assert report["errors"] == 1
    assert report["first_error"] == "RuntimeError: out of\u2028memory"
    entry = json.loads(path.read_text().split("\n")[3])
    assert entry["id"] == bad.id
    assert entry["answer"] is None
    variants = [Variant.parse("baseline@steps=8"), VARIANTS[1]]
    rows = compare(vlm, variants, tmp_path / "compare", limit=4, batch=4)
    assert [row["errors"] for row in rows] == [0, 1]
    entries = {
        lines[0]["settings"]["variant"]: lines[1:]
        for path in (tmp_path / "compare").glob("*.jsonl")
        for lines in [[json.loads(line) for line in path.read_text().split("\n")[:-1]]]
    }
    costs = [
        (mine["flops"], mine["steps"], theirs["baseline_flops"])
        for mine, theirs in zip(entries[variants[1].name], entries[variants[0].name], strict=True)
        if mine["id"] != bad.id
    ]
    flops, steps, baseline = map(sum, zip(*costs, strict=True))
    assert rows[1]["relative_cost"] == flops / baseline, "costs are of what both answered"
    assert rows[1]["f"] == pytest.approx(steps / 3 / 8)
    assert rows[1]["seconds_ratio"] is None
    assert "out of" in rows[1]["first_error"]

    broken.clear()
    again = evaluate_scenes(vlm, options, output=path, limit=4, batch=4)
    assert again["errors"] == 0, "what failed is asked again"
    assert calls[-1] == 1


def test_answers_with_line_separators_and_cut_characters(vlm, tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    evaluate_scenes(vlm, {}, output=path, limit=3, batch=3)
    lines = path.read_bytes().split(b"\n")
    entry = {**json.loads(lines[1]), "answer": "one\u2028two\x85three\x0cfour"}
    lines[1] = json.dumps(entry, ensure_ascii=False).encode()
    path.write_bytes(b"\n".join([*lines[:3], lines[3][:9] + "\u00e9".encode()[:1]]))
    calls = []
    monkeypatch.setattr(runner, "_ask", _counted(runner._ask, calls))
    evaluate_scenes(vlm, {}, output=path, limit=3, batch=3)
    assert calls == [1], "only the line that was cut is asked again"
    assert json.loads(path.read_bytes().split(b"\n")[1])["answer"] == entry["answer"]


def _counted(function, calls):
    def counted(vlm, samples, *rest):
        calls.append(len(samples))
        return function(vlm, samples, *rest)

    return counted


def test_draws_differ_between_questions_and_not_between_batches(vlm, tmp_path):
    variant = [Variant.parse("baseline:remasking=random@seed=3")]
    seeds = []
    for batch in (4, 3):
        folder = tmp_path / str(batch)
        compare(vlm, variant, folder, limit=4, batch=batch)
        (path,) = folder.glob("*.jsonl")
        entries = [json.loads(line) for line in path.read_text().split("\n")[1:-1]]
        seeds.append([(entry["seed"], entry["answer"]) for entry in entries])
    assert seeds[0] == seeds[1]
    assert len({seed for seed, _ in seeds[0]}) == 4


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"name": "a", "relative_cost": 1.0, "score": 0.5, "questions": 4}]
    for suffix, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        assert draw(rows, tmp_path / f"plot.{suffix}").read_bytes().startswith(start)


def test_matching():
    figures = {
        "lown": ("lown", 0.3, 0.7),
        "lown+fast_dllm": ("lown", 0.31, 0.7),
        "lown@steps=4": ("lown", 0.35, 0.6),
        "baseline@steps=8": ("baseline", 0.25, 0.6),
        "baseline@steps=16": ("baseline", 0.5, 0.8),
        "baseline": ("baseline", 1.0, 0.9),
    }
    rows = [
        {"name": name, "sampler": sampler, "relative_cost": cost, "score": score}
        for name, (sampler, cost, score) in figures.items()
    ]
    assert matched(rows, "lown")["name"] == "baseline@steps=16"
    assert matched(rows, "baseline@steps=8")["name"] == "lown"
    assert matched(rows[:4], "lown") is None, "no setting of the same sampler is a rival"
    assert matched_score(rows, "lown")["name"] == "lown+fast_dllm"
    assert matched_score(rows, "lown@steps=4")["name"] == "baseline@steps=8"
    assert matched_score(rows, "baseline") is None
    for find in (matched, matched_score):
        with pytest.raises(InvalidInputError, match="not among"):
            find(rows, "other")


def test_random_access_is_matched_to_the_certificates():
    variant = Variant.parse("lown:guard=none,budget=0.5+stride:keep_ratio=0.5@steps=8,seed=9")
    drawn = random_access([{"name": variant.name, "full_share": 0.31}], variant)
    assert [made.options["seed"] for made in drawn] == [0, 1, 2]
    for made in drawn:
        sampler = made.options["sampler"]
        assert (sampler.access, sampler.full_share) == ("random", 0.31)
        assert sampler.guard is None
        assert sampler.budget is None
        assert made.options["steps"] == 8
        assert made.options["stages"][0].keep_ratio == 0.5
    for text in ("baseline", "lown:access=every"):
        with pytest.raises(InvalidInputError, match="certificate"):
            Variant.parse(text).with_random_access(0.5, 0)
    with pytest.raises(InvalidInputError, match="answered nothing"):
        random_access([{"name": variant.name, "full_share": None}], variant)


def test_share_to_draw():
    # Three questions: 3 x 3 FULL forwards in 3 x 5 steps, so half of the later steps run FULL.
    assert share_to_draw(9, 15, 3, steps=9) == pytest.approx((1 + 8 / 2) / 9)
    assert share_to_draw(3, 15, 3, steps=8) == 1 / 8
    assert share_to_draw(15, 15, 3, steps=8) == 1
    assert share_to_draw(3, 3, 3, steps=8) == 1 / 8
    assert share_to_draw(0, 0, 0, steps=8) is None


@pytest.mark.parametrize("name", suite_names())
def test_suites_can_be_decoded(vlm, name):
    own = resolve_settings({}, vlm.generation_defaults)
    names = suite(name, own)
    assert names[0] == "baseline"
    assert len(set(names)) == len(names)
    sample = run_scenes.question_batches(1, 1)[0][0]
    for text in names:
        variant = Variant.parse(text)
        out = vlm.generate(sample.question, images=[sample.image], **variant.options)
        assert out.cost.flops > 0, text


def test_suites_follow_the_model_s_own_lengths():
    own = Settings(gen_length=32, steps=32, block_length=32)
    lown = suite("lown", own)
    assert {"baseline@steps=16", "baseline@steps=8", "lown:accept=k,order=confidence"} <= {*lown}
    assert Variant.parse("lown:access=random,full_share=0.125").name in lown
    samplers = Counter(Variant.parse(text).sampler_name for text in suite("caches", own))
    assert samplers == {"baseline": 7, "fast_dllm": 14, "lown": 14}
    assert "lown@block_length=8,cache=dual" in suite("caches", own)
    assert len(suite("lown-choices", own)) == 1 + 2 * 5
    budget = suite("lown-budget", own)
    assert {"baseline@steps=4", "lown:budget=0.07", "lown:budget=0.6"} <= {*budget}
    # 8 steps: a budget of 0.1 does not pay the first forward.
    short = suite("lown-budget", Settings(gen_length=8, steps=8, block_length=4))
    assert "lown:budget=0.15" in short
    assert "lown:budget=0.1" not in short
    assert "baseline@steps=1" not in short, "two blocks need two steps"
    assert not any("steps" in text for text in suite("lown", Settings(1, 1, 1)))
    with pytest.raises(UnknownNameError, match="Did you mean 'caches'"):
        suite("cache", own)


def test_sign_test():
    assert sign_test(0, 0) == 1
    assert sign_test(5, 5) == 1
    assert sign_test(0, 6) == pytest.approx(2 / 64)
    assert sign_test(6, 0) == sign_test(0, 6)


def test_command(checkpoint, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    variants = ["--variant", "baseline@steps=4", "--variant", "lown@steps=4"]
    where = ["--model", str(checkpoint), "--output", str(tmp_path), "--limit", "3"]
    name = "lown@steps=4"
    matching = ["--match", name, "--match-score", name, "--match-random", name]
    assert main(["compare", *where, *variants, "--plot", *matching]) == 0
    shown = capsys.readouterr().out
    assert "cheapest rival of lown@steps=4" in shown
    table = json.loads((tmp_path / "table.json").read_text())
    assert len(table["rows"]) == 5
    matches = {match["by"]: match for match in table["matches"]}
    assert list(matches) == ["random", "cost", "score"]
    drawn = matches["random"]["match"]
    assert [row["name"] for row in table["rows"][2:]] == drawn
    share = Variant.parse(drawn[0]).options["sampler"].full_share
    assert share == pytest.approx(table["rows"][1]["full_share"], abs=1e-4)
    assert matches["score"]["match"] == matched_score(table["rows"], name)["name"]
    rival = matched(table["rows"], name)
    assert matches["cost"]["match"] == (rival and rival["name"])
    for file in ("table.csv", "table.md", "plot.png", "plot.svg"):
        assert (tmp_path / file).stat().st_size > 0
    for mistake, message in (
        ([*variants, "--match", "other"], "--match 'other' is none of the variants"),
        ([*variants, "--match-random", "baseline@steps=4"], "certificate"),
        (["--suite", "lwon"], "Did you mean 'lown'"),
        ([], "at least one variant"),
    ):
        assert main(["compare", *where, *mistake]) == 2
        assert message in capsys.readouterr().err


def test_the_help_names_every_suite(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"begins with the reference: {', '.join(suite_names())};" in shown


def test_suites_and_variants_combine(checkpoint, tmp_path, capsys):
    where = ["--model", str(checkpoint), "--output", str(tmp_path), "--limit", "1"]
    given = ["--suite", "lown", "--variant", "lown", "--variant", "lown:budget=0.5"]
    assert main(["compare", *where, *given]) == 0
    names = [row["name"] for row in json.loads((tmp_path / "table.json").read_text())["rows"]]
    assert names[0] == "baseline"
    assert names[-1] == "lown:budget=0.5"
    assert names.count("lown") == 1


def test_a_schedule_is_part_of_a_setting(vlm, tmp_path):
    names = ("baseline", "baseline@schedule=shift:shift=0.5", "baseline@schedule=cosine,steps=4")
    rows = compare(vlm, [Variant.parse(name) for name in names], tmp_path, limit=2)
    assert [row["questions"] for row in rows] == [2, 2, 2]
    again = compare(vlm, [Variant.parse(name) for name in names], tmp_path, limit=2)
    assert again == rows


@pytest.mark.parametrize("text", ["5", "[1, 2]", "null", "words"])
def test_a_file_of_something_else_is_left_alone(tmp_path, text):
    path = tmp_path / "other.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(InvalidInputError, match="other settings"):
        Results(path, {}, SCENES)
    assert path.read_text() == text + "\n"
