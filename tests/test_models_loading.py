"""Checkpoints: official layouts, round trips, dtypes, and what is wrong with broken ones."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from golden_models import GOLDEN, fastdllm, read_json, tiny56
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from dlm_decode import models
from dlm_decode.canvas import IMAGE_TOKEN_ID
from dlm_decode.errors import CheckpointError, InvalidInputError, UnknownNameError
from dlm_decode.models.llada import LLaDAModelLM
from dlm_decode.models.llava_llada import LlavaLLaDAModelLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A sharded LLaDA-V folder in float32."""
    path = tmp_path_factory.mktemp("llada_v")
    model = tiny56()
    model.save_pretrained(path, max_shard_size="400KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A text-only folder as LLaDA-8B was published: OLMo's key names and config names."""
    path = tmp_path_factory.mktemp("llada_text")
    raw = read_json("fastdllm", "config.json")["model"]
    auto_map = {"AutoConfig": "configuration_llada.LLaDAConfig"}
    config = {**raw, "model_type": "llada", "auto_map": auto_map, "architectures": ["LLaDAModelLM"]}
    (path / "config.json").write_text(json.dumps(config))
    (path / "configuration_llada.py").write_text("raise SystemExit('remote code was run')")
    shutil.copy(GOLDEN / "fastdllm" / "weights.safetensors", path / "model.safetensors")
    return path


def same_weights(first, second):
    state = second.state_dict()
    assert state.keys() == first.state_dict().keys()
    return all(torch.equal(value, state[key]) for key, value in first.state_dict().items())


def copy_with(folder, target, **config_changes):
    shutil.copytree(folder, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    config.update(config_changes)
    config = {key: value for key, value in config.items() if value is not ...}
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_sharded_round_trip(folder, tmp_path):
    model = models.load_model(folder)
    assert type(model) is LlavaLLaDAModelLM and not model.training
    assert same_weights(tiny56(), model)
    assert model.config.architectures == ["LlavaLLaDAModelLM"]
    model.save_pretrained(tmp_path)
    again = models.load_model(tmp_path)
    assert same_weights(model, again)
    pixels = torch.rand(1, 3, 56, 56) - 0.5
    ids = torch.tensor([1, IMAGE_TOKEN_ID, 2])
    with torch.no_grad():  # buffers that no checkpoint holds are right, too
        expected = tiny56().encode_prompt(ids, pixels).embeds
        assert torch.equal(again.encode_prompt(ids, pixels).embeds, expected)


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
def test_auto_classes(folder, original, auto):
    assert AutoConfig.from_pretrained(folder).model_type == "llava_llada"
    assert same_weights(tiny56(), auto.from_pretrained(folder))
    assert same_weights(fastdllm(), auto.from_pretrained(original))


def test_original_key_names(original, tmp_path):
    model = models.load_model(original)
    assert type(model) is LLaDAModelLM
    assert same_weights(fastdllm(), model)
    assert model.special_ids.mask == 127
    model.save_pretrained(tmp_path)
    assert same_weights(model, models.load_model(tmp_path))
    fastdllm().save_pretrained(tmp_path / "ours")
    assert same_weights(model, models.load_model(tmp_path / "ours"))


def test_dtype_device_map_and_backend(folder):
    model = models.load_model(folder, dtype="bfloat16", device_map="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert models.load_model(folder, dtype=torch.float16).dtype == torch.float16
    assert models.load_model(folder, dtype="auto").dtype == torch.float32
    eager = models.load_model(folder, attn_implementation="eager", device="cpu")
    assert eager.config._attn_implementation == "eager"
    pixels = torch.rand(1, 3, 56, 56) - 0.5
    with torch.no_grad():
        prompt = model.encode_prompt(torch.tensor([1, IMAGE_TOKEN_ID, 2]), [pixels[0]])
        hidden = model.hidden_states(prompt.embeds[None], torch.arange(prompt.length)[None])
        assert model.logits(hidden[0]).dtype == torch.bfloat16
    with pytest.raises(InvalidInputError, match="dtype 'int8' is unknown"):
        models.load_model(folder, dtype="int8")
    with pytest.raises(InvalidInputError, match="attn_implementation 'fast'"):
        models.load_model(folder, attn_implementation="fast")


def test_overridden_ids(folder):
    model = models.load_model(folder, eos_token_id=7, stop_token_ids=[8], suppress_token_ids=())
    ids = model.special_ids
    assert (ids.mask, ids.eos, ids.stop, ids.suppress) == (500, 7, (8,), ())


@pytest.mark.parametrize("is_tied", [False, True])
def test_tied_and_untied_heads_survive(tmp_path, is_tied):
    config = fastdllm().config
    config.tie_word_embeddings = is_tied
    torch.manual_seed(1)
    model = LLaDAModelLM(config)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    model.save_pretrained(tmp_path)
    again = models.load_model(tmp_path)
    assert same_weights(model, again)
    assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == is_tied


def test_weights_that_do_not_fit_the_config(folder, tmp_path):
    wide = copy_with(folder, tmp_path / "wide", intermediate_size=99)
    with pytest.raises(
        CheckpointError,
        match=r"layers.0.mlp.gate_proj.weight is \(\d+, \d+\) and the config makes it \(99, ",
    ):
        models.load_model(wide)
    deep = copy_with(folder, tmp_path / "deep", num_hidden_layers=9)
    with pytest.raises(CheckpointError, match=r"missing: model.layers.\d.* and \d+ more"):
        models.load_model(deep)
    shallow = copy_with(folder, tmp_path / "shallow", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"unexpected: model.layers.1"):
        models.load_model(shallow)


def test_broken_folders(folder, original, tmp_path):
    with pytest.raises(InvalidInputError, match="no folder"):
        models.load_model(tmp_path / "nowhere")
    with pytest.raises(InvalidInputError, match=r"no folder './nowhere'"):
        models.load_processor("./nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no config.json"):
        models.load_model(tmp_path / "empty")
    no_type = copy_with(original, tmp_path / "no_type", model_type=...)
    with pytest.raises(
        CheckpointError,
        match=r"has no model_type; pass model_type=, one of lavida_llada, llada, llava_dream",
    ):
        models.load_model(no_type)
    other = copy_with(original, tmp_path / "other", model_type="lada")
    with pytest.raises(UnknownNameError, match="Did you mean 'llada'"):
        models.load_model(other)
    no_mask = copy_with(original, tmp_path / "no_mask", mask_token_id=...)
    with pytest.raises(CheckpointError, match=r"mask id 126336 .* outside its vocabulary of 128"):
        models.load_model(no_mask)
    assert models.load_model(no_mask, mask_token_id=127).special_ids.mask == 127
    cut = copy_with(folder, tmp_path / "cut")
    shard = min(cut.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"cannot read .*may be cut off"):
        models.load_model(cut)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {shard.name}"):
        models.load_model(cut)
    (cut / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        models.load_model(cut)


def test_pickled_weights_are_refused(original, tmp_path):
    """Only safetensors are read: a pickle can run code."""
    folder = copy_with(original, tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="convert the weights to safetensors"):
        models.load_model(folder)


def test_hub_ids_that_cannot_be_reached():
    with pytest.raises(InvalidInputError, match=r"cannot get 'nobody/no-such-model' from the hub"):
        models.load_model("nobody/no-such-model")


def test_no_tokenizer_means_no_processor(folder, tmp_path):
    assert models.load_processor(folder) is None
    broken = copy_with(folder, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot read the tokenizer"):
        models.load_processor(broken)


def test_a_model_of_ones_own(tmp_path):
    """One file with a config class and a model class makes a new model type loadable."""
    from dlm_decode.models.configuration import LLaDAConfig

    class OwnConfig(LLaDAConfig):
        model_type = "my_llada"

    @models.register_model("my_llada")
    class OwnModel(LLaDAModelLM):
        config_class = OwnConfig

    raw = read_json("fastdllm", "config.json")["model"]
    model = OwnModel(OwnConfig(**raw))
    model.save_pretrained(tmp_path)
    assert "my_llada" in models.names()
    loaded = models.load_model(tmp_path)
    assert type(loaded) is OwnModel and same_weights(model, loaded)
    assert loaded.special_ids.mask == 127


def test_extra_tensors_are_named(original, tmp_path):
    folder = copy_with(original, tmp_path / "extra")
    state = load_file(folder / "model.safetensors")
    state["model.transformer.blocks.0.q_norm.weight"] = torch.ones(4)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected: .*q_norm"):
        models.load_model(folder)
