"""empty_model and load_checkpoint in one process, beside from_pretrained and nf4.torch.load."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch_cases
from hypothesis import given
from hypothesis import strategies as st

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "transformers")

import nf4  # noqa: E402
import nf4.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from int4_models import CASES, checkpoint  # noqa: E402
from nf4.checkpoint import FormatError  # noqa: E402
from nf4.errors import InvalidArgument  # noqa: E402
from nf4.torch import Int4Linear, NF4Linear  # noqa: E402
from nf4.torch.distributed import empty_model, load_checkpoint, prepare  # noqa: E402
from nf4.torch.distributed._reading import runs_of_box  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402

TOKENS = torch.arange(14).view(2, 7)


def write(folder: Path, tied: bool = False, **options) -> transformers.PreTrainedModel:
    """A checkpoint of bitsandbytes' keys, and its model."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, attention_bias=True, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    nf4.torch.quantize_model(model, **options)
    model.save_pretrained(folder)
    return model


def require_equal(model: nn.Module, expected: nn.Module) -> None:
    state = expected.state_dict()
    assert model.state_dict().keys() == state.keys()
    for name, each in model.state_dict().items():
        assert torch.equal(each, state[name]), name
    assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"nested": False}, {"format": "fp4", "blocksize": 128}], ids=str
)
def test_bitsandbytes(tmp_path, options, tied):
    expected = write(tmp_path / "m", tied, **options)
    model = empty_model(tmp_path / "m")
    assert all(each.is_meta for each in model.parameters())
    assert not model.training
    assert type(model.model.layers[0].mlp.up_proj) is NF4Linear
    assert model.model.layers[0].mlp.up_proj.compute_dtype is torch.bfloat16
    load_checkpoint(model, tmp_path / "m")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    require_equal(model, expected)
    model.save_pretrained(tmp_path / "again")
    first, second = (load_file(tmp_path / each / "model.safetensors") for each in ("m", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert json.loads((tmp_path / "again/config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("case", CASES)
def test_integers(tmp_path, case):
    checkpoint(tmp_path / "m", case)
    model = empty_model(tmp_path / "m")
    assert type(model.model.layers[1].mlp.up_proj) is Int4Linear
    load_checkpoint(model, tmp_path / "m")
    require_equal(model, nf4.torch.load(tmp_path / "m"))


def test_codes_that_are_called_floats(tmp_path):
    """bnb_4bit_quant_storage, as FSDP of bitsandbytes needs it."""
    expected = write(tmp_path / "m")
    file = tmp_path / "m/model.safetensors"
    tensors = load_file(file)
    for name in list(tensors):
        if f"{name}.absmax" in tensors:
            tensors[name] = tensors[name].view(-1).view(torch.bfloat16).view(-1, 1)
    save_file(tensors, file, metadata={"format": "pt"})
    model = empty_model(tmp_path / "m")
    load_checkpoint(model, tmp_path / "m")
    require_equal(model, expected)


def test_a_model_that_has_memory_keeps_it(tmp_path):
    expected = write(tmp_path / "m")
    model = empty_model(tmp_path / "m").to_empty(device="cpu")
    model.model.rotary_emb = expected.model.rotary_emb
    load_checkpoint(model, tmp_path / "m")
    first = model.model.layers[0].mlp.up_proj.weight.data_ptr()
    load_checkpoint(model, tmp_path / "m")
    assert model.model.layers[0].mlp.up_proj.weight.data_ptr() == first
    require_equal(model, expected)


@pytest.mark.parametrize("options", [{}, {"format": "int4", "group_size": 32}], ids=str)
def test_layers_that_are_prepared_for_fsdp(tmp_path, options):
    expected = write(tmp_path / "m", **options)
    model = empty_model(tmp_path / "m")
    assert prepare(model)
    load_checkpoint(model, tmp_path / "m")
    require_equal(model, expected)


def test_wrappers_do_not_change_names(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    expected = write(tmp_path / "m")
    model = empty_model(tmp_path / "m")
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    load_checkpoint(torch.compile(model), tmp_path / "m")
    assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)


def test_dtypes(tmp_path):
    write(tmp_path / "m")
    model = empty_model(tmp_path / "m", dtype="fp16", compute_dtype="fp32")
    load_checkpoint(model, tmp_path / "m")
    assert model.lm_head.weight.dtype is torch.float16
    assert model.model.layers[0].mlp.up_proj.compute_dtype is torch.float32


def test_with_adapters(tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    expected = write(tmp_path / "m")
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(empty_model(tmp_path / "m"), adapters)
    assert all(each.is_meta for each in model.parameters())
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    before = torch.get_rng_state()
    load_checkpoint(model, tmp_path / "m")
    # Numbers of the CPU and of GPUs go on as they would have.
    assert torch.equal(torch.get_rng_state(), before) and not seeds
    assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)
    layer = model.get_submodule("base_model.model.model.layers.1.mlp.down_proj")
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert 0 < a.abs().max() <= layer.in_features**-0.5 and a.unique().numel() > a.numel() / 2
    assert a.requires_grad and not b.any()
    before = a.detach().clone()
    load_checkpoint(model, tmp_path / "m")
    assert torch.equal(layer.lora_A["default"].weight, before)


def test_adapters_that_begin_with_the_weight(tmp_path):
    peft = pytest.importorskip("peft")
    write(tmp_path / "m")
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(empty_model(tmp_path / "m"), adapters)
    with pytest.raises(
        InvalidArgument, match="q_proj has adapter 'default' on meta with init_lora"
    ):
        load_checkpoint(model, tmp_path / "m")


@pytest.mark.parametrize("missing", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_what_the_checkpoint_has_not_is_named(tmp_path, missing):
    write(tmp_path / "m")
    model = empty_model(tmp_path / "m")
    file = tmp_path / "m/model.safetensors"
    tensors = load_file(file)
    kept = {name: each for name, each in tensors.items() if not name.startswith(missing)}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(FormatError, match=f"the model needs {missing}"):
        load_checkpoint(model, tmp_path / "m")
    assert all(each.is_meta for each in model.parameters())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "fp4"}, "its format is fp4, but nf4 in the model"),
        ({"blocksize": 128}, "its blocksize is 128, but 64 in the model"),
        ({"nested": False}, "its nested_blocksize is 0, but 256 in the model"),
        ({"format": "int4", "group_size": 32}, "it is in int4, but NF4Linear in the model"),
    ],
    ids=["format", "blocksize", "nested", "integers"],
)
def test_a_checkpoint_of_another_format(tmp_path, options, said):
    write(tmp_path / "m")
    write(tmp_path / "other", **options)
    with pytest.raises(FormatError, match=said):
        load_checkpoint(empty_model(tmp_path / "m"), tmp_path / "other")


def test_weights_of_an_unknown_method_are_refused(tmp_path):
    model = write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "fp8"}})
    )
    for load in (empty_model, lambda path: load_checkpoint(model, path)):
        with pytest.raises(FormatError, match="quantized by 'fp8', which is not read"):
            load(tmp_path)


def test_layers_that_only_one_has_in_4_bits(tmp_path):
    write(tmp_path / "m")
    write(tmp_path / "other", skip=["*.mlp.*"])
    with pytest.raises(FormatError, match="needs model.layers.0.mlp.*weight in 4 bits"):
        load_checkpoint(empty_model(tmp_path / "m"), tmp_path / "other")
    with pytest.raises(FormatError, match="the model has no model.layers.0.mlp.* in 4 bits"):
        load_checkpoint(empty_model(tmp_path / "other"), tmp_path / "m")


def test_a_model_of_another_shape(tmp_path):
    write(tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    with pytest.raises(
        FormatError, match=r"its shape is \[\d+, \d+\], but \[\d+, \d+\] in the mod"
    ):
        empty_model(tmp_path / "m")


def test_bad_arguments(tmp_path):
    with pytest.raises(InvalidArgument, match="expected a local directory"):
        empty_model(tmp_path / "none")
    with pytest.raises(InvalidArgument, match="model is of type types.SimpleNamespace"):
        load_checkpoint(SimpleNamespace(), tmp_path)
    with pytest.raises(InvalidArgument, match="device"):
        load_checkpoint(nn.Linear(1, 1), tmp_path, device="nowhere")


@pytest.mark.parametrize("text", ["{", "[]", "1", '{"cache_implementation": "odd"}'])
def test_settings_of_generate_that_are_none(tmp_path, text):
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.warns(UserWarning, match="generation_config.json is not used: "):
        model = empty_model(tmp_path)
    assert model.generation_config is not None


@given(st.data())
def test_runs_of_a_box_are_its_elements_in_order(data):
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    offsets = [data.draw(st.integers(0, size)) for size in shape]
    sizes = [data.draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True)]
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    runs = list(runs_of_box(shape, offsets, sizes))
    found = [index for begin, end in runs for index in range(begin, end)]
    assert found == whole[box].reshape(-1).tolist()
    assert all(before[1] < after[0] for before, after in zip(runs, runs[1:], strict=False))
