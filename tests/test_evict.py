"""Stages that shorten the cache behind the prefill, beside a whole cache with masked columns."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch
from ar_models import ARCHITECTURES, picture

from dlm_decode import vision
from dlm_decode.cost import Work, forward_flops, layer_flops
from dlm_decode.cost.geometries import AUTOREGRESSIVE
from dlm_decode.cost.schedule import schedule_of
from dlm_decode.errors import InvalidInputError
from dlm_decode.vision.cache_stage import CacheBase, CacheView, Eviction
from dlm_decode.vision.inside import RowLayout

QUESTION = "what is this ?"
NAMES = ["kv_random", "kv_image_random", "kv_elastic"]
DROPPING = ["kv_random:seed=3", "kv_image_random:seed=3", "kv_elastic:merges=false"]
LENGTH = 6


@dataclass(frozen=True)
class Spy(CacheBase):
    """Does what another stage does, and takes notes."""

    inner: object
    seen: list

    def reads_attention(self):
        return self.inner.reads_attention()

    def evict(self, view):
        plan = self.inner.evict(view)
        self.seen.append((view, plan))
        return plan


def ask(vlm, stages=None, **options):
    return vlm.generate(
        QUESTION, images=picture(), stages=stages, gen_length=LENGTH, stop=False, **options
    )


def confidences(out):
    return [step.confidence[0, at].item() for at, step in enumerate(out.trajectory.steps)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keeping_everything_changes_nothing(ar_vlms, architecture, name):
    vlm = ar_vlms(architecture)
    whole, kept = ask(vlm), ask(vlm, f"{name}:keep_ratio=1.0")
    assert torch.equal(whole.sequences, kept.sequences)
    assert confidences(whole) == confidences(kept)
    assert whole.cost.row_flops == kept.cost.row_flops
    assert whole.cost.kv_bytes == kept.cost.kv_bytes
    assert kept.cost.layer_visual_tokens == ()


def masked_decode(vlm, stages, kept):
    """Tokens and their probabilities with a whole cache; `kept[layer]` is what a layer reads."""
    batch = vlm.processor(QUESTION, [picture()])
    inputs = {"input_ids": batch.input_ids[None], **batch.tensors}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    positions = vlm.architecture.position_ids(vlm.model, inputs)
    end, tokens, shares = positions.max(), [], []
    text_model = vlm.architecture.text_model(vlm.model)
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(vision.attach(vlm.model, stages))
        extras = vlm.architecture.forward_arguments(inputs)
        out = vlm.model(
            **{name: inputs[name] for name in ("input_ids", "attention_mask")},
            position_ids=positions,
            use_cache=True,
            **extras,
        )
        num_prompt = out.cache.get_seq_length()

        def hide(layer):
            def before(module, args, kwargs):
                is_read = torch.ones(num_prompt + len(tokens), dtype=torch.bool)
                is_read[:num_prompt] = False
                is_read[kept[layer]] = True
                return args, {**kwargs, "attention_mask": is_read[None, None, None]}

            return before

        for number, layer in enumerate(text_model.layers):
            handle = layer.register_forward_pre_hook(hide(number), with_kwargs=True)
            stack.callback(handle.remove)
        for step in range(LENGTH):
            probabilities = out.logits[0, -1].float().softmax(dim=-1)
            tokens.append(int(probabilities.argmax()))
            shares.append(float(probabilities.max()))
            mask = torch.ones(1, inputs["input_ids"].shape[1] + step + 1, dtype=torch.long)
            out = vlm.model(
                input_ids=torch.tensor([[tokens[-1]]]),
                attention_mask=mask,
                position_ids=(end + step + 1).expand_as(positions[..., :1]),
                cache=out.cache,
                use_cache=True,
            )
    return tokens, shares


@pytest.mark.parametrize("spec", DROPPING)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("front", [[], ["stride:keep_ratio=0.5"]])
def test_a_short_cache_equals_masked_columns(ar_vlms, architecture, spec, front):
    vlm, spy = ar_vlms(architecture), Spy(vision.make(spec), [])
    out = ask(vlm, [spy, *front])
    kept = [plan.index for _, plan in spy.seen]
    tokens, shares = masked_decode(vlm, front, kept)
    assert out.sequences[0].tolist() == tokens
    assert confidences(out) == pytest.approx(shares, abs=1e-5)
    whole = masked_decode(vlm, front, [torch.arange(len(view.ids)) for view, _ in spy.seen])
    assert whole[1] != pytest.approx(shares, abs=1e-3), "what is hidden matters"


@pytest.mark.parametrize("spec", [*DROPPING, "kv_elastic"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_in_a_batch_equal_single_rows(ar_vlms, architecture, spec):
    vlm = ar_vlms(architecture)
    questions = [QUESTION, "is this a red box ? <image> or <image>", "what ?"]
    images = [picture(), [picture(70, 30, 1), picture(20, 60, 2)], None]
    common = {"gen_length": LENGTH, "stages": [spec], "stop": False}
    together = vlm.generate(questions, images=images, **common)
    for row, question in enumerate(questions):
        alone = vlm.generate(question, images=images[row], **common)
        assert alone.sequences[0].tolist() == together.sequences[row].tolist()
        assert alone.cost.flops == together.cost.row_flops[row]
        assert alone.cost.kept_visual_tokens[0] == together.cost.kept_visual_tokens[row]


def test_seeds_and_questions_draw(ar_vlms):
    vlm = ar_vlms("llava")

    def drawn(spec, question=QUESTION):
        spy = Spy(vision.make(spec), [])
        vlm.generate(question, images=picture(), stages=[spy], gen_length=1, stop=False)
        first, *others = [plan.index.tolist() for _, plan in spy.seen]
        assert others == [first] * 2, "all layers lose the same"
        return first

    for name in NAMES[:2]:
        assert drawn(name) == drawn(f"{name}:seed=0") != drawn(f"{name}:seed=1")
        assert drawn(name) != drawn(name, "is this a box ?")


def test_shares_of_images_and_of_everything():
    owners = torch.tensor([-1, 0, 0, 0, 0, 0, 0, -1, 1, 1, 1, 1, -1])
    layout = RowLayout(owners >= 0, owners, owners, torch.zeros(13, 2))
    view = CacheView(0, torch.arange(13), layout, torch.arange(13.0).roll(4))
    kept = vision.make("kv_image_random:keep_ratio=0.5").evict(view).index
    assert (
        owners[kept].bincount(minlength=2).tolist() == [3, 2] if owners[kept].min() >= 0 else True
    )
    assert [(owners[kept] == owner).sum().item() for owner in (-1, 0, 1)] == [3, 3, 2]
    kept = vision.make("kv_random:keep_ratio=0.3").evict(view).index
    assert len(kept) == len(set(kept.tolist())) == 4
    assert kept.tolist() == sorted(kept.tolist())
    # The highest numbers stand at 1, 2 and 3 once they have been turned by four.
    plan = vision.make("kv_elastic:keep_ratio=0.2").evict(view)
    assert plan.index.tolist() == [1, 2, 3]
    assert plan.groups.tolist() == [0, 0, 1, *[2] * 10]
    apart = vision.make("kv_elastic:keep_ratio=0.15").evict(
        CacheView(0, view.ids, layout, torch.eye(13)[2] + torch.eye(13)[6])
    )
    assert apart.groups.tolist() == [0] * 5 + [1] * 8, "position 4 is as near to 2 as to 6"


def test_importance_is_the_attention_of_the_prefill(ar_vlms):
    vlm, spy = ar_vlms("llava"), Spy(vision.make("kv_elastic"), [])
    ask(vlm, spy)
    model = vlm.model
    batch = vlm.processor(QUESTION, [picture()])
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            out = model(input_ids=batch.input_ids[None], output_attentions=True, **batch.tensors)
    finally:
        model.set_attn_implementation(own)
    for (view, _), attention in zip(spy.seen, out.attentions, strict=True):
        assert torch.allclose(view.received, attention[0].mean(dim=0).sum(dim=0), atol=1e-5)


def test_merged_keys_and_values_are_means(ar_vlms):
    """Two caches of the same prompt: one of its own, one that the stage shortened."""
    from transformers import DynamicCache

    from dlm_decode.vision.eviction import Evictor

    vlm, spy = ar_vlms("llava"), Spy(vision.make("kv_elastic:keep_ratio=0.3"), [])
    evictor, cache = Evictor([spy], 3), DynamicCache()
    batch = vlm.processor(QUESTION, [picture()])
    with torch.no_grad(), vision.attach(vlm.model, None) as attachment:
        text_model = vlm.architecture.text_model(vlm.model)
        with evictor.watching(text_model, lambda: attachment.prompts):
            vlm.model(input_ids=batch.input_ids[None], cache=cache, use_cache=True, **batch.tensors)
    whole = [(layer.keys, layer.values) for layer in cache.layers]
    evicted = evictor.evict(cache, attachment.prompts)
    assert evicted.mask.tolist() == [[1] * evicted.lengths[0]]
    for layer, pair, (_, plan) in zip(cache.layers, whole, spy.seen, strict=True):
        for short, states in zip((layer.keys, layer.values), pair, strict=True):
            means = torch.stack(
                [states[0][:, plan.groups == at].mean(1) for at in range(len(plan.index))], 1
            )
            assert torch.allclose(short[0], means, atol=1e-6)


def test_cost_counts_the_short_cache(ar_vlms):
    vlm = ar_vlms("llava")
    whole, short = ask(vlm).cost, ask(vlm, "kv_image_random:keep_ratio=0.25").cost
    length = whole.prompt_lengths[0]
    left = length - 12
    assert short.visual_tokens == (16,) and short.kept_visual_tokens == (4,)
    assert short.layer_visual_tokens == ((4, 4, 4),)
    assert short.prompt_lengths == whole.prompt_lengths
    prefill = 3 * layer_flops(vlm.geometry, Work(length, length * (length + 1) // 2))
    steps = range(1, LENGTH)
    assert short.flops == prefill + sum(forward_flops(vlm.geometry, 1, left + t) for t in steps)
    assert short.baseline_flops == whole.flops
    # 3 layers, keys and values, 2 heads of 8 numbers of 4 bytes
    assert short.kv_bytes == 3 * 2 * 2 * 8 * 4 * (left + LENGTH - 1)
    first, second, *_ = ask(vlm, "kv_image_random:keep_ratio=0.25").trajectory.steps
    assert [forward.keys for forward in (*first.forwards, *second.forwards)] == [
        (length,),
        (left + 1,),
    ]
    scored = ask(vlm, "kv_elastic:keep_ratio=0.5").cost.flops
    dropped = ask(vlm, "kv_random:keep_ratio=0.5").cost.flops
    extra = layer_flops(vlm.geometry, Work(1, 1, scores=length**2))
    assert scored - dropped == 3 * (extra - layer_flops(vlm.geometry, Work(1, 1)))


@pytest.mark.parametrize("name", NAMES)
def test_refused_where_the_cache_is_not_ours(ar_vlms, vlm, name):
    spec = f"{name}:keep_ratio=1.0"
    model = ar_vlms("llava").model
    with pytest.raises(InvalidInputError, match="transformers' own generate"):
        vision.attach(model, [spec]).__enter__()
    with pytest.raises(InvalidInputError, match="transformers' own generate"):
        vision.make(spec).attach(model).__enter__()
    with pytest.raises(InvalidInputError, match="this is a diffusion model"):
        vlm.generate(QUESTION, stages=[spec])
    with pytest.raises(InvalidInputError, match="the formulas here"):
        schedule_of([vision.make(spec)], next(iter(AUTOREGRESSIVE.values())), 40)
    assert "attach" not in vars(model) and ask(ar_vlms("llava")).cost.calls == LENGTH


@pytest.mark.parametrize("others", [["fastv:k=1"], ["kv_elastic"]])
def test_refused_beside_stages_that_shorten_layers(ar_vlms, others):
    with pytest.raises(InvalidInputError, match="cannot work together"):
        ask(ar_vlms("llava"), ["kv_random", *others])
    assert ask(ar_vlms("llava"), ["kv_random", "fastv:k=1,keep_ratio=1.0"]).cost.calls == LENGTH


def test_layers_must_keep_equally_many(ar_vlms):
    @dataclass(frozen=True)
    class Uneven(CacheBase):
        def reads_attention(self):
            return False

        def evict(self, view):
            return Eviction(torch.arange(1 + view.layer))

    with pytest.raises(InvalidInputError, match="equally many in every layer"):
        ask(ar_vlms("llava"), Uneven())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kv_random:keep_ratio=0", "keep_ratio must be above 0"),
        ("kv_image_random:seed=-1", "seed must be a whole number of at least 0"),
        ("kv_elastic:keep_ratio=1.5", "at most 1"),
        ("kv_elastic:merges=2", "must be true or false"),
    ],
)
def test_knobs_that_cannot_work(spec, message):
    with pytest.raises(InvalidInputError, match=message):
        vision.make(spec)


def test_the_suite_of_stages_has_what_the_model_can_run():
    from dlm_decode.eval.variants import suite
    from dlm_decode.settings import resolve_settings

    settings = resolve_settings({}, {"gen_length": 8, "steps": 8, "block_length": 8})
    for reference, count in (("baseline", 0), ("autoregressive", 9)):
        assert sum("+kv_" in name for name in suite("stages", settings, reference)) == count
