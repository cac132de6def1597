"""nf4.torch.load: a tiny llama in every layout, beside the dense model of the oracle's weights and
beside transformers with compressed-tensors."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import nf4
import pytest
import torch_cases
from torch_cases import error

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "transformers")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from int4_models import CASES, GROUP, checkpoint  # noqa: E402
from nf4.checkpoint import FormatError  # noqa: E402
from nf4.torch import Int4Linear  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

QUANTIZED = 14
TOKENS = torch.arange(14).view(2, 7)


def layers_of(model) -> list[Int4Linear]:
    return [each for each in model.modules() if isinstance(each, Int4Linear)]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_dense_model(case, tied, tmp_path):
    dense = checkpoint(tmp_path / "m", case, tied)
    model = nf4.torch.load(tmp_path / "m")
    layout, _, act_order, scale_dtype = CASES[case]
    assert len(layers_of(model)) == QUANTIZED and not model.training
    for layer in layers_of(model):
        assert (layer.layout, layer.group_size) == (layout, GROUP)
        assert layer.quantized.dtype == scale_dtype
        assert (layer.quantized.g_idx is not None) == act_order
    for name, module in dense.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            assert torch.equal(model.get_submodule(name).dequantize("fp32"), module.weight), name
    assert error(logits(model), logits(dense)) <= 1e-5
    for layer in layers_of(model):
        layer.reorder_()
    assert error(logits(model), logits(dense)) <= 1e-5


@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded_again(case, tmp_path):
    checkpoint(tmp_path / "m", case)
    model = nf4.torch.load(tmp_path / "m")
    model.save_pretrained(tmp_path / "again")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("m", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("m", "again")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert torch.equal(logits(nf4.torch.load(tmp_path / "again")), logits(model))


HELD = ["compressed-tensors", "compressed-tensors, zeros"]


@pytest.mark.parametrize("case", HELD)
def test_beside_compressed_tensors_in_transformers(case, tmp_path):
    """Which takes no packed zero points but where it dequantizes at once."""
    for package in ("compressed_tensors", "loguru", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    checkpoint(tmp_path / "m", case)
    dtype = torch.bfloat16 if CASES[case][3] == "bf16" else torch.float16

    def theirs(**options):
        return transformers.LlamaForCausalLM.from_pretrained(tmp_path / "m", dtype=dtype, **options)

    ours = nf4.torch.load(tmp_path / "m", dtype=dtype)
    dense = theirs(quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
    for name, module in ours.named_modules():
        if isinstance(module, Int4Linear):
            assert torch.equal(module.dequantize(), dense.get_submodule(name).weight), name
    allowed = torch_cases.ALLOWED["bf16"] * 4
    assert error(logits(ours), logits(dense)) <= allowed
    if CASES[case][1]:
        compressed, converted = theirs(), theirs()
        assert error(logits(ours), logits(compressed)) <= allowed
        assert len(nf4.torch.convert(converted)) == QUANTIZED
        assert torch.equal(logits(converted), logits(ours))


def test_the_dtype_is_of_what_is_not_quantized(tmp_path):
    checkpoint(tmp_path / "m", "gptq")
    model = nf4.torch.load(tmp_path / "m", dtype="bf16", device="cpu")
    assert model.dtype == torch.bfloat16 and model.lm_head.weight.dtype == torch.bfloat16
    layer = layers_of(model)[0]
    assert layer.scales.dtype == torch.float16 and layer.bias.dtype == torch.bfloat16
    assert torch.equal(
        layer.dequantize("fp32"), layers_of(nf4.torch.load(tmp_path / "m"))[0].dequantize("fp32")
    )


def test_it_generates_and_its_adapters_would_train(tmp_path):
    checkpoint(tmp_path / "m", "awq")
    model = nf4.torch.load(tmp_path / "m")
    assert model.generate(TOKENS, max_new_tokens=3, do_sample=False).shape == (2, 10)
    found = model(inputs_embeds=torch.randn(1, 4, 64, requires_grad=True)).logits
    found.sum().backward()


def change(folder: Path, **tensors) -> None:
    """Replaces tensors, whose dots are double underscores; None removes one."""
    stored = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        key = name.replace("__", ".")
        stored[key] = value
        if value is None:
            del stored[key]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def test_without_g_idx_and_with_a_bias_that_the_model_has_not(tmp_path):
    dense = checkpoint(tmp_path / "m", "gptq", bias=False)
    bias = torch.randn(64)
    change(
        tmp_path / "m",
        model__layers__1__mlp__down_proj__g_idx=None,
        model__layers__1__mlp__down_proj__bias=bias,
    )
    layer = dense.model.layers[1].mlp.down_proj
    layer.bias = torch.nn.Parameter(bias)
    assert error(logits(nf4.torch.load(tmp_path / "m")), logits(dense)) <= 1e-5


Q = "model__layers__0__self_attn__q_proj__"
FAULTS = {
    "tensor 'model.layers.0.self_attn.q_proj.weight': g_idx[0] is 9": lambda folder: change(
        folder, **{Q + "g_idx": torch.full((64,), 9, dtype=torch.int32)}
    ),
    "q_proj.weight': its qzeros is missing": lambda folder: change(folder, **{Q + "qzeros": None}),
    "'model.norm.weight': the model needs it": lambda folder: change(
        folder, model__norm__weight=None
    ),
    "but [64, 64] in the model": lambda folder: change(
        folder,
        **{Q + "qweight": torch.zeros(8, 8, dtype=torch.int32),
           Q + "scales": torch.zeros(2, 8).half(),
           Q + "qzeros": torch.zeros(2, 1, dtype=torch.int32)},
    ),  # fmt: skip
    "the model has no model.layers.1.mlp.down_proj": lambda folder: change_config(
        folder, num_hidden_layers=1
    ),
    "bits is 8": lambda folder: change_config(
        folder, quantization_config={"quant_method": "gptq", "bits": 8, "group_size": 32}
    ),
    "transformers cannot build the model": lambda folder: change_config(
        folder, architectures=["NoSuchModel"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", FAULTS)
def test_faults_are_named(message, tmp_path):
    checkpoint(tmp_path / "m", "gptq")
    FAULTS[message](tmp_path / "m")
    with pytest.raises(FormatError) as caught:
        nf4.torch.load(tmp_path / "m")
    assert message in str(caught.value)


def test_a_dense_checkpoint(tmp_path):
    dense = checkpoint(tmp_path / "m", "gptq")
    dense.save_pretrained(tmp_path / "dense")
    with pytest.raises(FormatError, match="no quantized weights; .* quantize_model then"):
        nf4.torch.load(tmp_path / "dense")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "no/such/folder"}, "expected a local directory"),
        ({"path": ".", "dtype": "int8"}, "dtype is 'int8'"),
        ({"path": ".", "device": "abacus"}, "device is 'abacus'"),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(nf4.InvalidArgument, match=message):
        nf4.torch.load(**arguments)
