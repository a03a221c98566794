"""Shared fixtures. The hub is never asked."""

from __future__ import annotations

import json
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A folder with a small random LLaDA-V, a word tokenizer and generation defaults."""
    from transformers import PreTrainedTokenizerFast

    from dlm_decode.models.configuration import LlavaLLaDAConfig
    from dlm_decode.models.llava_llada import LlavaLLaDAModelLM
    from dlm_decode.training.data import build_tokenizer

    folder = tmp_path_factory.mktemp("checkpoint")
    build_tokenizer(folder)
    ids = PreTrainedTokenizerFast.from_pretrained(folder).get_vocab()
    config = LlavaLLaDAConfig(
        vocab_size=len(ids),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=400,
        mask_token_id=ids["<|mdm_mask|>"],
        eos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
        bos_token_id=ids["<|startoftext|>"],
        stop_token_ids=[ids["<|endoftext|>"]],
        mm_projector_type="mlp2x_gelu",
        mm_patch_merge_type="spatial_unpad",
        mm_newline_position="grid",
        image_aspect_ratio="anyres_max_4",
        image_grid_pinpoints="(1x1),...,(3x3)",
        vision_config=VISION,
    )
    torch.manual_seed(0)
    model = LlavaLLaDAModelLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"gen_length": 8, "steps": 8, "block_length": 8})
    )
    return folder


@pytest.fixture(scope="session")
def vlm(checkpoint):
    """The checkpoint, loaded."""
    import dlm_decode

    return dlm_decode.load(checkpoint)


@pytest.fixture(scope="session")
def ar_folders(tmp_path_factory):
    """Folders with small random autoregressive models, built when first asked for."""
    from functools import cache

    from ar_models import build_folder

    return cache(lambda name: build_folder(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def ar_vlms(ar_folders):
    """Those models, loaded."""
    from functools import cache

    import dlm_decode

    return cache(lambda name: dlm_decode.load(ar_folders(name)))
