"""`AutoregressiveVlm`: batches, pictures and videos, sampling, stops, costs, bad input, files."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from ar_models import ARCHITECTURES, VOCABULARY, picture

import dlm_decode
from dlm_decode.cost import Work, forward_flops, layer_flops
from dlm_decode.errors import CheckpointError, InvalidInputError, NumericalError, UnknownNameError

QUESTION = "what is this ?"
FRAMES = [picture(seed=seed) for seed in range(5)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_k": 30, "top_p": 0.9}])
def test_rows_in_a_batch_equal_single_rows(ar_vlms, architecture, options):
    vlm = ar_vlms(architecture)
    questions = [QUESTION, "is this a red box ? <image> or <image>", "what ?"]
    images = [picture(), [picture(70, 30, 1), picture(20, 60, 2)], None]
    videos: list = [None, None, None]
    if "video" in vlm.architecture.modalities:
        videos[2] = [FRAMES]
        options = {**options, "max_frames": 3, "force_sample": True}
    common = {"gen_length": 7, "stages": ["stride:keep_ratio=0.5"], **options}
    together = vlm.generate(questions, images=images, videos=videos, seed=[4, 5, 6], **common)
    assert len(together.text) == 3
    for row, question in enumerate(questions):
        media = {"images": images[row], "videos": videos[row]}
        own = {name: value for name, value in common.items() if "frame" not in name}
        own = own if videos[row] is None else common
        own = {name: value for name, value in own.items() if name != "force_sample" or videos[row]}
        alone = vlm.generate(question, **media, seed=4 + row, **own)
        length = alone.sequences.shape[1]
        assert alone.sequences[0].tolist() == together.sequences[row, :length].tolist()
        assert alone.text == together.text[row]
        assert alone.stop_positions[0] == together.stop_positions[row]
        assert alone.cost.flops == together.cost.row_flops[row]
        assert alone.cost.visual_tokens[0] == together.cost.visual_tokens[row]
    assert together.cost.vision_flops > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pictures_and_their_order_matter(ar_vlms, architecture):
    vlm = ar_vlms(architecture)
    first, second = picture(seed=1), picture(seed=2)
    ask = {"gen_length": 8, "stop": False}
    outs = [
        vlm.generate(QUESTION, images=images, **ask).sequences.tolist()
        for images in ([first, second], [second, first], [first], None)
    ]
    assert all(a != b for at, a in enumerate(outs) for b in outs[:at])


def test_cost_counts_prefill_and_decode_apart(ar_vlms):
    vlm = ar_vlms("llava")
    ask = {"images": picture(), "gen_length": 5, "stop": False}
    whole = vlm.generate(QUESTION, **ask).cost
    length = whole.prompt_lengths[0]
    assert whole.forwards == {("FULL", "prefill"): 1, ("FULL", "decode"): 4}
    prefill = 3 * layer_flops(vlm.geometry, Work(length, length * (length + 1) // 2))
    decode = sum(forward_flops(vlm.geometry, 1, length + t) for t in range(1, 5))
    assert whole.flops == whole.baseline_flops == prefill + decode
    assert whole.relative == 1.0
    # 3 layers, keys and values, 2 heads of 8 numbers of 4 bytes
    assert whole.kv_bytes == 3 * 2 * 2 * 8 * 4 * (length + 4)
    half = vlm.generate(QUESTION, stages=["stride:keep_ratio=0.5"], **ask).cost
    assert half.visual_tokens == half.kept_visual_tokens == (8,)
    assert half.kv_bytes == 3 * 2 * 2 * 8 * 4 * (length - 8 + 4)
    assert half.baseline_flops == whole.flops
    assert 0.5 < half.relative < 0.9
    none = vlm.generate(QUESTION, stages=["stride:keep_ratio=1.0"], **ask)
    assert none.cost.flops == whole.flops
    assert "1 FULL prefill, 4 FULL decode" in half.summary()


def test_trajectory_has_a_step_per_token(ar_vlms, tmp_path):
    vlm = ar_vlms("llava")
    out = vlm.generate(
        QUESTION, images=picture(), gen_length=4, stop=False, track=f"jsonl:{tmp_path}/t"
    )
    assert len(out.trajectory) == 4
    run, *steps, end = out.trajectory.records()
    assert run["sampler"] == {"name": "autoregressive", "options": {}}
    assert run["rows"][0]["visual_tokens"] == 16
    tokens = out.sequences[0].tolist()
    for at, step in enumerate(steps):
        ((position, token, text, confidence, reason),) = step["rows"][0]["commits"]
        assert (position, token, reason) == (at, tokens[at], "autoregressive")
        assert text == vlm.token_text(token) and 0 < confidence <= 1
        assert [f["kind"] for f in step["forwards"]] == ["prefill" if at == 0 else "decode"]
    assert end["rows"][0]["tokens"] == tokens
    assert len((tmp_path / "t").read_text().splitlines()) == 6


def test_stops_cut_a_row_and_the_others_go_on(ar_vlms):
    vlm = ar_vlms("llava")
    questions, images = [QUESTION, "what ?"], [picture(), picture(seed=3)]
    ask = {"gen_length": 8, "stop": False}
    free = vlm.generate(questions, images=images, **ask).sequences
    stop = free[0, 2:4].tolist()
    assert stop not in [free[1, at : at + 2].tolist() for at in range(7)]
    out = vlm.generate(questions, images=images, gen_length=8, stop=[stop])
    assert out.stop_positions[0] == 2
    assert out.sequences[0, :2].tolist() == free[0, :2].tolist()
    kept = out.stop_positions[1] or 8
    assert out.sequences[1, :kept].tolist() == free[1, :kept].tolist()
    assert out.cost.row_forwards[0] == {"FULL": 4}


def test_suppressed_ids_and_seeds(ar_vlms):
    vlm = ar_vlms("llava")
    ask = {"images": picture(), "gen_length": 8, "stop": False}
    greedy = vlm.generate(QUESTION, **ask).sequences[0].tolist()
    without = vlm.generate(QUESTION, suppress_token_ids=[greedy[0]], **ask).sequences[0].tolist()
    assert greedy[0] not in without
    drawn = [
        vlm.generate(QUESTION, temperature=3.0, seed=seed, **ask).sequences[0].tolist()
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert vlm.generate(QUESTION, temperature=3.0, top_k=1, **ask).sequences[0].tolist() == greedy


def test_a_streamer_sees_the_prompt_the_drafts_and_the_end(ar_vlms):
    class Streamer:
        def __init__(self):
            self.calls = []

        def put(self, value):
            self.calls.append(("put", len(value)))

        def put_draft(self, value):
            self.calls.append(("draft", len(value)))

        def end(self):
            self.calls.append(("end", 0))

    vlm, streamer = ar_vlms("llava"), Streamer()
    vlm.generate(QUESTION, images=picture(), gen_length=3, stop=False, streamer=streamer)
    assert streamer.calls == [("put", 10), *[("draft", 3)] * 3, ("put", 3), ("end", 0)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampler": "lown"}, "decodes diffusion models"),
        ({"steps": 4, "cfg_scale": 1.0}, "cfg_scale, steps: for diffusion models only"),
        ({"block_length": 4}, "for diffusion models only"),
        ({"cache": "prefix"}, "for diffusion models only"),
        ({"stages": ["redvtp"]}, "masked response positions"),
        ({"videos": [FRAMES]}, "reads image only"),
        ({"images": [picture()] * 2, "prompt": "<image> ?"}, "1 <image> tags"),
        ({"prompt": "what <image> ?"}, "1 <image> tags"),
        ({"prompt": " "}, "non-empty text"),
        ({"gen_length": 5000}, "reads at most 2048"),
        ({"input_ids": [1, 2]}, "exactly one of prompt and input_ids"),
        ({"pixel_values": torch.zeros(1, 3, 32, 32)}, "pixel_values cannot go with prompt"),
        ({"prompt": None, "input_ids": [5, 500]}, "outside the vocabulary"),
        (
            {"prompt": None, "input_ids": [5, 6], "video_grid_thw": torch.ones(1, 3)},
            "cannot be read",
        ),
        (
            {"prompt": None, "input_ids": [[5, 6]], "attention_mask": [[1, 0]]},
            "pad on the left|goes with",
        ),
        ({"prompt": None, "input_ids": []}, "S >= 1, got \\(1, 0\\)"),
        ({"prompt": None, "input_ids": [[5, 6], []]}, "S >= 1, got \\(0,\\)"),
        ({"prompt": None, "input_ids": [torch.ones(1, 2)]}, "S >= 1, got \\(1, 2\\)"),
        (
            {"prompt": None, "input_ids": torch.ones(1, 3), "attention_mask": [[1, 1]]},
            "attention_mask has shape \\(1, 2\\), and input_ids \\(1, 3\\)",
        ),
        ({"prompt": None, "input_ids": [5, 4, 4]}, "3 image placeholders|2 image placeholders"),
        ({"max_frames": 3}, "max_frames goes with videos"),
        ({"seed": [1, 2]}, "seed has 2 entries for 1 rows"),
        ({"fancy": 1}, "no argument fancy"),
    ],
)
def test_what_cannot_work_is_refused(ar_vlms, arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        ar_vlms("llava").generate(**{"prompt": QUESTION, **arguments})


def test_right_padding_is_refused(ar_vlms):
    ids = torch.tensor([[5, 6, 3]])
    with pytest.raises(InvalidInputError, match="pad on the left"):
        ar_vlms("llava").generate(input_ids=ids, attention_mask=torch.tensor([[1, 1, 0]]))


def test_stages_are_one_several_or_none(ar_vlms):
    def ids(stages):
        out = ar_vlms("llava").generate(
            QUESTION, images=picture(), stages=stages, gen_length=3, stop=False
        )
        return out.cost.visual_tokens, out.sequences.tolist()

    spec = "stride:keep_ratio=0.5"
    assert ids(spec) == ids([spec]) != ids(None)
    assert ids(None) == ids(())


def test_unknown_names_say_the_nearest(ar_vlms):
    with pytest.raises(UnknownNameError, match="baseline"):
        ar_vlms("llava").generate(QUESTION, sampler="baselin")


def test_diffusion_models_refuse_the_autoregressive_sampler(vlm):
    with pytest.raises(InvalidInputError, match="this is a diffusion model"):
        vlm.generate("is there a red square ?", sampler="autoregressive")


def test_nan_is_an_error(ar_vlms):
    vlm = ar_vlms("llava")
    weight = vlm.model.lm_head.weight
    kept = weight.detach().clone()
    try:
        weight.data[3] = float("nan")
        with pytest.raises(NumericalError, match="NaN at step 0"):
            vlm.generate(QUESTION, images=picture(), gen_length=3)
    finally:
        weight.data.copy_(kept)


def test_a_video_needs_as_many_frames_as_the_others(ar_vlms):
    vlm = ar_vlms("video_llava")
    ask = {"videos": [[FRAMES], [FRAMES[:2]]], "gen_length": 2}
    with pytest.raises(InvalidInputError, match="force_sample=True"):
        vlm.generate([QUESTION, QUESTION], force_sample=False, **ask)
    assert len(vlm.generate([QUESTION, QUESTION], **ask).text) == 2  # 8 frames are its own default


def test_times_of_frames(ar_vlms):
    vlm = ar_vlms("qwen2_5_vl")
    ask = {"videos": [FRAMES], "gen_length": 6, "stop": False}
    slow, fast = (
        vlm.generate(QUESTION, frame_rate=rate, fps=rate, **ask).sequences for rate in (0.5, 8)
    )
    assert not torch.equal(slow, fast)
    told = vlm.generate(QUESTION, frame_rate=2, time_instruction=True, **ask)
    assert (
        told.cost.prompt_lengths > vlm.generate(QUESTION, frame_rate=2, **ask).cost.prompt_lengths
    )


def test_frames_of_a_video_are_patches_in_time(ar_vlms):
    """Two equal frames make the patches of one image, which repeats itself in time."""
    vlm = ar_vlms("qwen2_5_vl")
    from dlm_decode.video import open_video

    processor, image = vlm.processor, picture(48, 36)
    video = processor(QUESTION, (), [open_video([image, image, FRAMES[1].resize((48, 36))])])
    tensors = video.tensors
    frames, rows, columns = tensors["video_grid_thw"][0].tolist()
    assert frames == 2
    size = {"shortest_edge": 128 * 64, "longest_edge": 768 * 64}
    alone = [
        processor.image_processor(images=[part], size=size, return_tensors="pt")["pixel_values"]
        for part in (image, FRAMES[1].resize((48, 36)))
    ]
    assert torch.equal(tensors["pixel_values_videos"], torch.cat(alone))
    assert int((video.input_ids == VOCABULARY["<video>"]).sum()) == frames * rows * columns // 4


def test_folders_load_without_template_or_tokenizer(ar_folders, tmp_path):
    folder = tmp_path / "bare"
    shutil.copytree(ar_folders("llava"), folder)
    for name in ("chat_template.jinja", "preprocessor_config.json"):
        (folder / name).unlink()
    vlm = dlm_decode.load(folder)
    assert vlm.processor.chat_template is None
    ids = vlm.processor(QUESTION).input_ids.tolist()
    words = [VOCABULARY[word] for word in ("<s>", "user", ":", "what", "is", "this", "?")]
    assert ids == [*words, VOCABULARY["assistant"], VOCABULARY[":"]]
    with pytest.raises(InvalidInputError, match=r"preprocessor_config\.json"):
        vlm.generate(QUESTION, images=picture())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    vlm = dlm_decode.load(folder)
    assert vlm.generate(input_ids=ids, gen_length=3, stop=False).text is None
    with pytest.raises(InvalidInputError, match="tokenizer"):
        vlm.generate(QUESTION)


def test_loading_checks_weights_and_arguments(ar_folders, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(ar_folders("llava"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 4
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="missing"):
        dlm_decode.load(folder)
    with pytest.raises(InvalidInputError, match="no mask id"):
        dlm_decode.load(ar_folders("llava"), mask_token_id=3)
    vlm = dlm_decode.load(ar_folders("llava"), dtype="bfloat16", eos_token_id=9)
    assert vlm.model.dtype == torch.bfloat16
    assert vlm.special_ids.stop == (9,)


def test_command_line(ar_folders, tmp_path, capsys):
    from dlm_decode.cli import main

    picture().save(tmp_path / "picture.png")
    ask = ["generate", "--model", str(ar_folders("llava")), "--prompt", QUESTION]
    ask += ["--image", str(tmp_path / "picture.png"), "--gen-length", "4", "--no-stop"]
    assert main([*ask, "--stage", "stride:keep_ratio=0.5", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["tokens"]) == 4
    assert shown["cost"]["forwards"] == {"FULL/prefill": 1, "FULL/decode": 3}
    assert shown["cost"]["visual_tokens"] == [8]
    assert main([*ask, "--steps", "4"]) == 2
    assert "for diffusion models only" in capsys.readouterr().err
    assert main([*ask, "--sampler", "lown"]) == 2
    assert "decodes diffusion models" in capsys.readouterr().err
