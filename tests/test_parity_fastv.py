"""FastV against the authors' program: kept set, prefill and cached decoding (golden data)."""

from __future__ import annotations

import json

import pytest
import torch
from golden_models import GOLDEN
from safetensors import safe_open
from text_models import cache_of, causal_lm, layout

from dlm_decode.vision.fastv import FastV
from dlm_decode.vision.layer_hooks import LayerReducer

CASES = sorted(path.stem for path in (GOLDEN / "fastv").glob("*.safetensors"))


def load(case):
    with safe_open(GOLDEN / "fastv" / f"{case}.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        meta = json.loads(file.metadata()["meta"])
    state = {name[2:]: tensors.pop(name) for name in list(tensors) if name.startswith("w.")}
    model = causal_lm(
        "llama",
        num_layers=meta["layers"],
        num_heads=meta["heads"],
        num_kv_heads=meta["kv_heads"],
        hidden_size=meta["hidden"],
        intermediate_size=meta["intermediate"],
        vocab_size=meta["vocab"],
        rms_norm_eps=meta["rms_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["rope_theta"]},
    )
    model.load_state_dict(state)
    return model, tensors, meta


def test_number_of_cases():
    assert len(CASES) == 3


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_prefill_and_cached_decoding(case):
    model, golden, meta = load(case)
    stage = FastV.from_drop_ratio(meta["K"], meta["R"])
    reducer = LayerReducer([stage], meta["layers"])
    row = layout(meta["pre"], meta["n_image"], meta["post"])
    with reducer.hooks(model.model):
        reducer.begin([row], [0])
        bare = model(inputs_embeds=golden["inputs_embeds"][None], use_cache=False)
        reducer.begin([row], [0])
        out = model(inputs_embeds=golden["inputs_embeds"][None], use_cache=True)
        steps = [
            model(input_ids=torch.tensor([[token]]), **cache_of(out))
            for token in meta["decode_input_tokens"]
        ]
    assert torch.equal(reducer.positions[-1][0], golden["keep_index"])
    assert [lengths[0] for lengths in reducer.lengths] == meta["kv_len_after_prefill"]
    (cache,) = cache_of(out).values()
    cached = [layer.get_seq_length() for layer in cache.layers]
    assert cached == [length + 3 for length in meta["kv_len_after_prefill"]]
    close = {"rtol": 0, "atol": 5e-5}
    torch.testing.assert_close(bare.logits[0], golden["prefill_logits_nocache"], **close)
    torch.testing.assert_close(out.logits[0], golden["prefill_logits_cache"], **close)
    decoded = torch.cat([step.logits[0] for step in steps])
    torch.testing.assert_close(decoded, golden["decode_logits"], **close)
    plain = model(inputs_embeds=golden["inputs_embeds"][None]).logits[0, -1]
    torch.testing.assert_close(plain, golden["vanilla_last_logits"], **close)
    assert not torch.allclose(plain, out.logits[0, -1], atol=1e-3), "pruning must show"
