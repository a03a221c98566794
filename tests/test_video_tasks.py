import json
import shutil
from pathlib import Path

import pytest
from clips import write_frames

from dlm_decode.errors import InvalidInputError, MediaError, UnknownNameError
from dlm_decode.eval import egoschema, mlvu, video_questions
from dlm_decode.eval.video_questions import annotation_folder, find_video, right_letters

ANNOTATIONS = Path(__file__).parent / "annotations"
EGO_IDS = [f"11111111-aaaa-4bbb-8ccc-00000000000{number}" for number in (1, 2, 3)]


@pytest.fixture(autouse=True)
def _no_videos_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "hub"))


def ego(layout="egoschema_hf", **options):
    return egoschema.load_task(str(ANNOTATIONS / layout), is_blind=True, **options)


def mlvu_of(layout, split, **options):
    return mlvu.load_task(str(ANNOTATIONS / layout), split=split, is_blind=True, **options)


def entry(task, sample, text):
    return {
        **task.facts(sample),
        "answer": text,
        **task.judge(sample, text),
        "flops": 1,
        "baseline_flops": 2,
    }


def test_egoschema_layouts_give_the_same_questions():
    hub, github = ego(), ego("egoschema_github")
    assert hub.samples() == github.samples()
    assert hub.data == github.data
    assert [sample.id for sample in hub.samples()] == EGO_IDS
    assert [sample.right for sample in hub.samples()] == [("C",), ("A",), ("E",)]
    sample = hub.samples()[1]
    assert sample.options[3] == "C adds water. Then c throws the dough away."
    assert sample.question.split("\n") == [
        "How does c's handling of the dough change between the first and the last minute of the "
        "video?",
        "A. C first kneads with both hands, then shapes small rounds.",
        "B. C first shapes rounds, then kneads with both hands.",
        "C. C works alone at first, then lets a machine knead.",
        "D. C adds water. Then c throws the dough away.",
        "E. C never touches the dough after the first minute.",
        egoschema.INSTRUCTION,
    ]
    assert [sample.id for sample in hub.samples(2)] == EGO_IDS[:2]


def test_the_instruction_is_part_of_the_data():
    plain = ego().data
    assert ego(instruction="Which?").samples()[0].question.endswith("shelf.\nWhich?")
    assert ego(instruction="").samples()[0].question.endswith("near the shelf.")
    assert ego(instruction="Which?").data != plain


def test_questions_without_answers_are_refused(tmp_path):
    shutil.copytree(ANNOTATIONS / "egoschema_hf" / "GENERATION", tmp_path / "Subset")
    with pytest.raises(InvalidInputError, match="no public answers"):
        egoschema.load_task(str(tmp_path), is_blind=True)
    github = tmp_path / "github"
    github.mkdir()
    shutil.copy(ANNOTATIONS / "egoschema_github" / "questions.json", github)
    with pytest.raises(InvalidInputError, match=r"subset_answers\.json"):
        egoschema.load_task(str(github), is_blind=True)
    (github / "subset_answers.json").write_text(json.dumps({EGO_IDS[1]: 3}))
    task = egoschema.load_task(str(github), is_blind=True)
    assert [(sample.id, sample.right) for sample in task.samples()] == [(EGO_IDS[1], ("D",))]
    (github / "subset_answers.json").write_text(json.dumps({"other": 3}))
    with pytest.raises(InvalidInputError, match="lacks 1 of the answered"):
        egoschema.load_task(str(github), is_blind=True)
    (github / "subset_answers.json").write_text("{")
    with pytest.raises(InvalidInputError, match="cannot read"):
        egoschema.load_task(str(github), is_blind=True)


@pytest.mark.parametrize("split", ["test", "dev"])
def test_mlvu_layouts_give_the_same_questions(split):
    official, mirror = (mlvu_of(f"mlvu_{split}_{kind}", split) for kind in ("official", "mirror"))

    def facts(task):
        return [(s.kind, s.question, s.video, s.options, s.right) for s in task.samples()]

    assert facts(official) == facts(mirror)
    expected = {
        "test": [("anomaly_reco", ("E",)), ("tutorialQA", ("F",)), ("sportsQA", ("B",))],
        "dev": [("plotQA", ("A",)), ("needle", ("C",)), ("count", ("D",))],
    }
    assert [(s.kind, s.right) for s in official.samples()] == expected[split]


def test_mlvu_prompts():
    test = mlvu_of("mlvu_test_official", "test").samples()[0]
    assert test.id == "AR_0"
    assert test.question == (
        "Is anything unusual in this surveillance footage? If so, which kind?\n(A) Arson\n"
        "(B) Normal\n(C) Burglary\n(D) Fighting\n(E) Vandalism\n(F) Shooting"
    )
    dev = mlvu_of("mlvu_dev_mirror", "dev").samples()[2]
    assert mlvu_of("mlvu_dev_mirror", "dev").data["instruction"].startswith("Only give")
    assert dev.question.endswith(
        "(A) 3\n(B) 1\n(C) 4\n(D) 2\nOnly give the best option.\nBest option: ("
    )
    other = mlvu_of("mlvu_test_mirror", "test", instruction="Answer with a letter.").samples()[0]
    assert other.question == test.question + "\nAnswer with a letter."


def _official(folder, rows):
    (folder / "test-ground-truth").mkdir(parents=True)
    (folder / "test-ground-truth" / "test_mcq_gt.json").write_text(json.dumps(rows))
    return str(folder)


ROW = {
    "video": "v.mp4",
    "question": "How often?",
    "candidates": ["1", "2", "2", "3"],
    "answer": "2",
    "question_type": "count",
}


def test_equal_candidates_are_both_right_and_a_lost_answer_is_none(tmp_path):
    rows = [ROW, {**ROW, "answer": "7"}, {**ROW, "candidates": [1, 2, 3], "answer": 3}]
    task = mlvu.load_task(_official(tmp_path, rows), is_blind=True)
    first, second, third = task.samples()
    assert first.right == ("B", "C")
    assert second.right == ()
    assert third.right == ("C",)
    assert [task.judge(first, text)["is_right"] for text in ("B", "(C)", "A", "2")] == [
        True,
        True,
        False,
        True,
    ]
    entries = [entry(task, first, "C"), entry(task, second, "A"), entry(task, second, "hm")]
    assert task.scores(entries)["without_right_option"] == 2
    assert task.scores(entries)["unparsed"] == 1
    assert right_letters("a paper boat.", ["A paper boat", "A boat"]) == ("A",)
    assert right_letters("", ["", "x"]) == ("A",)


def test_ids_that_repeat_are_told_apart(tmp_path):
    rows = [{**ROW, "question_id": "AC_0"}, {**ROW, "question_id": "AC_0"}]
    task = mlvu.load_task(_official(tmp_path, rows), is_blind=True)
    assert [sample.id for sample in task.samples()] == ["0/AC_0", "1/AC_0"]


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([{**ROW, "question_type": "counts"}], UnknownNameError, "Did you mean 'count'"),
        ([{k: v for k, v in ROW.items() if k != "answer"}], InvalidInputError, "lacks 'answer'"),
        ([{**ROW, "candidates": None}], InvalidInputError, "has 0 options"),
        ([{**ROW, "candidates": ["2"]}], InvalidInputError, "has 1 options"),
        ({"a": 1}, InvalidInputError, "no list of questions"),
        ([], InvalidInputError, "no questions"),
    ],
)
def test_bad_annotations(tmp_path, rows, error, message):
    with pytest.raises(error, match=message):
        mlvu.load_task(_official(tmp_path, rows), is_blind=True)


def test_a_split_that_is_not_there(tmp_path):
    with pytest.raises(InvalidInputError, match="no questions of the split 'test'"):
        mlvu_of("mlvu_dev_official", "test")
    with pytest.raises(UnknownNameError, match="Did you mean 'test'"):
        mlvu_of("mlvu_test_official", "tests")


def test_mlvu_score_is_a_mean_over_types():
    task = mlvu_of("mlvu_test_official", "test")
    anomaly, tutorial, _ = task.samples()
    entries = [
        *(entry(task, anomaly, text) for text in ("E", "E", "(E)", "B")),
        entry(task, tutorial, "Answer: A"),
        entry(task, tutorial, "F"),
        entry(task, tutorial, "A man saws"),
    ]
    report = task.scores(entries)
    assert report["accuracy_by_kind"] == {"anomaly_reco": 3 / 4, "tutorialQA": 1 / 3}
    assert report["score"] == pytest.approx((3 / 4 + 1 / 3) / 2)
    assert report["accuracy"] == pytest.approx(4 / 7)
    assert report["unparsed"] == 1
    assert report["types_not_asked"] == [
        kind for kind in mlvu.SPLITS["test"].types if kind not in ("anomaly_reco", "tutorialQA")
    ]
    assert len(mlvu.SPLITS["test"].types) == 9
    assert len(mlvu.SPLITS["dev"].types) == 7
    assert report["is_complete"] is False
    assert task.metric.startswith("mean over 9 task types")


def test_six_letters_can_be_right_and_a_seventh_cannot():
    task = mlvu_of("mlvu_test_official", "test")
    tutorial = task.samples()[1]
    assert task.judge(tutorial, "Best option: (F)") == {"choice": "F", "is_right": True}
    assert task.judge(tutorial, "(G)") == {"choice": None, "is_right": False}
    assert ego().judge(ego().samples()[0], "F") == {"choice": None, "is_right": False}


def test_errors_are_no_wrong_answers():
    task = ego()
    first, second, third = task.samples()
    failed = {**task.facts(third), "is_right": False, "error": "x", "flops": 0, "baseline_flops": 0}
    report = task.scores([entry(task, first, "C"), entry(task, second, "B"), failed])
    assert report["score"] == report["accuracy"] == pytest.approx(1 / 3)
    assert report["accuracy_of_answered"] == 1 / 2
    assert (report["errors"], report["unparsed"]) == (1, 0)
    assert task.scores([failed])["accuracy_of_answered"] is None


def test_a_whole_benchmark_is_complete(monkeypatch):
    task = ego()
    entries = [entry(task, sample, "A") for sample in task.samples()]
    assert task.scores(entries)["is_complete"] is False
    monkeypatch.setattr(egoschema.EgoSchema, "num_expected", 3)
    assert task.scores(entries)["is_complete"] is True
    assert task.scores([*entries[:2], {**entries[2], "error": "x"}])["is_complete"] is False


def test_videos_are_found(tmp_path):
    write_frames(tmp_path / "one", 5)
    write_frames(tmp_path / "2_needle" / "needle_x", 3)
    (tmp_path / "two.MP4").write_bytes(b"")
    assert find_video(tmp_path, "one.mp4") == tmp_path / "one"
    assert find_video(tmp_path, "two") == tmp_path / "two.MP4"
    assert find_video(tmp_path, "two.mp4") == tmp_path / "two.MP4"
    nested = tmp_path / "2_needle" / "needle_x"
    assert find_video(tmp_path, "needle_x.mp4", ["2_needle"]) == nested
    with pytest.raises(MediaError, match=r"no video 'three\.mp4' in .*2_needle"):
        find_video(tmp_path, "three.mp4", ["2_needle"])


def test_dev_videos_lie_in_folders_by_type(tmp_path):
    data = tmp_path / "data"
    shutil.copytree(ANNOTATIONS / "mlvu_dev_official", data)
    with pytest.raises(InvalidInputError, match="pass --videos FOLDER"):
        mlvu.load_task(str(data), split="dev")
    write_frames(data / "MLVU" / "video" / "2_needle" / "needle_x_1", 9)
    task = mlvu.load_task(str(data), split="dev")
    plot, needle, _ = task.samples()
    assert task.media(needle) == {"videos": [data / "MLVU" / "video" / "2_needle" / "needle_x_1"]}
    with pytest.raises(MediaError, match=r"movie_x_1\.mp4"):
        task.media(plot)


def test_sources(tmp_path, monkeypatch):
    with pytest.raises(InvalidInputError, match="cannot fetch the data set 'nobody/nothing'"):
        annotation_folder("nobody/nothing", ["*.json"])
    with pytest.raises(InvalidInputError, match="it is no hub id"):
        annotation_folder("./missing", ["*.json"])
    (tmp_path / "file.json").write_text("[]")
    with pytest.raises(InvalidInputError, match="is a file"):
        annotation_folder(str(tmp_path / "file.json"), ["*.json"])
    asked = []

    def snapshot_download(name, repo_type, allow_patterns):
        asked.append((name, repo_type, tuple(allow_patterns)))
        return str(ANNOTATIONS / "egoschema_hf")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    task = egoschema.load_task(is_blind=True)
    assert asked == [("lmms-lab/egoschema", "dataset", egoschema._PATTERNS)]
    assert [sample.id for sample in task.samples()] == EGO_IDS
    assert task.source == "lmms-lab/egoschema"
    with pytest.raises(InvalidInputError, match="pass --videos FOLDER"):
        egoschema.load_task()
    with pytest.raises(InvalidInputError, match="no folder '/nowhere'"):
        egoschema.load_task(videos="/nowhere")


def test_no_hub_pattern_fetches_a_video():
    from fnmatch import fnmatch

    videos = ("videos_chunked_01.zip", "MLVU/video/1_plotQA/x.mp4", "MLVU_Test/test_video.tar.gz")
    for pattern in (*egoschema._PATTERNS, *mlvu._PATTERNS):
        assert not any(fnmatch(name, pattern) for name in videos)
    assert any(fnmatch("MLVU/json/1_plotQA.json", pattern) for pattern in mlvu._PATTERNS)
    truth = "test-ground-truth/test_mcq_gt.json"
    assert any(fnmatch(truth, pattern) for pattern in mlvu._PATTERNS)
    assert set(video_questions.PRESETS) == {"lown-paper"}
