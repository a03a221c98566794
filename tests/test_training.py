import argparse
import json
import random

import numpy as np
import pytest
import torch

import dlm_decode
from dlm_decode.errors import InvalidInputError
from dlm_decode.eval.scenes import generate_scene
from dlm_decode.training import language, tiny
from dlm_decode.training.data import NAMES, build_pool, build_tokenizer
from dlm_decode.training.language import CANVAS, Drawer, Encoder, Stage, train_language
from dlm_decode.training.tower import PatchReader, encode_pool, train_tower

FEW = Stage("few", 6, 4, 2e-3, patches=6, background=3)
ALL = Stage("all", 2, 4, 1e-3)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Held-out questions are decoded during training; a few say as much here."""
    original = language._evaluate
    monkeypatch.setattr(language, "_evaluate", lambda *given: original(*given, count=2))


@pytest.fixture(scope="module")
def drawer(tmp_path_factory):
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    pool = build_pool(24, "train")
    features = np.random.default_rng(0).normal(size=(24, 144, 96)).astype(np.float16)
    return Drawer(pool, features, Encoder(PreTrainedTokenizerFast.from_pretrained(folder)))


def _train(drawer, folder, stages=(FEW, ALL), **options):
    return train_language(
        drawer, drawer, list(stages), folder, vocab_size=len(drawer.encoder.ids), **options
    )


def test_every_object_has_one_anchor_that_shows_it(drawer):
    pool = drawer.pool
    for row, scene in enumerate(pool.scenes):
        anchors = np.flatnonzero(pool.is_anchor[row])
        shown = sorted(NAMES[name] for name in pool.names[row, anchors])
        assert shown == sorted(item.name for item in scene.objects)


def test_few_visual_tokens_hold_every_anchor_at_its_true_position(drawer):
    rows = np.arange(24)
    _, positions, is_real = drawer.visual(
        rows, FEW, np.ones(24, dtype=bool), np.random.default_rng(0)
    )
    shown = positions.numpy() - len(drawer.encoder.head)
    assert is_real.all()
    for row in rows:
        assert set(np.flatnonzero(drawer.pool.is_anchor[row])) <= set(shown[row])
        assert len(set(shown[row])) == 6 + 3 + 1
        assert shown[row, -1] == 144


def test_a_short_run_lowers_the_loss(drawer, tmp_path):
    stage = Stage("few", 24, 16, 3e-3, patches=6, background=3)
    _train(drawer, tmp_path, [stage], evaluate_every=8)
    losses = [
        json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()
    ]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.2


def test_a_killed_run_resumes_to_the_same_weights(drawer, tmp_path, monkeypatch):
    whole = _train(drawer, tmp_path / "whole", evaluate_every=3)
    original = Drawer.batches

    def killed(self, stage, seed, step):
        if (stage.name, step) == ("few", 4):
            raise KeyboardInterrupt
        return original(self, stage, seed, step)

    monkeypatch.setattr(Drawer, "batches", killed)
    with pytest.raises(KeyboardInterrupt):
        _train(drawer, tmp_path / "cut", evaluate_every=3)
    monkeypatch.setattr(Drawer, "batches", original)
    resumed = _train(drawer, tmp_path / "cut", evaluate_every=3)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_tower_training_resumes(tmp_path):
    pool = build_pool(8, "train")
    whole = train_tower(pool, pool, tmp_path / "whole.pt", steps=4, batch=4, save_every=2)
    train_tower(pool, pool, tmp_path / "cut.pt", steps=2, schedule_steps=4, batch=4, save_every=2)
    resumed = train_tower(pool, pool, tmp_path / "cut.pt", steps=4, batch=4)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_the_whole_command_writes_a_folder_that_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "stages", lambda scale: [FEW, ALL])
    monkeypatch.setattr(tiny, "WATCHED_SCENES", 6)
    parser = argparse.ArgumentParser()
    tiny.add_arguments(parser)
    given = [
        "--output",
        str(tmp_path / "out"),
        "--scenes",
        "12",
        "--dense-scenes",
        "4",
        "--tower-steps",
        "2",
    ]
    assert tiny.run(parser.parse_args(given)) == 0
    model = dlm_decode.load(tmp_path / "out")
    assert model.generation_defaults["gen_length"] == CANVAS
    assert model.model.dtype == torch.float32
    out = model.generate("What is in the picture?", build_pool(1, "heldout").scenes[0].image)
    assert out.cost.visual_tokens == (145,)
    tower, weights = tiny.from_export(tmp_path / "out")
    again = tmp_path / "again"
    assert (
        tiny.run(
            parser.parse_args([*given, "--output", str(again), "--start", str(again)[:-5] + "out"])
        )
        == 0
    )
    assert (
        weights.keys()
        == language.Reader(len(weights["language.lm_head.weight"]), 96).state_dict().keys()
    )
    first, second = (
        tiny.from_export(folder)[0].tower.state_dict() for folder in (tmp_path / "out", again)
    )
    assert all(torch.equal(first[key], second[key]) for key in tower.tower.state_dict())
    with pytest.raises(InvalidInputError, match="at least 1"):
        tiny.run(parser.parse_args(["--output", str(tmp_path / "out"), "--scenes", "0"]))


def test_training_and_decoding_see_the_same_sequence(drawer, tmp_path):
    """Logits of a fully masked response are those that `generate` starts from."""
    tower, scenes = PatchReader(), build_pool(4, "heldout")
    reader = _train(drawer, tmp_path / "work", [FEW])
    for parameter in [*tower.parameters(), *reader.parameters()]:
        parameter.data = parameter.data.half().float()
    build_tokenizer(tmp_path / "tokenizer")
    tiny.export(tmp_path / "out", tower, reader, tmp_path / "tokenizer")
    vlm = dlm_decode.load(tmp_path / "out")
    held = Drawer(scenes, encode_pool(tower, scenes).astype(np.float32), drawer.encoder)
    samples, rows = held.samples(random.Random(0), 3)
    text = held.encoder.batch(samples, np.full(3, 145))
    features, order, is_real = held.visual(
        rows, ALL, np.ones(3, dtype=bool), np.random.default_rng(0)
    )
    masks = torch.full((3, CANVAS), held.encoder.mask)
    with torch.no_grad():
        states = reader(
            torch.cat([text["prompt"], masks], dim=1),
            text["positions"],
            torch.cat([is_real, text["is_real"]], dim=1),
            features,
            order,
        )
        ours = reader.language.logits(states[:, -CANVAS:])
        for row, sample in enumerate(samples):
            assert vlm.processor is not None
            inputs = vlm.processor(
                sample.question, [generate_scene(sample.scene.seed, "heldout").image]
            )
            prompt = vlm.model.encode_prompt(**vars(inputs))
            embeds = torch.cat([prompt.embeds, vlm.model.embed(masks[0])])[None]
            theirs = vlm.model.logits(
                vlm.model.hidden_states(embeds, torch.arange(embeds.shape[1])[None], None)[0]
            )
            torch.testing.assert_close(theirs[-CANVAS:], ours[row], atol=5e-3, rtol=1e-3)
