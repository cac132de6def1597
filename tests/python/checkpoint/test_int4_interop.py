"""Integer checkpoints loaded by compressed-tensors, by itself and in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoint_helpers as helpers
import int4_checkpoints as models
import int4_oracle as oracle
import pytest
from int4_checkpoints import CASES, LAYER, Case
from nf4.checkpoint import convert_checkpoint, dequantize_checkpoint
from nf4.cli import main

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("in_process")]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
for _package in ("loguru", "compressed_tensors", "accelerate"):
    pytest.importorskip(_package)

from compressed_tensors.compressors import PackedQuantizationCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationConfig  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

_HELD = [case for case in CASES if not case.act_order]


@pytest.mark.parametrize("case", _HELD, ids=str)
def test_compressed_tensors_decompresses_what_we_convert(case, tmp_path):
    source = output = case.folder(tmp_path / "q")
    if case.layout != "compressed-tensors":
        output = tmp_path / "ct"
        convert_checkpoint(str(source), str(output), "compressed-tensors")
    (scheme,) = QuantizationConfig.model_validate(
        helpers.stored_config(output)
    ).config_groups.values()
    stored = load_file(output / "model.safetensors")
    for module, weight in case.weights().items():
        parts = {n: a for n, a in stored.items() if n.startswith(f"{module}.")}
        parts = {name.removeprefix(f"{module}."): array for name, array in parts.items()}
        theirs = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
        expected = oracle.dequantize(weight, case.scale_dtype)
        assert theirs.contiguous().view(torch.uint8).numpy().tobytes() == expected.tobytes()


def _llama(folder: Path, dtype: torch.dtype, tied: bool) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        tie_word_embeddings=tied,
    )
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def _load(path: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, device_map="cpu", **options)


def _same_weights(model: torch.nn.Module, dense: Path) -> None:
    expected = load_file(dense / "model.safetensors")
    found = dict(model.named_parameters())
    assert {n for n in expected if n in found} == expected.keys()
    for name, array in expected.items():
        assert torch.equal(found[name], array), name


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("layout", oracle.LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_what_we_quantize(layout, symmetric, tied, tmp_path):
    """By way of compressed-tensors, whose path on the meta device takes no packed zero points:
    dequantize=True loads them."""
    source = _llama(tmp_path / "dense", torch.bfloat16, tied)
    arguments = ["quantize", str(source), str(tmp_path / "q"), "--format", "int4"]
    arguments += ["--layout", layout, "--group-size", "32"]
    assert main([*arguments, "--symmetric" if symmetric else "--asymmetric"]) == 0
    output = tmp_path / "q"
    if layout != "compressed-tensors":
        output = tmp_path / "ct"
        convert_checkpoint(str(tmp_path / "q"), str(output), "compressed-tensors")
    dequantize_checkpoint(str(tmp_path / "q"), str(tmp_path / "back"))
    loaded = transformers.CompressedTensorsConfig(dequantize=True)
    model = _load(output, quantization_config=loaded)
    _same_weights(model, tmp_path / "back")
    if symmetric:
        tokens = torch.tensor([[1, 2, 3, 4]])
        compressed = _load(output)(tokens).logits
        assert torch.equal(compressed, _load(tmp_path / "back")(tokens).logits)


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq"])
def test_transformers_reads_our_configuration(layout, tmp_path):
    """GPTQModel and AutoAWQ are not needed to parse it."""
    source = Case("compressed-tensors").folder(tmp_path / "q")
    convert_checkpoint(str(source), str(tmp_path / "out"), layout)
    kind = transformers.AwqConfig if layout == "awq" else transformers.GPTQConfig
    parsed = kind.from_dict(helpers.stored_config(tmp_path / "out"))
    assert (parsed.bits, parsed.group_size) == (4, 32)
    if layout == "awq":
        assert parsed.zero_point and parsed.format == "gemm"
        assert parsed.modules_to_not_convert == ["lm_head"]
    else:
        assert parsed.format == layout and parsed.sym and not parsed.desc_act


def test_checkpoints_of_compressed_tensors_are_read(tmp_path):
    """ModelCompressor's own output, from a model quantized by its classes."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import apply_quantization_config

    case = Case("compressed-tensors", symmetric=False)
    weight = case.weights()[LAYER]
    model = torch.nn.Sequential()
    model.add_module("layer", torch.nn.Linear(weight.cols, weight.rows, bias=False))
    config = QuantizationConfig.model_validate(case.config | {"ignore": []})
    dense = torch.from_numpy(oracle.dequantize(weight, "fp16"))
    model.layer.weight.data = dense
    apply_quantization_config(model, config)
    model.layer.weight_scale.data = torch.from_numpy(weight.scales)
    zeros = torch.from_numpy(oracle.zeros_of(weight)).to(torch.int8) - 8
    model.layer.weight_zero_point.data = zeros
    ModelCompressor(quantization_config=config).compress_model(model)
    stored = {name: array.numpy() for name, array in model.state_dict().items()}
    source = models.write(tmp_path / "q", stored, case.config)
    assert main(["verify", str(source)]) == 0
    dequantize_checkpoint(str(source), str(tmp_path / "d"))
    data = helpers.load_all(tmp_path / "d")["layer.weight"][2]
    assert data == dense.numpy().tobytes()
