import itertools
import random
import re

import numpy as np
import pytest

from dlm_decode.eval.scene_questions import (
    EXTRA_KINDS,
    KINDS,
    SceneSample,
    ask,
    heldout_samples,
    scene_samples,
    score,
)
from dlm_decode.eval.scenes import CELL_SIZE, _digits, generate_scene, split_of
from dlm_decode.training.data import build_tokenizer
from dlm_decode.training.language import CANVAS

SPLITS = ("train", "heldout")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def samples():
    return [
        sample
        for split in SPLITS
        for seed in range(60)
        for sample in scene_samples(seed, split, list(EXTRA_KINDS))
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_a_seed_always_gives_the_same_scene_and_questions(split):
    first, again = generate_scene(3, split), generate_scene(3, split)
    assert first == again
    assert np.array_equal(np.asarray(first.image), np.asarray(again.image))
    assert scene_samples(3, split) == scene_samples(3, split)
    assert generate_scene(4, split) != first


def test_splits_share_no_scene():
    for split in SPLITS:
        scenes = [generate_scene(seed, split) for seed in range(200)]
        assert all(split_of(scene.objects) == split for scene in scenes if not scene.is_photo)


def test_splits_share_no_digit():
    digits = {
        split: {image.tobytes() for label in range(10) for image in _digits()[split, label]}
        for split in SPLITS
    }
    assert not digits["train"] & digits["heldout"]
    assert sum(map(len, _digits().values())) == 1797


def test_objects_lie_in_their_cells():
    for seed in range(50):
        scene = generate_scene(seed)
        for item, (left, top, right, bottom) in zip(scene.objects, scene.boxes, strict=True):
            row, column = divmod(item.cell, 3)
            assert column * CELL_SIZE <= left < right <= (column + 1) * CELL_SIZE
            assert row * CELL_SIZE <= top < bottom <= (row + 1) * CELL_SIZE


def test_texts_have_known_words_and_fit_the_canvas(samples, tokenizer):
    unknown = tokenizer.convert_tokens_to_ids("<unk>")
    for sample in samples:
        question, answer = (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (sample.question, sample.answer)
        )
        assert unknown not in question + answer
        assert len(answer) <= CANVAS


def test_natural_spelling_gives_the_same_ids(tokenizer):
    spelled, plain = (
        "What COLOUR is the circle at the centre?",
        "what colour is the circle at the center ?",
    )
    assert tokenizer(spelled)["input_ids"] == tokenizer(plain)["input_ids"]


def test_every_kind_is_asked(samples):
    assert {sample.kind for sample in samples} == {*KINDS, *EXTRA_KINDS, "photo"}
    listed = list(heldout_samples(40))
    assert len({sample.id for sample in listed}) == 40
    assert {sample.kind for sample in heldout_samples(9, kinds=["count"])} == {"count"}


def test_extra_kinds_are_asked_where_named_and_change_nothing_else():
    plain = list(heldout_samples(200))
    assert not {sample.kind for sample in plain} & EXTRA_KINDS.keys()
    asked = list(heldout_samples(200, [*KINDS, "photo", *EXTRA_KINDS]))
    others = [sample for sample in asked if sample.kind not in EXTRA_KINDS]
    assert len(others) < 200 and others == plain[: len(others)]


def test_a_list_counts_in_any_order_and_only_if_complete(samples):
    for sample in (sample for sample in samples if sample.kind == "list"):
        parts = sample.answer.removesuffix(" .").split(" , ")
        assert score(sample, ", ".join(reversed(parts)) + ".")
        assert not score(sample, ", ".join([*parts, parts[0]]))
        assert not score(sample, ", ".join(parts[1:]))


def test_right_answers_score_and_wrong_ones_do_not(samples):
    for sample in samples:
        assert score(sample, sample.answer)
        assert score(sample, sample.answer.upper().replace(" .", "."))
        assert not score(sample, "")
        assert not score(sample, "large purple nothing .")


def test_an_answer_of_another_scene_is_wrong(samples):
    described = [sample for sample in samples if sample.kind == "describe"][:20]
    for one, other in itertools.permutations(described, 2):
        assert one.answer == other.answer or not score(one, other.answer)


def _truth(sample: SceneSample) -> bool:
    """Checks an answer against the scene by other means than it was made with."""
    words = sample.answer.split()
    things = {f"{item.colour} {item.name}": item for item in sample.scene.objects}
    if sample.kind == "exists":
        return (words[0] == "yes") == (" ".join(words[-3:-1]) in things)
    if sample.kind == "where" and words[:3] != ["there", "is", "no"]:
        return things[" ".join(words[1:3])].place == " ".join(words[6:-1])
    if sample.kind == "count" and words[-2] in ("object", "objects") and words[-3].isdigit():
        return int(words[-3]) == len(sample.scene.objects)
    return True


def test_answers_are_true(samples):
    assert [sample.id for sample in samples if not _truth(sample)] == []


def test_a_choice_has_one_right_option():
    rng = random.Random(0)
    for seed in range(40):
        scene = generate_scene(seed, photo_share=0.0)
        sample = ask(scene, "choice", rng)
        options = re.findall(r"[a-d] \) (\w+ \w+)", sample.question)
        present = {f"{item.colour} {item.name}" for item in scene.objects}
        assert sum(option in present for option in options) == 1
        assert len(set(options)) == 4
        letter, name = re.fullmatch(r"([a-d]) \) (\w+ \w+) \.", sample.answer).groups()
        assert options["abcd".index(letter)] == name and name in present


def test_a_picture_that_is_no_scene_has_no_objects():
    scene = next(scene for seed in range(200) if (scene := generate_scene(seed)).is_photo)
    assert scene.objects == ()
    assert ask(scene, "photo", random.Random(1)).answer.startswith("i can not tell")
