"""Stages between the layers of stock models: equal to whole masks, to single rows, to recomputing,
and gone afterwards."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from text_models import KINDS, cache_of, causal_lm, layout
from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

from dlm_decode.errors import InvalidInputError
from dlm_decode.vision.fastv import FastV
from dlm_decode.vision.layer_hooks import LayerReducer
from dlm_decode.vision.lightkv import LightKV
from dlm_decode.vision.stride import Stride

LAYOUT = layout(3, 9, 4)
LIGHT = LightKV("0-1", 1, 0.5)


def embeds(*lengths, size=32, seed=0):
    """Left-padded random embeddings and the padding of each row."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(length, size, generator=generator) for length in lengths]
    longest = max(lengths)
    padding = [longest - length for length in lengths]
    return torch.stack(
        [torch.cat([torch.zeros(pad, size), row]) for pad, row in zip(padding, rows, strict=True)]
    ), padding


def mask_of(padding, length):
    return (torch.arange(length) >= torch.tensor(padding)[:, None]).long()


@torch.no_grad()
def run(model, stages, layouts, inputs, padding, tokens=(), num_layers=4, **options):
    """Logits of the prefill's last position and of each decoding step, and the reducer."""
    reducer = LayerReducer(stages, num_layers)
    mask = mask_of(padding, inputs.shape[1])
    if any(padding) or options.pop("is_masked", False):
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        options = {**options, "attention_mask": mask, "position_ids": positions}
    with reducer.hooks(model.model):
        reducer.begin(layouts, padding)
        out = model(inputs_embeds=inputs, use_cache=True, **options)
        logits = [out.logits[:, -1]]
        for step, token in enumerate(tokens):
            extra = {}
            if "attention_mask" in options:
                mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=torch.long)], dim=1)
                extra["attention_mask"] = mask
                extra["position_ids"] = options["position_ids"][:, -1:] + 1 + step
            ids = torch.full((len(inputs), 1), token)
            out = model(input_ids=ids, **cache_of(out), **extra)
            logits.append(out.logits[:, -1])
    return torch.stack(logits, dim=1), reducer


@torch.no_grad()
def by_masks(model, inputs, layer, kept):
    """Logits `(S, V)` of one row, computed whole: from `layer` on nobody attends to the rest."""
    text = model.model
    length = inputs.shape[1]
    cos_sin = text.rotary_emb(inputs, torch.arange(length)[None])
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    is_kept = torch.zeros(length, dtype=torch.bool)
    is_kept[kept] = True
    hidden = inputs
    for index, block in enumerate(text.layers):
        mask = causal if index < layer else causal & (is_kept | torch.eye(length).bool())
        if model.config._attn_implementation == "eager":
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        hidden = block(hidden, attention_mask=mask[None, None], position_embeddings=cos_sin)
    return model.lm_head(text.norm(hidden))[0]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_dropping_is_masking_and_cached_decoding_is_recomputing(kind, implementation):
    model = causal_lm(kind, attn_implementation=implementation)
    inputs, padding = embeds(16)
    tokens = (7, 3, 11)
    logits, reducer = run(model, [FastV(2)], [LAYOUT], inputs, padding, tokens)
    kept = reducer.positions[-1][0]
    assert reducer.lengths == ((16,), (16,), (11,), (11,))
    assert kept.tolist() == sorted(set(kept.tolist()))
    assert set(kept.tolist()) >= {0, 1, 2, 12, 13, 14, 15}
    assert reducer.num_scores == ((0,), (16,), (0,), (0,))
    whole = torch.cat([inputs, model.model.embed_tokens(torch.tensor([tokens]))], dim=1)
    expected = by_masks(model, whole, 2, torch.cat([kept, torch.arange(16, 19)]))
    torch.testing.assert_close(logits[0], expected[15:], rtol=1e-5, atol=1e-5)
    plain, _ = run(model, [], [LAYOUT], inputs, padding, tokens)
    assert not torch.allclose(plain, logits, atol=1e-3)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("stage", [FastV(1, 0.4), FastV(2, 0.3, rows="text_mean"), LIGHT], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_padded_batch_are_as_alone(kind, stage, implementation):
    """Rows that are padded, that have two images, none, and one that is left longest."""
    model = causal_lm(kind, attn_implementation=implementation)
    layouts = [LAYOUT, layout(2, 8, 1, 8, 3), layout(12), layout(1, 18, 2), layout(21)]
    lengths = [len(row.is_visual) for row in layouts]
    inputs, padding = embeds(*lengths)
    tokens = (7, 3)
    batch, reducer = run(model, [stage], layouts, inputs, padding, tokens)
    last = reducer.lengths[-1]
    assert last[2:5:2] == (12, 21) and last[0] < 16 and last[1] < 22 and last[3] < 21
    for row, own in enumerate(layouts):
        alone, single = run(
            model, [stage], [own], inputs[row : row + 1, padding[row] :], [0], tokens
        )
        torch.testing.assert_close(batch[row], alone[0], rtol=0, atol=2e-5)
        assert torch.equal(reducer.positions[-1][row], single.positions[-1][0])
        assert [lengths[row] for lengths in reducer.lengths] == [
            lengths[0] for lengths in single.lengths
        ]
        assert [scores[row] for scores in reducer.num_scores] == [
            scores[0] for scores in single.num_scores
        ]


@dataclass(frozen=True)
class Onlooker(FastV):
    """Scores as FastV does, and takes nothing away."""

    def reduce(self, view):
        super().reduce(view)


def test_pairs_are_counted_once_where_a_stage_takes_nothing_away():
    inputs, padding = embeds(16)
    _, reducer = run(causal_lm(KINDS[0]), [Onlooker(2), FastV(2)], [LAYOUT], inputs, padding)
    assert reducer.num_scores == ((0,), (32,), (0,), (0,))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_equally_long_rows_that_lose_unequally_many(implementation):
    """No mask comes from the model, and one is needed behind the stage."""
    model = causal_lm("llama", attn_implementation=implementation)
    layouts = [layout(3, 9, 4), layout(3, 2, 11)]
    inputs, padding = embeds(16, 16)
    batch, reducer = run(model, [FastV(2)], layouts, inputs, padding, (5, 6))
    assert reducer.lengths[-1] == (11, 15)
    for row, own in enumerate(layouts):
        alone, _ = run(model, [FastV(2)], [own], inputs[row : row + 1], [0], (5, 6))
        torch.testing.assert_close(batch[row], alone[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "stage",
    [FastV(2, 1.0), FastV(4, 0.1), LightKV("0-1", 1, 0.0), LightKV("3", 1), LightKV("1", 2)],
    ids=str,
)
def test_what_changes_nothing_is_bit_for_bit_no_stage(stage):
    """Everything kept, everything run, nothing merged, the last layer, too small an image."""
    model = causal_lm(KINDS[0])
    inputs, padding = embeds(16)
    plain, _ = run(model, [], [LAYOUT], inputs, padding, (1, 2))
    same, _ = run(model, [stage], [LAYOUT], inputs, padding, (1, 2))
    assert torch.equal(plain, same)


def test_stages_one_behind_another():
    """At different layers, and at the same one."""
    model = causal_lm(KINDS[0])
    inputs, padding = embeds(16)
    stages = [FastV(1, 0.5), LightKV("0-2", 1, 0.5, positions="original")]
    _, reducer = run(model, stages, [layout(2, 16 - 5, 3)], inputs, padding)
    assert reducer.lengths == ((16,), (11,), (11,), (11,)), "six tokens are too few to merge"
    _, reducer = run(model, [FastV(1, 0.9), LIGHT], [layout(2, 11, 3)], inputs, padding)
    assert reducer.lengths == ((16,), (10,), (10,), (10,)), "ten of eleven, then five"


def test_what_the_hooks_show_is_what_the_layer_computes(monkeypatch):
    model = causal_lm(KINDS[0])
    inputs, padding = embeds(14, 16)
    seen = []
    reduce = FastV.reduce
    monkeypatch.setattr(
        FastV, "reduce", lambda self, view: (seen.append(view), reduce(self, view))[1]
    )
    stages, rows = [FastV(2)], [layout(1, 9, 4), LAYOUT]
    run(model, stages, rows, inputs, padding)
    eager = causal_lm("llama", attn_implementation="eager")
    for row, view in enumerate(seen):
        own = inputs[row : row + 1, padding[row] :]
        with torch.no_grad():
            out = eager(inputs_embeds=own, output_attentions=True, output_hidden_states=True)
        length = own.shape[1]
        attention = view.attention(torch.arange(length))
        torch.testing.assert_close(attention, out.attentions[1][0], rtol=0, atol=1e-5)
        torch.testing.assert_close(view.hidden, out.hidden_states[2][0], rtol=0, atol=2e-5)
        assert view.position_ids.tolist() == list(range(length))
        assert (view.layer, view.num_layers, view.is_causal) == (1, 4, True)


@torch.no_grad()
@pytest.mark.parametrize("stage", [FastV(1, 0.5), LIGHT], ids=str)
def test_three_axes_of_positions(stage):
    """Qwen2.5-VL's text model shows its layers cosines and sines only."""
    torch.manual_seed(0)
    config = Qwen2_5_VLTextConfig(
        hidden_size=32, intermediate_size=48, vocab_size=50, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    )  # fmt: skip
    model = Qwen2_5_VLTextModel(config).eval()
    inputs, padding = embeds(16)
    places = torch.arange(16)
    positions = torch.stack([places, places // 2, places % 5])[:, None]
    reducer = LayerReducer([stage], 4)
    seen = []
    with reducer.hooks(model):
        reducer.begin([LAYOUT], padding)
        # Registered behind the reducer's own hook, so that it sees what the layer is given.
        model.layers[3].register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["position_embeddings"]),
            with_kwargs=True,
        )
        model(inputs_embeds=inputs, position_ids=positions)
    kept = reducer.positions[-1][0]
    expected = positions[..., kept]
    if stage is LIGHT:
        expected = torch.arange(len(kept)).expand(3, 1, -1)
    for given, right in zip(seen[-1], model.rotary_emb(inputs, expected), strict=True):
        assert torch.equal(given, right)


def test_generate_of_transformers_and_its_beams():
    model = causal_lm(KINDS[0])
    inputs, padding = embeds(14, 16)
    layouts = [layout(1, 9, 4), LAYOUT]
    reducer = LayerReducer([FastV(2)], 4)
    options = {
        "inputs_embeds": inputs, "attention_mask": mask_of(padding, 16), "max_new_tokens": 4,
        "do_sample": False, "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    with reducer.hooks(model.model):
        reducer.begin(layouts, padding)
        greedy = model.generate(**options)
        reducer.begin(layouts, padding)
        beams = model.generate(**options, num_beams=2)
        for row, own in enumerate(layouts):
            reducer.begin([own], [0])
            alone = {**options, "inputs_embeds": inputs[row : row + 1, padding[row] :]}
            del alone["attention_mask"]
            assert torch.equal(model.generate(**alone)[0], greedy[row])
            reducer.begin([own], [0])
            assert torch.equal(model.generate(**alone, num_beams=2)[0], beams[row])


def num_hooks(model):
    return sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()
    )


def test_nothing_is_left_behind():
    """After a run, after an error in a stage, and after one in the layer that is looked at."""
    model = causal_lm(KINDS[0])
    inputs, padding = embeds(16)
    plain = model(inputs_embeds=inputs).logits
    run(model, [FastV(2)], [LAYOUT], inputs, padding)
    assert num_hooks(model) == 0
    with pytest.raises(InvalidInputError, match="only diffusion models"):
        run(model, [FastV(2, rows="mask_mean")], [LAYOUT], inputs, padding)
    assert num_hooks(model) == 0
    reducer = LayerReducer([FastV(2)], 4)

    def fail(*_):
        raise RuntimeError("in the layer")

    broken = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the layer"), reducer.hooks(model.model):
        reducer.begin([LAYOUT], [0])
        model(inputs_embeds=inputs)
    broken.remove()
    assert num_hooks(model) == 0
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(inputs_embeds=inputs).logits, plain)


def test_what_cannot_work_is_said():
    model, inputs = causal_lm(KINDS[0]), embeds(16)[0]
    for stages, num_layers, message in (
        ([FastV(5)], 4, "layers \\[4\\], and the model has 4"),
        ([LightKV("2-7", 1)], 4, "layers \\[7\\]"),
        ([Stride()], 4, "does not act between"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            LayerReducer(stages, num_layers)
    with pytest.raises(InvalidInputError, match="prepared for 3 layers"):
        LayerReducer([FastV(2)], 3).hooks(model.model).__enter__()
    with pytest.raises(InvalidInputError, match="pass the language model itself"):
        LayerReducer([FastV(2)], 4).hooks(model).__enter__()
    reducer = LayerReducer([FastV(2)], 4)
    with pytest.raises(InvalidInputError, match="no prefill has run"):
        _ = reducer.lengths
    with reducer.hooks(model.model):
        with pytest.raises(InvalidInputError, match="call begin"):
            model(inputs_embeds=inputs)
        with pytest.raises(InvalidInputError, match="one of each"):
            reducer.begin([LAYOUT], [0, 0])
        reducer.begin([LAYOUT], [1])
        with pytest.raises(InvalidInputError, match="1 rows of 16 columns"):
            model(inputs_embeds=inputs)
        reducer.begin([LAYOUT], [0])
        out = model(inputs_embeds=inputs, use_cache=True)
        with pytest.raises(InvalidInputError, match="one token per row, got 2"):
            model(input_ids=torch.tensor([[1, 2]]), **cache_of(out))
        reducer.begin([LAYOUT], [0])
        model(inputs_embeds=inputs, use_cache=False)
        with pytest.raises(InvalidInputError, match="without a cache"):
            model(inputs_embeds=inputs, use_cache=False)
