"""The language model: reference logits, padding, attention backends, grouped heads, configs."""

from __future__ import annotations

import pytest
import torch
from golden_models import GOLDEN, fastdllm, read_json
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from dlm_decode.canvas import IMAGE_TOKEN_ID
from dlm_decode.errors import CheckpointError, InvalidInputError
from dlm_decode.models.attention import check_backend, mask_for
from dlm_decode.models.configuration import LLaDAConfig, rope_theta_of
from dlm_decode.models.llada import LLaDAModelLM

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "mask_token_id": 59,
}


def random_model(**changes):
    torch.manual_seed(3)
    model = LLaDAModelLM(LLaDAConfig(**{**SIZES, **changes})).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def test_reference_logits():
    model, prompts = fastdllm(), read_json("fastdllm", "cases.json")["prompts"]
    expected = load_file(GOLDEN / "fastdllm" / "logits.safetensors")["full_step0"]
    prompt = torch.tensor(prompts["p0"])
    masks = torch.full((1, 32), model.special_ids.mask)
    got = model(input_ids=torch.cat([prompt, masks], dim=1))
    assert torch.allclose(got, expected, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_on_real_tokens(backend, side):
    model = random_model(num_key_value_heads=2)
    model.config._attn_implementation = backend
    rows = [torch.randint(0, 58, (length,)) for length in (9, 5, 1)]
    ids, real = torch.full((3, 9), 7), torch.zeros(3, 9, dtype=torch.long)
    for row, tokens in enumerate(rows):
        place = slice(9 - len(tokens), 9) if side == "left" else slice(0, len(tokens))
        ids[row, place], real[row, place] = tokens, 1
    together = model(input_ids=ids, attention_mask=real)
    assert torch.isfinite(together).all()
    for row, tokens in enumerate(rows):
        alone = model(input_ids=tokens[None])
        assert torch.allclose(together[row, real[row].bool()], alone[0], atol=1e-5)
    other = ids.masked_fill(real == 0, 23)
    same = model(input_ids=other, attention_mask=real)
    assert torch.equal(same[real.bool()], together[real.bool()])


@torch.no_grad()
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("is_padded", [False, True])
def test_backends_agree(num_kv_heads, is_padded):
    model = random_model(num_key_value_heads=num_kv_heads)
    ids = torch.randint(0, 58, (2, 11))
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :4] = 0
    results = []
    for backend in ("eager", "sdpa", "flex_attention"):
        model.config._attn_implementation = backend
        logits = model(input_ids=ids, attention_mask=mask if is_padded else None)
        results.append(logits[mask.bool()])
    assert torch.allclose(results[0], results[1], atol=1e-5)
    assert torch.allclose(results[0], results[2], atol=1e-5)


@torch.no_grad()
def test_grouped_heads_equal_repeated_ones():
    grouped = random_model(num_key_value_heads=2)
    state = grouped.state_dict()
    for key, value in state.items():
        if "k_proj" in key or "v_proj" in key:
            heads = value.unflatten(0, (2, -1)).repeat_interleave(2, dim=0)
            state[key] = heads.flatten(0, 1)
    full = random_model()
    full.load_state_dict(state)
    ids = torch.randint(0, 58, (1, 8))
    assert torch.allclose(grouped(input_ids=ids), full(input_ids=ids), atol=1e-5)


@torch.no_grad()
def test_attention_is_bidirectional_and_positions_matter():
    model = random_model()
    ids = torch.randint(0, 58, (1, 8))
    before = model(input_ids=ids)
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % 58
    assert not torch.allclose(model(input_ids=changed)[0, 0], before[0, 0], atol=1e-3)
    shifted = model(input_ids=ids, position_ids=torch.arange(8)[None] + 5)
    assert torch.allclose(shifted, before, atol=1e-4)  # only differences of positions count
    spread = model(input_ids=ids, position_ids=torch.arange(8)[None] * 3)
    assert not torch.allclose(spread, before, atol=1e-3)


class _SquareTensors(TorchDispatchMode):
    def __init__(self, length):
        super().__init__()
        self.length, self.found = length, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape[-2:] == (self.length, self.length):
            self.found.append((func, tuple(out.shape)))
        return out


@torch.no_grad()
def test_sdpa_builds_no_square_tensor():
    """Neither scores nor a mask of sequence times sequence: that is what runs out of memory."""
    length = 37
    with _SquareTensors(length) as watch:
        random_model()(input_ids=torch.randint(0, 58, (2, length)))
    assert watch.found == []
    assert mask_for("sdpa", None, length) is None
    key_mask = torch.ones(2, length, dtype=torch.bool)
    assert mask_for("sdpa", key_mask, length).shape == (2, 1, 1, length)


@torch.no_grad()
def test_bfloat16_keeps_its_dtype():
    model = random_model().to(torch.bfloat16)
    ids = torch.randint(0, 58, (1, 8))
    logits = model(input_ids=ids)
    assert logits.dtype == torch.bfloat16
    exact = random_model()(input_ids=ids)
    assert (logits.float() - exact).abs().mean() < 0.1 * exact.abs().mean()


def test_norm_multiplies_after_the_cast():
    norm = random_model().model.norm.to(torch.bfloat16)
    norm.weight.data.fill_(1.01)
    hidden = torch.randn(4, 32, dtype=torch.bfloat16)
    wide = hidden.float()
    cast = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert torch.equal(norm(hidden), norm.weight * cast)


def test_text_only_model_refuses_images():
    model = random_model()
    with pytest.raises(InvalidInputError, match="text-only"):
        model.encode_prompt(torch.tensor([1]), torch.zeros(1, 3, 8, 8))
    with pytest.raises(InvalidInputError, match="1 image placeholders"):
        model.encode_prompt(torch.tensor([1, IMAGE_TOKEN_ID]))
    with pytest.raises(InvalidInputError, match="left to right"):
        model.generate(torch.tensor([[1]]))
    prompt = model.encode_prompt(torch.tensor([1, 2]))
    assert prompt.length == 2 and not prompt.is_visual.any()


def test_backend_names():
    with pytest.raises(InvalidInputError, match="'flash' is unknown; use one of sdpa"):
        check_backend("flash")
    from transformers.utils.import_utils import is_flash_attn_2_available

    if not is_flash_attn_2_available():
        with pytest.raises(InvalidInputError, match="needs the flash-attn package"):
            check_backend("flash_attention_2")


def test_original_config_names():
    config = LLaDAConfig(**read_json("fastdllm", "config.json")["model"])
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (64, 3, 160)
    assert (config.vocab_size, config.max_position_embeddings, config.head_dim) == (128, 256, 16)
    config.check()


def test_rotary_base_is_read_from_either_field():
    new = {"rope_type": "default", "rope_theta": 5e5}
    assert rope_theta_of(5e5, None, None) == 5e5
    assert rope_theta_of(None, None, new) == 5e5
    assert rope_theta_of(None, {"type": "default"}, new) == 5e5
    sizes = {key: value for key, value in SIZES.items() if key != "rope_theta"}
    assert LLaDAConfig(**sizes, rope_parameters=new).rope_theta == 5e5
    assert LLaDAConfig(**SIZES, rope_scaling=None).rope_theta == 10000.0
    with pytest.raises(CheckpointError, match="lacks rope_theta"):
        LLaDAModelLM(LLaDAConfig(**sizes))
    with pytest.raises(CheckpointError, match="rotary scaling"):
        LLaDAConfig(**SIZES, rope_scaling={"rope_type": "yarn", "factor": 4})


def test_special_ids_come_from_the_config_or_the_type():
    ids = random_model(eos_token_id=3, stop_token_ids=[3, 4]).special_ids
    assert (ids.mask, ids.eos, ids.stop, ids.suppress) == (59, 3, (3, 4), ())
    official = random_model(vocab_size=126464, hidden_size=4, mask_token_id=None).special_ids
    assert (official.mask, official.eos, official.stop) == (126336, 126081, (126081, 126348))
