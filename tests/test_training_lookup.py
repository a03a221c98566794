"""Practice in looking options up asks for letters, and for nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from dlm_decode.eval.scene_questions import ask, options_of
from dlm_decode.eval.scenes import generate_scene
from dlm_decode.training.data import build_tokenizer
from dlm_decode.training.language import Encoder, noised
from dlm_decode.training.lookup import ask_for_letters


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return Encoder(PreTrainedTokenizerFast.from_pretrained(folder))


@pytest.mark.parametrize("is_blind", [False, True])
def test_only_letters_are_asked_for(encoder, is_blind):
    numbers = np.random.default_rng(0)
    for seed in range(12):
        scene = generate_scene(seed, photo_share=0.0)
        sample = ask(scene, "choice", random.Random(seed))
        options = options_of(sample.question)
        text = encoder.batch([sample], np.zeros(1, dtype=np.int64))
        noisy = noised(text, numbers, encoder.mask, 0.5)
        ask_for_letters(
            encoder,
            text["response"][0],
            noisy["tokens"][0],
            noisy["is_masked"][0],
            options,
            numbers,
            is_blind=is_blind,
        )
        response, is_masked = text["response"][0], noisy["is_masked"][0]
        asked = encoder.tokenizer.convert_ids_to_tokens(response[is_masked].tolist())
        if is_blind:
            assert sorted(asked) == ["a", "b", "c", "d"]
        else:
            assert asked == [sample.answer[0]]
        shown = noisy["tokens"][0, -len(response) :]
        assert torch.equal(shown[~is_masked], response[~is_masked])
        assert (shown[is_masked] == encoder.mask).all()
        words = encoder.tokenizer.decode(response, skip_special_tokens=True)
        for letter, option in zip("abcd", options, strict=True):
            assert (f"{letter} ) {option}" in words) == (is_blind or letter == sample.answer[0])
