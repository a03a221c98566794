"""Clips, what is asked about them, and how a model learns from them."""

from __future__ import annotations

import argparse
import random

import numpy as np
import pytest
import torch

import dlm_decode
from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.eval.clip_questions import (
    KINDS,
    ask,
    clip_samples,
    clip_vocabulary,
    first_samples,
    practice,
    score,
)
from dlm_decode.eval.clips import MOTIONS, NUM_FRAMES, NUM_STEPS, generate_clip, split_of
from dlm_decode.eval.generated import generated_task
from dlm_decode.eval.scenes import COLOURS
from dlm_decode.training import language, tiny, video
from dlm_decode.training.clip_data import ClipDrawer, ClipReader, encode_clips
from dlm_decode.training.language import Stage, train_language
from dlm_decode.training.tiny import from_export, read_encoder

SPLITS = ("train", "heldout")
FEW = Stage("few", 3, 6, 1e-3, patches=1, background=4)
ALL = Stage("all", 1, 2, 1e-3)


@pytest.mark.parametrize("split", SPLITS)
def test_a_clip_is_a_function_of_split_and_seed(split):
    first, second = generate_clip(5, split), generate_clip(5, split)
    assert first == second
    assert [a.tobytes() for a in first.frames()] == [b.tobytes() for b in second.frames()]
    assert first.frames()[0].size == (96, 96)
    assert len(first.frames()) == NUM_FRAMES
    assert clip_samples(5, split) == clip_samples(5, split)


def test_no_course_of_events_is_in_both_splits():
    for split in SPLITS:
        assert {split_of(generate_clip(seed, split).objects) for seed in range(60)} == {split}


def test_what_happens_is_what_the_clip_says():
    """Paths go where the motion says, nothing leaves the picture, and nothing touches."""
    for seed in range(120):
        clip = generate_clip(seed)
        assert len({item.colour for item in clip.objects}) == len(clip.objects) == 1 + seed % 4
        for item in clip.objects:
            across, down = MOTIONS[item.motion]
            moved = [b - a for a, b in zip(item.path[0], item.path[-1], strict=True)]
            assert np.sign(np.round(moved, 6)).tolist() == [across, down]
            assert max(map(abs, moved)) >= 28 or item.motion == "nowhere"
            assert len(item.path) == item.stop - item.first >= 4
            assert all(item.radius <= part <= 96 - item.radius for xy in item.path for part in xy)
        for step in range(NUM_STEPS):
            there = [(o.at(step), o.radius) for o in clip.objects if o.at(step) is not None]
            for number, (one, radius) in enumerate(there):
                for other, width in there[:number]:
                    assert one is not None and other is not None
                    apart = max(abs(a - b) for a, b in zip(one, other, strict=True))
                    assert apart >= radius + width


def test_pictures_show_the_objects_where_they_are():
    clip = next(c for c in map(generate_clip, range(99)) if c.objects[0].name == "square")
    item, shade = clip.objects[0], clip.shades[0]
    assert max(abs(a - b) for a, b in zip(shade, COLOURS[item.colour], strict=True)) <= 14
    for step, picture in enumerate(clip.steps()):
        centre = item.at(step)
        if centre is not None:
            assert picture.getpixel((int(centre[0]), int(centre[1]))) == shade
        elif step < item.first:
            where = tuple(int(part) for part in item.path[0])
            hidden = [o.at(step) for o in clip.objects[1:]]
            if all(
                at is None or max(abs(at[0] - where[0]), abs(at[1] - where[1])) > 28
                for at in hidden
            ):
                assert picture.getpixel(where) == clip.background
    frames = [frame.tobytes() for frame in clip.frames()]
    assert frames[::2] == frames[1::2]


def test_questions_have_four_options_one_of_them_right():
    samples = list(first_samples(150))
    assert {sample.kind for sample in samples} == set(KINDS)
    letters = set()
    for sample in samples:
        assert len(set(sample.options)) == 4
        letter, bracket, *rest = sample.answer.split()
        assert bracket == ")"
        letters.add(letter)
        right = sample.options["abcd".index(letter)]
        clip, question = sample.clip, sample.question
        if sample.kind == "movement":
            item = next(o for o in clip.objects if f"the {o.colour} {o.name} move" in question)
            assert right == item.motion
        elif sample.kind == "order":
            named = {f"{o.colour} {o.name}": o.first for o in clip.objects}
            pick = min if " first ?" in question else max
            assert [name for name, step in named.items() if step == pick(named.values())] == [right]
        else:
            assert right == str(len(clip.objects))
        option, sentence = " ".join(rest).split(" , ")
        assert option == right
        assert right in sentence
        assert score(sample, sample.answer)
        assert score(sample, f"{letter.upper()}.")
        assert not score(sample, " ".join(("x", bracket, *rest)))
        assert not score(sample, "")
    assert letters == set("abcd")


def test_questions_without_options_need_every_word():
    clip, rng = generate_clip(2), random.Random(0)
    found = [practice(clip, "movement", rng) for _ in range(40)]
    bare = next(sample for sample in found if sample is not None and not sample.options)
    assert score(bare, bare.answer)
    assert not score(bare, bare.answer.split()[-2])
    assert {len(sample.options) for sample in found if sample} == {0, 2, 3, 4}
    assert ask(generate_clip(0), "order", rng) is None, "one object is no order"


def test_every_word_is_known():
    words, rng = set(clip_vocabulary()), random.Random(9)
    for seed in range(500, 560):
        for kind in (*KINDS, "place"):
            sample = practice(generate_clip(seed, "heldout"), kind, rng)
            if sample is not None:
                assert {*sample.question.split(), *sample.answer.split()} <= words


def test_tasks_are_found_by_name():
    assert generated_task("clips").name == "clips"
    assert generated_task("scenes").samples(2)[0].kind == "describe"
    with pytest.raises(UnknownNameError, match="clips"):
        generated_task("clip")


@pytest.fixture(scope="module")
def drawer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    video.extend_tokenizer(video.SHIPPED, folder)
    clips = [generate_clip(seed) for seed in range(6)]
    features = encode_clips(dlm_decode.load("tiny").model, clips)
    return ClipDrawer(clips, features, read_encoder(folder, video.CANVAS, video.ENDING))


@pytest.fixture
def quick(monkeypatch):
    """Held-out questions are decoded during training; a few say as much here."""
    original = language._evaluate
    monkeypatch.setattr(language, "_evaluate", lambda *given: original(*given, count=2))


def test_few_tokens_show_every_object_in_every_step(drawer):
    shown = drawer._few(drawer.clips[3], FEW, np.random.default_rng(0))
    assert shown.tolist() == sorted(set(shown.tolist()))
    for step in range(NUM_STEPS):
        for item in drawer.clips[3].objects:
            centre = item.at(step)
            if centre is not None:
                cell = int(centre[1] // 16) * 7 + int(centre[0] // 16)
                assert {step * 2 * 42 + cell, (step * 2 + 1) * 42 + cell} & set(shown.tolist())


def test_lookup_practice_masks_the_letter_only(drawer):
    stage = Stage("few", 1, 48, 1e-3, patches=1)
    found = 0
    for batch in drawer.batches(stage, 0, 0):
        is_blind = ~batch["is_real"][:, : batch["features"].shape[1]].any(dim=1)
        letters = torch.tensor([drawer.encoder.ids[letter] for letter in "abcd"])
        is_letter = torch.isin(batch["response"], letters)
        for row in is_blind.nonzero()[:, 0].tolist():
            found += int(is_letter[row].sum() > 1)
            if is_letter[row].sum() > 1:
                assert torch.equal(is_letter[row], batch["is_masked"][row])
    assert found >= 3


def test_a_run_writes_a_folder_that_sees_what_training_saw(tmp_path, quick, monkeypatch, drawer):
    """Resumed after a kill; then logits of a masked response equal those of training's layout."""
    monkeypatch.setattr(video, "stages", lambda scale: [FEW, ALL])
    monkeypatch.setattr(video, "WATCHED_CLIPS", 4)
    parser = argparse.ArgumentParser()
    tiny.add_arguments(parser)
    given = ["--kind", "video", "--output", str(tmp_path / "out"), "--clips", "6"]
    assert tiny.run(parser.parse_args(given)) == 0
    assert tiny.run(parser.parse_args(given)) == 0, "a finished run is taken up, and ends"
    vlm = dlm_decode.load(tmp_path / "out")
    assert vlm.model.config.model_type == "llava_llada_video"
    assert vlm.generation_defaults["max_frames"] == NUM_FRAMES
    _, weights = from_export(tmp_path / "out")
    reader = ClipReader(drawer.encoder)
    reader.load_state_dict(weights)
    samples = [clip_samples(row, "train")[-1] for row in range(2)]
    text = drawer.encoder.batch(samples, np.full(2, drawer.num_visual))
    visual = drawer.visual(np.arange(2), ALL, np.ones(2, dtype=bool), np.random.default_rng(0))
    masks = torch.full((2, video.CANVAS), drawer.encoder.mask)
    features, order, is_real = visual
    with torch.no_grad():
        tokens = torch.cat([text["prompt"], masks], dim=1)
        keep = torch.cat([is_real, text["is_real"]], dim=1)
        states = reader(tokens, text["positions"], keep, features, order)
        ours = reader.language.logits(states[:, -video.CANVAS :])
        for row, sample in enumerate(samples):
            assert vlm.processor is not None
            inputs = vlm.processor(sample.question, videos=[sample.video], think_mode="no_think")
            prompt = vlm.model.encode_prompt(**vars(inputs))
            embeds = torch.cat([prompt.embeds, vlm.model.embed(masks[0])])[None]
            theirs = vlm.model.logits(
                vlm.model.hidden_states(embeds, torch.arange(embeds.shape[1])[None], None)[0]
            )
            torch.testing.assert_close(theirs[-video.CANVAS :], ours[row], atol=5e-3, rtol=1e-3)
    out = vlm.generate(samples[0].question, videos=[samples[0].video])
    assert out.cost.visual_tokens == (drawer.num_visual,)
    assert out.cost.baseline_forwards == video.CANVAS


def test_a_killed_run_resumes_to_the_same_weights(tmp_path, quick, monkeypatch, drawer):
    vocab_size = len(drawer.encoder.ids)
    start = video.extended(from_export(video.SHIPPED)[1], vocab_size)

    def trained(folder):
        reader = ClipReader(drawer.encoder)
        return train_language(
            drawer,
            drawer,
            [FEW],
            folder,
            vocab_size=vocab_size,
            evaluate_every=2,
            start=start,
            reader=reader,
        ).state_dict()

    whole = trained(tmp_path / "whole")
    original = ClipDrawer.batches

    def killed(self, stage, seed, step):
        if step == 2:
            raise KeyboardInterrupt
        return original(self, stage, seed, step)

    monkeypatch.setattr(ClipDrawer, "batches", killed)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut")
    monkeypatch.setattr(ClipDrawer, "batches", original)
    resumed = trained(tmp_path / "cut")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    assert not torch.equal(whole["newline"], start["newline"])
    assert torch.equal(whole["projector.0.weight"], start["projector.0.weight"])


def test_options_of_another_kind_are_refused(tmp_path):
    parser = argparse.ArgumentParser()
    tiny.add_arguments(parser)
    out = ["--output", str(tmp_path / "out")]
    for given in (["--clips", "5"], ["--kind", "video", "--scenes", "5"]):
        with pytest.raises(InvalidInputError, match="leave it out"):
            tiny.run(parser.parse_args([*out, *given]))
    with pytest.raises(InvalidInputError, match="at least 1"):
        tiny.run(parser.parse_args([*out, "--kind", "video", "--clips", "0"]))
    assert not (tmp_path / "out.work").exists()
