"""`load` and `generate`: entries, batches, infilling, stops, outputs, and what bad input gets."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import dlm_decode
from dlm_decode import samplers, stages
from dlm_decode.cost import forward_flops
from dlm_decode.errors import (
    CheckpointError,
    InvalidInputError,
    MediaError,
    NumericalError,
    UnknownNameError,
)
from dlm_decode.samplers.baseline import Baseline
from dlm_decode.samplers.lown import Lown
from dlm_decode.vision.cache_stage import CacheStage

QUESTION = "what colour is the circle ?"


def picture(width=40, height=30, seed=0):
    numbers = np.random.default_rng(seed)
    return Image.fromarray(numbers.integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_defaults_come_from_the_checkpoint(vlm):
    out = vlm.generate(QUESTION, images=[picture()], stop=False)
    assert out.sequences.shape == (1, 8)
    assert isinstance(out.text, str)
    assert out.cost.calls == len(out.trajectory) == 8
    assert out.cost.relative == 1.0
    assert out.cost.visual_tokens == (out.trajectory.run["rows"][0]["visual_tokens"],)
    assert out.cost.vision_flops > 0
    assert "8 FULL full" in out.cost.summary()


def test_ids_entry_equals_text_entry(vlm):
    image = picture()
    text = vlm.generate(QUESTION, images=image, stop=False)
    inputs = vlm.processor(QUESTION, images=[image])
    ids = vlm.generate(
        input_ids=inputs.input_ids,
        pixel_values=inputs.pixel_values,
        image_sizes=inputs.image_sizes,
        modalities=inputs.modalities,
        stop=False,
    )
    prompt = vlm.model.encode_prompt(
        inputs.input_ids, inputs.pixel_values, inputs.image_sizes, inputs.modalities
    )
    embeds = vlm.generate(inputs_embeds=prompt.embeds, stop=False)
    assert text.sequences.tolist() == ids.sequences.tolist() == embeds.sequences.tolist()


SAMPLERS = [
    *samplers.names(),
    *samplers.aliases(),
    "baseline:remasking=random",
    "lown:guard=none,positions=original",
]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_batch_equals_singles(vlm, sampler, temperature):
    questions = [QUESTION, "is there a red square ?", "how many objects are there in the picture ?"]
    images = [[picture(seed=1)], None, [picture(60, 20, seed=2)]]
    options = {
        "sampler": sampler,
        "temperature": temperature,
        "gen_length": 12,
        "steps": 7,
        "block_length": 5,
    }
    seeds = [7, 8, 9]
    together = vlm.generate(questions, images=images, seed=seeds, **options)
    for row, (question, image) in enumerate(zip(questions, images, strict=True)):
        alone = vlm.generate(question, images=image, seed=seeds[row], **options)
        length = alone.sequences.shape[1]
        assert alone.sequences[0].tolist() == together.sequences[row, :length].tolist()
        assert alone.text == together.text[row]
        assert alone.stop_positions[0] == together.stop_positions[row]
        assert alone.cost.flops == together.cost.row_flops[row]


# What keeps everything, and what keeps less in a model of two layers.
STAGE_OPTIONS = {
    "fastv": ("k=1,keep_ratio=1.0", "k=1"),
    "dart": ("k=1,keep_ratio=1.0", "k=1"),
    "lightkv": ("ratios=0", "at_layers=0,windows=1"),
    "pyramiddrop": ("keep_ratios=1", "depths=1,keep_ratios=0.5"),
}


DIFFUSION_STAGES = [n for n in stages.names() if not issubclass(stages.get(n), CacheStage)]


@pytest.mark.parametrize("stage", DIFFUSION_STAGES)
@pytest.mark.parametrize("sampler", samplers.names())
def test_every_stage_works_with_every_sampler(vlm, sampler, stage):
    ask = {"images": picture(), "sampler": sampler, "stop": False}
    whole = vlm.generate(QUESTION, **ask)
    all_of_it, half_of_it = STAGE_OPTIONS.get(stage, ("keep_ratio=1.0", "keep_ratio=0.5"))
    kept = vlm.generate(QUESTION, stages=[f"{stage}:{all_of_it}"], **ask)
    assert torch.equal(whole.sequences, kept.sequences)
    assert whole.cost.flops == kept.cost.flops
    half = vlm.generate(QUESTION, stages=[f"{stage}:{half_of_it}"], **ask)
    assert half.cost.kept_visual_tokens[0] < whole.cost.kept_visual_tokens[0]
    assert vlm.model.special_ids.mask not in half.sequences


@pytest.mark.parametrize("sampler", samplers.names())
def test_every_sampler_takes_at_most_the_schedule_and_repeats(vlm, sampler):
    ask = {
        "images": picture(),
        "sampler": sampler,
        "gen_length": 12,
        "steps": 6,
        "stop": False,
        "temperature": 0.8,
        "seed": 4,
    }
    first, second = (vlm.generate(QUESTION, **ask) for _ in range(2))
    assert torch.equal(first.sequences, second.sequences)
    assert first.sequences.shape == (1, 12)
    assert vlm.model.special_ids.mask not in first.sequences


def test_padding_of_the_batch_is_the_pad_id(vlm):
    out = vlm.generate(
        [QUESTION, QUESTION], prefill=["the circle is red .", None], gen_length=8, stop=["red"]
    )
    lengths = [len(row["tokens"]) for row in out.trajectory.end["rows"]]
    assert out.stop_positions[0] == 3
    assert (out.sequences[0, lengths[0] :] == vlm.model.special_ids.pad).all()


def test_infilling_keeps_what_is_given(vlm):
    template = "the circle is <|mdm_mask|> <|mdm_mask|> ."
    out = vlm.generate(QUESTION, prefill=template, stop=False)
    ids = vlm.processor.encode(template)
    assert out.sequences.shape[1] == len(ids) == 6
    kept = [
        (got, want)
        for got, want in zip(out.sequences[0].tolist(), ids, strict=True)
        if want != vlm.model.special_ids.mask
    ]
    assert len(kept) == 4
    assert all(got == want for got, want in kept)
    assert out.cost.num_forwards == 2
    longer = vlm.generate(QUESTION, prefill=ids, gen_length=9, stop=False)
    assert longer.cost.num_forwards == 5
    begun = vlm.generate(QUESTION, prefill="the circle is", stop=False)
    assert begun.sequences.shape[1] == 8, "no template: the model's own canvas length"
    assert begun.cost.num_forwards == 5


def test_prompt_may_hold_the_mask_id(vlm):
    mask = vlm.model.special_ids.mask
    ids = vlm.processor(QUESTION).input_ids
    ids = torch.cat([ids[:3], torch.tensor([mask]), ids[3:]])
    out = vlm.generate(input_ids=ids, stop=False)
    assert mask not in out.sequences
    assert out.cost.num_forwards == 8


def test_suffix_is_read_and_returned(vlm):
    plain = vlm.generate(QUESTION, stop=False)
    out = vlm.generate(QUESTION, suffix="yes .", stop=False)
    assert out.sequences[0, -2:].tolist() == vlm.processor.encode("yes .")
    assert out.sequences.shape[1] == 10
    assert out.cost.flops > plain.cost.flops


def test_stops_as_text_ids_and_sequences(vlm):
    whole = vlm.generate(QUESTION, stop=False).sequences[0].tolist()
    target = whole[4]
    first = whole.index(target)
    for stop in (target, [target], [[target]], [vlm.processor.token_text(target)]):
        out = vlm.generate(QUESTION, stop=stop, block_length=1)
        found = out.stop_positions[0]
        assert (
            found is None
            or out.sequences[0].tolist()
            == vlm.generate(QUESTION, stop=False, block_length=1).sequences[0, :found].tolist()
        )
    assert first <= 4


def test_early_stop_saves_forwards(vlm):
    eos = vlm.model.special_ids.eos
    out = vlm.generate(QUESTION, prefill=[vlm.model.special_ids.mask, eos], gen_length=8)
    assert out.stop_positions == (1,)
    assert out.cost.num_forwards == 1
    assert out.cost.baseline_forwards == 7
    assert "6 fewer than the schedule" in out.cost.summary()


def test_suppressed_ids_never_appear(vlm):
    first = vlm.generate(QUESTION, stop=False).sequences[0].tolist()
    out = vlm.generate(QUESTION, stop=False, suppress_token_ids=first)
    assert not set(first) & set(out.sequences[0].tolist())


def test_only_the_likeliest_tokens_take_part(vlm):
    ask = {"gen_length": 8, "stop": False}
    greedy = vlm.generate(QUESTION, **ask)
    for limits in ({"top_k": 1}, {"top_p": 1e-6}):
        sure = vlm.generate(QUESTION, **ask, **limits, temperature=0.9)
        assert (
            sure.trajectory.steps[0].confidence.max() > greedy.trajectory.steps[0].confidence.max()
        )
        assert vlm.model.special_ids.mask not in sure.sequences
    both = vlm.generate([QUESTION, "where is it ?"], **ask, top_k=3, top_p=0.9, temperature=0.9)
    alone = vlm.generate(QUESTION, **ask, top_k=3, top_p=0.9, temperature=0.9)
    assert both.sequences[0].tolist() == alone.sequences[0].tolist()
    # The mask id may be the likeliest of all; it takes nobody's place.
    head = vlm.model.lm_head.weight
    mask = vlm.model.special_ids.mask
    kept = head.data[mask].clone()
    try:
        head.data[mask] = 9 * head.data[greedy.sequences[0, 0]]
        out = vlm.generate(QUESTION, **ask, top_k=1)
        assert mask not in out.sequences
    finally:
        head.data[mask] = kept


def test_ids_without_a_token_are_no_candidates(vlm):
    model = vlm.model
    kept = model.num_valid_tokens
    try:
        model.num_valid_tokens = 9
        out = vlm.generate(QUESTION, stop=False)
        assert out.sequences.max() < 9
    finally:
        model.num_valid_tokens = kept


def test_guidance_runs_a_second_view(vlm):
    out = vlm.generate(QUESTION, images=picture(), cfg_scale=1.0, stop=False)
    assert out.cost.forwards == {("FULL", "full"): 8, ("UNCONDITIONAL", "full"): 8}
    assert out.cost.calls == 8
    assert out.cost.relative == 1.0


def test_stage_shrinks_the_full_view_and_ratio_one_changes_nothing(vlm):
    plain = vlm.generate(QUESTION, images=picture(), stop=False)
    same = vlm.generate(QUESTION, images=picture(), stages=["stride:keep_ratio=1"], stop=False)
    half = vlm.generate(QUESTION, images=picture(), stages=["stride:keep_ratio=0.5"], stop=False)
    assert same.sequences.tolist() == plain.sequences.tolist()
    assert half.cost.visual_tokens[0] == round(plain.cost.visual_tokens[0] / 2)
    assert half.cost.relative < 0.8
    assert half.trajectory.run["stages"] == [{"name": "stride", "options": {"keep_ratio": 0.5}}]


def test_video_frames(vlm, tmp_path):
    frames = [picture(32, 32, seed) for seed in range(3)]
    for index, frame in enumerate(frames):
        frame.save(tmp_path / f"{index}.png")
    from_list = vlm.generate(QUESTION, videos=[frames], stop=False)
    from_folder = vlm.generate(QUESTION, videos=tmp_path, stop=False)
    assert from_list.cost.visual_tokens == (3 * 2 * 3,)
    assert from_list.sequences.tolist() == from_folder.sequences.tolist()


def test_a_batch_of_videos(vlm, tmp_path):
    """One entry per prompt; a video gives what it gives alone, and its frames are recorded."""
    frames = [picture(32, 32, seed) for seed in range(6)]
    ask = {"max_frames": 2, "stop": False}
    both = vlm.generate([QUESTION] * 3, videos=[[frames], None, [frames[:1], frames]], **ask)
    counts = [0 if row is None else row for row in both.cost.visual_tokens]
    assert counts == [2 * 6, 0, 3 * 6]
    alone = vlm.generate(QUESTION, videos=[frames], **ask)
    assert alone.sequences[0].tolist() == both.sequences[0].tolist()
    rows = [row["videos"] for row in both.trajectory.run["rows"]]
    assert [[video["indices"] for video in row] for row in rows] == [[[0, 5]], [], [[0], [0, 5]]]
    assert vlm.generate(QUESTION, videos=np.stack([np.asarray(frame) for frame in frames]), **ask)


def test_several_images_are_padded_not_tiled(vlm):
    one = vlm.generate(QUESTION, images=[picture()], stop=False)
    two = vlm.generate(QUESTION, images=[picture(), picture(seed=3)], stop=False)
    assert one.cost.visual_tokens[0] > 17
    assert two.cost.visual_tokens == (2 * 17,)


def test_lown_limits_on_a_real_model(vlm):
    options = {"images": picture(), "gen_length": 12, "steps": 6, "block_length": 6, "stop": False}
    baseline = vlm.generate(QUESTION, **options)
    always = vlm.generate(
        QUESTION, sampler=Lown(access="always", accept="k", order="confidence"), **options
    )
    assert always.sequences.tolist() == baseline.sequences.tolist()
    assert always.cost.relative == 1.0
    routed = vlm.generate(QUESTION, sampler="lown", **options)
    assert len(routed.trajectory) <= 6
    assert routed.trajectory.run["notes"] == []
    plain = vlm.generate(QUESTION, sampler="lown", gen_length=6, stop=False)
    assert "rows [0] have no visual tokens" in plain.trajectory.run["notes"][0]
    assert (
        plain.sequences.tolist()
        == vlm.generate(QUESTION, gen_length=6, stop=False).sequences.tolist()
    )


def test_relative_cost_is_pi_f_plus_sigma_rho(vlm):
    """Both sides are counted on their own: the shares from forwards, pi and rho from lengths."""
    options = {"images": picture(), "gen_length": 12, "steps": 6, "block_length": 6, "stop": False}
    whole = vlm.generate(QUESTION, **options).cost
    for chosen in ([], ["stride:keep_ratio=0.5"]):
        cost = vlm.generate([QUESTION] * 2, sampler="lown", stages=chosen, **twice(options)).cost
        for row in range(2):
            length = cost.prompt_lengths[row] + 12
            costs = [
                forward_flops(vlm.model.geometry, count, count)
                for count in (length, length - cost.visual_tokens[row])
            ]
            unpruned = whole.prompt_lengths[0] + 12
            pi, rho = (c / forward_flops(vlm.model.geometry, unpruned, unpruned) for c in costs)
            f, sigma = (cost.row_forwards[row][view] / 6 for view in ("FULL", "TEXT_ONLY"))
            shares = cost.routing(row)
            assert (shares.f, shares.sigma) == (f, sigma)
            assert (shares.pi, shares.rho) == (pytest.approx(pi), pytest.approx(rho))
            spent = cost.row_flops[row] / cost.row_baseline_flops[row]
            assert shares.relative == pytest.approx(spent) == pytest.approx(pi * f + sigma * rho)
        assert (pi < 1) is bool(chosen)
    with pytest.raises(InvalidInputError, match="not defined with cfg_scale"):
        vlm.generate(QUESTION, cfg_scale=0.5, **options).cost.routing()


def twice(options):
    return {**options, "images": [options["images"]] * 2}


def test_trajectory_file_round_trip(vlm, tmp_path):
    from dlm_decode.record import read_records

    out = vlm.generate(QUESTION, images=picture(), track=f"jsonl:{tmp_path / 'a' / 'live.jsonl'}")
    saved = out.trajectory.save(tmp_path / "after.jsonl")
    live, after = read_records(tmp_path / "a" / "live.jsonl"), read_records(saved)
    assert live == after == json.loads(json.dumps(list(out.trajectory.records())))
    assert [record["type"] for record in live] == ["run", *["step"] * len(out.trajectory), "end"]
    commits = [
        commit for record in live[1:-1] for row in record["rows"] for commit in row["commits"]
    ]
    assert len({commit[0] for commit in commits}) == len(commits)
    assert out.trajectory.commit_steps()[commits[0][0]] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ""}, "prompt 0 is empty"),
        ({"prompt": "   "}, "prompt 0 is '   '"),
        ({"prompt": []}, "empty list"),
        ({}, "exactly one of prompt, input_ids and inputs_embeds, got none"),
        ({"prompt": "a", "input_ids": torch.tensor([1])}, "got prompt and input_ids"),
        ({"prompt": "a", "pixel_values": []}, "go with input_ids"),
        ({"input_ids": torch.tensor([1]), "images": ["x.png"]}, "images and videos go with prompt"),
        ({"input_ids": torch.zeros(0, dtype=torch.long)}, r"shape \(P,\) with P >= 1"),
        ({"input_ids": torch.tensor([[1, 2], [3, 4]])}, "for a batch pass a list"),
        ({"input_ids": torch.tensor([10**6])}, "outside the vocabulary"),
        ({"prompt": "<image> a <image> ?", "images": [picture()]}, "2 <image> tags, and 1 images"),
        ({"prompt": ["a", "b"], "images": [picture()]}, "one entry per prompt"),
        ({"prompt": "a", "images": "missing.png"}, "no image at 'missing.png'"),
        ({"prompt": "a", "sampler": "basline"}, "Did you mean 'baseline'"),
        ({"prompt": "a", "sampler": Baseline}, "pass an instance"),
        ({"prompt": "a", "stages": ["strid"]}, "Did you mean 'stride'"),
        ({"prompt": "a", "cache": "prefx"}, "unknown cache policy 'prefx'. Did you mean 'prefix'"),
        ({"prompt": "a", "preset": "offical"}, "Did you mean 'official'"),
        (
            {"prompt": "a", "gen_length": 4, "steps": 1, "block_length": 2},
            "gen_length 4, block_length 2, steps 1",
        ),
        (
            {"prompt": "a", "gen_length": 5, "steps": 4, "block_length": 2, "preset": "official"},
            "preset 'official'",
        ),
        ({"prompt": "a", "gen_length": 1000}, "the model reads at most 400"),
        ({"prompt": "a", "temperature": -0.5}, "temperature must be"),
        ({"prompt": "a", "seed": [1, 2]}, "seed has 2 entries for 1 rows"),
        ({"prompt": "a", "stop": [[]]}, "a stop sequence is empty"),
        ({"prompt": "a", "stop": True}, "stop=True means nothing"),
        ({"prompt": "a", "stop": 5.5}, "must be a text or a sequence of ids, got 5.5"),
        ({"prompt": "a", "prefill": 5}, "prefill must be a text or a sequence of ids, got 5"),
        ({"prompt": "a", "suffix": ""}, "suffix is empty"),
        (
            {"prompt": "a", "prefill": [-1, 5]},
            r"prefill has ids \[-1\], which are outside the vocabulary",
        ),
        ({"prompt": "a", "suffix": [10**6]}, "suffix has ids"),
        ({"inputs_embeds": torch.zeros(3, 7)}, "inputs_embeds have width 7"),
        (
            {"prompt": "a", "prefill": "red red red", "gen_length": 2},
            "prefill has 3 tokens and gen_length is 2",
        ),
        ({"prompt": "a", "suppress_token_ids": [10**6]}, "outside the vocabulary"),
        ({"prompt": ["a", "b"], "streamer": object()}, "a streamer shows one row"),
        ({"prompt": "a", "track": "wanbd"}, "Did you mean 'wandb'"),
    ],
)
def test_bad_arguments_are_named(vlm, arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        vlm.generate(**arguments)


def test_nan_weights_are_an_error(vlm):
    weight = vlm.model.model.norm.weight.data
    kept = weight.clone()
    weight.fill_(float("nan"))
    try:
        with pytest.raises(NumericalError, match="NaN"):
            vlm.generate(QUESTION)
    finally:
        weight.copy_(kept)


def test_without_a_tokenizer_only_ids_work(checkpoint, tmp_path):
    folder = tmp_path / "bare"
    shutil.copytree(checkpoint, folder)
    for file in folder.glob("*token*"):
        file.unlink()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    bare = dlm_decode.load(folder)
    with pytest.raises(InvalidInputError, match="needs a tokenizer"):
        bare.generate(QUESTION)
    with pytest.raises(InvalidInputError, match="needs a tokenizer"):
        bare.generate(input_ids=[1, 2, 3], stop=["red"])
    out = bare.generate(input_ids=[1, 2, 3], gen_length=4, stop=False)
    assert out.text is None
    assert out.sequences.shape == (1, 4)


def test_load_names_what_is_wrong(tmp_path):
    with pytest.raises(InvalidInputError, match="no folder"):
        dlm_decode.load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        dlm_decode.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llava_lada"}')
    with pytest.raises(UnknownNameError, match="Did you mean 'llava_llada'"):
        dlm_decode.load(tmp_path)
    with pytest.raises(InvalidInputError, match="exclude each other"):
        dlm_decode.load(tmp_path, device="cpu", device_map="auto")


def test_load_overrides_special_ids(checkpoint):
    other = dlm_decode.load(
        checkpoint, stop_token_ids=[5], suppress_token_ids=[6], eos_token_id=7, mask_token_id=8
    )
    ids = other.model.special_ids
    assert (ids.stop, ids.suppress, ids.eos, ids.mask) == ((5,), (6,), 7, 8)


def test_truncated_image(vlm, tmp_path):
    path = tmp_path / "cut.png"
    picture(200, 200).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(MediaError, match=r"cut\.png"):
        vlm.generate(QUESTION, images=path)


def test_transformers_generate_says_where_to_go(vlm):
    with pytest.raises(InvalidInputError, match=r"dlm_decode\.load"):
        vlm.model.generate(torch.tensor([[1]]))


class Recorder:
    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(("put", value.clone()))

    def put_draft(self, value):
        self.calls.append(("draft", value.clone()))

    def end(self):
        self.calls.append(("end", None))


def test_streamer_protocol(vlm):
    recorder = Recorder()
    out = vlm.generate(QUESTION, images=picture(), streamer=recorder, stop=False)
    assert [name for name, _ in recorder.calls] == ["put", *["draft"] * 8, "put", "end"]
    assert (recorder.calls[0][1] >= 0).all()
    masks = [
        int((value == vlm.model.special_ids.mask).sum())
        for name, value in recorder.calls
        if name == "draft"
    ]
    assert masks == list(range(7, -1, -1))
    assert recorder.calls[-2][1].tolist() == out.sequences[0].tolist()
