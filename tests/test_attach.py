"""Stages on stock models: generate of transformers inside `attach`, salience, hooks that leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from ar_models import ARCHITECTURES, VOCABULARY, picture

from dlm_decode import vision
from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.vision import attach
from dlm_decode.vision.inside import layout_of
from dlm_decode.vision.stride import Stride

QUESTION = "what is this ?"
PICTURES = [[picture()], [picture(70, 30, 1), picture(20, 60, 2)]]


@dataclass(frozen=True)
class Reader:
    """Asks for everything and changes nothing."""

    tower_needs: ClassVar = ("salience", "tower_keys")

    def before_lm(self, prompt):
        return prompt


@dataclass(frozen=True)
class Failing:
    def before_lm(self, prompt):
        raise RuntimeError("on purpose")


def inputs_of(vlm, pictures=PICTURES, videos=None):
    """What a processor of transformers would return for these prompts."""
    from dlm_decode.autoregressive_inputs import batch_from_text
    from dlm_decode.settings import Settings

    questions = [QUESTION + " a" * row for row in range(len(pictures))]
    pad = VOCABULARY["<pad>"]
    batch = batch_from_text(
        vlm.processor, questions, pictures, videos, Settings(), pad_id=pad, is_timed=False
    )
    inputs = dict(batch.inputs)
    if vlm.architecture.config.model_type == "qwen2_5_vl":
        ids = inputs["input_ids"]
        kinds = (ids == VOCABULARY["<image>"]).int() + 2 * (ids == VOCABULARY["<video>"]).int()
        inputs["mm_token_type_ids"] = kinds
    return inputs


def answer(vlm, inputs, **options):
    """New tokens of transformers' own generate."""
    ids = vlm.model.generate(
        **inputs, do_sample=False, eos_token_id=None, max_new_tokens=6, **options
    )
    return ids[:, inputs["input_ids"].shape[1] :]


def is_clean(model) -> bool:
    """Nothing of ours is left on the model; transformers' own hooks stay."""
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    ]
    ours = [hook for hook in hooks if hook.__module__.startswith("dlm_decode")]
    return not ours and not [name for name in vars(model.model) if name.startswith("get_")]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_our_tokens_are_those_of_transformers(ar_vlms, architecture):
    vlm = ar_vlms(architecture)
    inputs = inputs_of(vlm)
    plain = answer(vlm, inputs)
    with attach(vlm.model, "stride:keep_ratio=1.0"):
        assert torch.equal(answer(vlm, inputs), plain)
    own = vlm.generate(**inputs, gen_length=6, stop=False)
    assert torch.equal(own.sequences, plain)
    with attach(vlm.model, ["stride:keep_ratio=0.5"]) as attachment:
        pruned = answer(vlm, inputs)
    own = vlm.generate(**inputs, gen_length=6, stop=False, stages=["stride:keep_ratio=0.5"])
    assert torch.equal(own.sequences, pruned)
    assert not torch.equal(pruned, plain)
    assert own.cost.visual_tokens == tuple(p.num_visual for p in attachment.prompts)
    assert is_clean(vlm.model)


@pytest.mark.parametrize("architecture", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize("positions", ["original", "renumbered"])
def test_positions_go_on_where_the_stage_left_them(ar_vlms, architecture, positions):
    @dataclass(frozen=True)
    class Half:
        def before_lm(self, prompt):
            keep = torch.arange(prompt.length) % 2 == 0
            return vision.base.keep_positions(prompt, keep, positions)

    vlm = ar_vlms(architecture)
    inputs, seen = inputs_of(vlm), []
    with attach(vlm.model, Half()) as attachment:
        hook = vlm.model.model.language_model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
        )
        cached = answer(vlm, inputs)
        ends = [prompt.next_position for prompt in attachment.prompts]
    hook.remove()
    for step, position_ids in enumerate(seen[1:]):
        expected = torch.tensor(ends)[:, None] + step
        assert torch.equal(position_ids, expected.expand_as(position_ids))
    assert len(seen) == 6
    lengths = [prompt.length for prompt in attachment.prompts]
    if positions == "renumbered":
        assert ends == lengths
    elif architecture == "llava":
        assert ends == inputs["attention_mask"].sum(dim=1).tolist()
        with attach(vlm.model, Half()):
            assert torch.equal(answer(vlm, inputs, use_cache=False), cached)
    else:
        _, deltas = vlm.model.model.get_rope_index(**inputs)
        assert ends == (inputs["attention_mask"].sum(dim=1) + deltas[:, 0]).tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_in_a_batch_equal_single_rows_in_transformers(ar_vlms, architecture):
    vlm = ar_vlms(architecture)
    with attach(vlm.model, Stride(0.5)):
        together = answer(vlm, inputs_of(vlm))
    for row, pictures in enumerate(PICTURES):
        alone = inputs_of(vlm, [[]] * row + [pictures])
        length = int(alone["attention_mask"][row].sum())
        for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            if name in alone:
                alone[name] = alone[name][row:, -length:]
        with Stride(0.5).attach(vlm.model):
            assert answer(vlm, alone)[0].tolist() == together[row].tolist()


INSIDE = [["fastv:k=1,keep_ratio=0.5"], ["lightkv:at_layers=1,windows=1,ratios=0.5"]]
INSIDE += [["stride:keep_ratio=0.75", "fastv:k=2,keep_ratio=0.25"]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("stages", INSIDE)
def test_stages_between_layers(ar_vlms, architecture, stages):
    vlm = ar_vlms(architecture)
    inputs = inputs_of(vlm)
    with attach(vlm.model, stages) as attachment:
        pruned = answer(vlm, inputs)
        lengths = attachment.layer_lengths
    own = vlm.generate(**inputs, gen_length=6, stop=False, stages=stages)
    assert torch.equal(own.sequences, pruned)
    assert [len(layer) for layer in lengths] == [2, 2, 2]
    assert sum(lengths[-1]) < sum(lengths[0])
    visual = own.cost.layer_visual_tokens
    assert [counts[0] for counts in visual] == list(own.cost.visual_tokens)
    assert tuple(counts[-1] for counts in visual) == own.cost.kept_visual_tokens
    bytes_kept = sum(map(sum, lengths)) + 3 * 2 * 5
    assert own.cost.kv_bytes == 2 * 2 * 8 * 4 * bytes_kept
    assert is_clean(vlm.model)
    for row, pictures in enumerate(PICTURES):
        question = QUESTION + " a" * row
        alone = vlm.generate(question, images=pictures, gen_length=6, stop=False, stages=stages)
        assert alone.sequences[0].tolist() == pruned[row].tolist()
        assert alone.cost.flops == own.cost.row_flops[row] <= own.cost.row_baseline_flops[row]
        # LightKV leaves pictures of fewer than 8 tokens alone.
        is_left = own.cost.visual_tokens[row] < 8 and stages[0].startswith("lightkv")
        assert (alone.cost.relative == 1) == is_left


def test_beams_and_several_answers(ar_vlms):
    vlm = ar_vlms("llava")
    inputs = inputs_of(vlm)
    with attach(vlm.model, Stride(0.5)) as attachment:
        together = answer(vlm, inputs, num_beams=3, num_return_sequences=2)
        assert len(attachment.prompts) == 6
    single = inputs_of(vlm, PICTURES[:1])
    with attach(vlm.model, Stride(0.5)):
        alone = answer(vlm, single, num_beams=3, num_return_sequences=2)
    assert torch.equal(alone, together[:2])


def tower_rows(vlm, inputs):
    """The tower's attention, from transformers with the eager kernel."""
    core = vlm.model.model
    tower = core.image_tower if hasattr(core, "image_tower") else core.vision_tower
    tower.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return tower(inputs["pixel_values"], output_attentions=True).attentions[-2]
    finally:
        tower.set_attn_implementation("sdpa")


@pytest.mark.parametrize("architecture", ["llava", "video_llava", "internvl"])
def test_salience_is_what_the_class_token_attends_to(ar_vlms, architecture):
    vlm = ar_vlms(architecture)
    inputs = inputs_of(vlm)
    with attach(vlm.model, Reader()) as attachment, torch.no_grad():
        shown = vlm.model(**inputs).logits
    with torch.no_grad():
        assert torch.equal(shown, vlm.model(**inputs).logits)
    expected = tower_rows(vlm, inputs)[:, :, 0, 1:].mean(dim=1)
    if architecture == "internvl":
        expected = torch.nn.functional.avg_pool2d(expected.unflatten(1, (4, 4)), 2).flatten(1)
    found = torch.cat([prompt.salience[prompt.is_visual] for prompt in attachment.prompts])
    torch.testing.assert_close(found, expected.flatten(), atol=1e-6, rtol=0)
    for prompt in attachment.prompts:
        assert prompt.tower_keys.shape == (prompt.length, 8)
        assert (prompt.salience[~prompt.is_visual] == 0).all()


def test_salience_of_tiles_lies_where_their_tokens_lie(ar_vlms):
    """The features are replaced by the salience of their patch, and must come out equal."""
    vlm = ar_vlms("llava_next")
    inputs = inputs_of(vlm)
    core = vlm.model.model
    with attach(vlm.model, Reader()) as attachment, torch.no_grad():
        vlm.model(**inputs)
    sizes = inputs["image_sizes"]
    tiles = [vlm.architecture._num_tiles(size) for size in sizes.tolist()]
    pixels = torch.cat([p[:n] for p, n in zip(inputs["pixel_values"], tiles, strict=True)])
    core.vision_tower.set_attn_implementation("eager")
    with torch.no_grad():
        rows = core.vision_tower(pixels, output_attentions=True).attentions[-2]
    core.vision_tower.set_attn_implementation("sdpa")
    maps = rows[:, :, 0, 1:].mean(dim=1)[..., None].split(tiles)
    packed, _ = core.pack_image_features(maps, sizes, "default", image_newline=torch.zeros(1))
    found = torch.cat([prompt.salience[prompt.is_visual] for prompt in attachment.prompts])
    torch.testing.assert_close(found, torch.cat(packed)[:, 0], atol=1e-6, rtol=0)
    for prompt in attachment.prompts:
        layout = layout_of(prompt)
        has_cell = layout.parts[prompt.is_visual] >= 0
        assert torch.equal(has_cell, prompt.salience[prompt.is_visual] > 0)


def test_salience_of_windows_is_put_in_order(ar_vlms):
    """Qwen2.5-VL: what all patches of a frame give, from a tower that only attends to frames."""
    vlm = ar_vlms("qwen2_5_vl")
    inputs = inputs_of(vlm)
    visual, seen = vlm.model.model.visual, []
    with attach(vlm.model, Reader()) as attachment, torch.no_grad():
        handle = visual.blocks[1].attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
        )
        vlm.model(**inputs)
        handle.remove()
    for prompt in attachment.prompts:
        for span in prompt.spans:
            inside = prompt.salience[span.start : span.start + span.length]
            frames = span.frames
            # Every query gives 1 in all, and a visual token stands for the mean of 4 patches.
            torch.testing.assert_close(inside.sum() * 4, torch.tensor(float(frames)))
    # The merger sees tokens in window order; features in place are its output, reordered.
    (args, kwargs), grid = seen[0], inputs["image_grid_thw"]
    hidden = args[0] if args else kwargs["hidden_states"]
    marks = hidden.float()[:, 0].unflatten(0, (-1, 4)).mean(dim=1)
    expected = marks[window_order(visual, grid).argsort()]
    joined = vlm.architecture._joined(hidden.float()[:, 0], grid)
    torch.testing.assert_close(joined, expected)


def window_order(visual, grid):
    """Which visual token stands where in window order, by marking each with its number."""
    count = int(grid.prod(dim=1).sum()) // 4
    seen = []
    merger = visual.merger.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    numbers = torch.arange(count, dtype=torch.float32).repeat_interleave(4)[:, None]
    patch = visual.patch_embed.register_forward_hook(
        lambda module, args, out: numbers.expand(-1, out.shape[1]).clone()
    )
    blocks = [
        block.register_forward_hook(lambda module, args, kwargs, out: args[0], with_kwargs=True)
        for block in visual.blocks
    ]
    with torch.no_grad():
        dim = visual.patch_embed.proj.weight[0].numel()
        visual(torch.zeros(count * 4, dim), grid_thw=grid)
    for handle in (merger, patch, *blocks):
        handle.remove()
    return seen[0][::4, 0].round().long()


def test_sections_lay_out_all_but_class_tokens_and_newlines(ar_vlms):
    frames = [picture(seed=seed) for seed in range(4)]
    for architecture, parts in (("qwen2_5_vl", 2), ("video_llava", 4), ("internvl", 4)):
        vlm = ar_vlms(architecture)
        inputs = inputs_of(vlm, [[]], [[frames]])
        with attach(vlm.model, Reader()) as attachment, torch.no_grad():
            vlm.model(**inputs)
        (prompt,) = attachment.prompts
        layout = layout_of(prompt)
        assert layout.parts.max() + 1 == parts
        missing = int((layout.parts[prompt.is_visual] < 0).sum())
        assert missing == (4 if architecture == "video_llava" else 0)
        assert (prompt.salience[layout.parts >= 0] > 0).all()


def test_hooks_leave_after_an_error(ar_vlms):
    vlm = ar_vlms("llava")
    inputs = inputs_of(vlm)
    plain = answer(vlm, inputs)
    with pytest.raises(RuntimeError, match="on purpose"), attach(vlm.model, Failing()):
        answer(vlm, inputs)
    assert is_clean(vlm.model)
    with attach(vlm.model, Reader()), pytest.raises(InvalidInputError, match="attached already"):
        attach(vlm.model, Stride(0.5)).__enter__()
    assert is_clean(vlm.model)
    assert torch.equal(answer(vlm, inputs), plain)


def test_what_attach_refuses(ar_vlms, vlm):
    model = ar_vlms("llava").model
    inputs = inputs_of(ar_vlms("llava"))
    with pytest.raises(InvalidInputError, match="masked response positions"):
        attach(model, "redvtp").__enter__()
    with pytest.raises(UnknownNameError, match="stride"):
        attach(model, "strid").__enter__()
    with pytest.raises(UnknownNameError, match="llava_next"):
        attach(vlm.model, "stride").__enter__()
    features = model.model.get_image_features(inputs["pixel_values"])
    early = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with attach(model, "stride"), pytest.raises(InvalidInputError, match="while the stages"):
        model(**early, mm_encoder_outputs={"image": features})
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    with attach(model, "stride"), pytest.raises(InvalidInputError, match="input_ids"):
        model(inputs_embeds=embeds)
    with attach(model, "stride"), torch.no_grad():
        cache = model(**inputs).cache
        with pytest.raises(InvalidInputError, match="follows on a cache"):
            model(**early, cache=cache)
    assert is_clean(model)
