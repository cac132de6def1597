"""quantize_model: what save_pretrained writes afterwards is what `nf4 quantize` makes of the dense
checkpoint, to the byte; transformers and nf4.torch.load load it; one layer at a time is dense."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import weakref

import nf4
import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "in_process")]
torch_cases.require("torch", "transformers")

import nf4.torch.distributed  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from nf4.checkpoint import QuantizeOptions, quantize_checkpoint  # noqa: E402
from nf4.torch import Int4Linear, NF4Linear, functional, quantize_model, quantizing  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

TOKENS = torch.arange(14).view(2, 7)


def llama(tied=False, bias=False):
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, attention_bias=bias, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def gpt2():
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=2, vocab_size=100, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config).eval()


def bert():
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=100, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).eval()


def mixture():
    config = transformers.Qwen2MoeConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=64, num_hidden_layers=1,
        shared_expert_intermediate_size=64, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=100, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config).eval()


CASES = {
    "nf4": (llama, {}),
    "tied, biases": (lambda: llama(True, True), {"format": "fp4", "nested": False}),
    "skip": (llama, {"skip": ("layers.0", "o_proj"), "blocksize": 128}),
    "only": (llama, {"only": ("lm_head", "*.mlp.*")}),
    "Conv1D": (gpt2, {}),
    "classifier": (bert, {}),
    "mixture": (mixture, {}),
    "half": (lambda: llama().half(), {}),
    "int4": (llama, {"format": "int4", "group_size": 32}),
    "gptq": (
        lambda: llama().bfloat16(),
        {"format": "int4", "layout": "gptq", "group_size": 64, "symmetric": False},
    ),
    "awq": (bert, {"format": "int4", "layout": "awq", "group_size": -1}),
    "mxfp4": (llama, {"format": "mxfp4", "skip": ("layers.0.mlp",)}),
    "nvfp4": (lambda: llama(True, True).bfloat16(), {"format": "nvfp4"}),
    "modelopt": (bert, {"format": "nvfp4", "layout": "modelopt"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_saved_model_is_that_of_the_command(tmp_path, case):
    make, options = CASES[case]
    model = make()
    model.save_pretrained(tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "expected", QuantizeOptions(**options))
    names = quantize_model(model, **options)
    kind = Int4Linear if options.get("format") == "int4" else NF4Linear
    assert names and all(type(model.get_submodule(name)) is kind for name in names)
    model.save_pretrained(tmp_path / "found")
    found, expected = (load_file(tmp_path / n / "model.safetensors") for n in ("found", "expected"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name
    configs = (
        json.loads((tmp_path / n / "config.json").read_text()) for n in ("found", "expected")
    )
    assert next(configs) == next(configs)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_transformers_loads_what_was_saved(tmp_path, make):
    torch_cases.require("bitsandbytes", "accelerate")
    model = make()
    names = quantize_model(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert nf4.torch.convert(loaded) == names
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize(
    "options",
    [
        {"format": "int4", "group_size": 32},
        {"format": "mxfp4"},
        {"format": "nvfp4"},
        {"format": "nvfp4", "layout": "modelopt"},
    ],
    ids=str,
)
def test_load_takes_what_was_saved(tmp_path, options):
    model = llama()
    quantize_model(model, **options)
    model.save_pretrained(tmp_path)
    loaded = nf4.torch.load(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


def test_a_group_size_that_leaves_layers_dense_is_named():
    with pytest.warns(
        UserWarning, match="128 leaves 12 of 14 matrices dense.*; a group size of 64 leaves none"
    ):
        quantize_model(llama(), format="int4")


def test_a_quantized_model_computes_what_its_dense_weights_do():
    model = llama()
    calls = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: calls.append(1))
    names = quantize_model(model, compute_dtype="fp32")
    assert model.get_submodule(names[0]).compute_dtype is torch.float32
    with torch.no_grad():
        found = model(TOKENS).logits
    assert calls and nf4.torch.to_dense(model) == names
    assert not hasattr(model.config, "quantization_config")
    with torch.no_grad():
        assert torch_cases.error(found, model(TOKENS).logits) < 1e-5


def test_one_layer_at_a_time_is_dense(monkeypatch):
    model = llama()
    dense = {
        name: weakref.ref(layer.weight)
        for name, layer in model.named_modules()
        if type(layer) is torch.nn.Linear and name != "lm_head"
    }
    alive = []
    gc.disable()  # so that a cycle counts as alive
    quantize = functional.quantize

    def counting(weight, **options):
        alive.append(sum(each() is not None for each in dense.values()))
        return quantize(weight, **options)

    monkeypatch.setattr(functional, "quantize", counting)
    try:
        quantize_model(model)
    finally:
        gc.enable()
    assert alive == list(range(len(dense), 0, -1))


def test_weights_that_are_shared_stay_dense():
    model = llama()
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = mlp.gate_proj.weight
    model.model.layers[1].self_attn.k_proj = model.model.layers[1].self_attn.v_proj
    names = quantize_model(model)
    assert len(names) == 14 - 4
    assert mlp.up_proj.weight is mlp.gate_proj.weight


def test_the_device_is_where_all_of_it_goes():
    model = llama()
    quantize_model(model, device="cpu")
    assert {each.device.type for each in (*model.parameters(), *model.buffers())} == {"cpu"}


def fail_at(monkeypatch, name, call, owner=functional):
    """Makes a function of `owner` run out of memory in this call of it, once."""
    real, calls = getattr(owner, name), []

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == call:
            raise torch.OutOfMemoryError("out of memory")
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("case", ["nf4", "Conv1D", "gptq", "tied, biases", "nvfp4"])
def test_a_call_that_failed_can_be_repeated(monkeypatch, tmp_path, case):
    make, options = CASES[case]
    model = make()
    model.save_pretrained(tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "expected", QuantizeOptions(**options))
    name, module = {
        "int4": ("quantize_int4", functional), "nvfp4": ("quantize_into", quantizing)
    }.get(options.get("format"), ("quantize", functional))  # fmt: skip
    fail_at(monkeypatch, name, 4, module)
    with pytest.raises(torch.OutOfMemoryError):
        quantize_model(model, **options)
    assert sum(isinstance(each, (NF4Linear, Int4Linear)) for each in model.modules()) == 3
    other = {**options, "skip": ("lm_head",)}
    with pytest.raises(nf4.InvalidArgument, match=r"model is quantized in part: .*: skip=\(\)"):
        quantize_model(model, **other)
    assert not hasattr(model.config, "quantization_config")
    names = quantize_model(model, device="cpu", **options)
    model.save_pretrained(tmp_path / "found")
    found, expected = (load_file(tmp_path / n / "model.safetensors") for n in ("found", "expected"))
    assert names and found.keys() == expected.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    configs = ((tmp_path / n / "config.json").read_bytes() for n in ("found", "expected"))
    assert json.loads(next(configs)) == json.loads(next(configs))
    with pytest.raises(nf4.InvalidArgument, match="quantized already"):
        quantize_model(model, **options)


def test_a_call_that_failed_before_the_first_layer_binds_nothing(monkeypatch):
    model = llama()
    fail_at(monkeypatch, "quantize", 1)
    with pytest.raises(torch.OutOfMemoryError):
        quantize_model(model)
    assert quantize_model(model, blocksize=128)


def test_a_model_that_cannot_be_moved_is_complete_without(monkeypatch):
    model = llama()

    def refuse(*_):
        raise RuntimeError("dispatched")

    monkeypatch.setattr(model, "to", refuse)
    with pytest.raises(RuntimeError, match="dispatched"):
        quantize_model(model, device="cpu")
    assert not hasattr(model.config, "quantization_config")
    assert len(quantize_model(model)) == 14 and model.config.quantization_config


def with_nan(model):
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = float("nan")
    return model


def with_own_forward(model):
    model.model.layers[1].mlp.down_proj.forward = lambda x: x
    return model


def with_offloaded_head(model):
    model.lm_head.to("meta")
    return model


def on_meta(model):
    model.model.layers[1].mlp.down_proj.to("meta")
    return model


REFUSED = {
    "of transformers": (lambda: torch.nn.Sequential(torch.nn.Linear(64, 64)), {}),
    "quantized already": (lambda: quantize_model(model := llama()) and model, {}),
    "down_proj: the weight has NaN": (lambda: with_nan(llama()), {}),
    "down_proj: the layer has a forward of its own": (lambda: with_own_forward(llama()), {}),
    "down_proj: the weight is on meta": (lambda: on_meta(llama()), {}),
    "device is given, and lm_head.weight is on meta": (
        lambda: with_offloaded_head(llama()),
        {"device": "cpu"},
    ),
    "no module matches 'absent'": (llama, {"skip": ["absent"]}),
    "skip is 'lm_head'": (llama, {"skip": "lm_head"}),
    "no layer that may": (llama, {"skip": ["model"]}),
    "format is 'int8'": (llama, {"format": "int8"}),
    "layout is 'marlin'": (llama, {"format": "int4", "layout": "marlin"}),
    "layout is 'modelopt'; expected compressed-tensors": (
        llama,
        {"format": "mxfp4", "layout": "modelopt"},
    ),
    'nested is False, but format "nvfp4" has none': (llama, {"format": "nvfp4", "nested": False}),
    'experts is True; expected False with format "mxfp4"': (
        mixture,
        {"format": "mxfp4", "experts": True},
    ),
    'group_size is 32, but format "nf4" has none; expected format "int4"': (
        llama,
        {"group_size": 32},
    ),
    'blocksize is 64, but format "int4" has none; expected format "nf4" or "fp4"': (
        llama,
        {"format": "int4", "blocksize": 64},
    ),
    'blocksize is 64, but format "mxfp4" has none; expected format "nf4" or "fp4"': (
        llama,
        {"format": "mxfp4", "blocksize": 64},
    ),
    'blocksize is 64, but format "nvfp4" has none; expected format "nf4" or "fp4"': (
        llama,
        {"format": "nvfp4", "blocksize": 64},
    ),
    "group_size is 12": (llama, {"format": "int4", "group_size": 12}),
    "blocksize": (llama, {"blocksize": 48}),
    "compute_dtype": (llama, {"compute_dtype": "int8"}),
    "device is 'abacus'": (llama, {"device": "abacus"}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_refused_changes_nothing(said):
    make, options = REFUSED[said]
    model = make()
    before = dict(model.named_modules())
    with pytest.raises(nf4.InvalidArgument, match=said):
        quantize_model(model, **options)
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize(
    "call",
    [lambda folder: quantize_model(llama()), nf4.torch.load, nf4.torch.distributed.empty_model],
)
def test_a_transformers_that_is_too_old_is_named(call, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "4.57.1")
    with pytest.raises(ImportError, match=r"transformers 5\.0 or later, and transformers 4\.57\.1"):
        call(tmp_path)


def test_numbers_that_are_not_finite_can_be_allowed():
    assert quantize_model(with_nan(llama()), allow_nonfinite=True)
