"""Training of the autoregressive twin: small runs, seconds each."""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast

import dlm_decode
from dlm_decode.errors import InvalidInputError
from dlm_decode.training import autoregressive, tiny, tiny_ar
from dlm_decode.training.autoregressive import (
    ArDrawer,
    ArEncoder,
    ArReader,
    greedy_hits,
    model_config,
    train_ar,
)
from dlm_decode.training.clip_tower import ClipPatchReader
from dlm_decode.training.data import build_ar_tokenizer, build_pool, pixels_of
from dlm_decode.training.stages import TrainingStage
from dlm_decode.training.tower import PatchReader, train_tower

FEW = TrainingStage("few", 6, 4, 2e-3, patches=6, background=3)
ALL = TrainingStage("all", 2, 4, 1e-3, is_flat=True)
NONE = -100
SHIPPED = Path(dlm_decode.__file__).parent / "data"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(autoregressive, "NUM_WATCHED", 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_ar_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def drawer(folder):
    pool = build_pool(24, "train")
    features = np.random.default_rng(0).normal(size=(24, 144, 96)).astype(np.float16)
    return ArDrawer(pool, features, ArEncoder(PreTrainedTokenizerFast.from_pretrained(folder)))


def test_labels_are_the_answer_one_token_ahead(drawer):
    encoder = drawer.encoder
    samples, _ = drawer.samples(random.Random(0), 12)
    text = encoder.batch(samples, has_image=True)
    for row, sample in enumerate(samples):
        tokens, labels = text["tokens"][row], text["labels"][row]
        where = (labels != NONE).nonzero().flatten()
        assert labels[where].tolist() == [*encoder.words(sample.answer), encoder.end]
        assert tokens[where[1:]].tolist() == labels[where[:-1]].tolist()
        assert tokens[: where[0] + 1].tolist() == [
            *encoder.words("<s> user :"),
            encoder.newline,
            *encoder.words(sample.question),
            *encoder.words("assistant :"),
        ]


def test_flags_mark_what_is_named_and_whether_it_is_there(drawer):
    encoder = drawer.encoder
    word = {index: name for name, index in encoder.ids.items()}
    samples, _ = drawer.samples(random.Random(1), 60)
    text = encoder.batch(samples, has_image=True)
    seen = set()
    for row, sample in enumerate(samples):
        there = {f"{item.colour} {item.name}" for item in sample.scene.objects}
        for at in (text["flags"][row] != NONE).nonzero().flatten().tolist():
            name = " ".join(word[int(index)] for index in text["tokens"][row, at - 1 : at + 1])
            assert text["flags"][row, at] == (name in there)
            seen.add((sample.kind, name in there))
    assert seen == {(kind, flag) for kind in ("choice", "exists") for flag in (True, False)}


def test_few_visual_tokens_stand_at_their_true_positions(drawer):
    rows = np.arange(4)
    samples = [drawer.samples(random.Random(2), 1)[0][0]] * 4
    batch = drawer.group(samples, rows, FEW, np.random.default_rng(0))
    positions = batch["positions"].numpy()
    for row in rows:
        shown = positions[row, 3 : 3 + 9] - 3
        assert set(np.flatnonzero(drawer.pool.is_anchor[row])) <= set(shown)
    assert (positions[:, :3] == [0, 1, 2]).all()
    assert (positions[:, 12] == 3 + 144).all()
    assert (np.diff(positions[:, 12:]) == 1).all()


def test_an_answer_read_off_one_pass_is_what_generate_writes(drawer, folder, tmp_path):
    """Also that training and the exported folder see the same sequence."""
    tower, pool = ClipPatchReader(), build_pool(6, "heldout")
    torch.manual_seed(0)
    reader = ArReader(model_config(drawer.encoder.ids)).eval()
    for parameter in [*tower.parameters(), *reader.parameters()]:
        parameter.data = parameter.data.half().float()
    tiny_ar.export_ar(tmp_path, tower, reader, folder)
    model = LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    processor = LlavaProcessor.from_pretrained(tmp_path, backend="pil")
    features = tower.features(pixels_of(pool.images)).detach().numpy()
    held = ArDrawer(pool, features, drawer.encoder)
    samples, rows = held.samples(random.Random(3), 3)
    for row, sample in enumerate(samples):
        batch = held.group([sample], rows[row : row + 1], ALL, np.random.default_rng(0))
        with torch.no_grad():
            ours = reader.language.lm_head(reader(batch)[0])[0]
        asked = [{"type": "image"}, {"type": "text", "text": sample.question}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": asked}], add_generation_prompt=True
        )
        inputs = processor(text=[text], images=[sample.image], return_tensors="pt")
        start = int((batch["labels"][0] != NONE).int().argmax()) + 1
        assert inputs["input_ids"].shape[1] == start
        with torch.no_grad():
            theirs = model(**inputs).logits[0]
        torch.testing.assert_close(theirs, ours[:start], atol=2e-4, rtol=1e-3)


def test_hits_are_answers_whose_every_word_comes_first(drawer):
    samples, rows = drawer.samples(random.Random(4), 20)
    reader = ArReader(model_config(drawer.encoder.ids)).eval()
    reader.language.lm_head = torch.nn.Identity()
    size = len(drawer.encoder.ids)

    def told(is_right_from):
        """A model that writes right answers but for the first `is_right_from` words."""

        def forward(batch):
            labels = batch["labels"].clone()
            for row in labels:
                where = (row != NONE).nonzero().flatten()[:is_right_from]
                row[where] = (row[where] + 1) % size
            return torch.nn.functional.one_hot(labels.clamp_min(0), size).float(), None

        reader.forward = forward
        return greedy_hits(reader, drawer, samples, rows, FEW)

    assert all(told(0))
    assert not any(told(1))


def _train(drawer, folder, stages=(FEW, ALL), **options):
    return train_ar(drawer, drawer, list(stages), folder, **options)


def test_a_short_run_lowers_the_loss(drawer, tmp_path):
    stage = TrainingStage("few", 24, 16, 3e-3, patches=6, background=3)
    _train(drawer, tmp_path, [stage], evaluate_every=8)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.2


def test_a_killed_run_resumes_to_the_same_weights(drawer, tmp_path, monkeypatch):
    whole = _train(drawer, tmp_path / "whole", evaluate_every=3)
    original = ArDrawer.batches

    def killed(self, stage, seed, step):
        if (stage.name, step) == ("few", 4):
            raise KeyboardInterrupt
        return original(self, stage, seed, step)

    monkeypatch.setattr(ArDrawer, "batches", killed)
    with pytest.raises(KeyboardInterrupt):
        _train(drawer, tmp_path / "cut", evaluate_every=3)
    monkeypatch.setattr(ArDrawer, "batches", original)
    resumed = _train(drawer, tmp_path / "cut", evaluate_every=3)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_the_class_token_learns_what_is_in_the_picture(tmp_path):
    pool = build_pool(16, "train", photo_share=0.0)
    reader: Any = ClipPatchReader()
    before = reader.loss(pool, np.arange(16)).item()
    reader = train_tower(
        pool, pool, tmp_path / "tower.pt", steps=12, batch=16, kind=ClipPatchReader
    )
    assert reader.loss(pool, np.arange(16)).item() < before - 1
    assert {"cls_name", "cls_count", "digit"} <= reader.accuracy(pool).keys()
    reader.zero_grad()
    states = reader.states(pixels_of(pool.images))
    reader._scene_loss(states[:, 0], pool, np.arange(16)).backward()
    assert reader.tower.embeddings.patch_embedding.weight.grad.abs().max() > 0


def test_where_the_class_token_looks_is_learnt(tmp_path):
    """The part of the loss that concerns its look falls by itself; it is in the layer read."""
    pool = build_pool(8, "train", photo_share=0.0)
    reader: Any = ClipPatchReader()
    rows, optimizer = np.arange(8), torch.optim.AdamW(reader.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        loss = reader.look_loss(reader._entering(pixels_of(pool.images)), pool, rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    layers = reader.tower.encoder.layers
    assert layers[-2].self_attn.k_proj.weight.grad.abs().max() > 0
    assert layers[-1].self_attn.k_proj.weight.grad is None


def test_a_tower_that_is_taken_over_sees_nearly_the_same():
    pool = build_pool(8, "heldout")
    siglip, _ = tiny.from_export(SHIPPED / "tiny")
    clip = ClipPatchReader()
    clip.take_over(siglip, pool)
    pixels = pixels_of(pool.images)
    with torch.no_grad():
        wanted, given, other = (
            reader.features(pixels).flatten(0, 1) for reader in (siglip, clip, ClipPatchReader())
        )
    similar = torch.nn.functional.cosine_similarity(given, wanted).mean()
    assert similar > 0.8
    assert torch.nn.functional.cosine_similarity(other, wanted).mean() < 0.5


def test_the_whole_command_writes_a_folder_that_transformers_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_ar, "ar_stages", lambda scale: [FEW, ALL])
    monkeypatch.setattr(tiny, "WATCHED_SCENES", 6)
    parser = argparse.ArgumentParser()
    tiny.add_arguments(parser)
    given = ["--kind", "ar", "--scenes", "12", "--dense-scenes", "4", "--tower-steps", "2"]
    first, second = tmp_path / "first", tmp_path / "second"
    start = ["--start", str(SHIPPED / "tiny")]
    assert tiny.run(parser.parse_args([*given, *start, "--output", str(first)])) == 0
    loaded: Any = LlavaForConditionalGeneration.from_pretrained(first, output_loading_info=True)
    model, report = loaded
    assert not any(report[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    assert model.dtype == torch.float32
    assert (
        tiny.run(parser.parse_args([*given, "--start", str(first), "--output", str(second)])) == 0
    )
    towers = [tiny_ar.from_ar_export(path)[0].tower.state_dict() for path in (first, second)]
    assert all(torch.equal(value, towers[1][name]) for name, value in towers[0].items())
    with pytest.raises(InvalidInputError, match="holds no config"):
        tiny.run(
            parser.parse_args([*given, "--start", str(tmp_path), "--output", str(tmp_path / "x")])
        )


def test_only_these_kinds_of_folders_are_started_from(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    with pytest.raises(InvalidInputError, match="'qwen2_5_vl'"):
        tiny_ar.ArRecipe().read(tmp_path, build_pool(1, "train"))
    assert isinstance(tiny_ar.ArRecipe().tower_kind(), PatchReader)
