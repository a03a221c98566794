"""Prompts: templates, image tags, messages, modes of pixels, text of ids."""

from __future__ import annotations

import pytest
import torch
from golden_models import tiny56_config
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dlm_decode.canvas import IMAGE_TOKEN_ID
from dlm_decode.errors import CheckpointError, InvalidInputError, MediaError
from dlm_decode.models.configuration import LLaDAConfig
from dlm_decode.models.processing import VlmProcessor

SPECIAL = ["<|startoftext|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
WORDS = ["[UNK]", *SPECIAL, "what", "is", "this", "?", "user", "system", "assistant", "and", "that"]


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=SPECIAL[0], unk_token="[UNK]")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    fast.chat_template = (
        "<|startoftext|>{% for m in messages %}{{ m['role'] }} {{ m['content'] }}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
    )
    return fast


@pytest.fixture
def processor(tokenizer):
    return VlmProcessor(tokenizer, tiny56_config())


def picture(width=56, height=56):
    return Image.new("RGB", (width, height), (10, 200, 30))


def words(processor, ids):
    return [
        "IMAGE" if token == IMAGE_TOKEN_ID else processor.token_text(token)
        for token in ids.tolist()
    ]


def test_text_only(processor):
    inputs = processor("what is this ?")
    expected = ["<|startoftext|>", "user", "what", "is", "this", "?", "<|eot_id|>", "assistant"]
    assert words(processor, inputs.input_ids) == expected
    assert inputs.pixel_values is inputs.image_sizes is inputs.modalities is None


def test_tags_are_added_in_front_or_kept_in_place(processor):
    added = processor("what is this ?", [picture()])
    kept = processor("<image>\nwhat is this ?", [picture()])
    assert torch.equal(added.input_ids, kept.input_ids)
    assert words(processor, added.input_ids)[:4] == ["<|startoftext|>", "user", "IMAGE", "what"]
    between = processor("this <image> and that <image>", [picture(), picture()])
    assert words(processor, between.input_ids)[2:-2] == ["this", "IMAGE", "and", "that", "IMAGE"]


def test_official_token_drop(processor):
    inputs = processor("<image> and that", [picture()], official_token_drop=True)
    assert words(processor, inputs.input_ids) == [
        "<|startoftext|>",
        "user",
        "IMAGE",
        "that",  # the first word behind the image is lost
        "<|eot_id|>",
        "assistant",
    ]


def test_messages(processor):
    chat = [
        {"role": "system", "content": "that"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " what ?"}]},
        {"role": "assistant", "content": "this"},
        {"role": "user", "content": "is that ?"},
    ]
    inputs = processor(chat, [picture()])
    text = "<|startoftext|> system that <|eot_id|> user IMAGE what ? <|eot_id|> assistant this"
    assert words(processor, inputs.input_ids)[: len(text.split())] == text.split()
    assert chat[1]["content"][0] == {"type": "image"}  # the caller's messages stay as they are
    for messages, message in (
        ([], "messages is empty"),
        ([{"content": "x"}], "mapping with 'role'"),
        (["x"], "mapping with 'role'"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "content part must have type"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            processor(messages)
    with pytest.raises(InvalidInputError, match="no user message"):
        processor([{"role": "system", "content": "x"}], [picture()])


def test_numbers_of_tags_and_images_must_agree(processor):
    with pytest.raises(InvalidInputError, match="2 <image> tags, and 1 images and 0 videos"):
        processor("<image> <image> what ?", [picture()])
    with pytest.raises(InvalidInputError, match="1 <image> tags, and 0 images"):
        processor("<image> what ?")


def test_modes_of_pixels(processor):
    single = processor("what ?", [picture(112, 56)])
    assert single.pixel_values[0].shape == (3, 3, 56, 56)  # base and two tiles
    assert single.image_sizes == [(112, 56)]
    several = processor("what ?", [picture(112, 56), picture()])
    assert [tuple(part.shape) for part in several.pixel_values] == [(3, 56, 56)] * 2
    stacked = processor("what ?", [picture(112, 56), picture()], stack_images=True)
    assert stacked.pixel_values.shape == (2, 3, 56, 56)
    tiled = VlmProcessor(processor.tokenizer, tiny56_config(multi_image_aspect_ratio=None))
    assert tiled("what ?", [picture(112, 56)] * 2).pixel_values[0].shape == (3, 3, 56, 56)
    padded = VlmProcessor(processor.tokenizer, tiny56_config(image_aspect_ratio="pad"))
    grey = padded.image_pixels(picture(112, 56))
    assert torch.allclose(grey[:, 0, 0], torch.full((3,), 127 / 127.5 - 1))
    unknown = VlmProcessor(processor.tokenizer, tiny56_config(image_aspect_ratio="tall"))
    with pytest.raises(CheckpointError, match="image_aspect_ratio 'tall'"):
        unknown.image_pixels(picture())


def test_pixels_are_red_first_and_centred(processor):
    pixels = processor.image_pixels(Image.new("RGB", (56, 56), (255, 0, 127)))[0]
    assert pixels.dtype == torch.float32
    assert pixels[:, 0, 0].tolist() == pytest.approx([1.0, -1.0, 127 / 127.5 - 1])


def test_videos_follow_images(processor):
    frames = [picture(80, 40)] * 3
    inputs = processor("what ?", [picture()], [frames])
    assert inputs.modalities == ["image", "video"]
    assert [len(part) for part in inputs.pixel_values] == [2, 3]
    assert inputs.image_sizes == [(56, 56), (80, 40)]
    with pytest.raises(MediaError, match="no frames"):
        processor("what ?", [], [[]])


def test_text_only_models_refuse_media(tokenizer):
    with pytest.raises(InvalidInputError, match="text-only model"):
        VlmProcessor(tokenizer, LLaDAConfig())("what ?", [picture()])


def test_text_of_ids(processor):
    ids = processor.encode("what is this ?")
    assert processor.decode([*ids, 2, -200]) == "what is this ?"
    assert processor.token_text(2) == "<|eot_id|>"
    assert processor.num_tokens == len(WORDS)


def test_save_and_load(processor, tmp_path):
    from dlm_decode.models import load_processor

    processor.save_pretrained(tmp_path)
    processor.config.save_pretrained(tmp_path)
    again = load_processor(tmp_path)
    assert again is not None
    first, second = processor("what ?", [picture()]), again("what ?", [picture()])
    assert torch.equal(first.input_ids, second.input_ids)
    assert torch.equal(first.pixel_values[0], second.pixel_values[0])
