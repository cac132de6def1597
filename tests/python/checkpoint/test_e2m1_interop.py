"""MXFP4 and NVFP4 beside compressed-tensors and transformers' gpt-oss, whose formats they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoint_helpers as helpers
import e2m1_checkpoints as models
import int4_checkpoints
import pytest
from e2m1_checkpoints import LAYER, STACK
from nf4.checkpoint import dequantize_checkpoint
from nf4.cli import main

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("in_process")]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

import gpt_oss_models  # noqa: E402
from compressed_tensors.compressors import (  # noqa: E402
    MXFP4PackedCompressor,
    NVFP4PackedCompressor,
)
from compressed_tensors.quantization import QuantizationScheme  # noqa: E402
from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16  # noqa: E402
from compressed_tensors.quantization.utils.helpers import (  # noqa: E402
    calculate_qparams,
    generate_gparam,
)
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_KINDS = {"mxfp4": (MXFP4PackedCompressor, MXFP4A16), "nvfp4": (NVFP4PackedCompressor, NVFP4A16)}


def compressed(
    kind: str, weight: torch.Tensor, shared: torch.Tensor | None = None
) -> tuple[dict[str, Any], torch.Tensor]:
    """What compressed-tensors makes of a weight: the tensors of a layer, and the weight that it
    decompresses them to. shared: the global scale of NVFP4, if it is not that of the weight."""
    compressor, scheme = _KINDS[kind]
    args = scheme["weights"]
    exact = weight.float()  # in bf16 it would round the global scale
    blocks = exact.unflatten(-1, (-1, args.group_size))
    of_all = shared
    if kind == "nvfp4" and shared is None:
        of_all = generate_gparam(exact.min(), exact.max())
    scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=of_all)
    given = {"weight": weight, "weight_scale": scales}
    if of_all is not None:
        given["weight_global_scale"] = of_all
    settings = QuantizationScheme(targets=["Linear"], weights=args)
    stored = compressor.compress(given, settings)
    return stored, compressor.decompress(stored, settings)["weight"]


def _write(folder: Path, stored: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    int4_checkpoints.write(folder, {}, config)
    save_file({n: t.contiguous() for n, t in stored.items()}, folder / "model.safetensors")
    return folder


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("spread", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("kind", _KINDS)
def test_dequantize_gives_the_bits_of_compressed_tensors(kind, spread, tmp_path):
    torch.manual_seed(0)
    weight = (torch.randn(40, 128) * spread * torch.rand(40, 1)).bfloat16()
    stored, expected = compressed(kind, weight)
    config = models.compressed_config(kind)
    named = {f"{LAYER}.{name}": each for name, each in stored.items()}
    source = _write(tmp_path / "q", named, config)
    assert int4_checkpoints.findings("fault", source) == []
    dequantize_checkpoint(str(source), str(tmp_path / "d"), dtype="bf16")
    _, _, data = helpers.load_all(tmp_path / "d")[f"{LAYER}.weight"]
    assert data == _bits(expected.bfloat16())


@pytest.mark.parametrize("spread", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("kind", _KINDS)
def test_quantize_gives_the_bytes_of_compressed_tensors(kind, spread, tmp_path):
    torch.manual_seed(1)
    weight = (torch.randn(40, 128) * spread * torch.rand(40, 1)).bfloat16()
    weight[3, 32:64] = 0
    expected, _ = compressed(kind, weight)
    save_file({f"{LAYER}.weight": weight}, tmp_path / "dense.safetensors")
    made = str(tmp_path / "q.safetensors")
    assert main(["quantize", str(tmp_path / "dense.safetensors"), made, "--format", kind]) == 0
    found = load_file(made)
    assert found.keys() == {f"{LAYER}.{name}" for name in expected}
    for name, tensor in expected.items():
        own = found[f"{LAYER}.{name}"]
        assert (own.dtype, own.shape) == (tensor.dtype, tensor.shape), name
        assert _bits(own) == _bits(tensor), name


@pytest.mark.parametrize("group", [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")])
def test_fused_layers_have_the_bytes_of_compressed_tensors(group, tmp_path):
    """llm-compressor gives them the smallest of their global scales, which divides."""
    torch.manual_seed(2)
    weights = {
        name: torch.randn(16 * rows, 64).mul(rows).bfloat16() for rows, name in enumerate(group, 1)
    }
    exact = [each.float() for each in weights.values()]
    shared = torch.stack([generate_gparam(each.min(), each.max()) for each in exact]).min(0)[0]
    parent = "model.layers.0.block"
    save_file(
        {f"{parent}.{name}.weight": each for name, each in weights.items()},
        tmp_path / "dense.safetensors",
    )
    made = str(tmp_path / "q.safetensors")
    assert main(["quantize", str(tmp_path / "dense.safetensors"), made, "--format", "nvfp4"]) == 0
    found = load_file(made)
    for name, weight in weights.items():
        expected, _ = compressed("nvfp4", weight, shared)
        for part, tensor in expected.items():
            assert _bits(found.pop(f"{parent}.{name}.{part}")) == _bits(tensor), (name, part)
    assert not found


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_gives_the_bits_of_transformers_for_gpt_oss(dtype, tmp_path):
    """Every code with every scale byte but NaN's, which transformers takes for 2^128."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=DTYPES[dtype])
    stored = {f"{STACK}_blocks": blocks.contiguous(), f"{STACK}_scales": scales.contiguous()}
    save_file(stored, tmp_path / "q.safetensors")
    dequantize_checkpoint(
        str(tmp_path / "q.safetensors"), str(tmp_path / "d.safetensors"), dtype=dtype
    )
    ((_, shape, data),) = helpers.load_all(tmp_path / "d.safetensors").values()
    assert shape == (1, 255, 512)
    assert data == _bits(expected.transpose(1, 2))


def test_transformers_loads_a_dequantized_gpt_oss(tmp_path):
    """dequantize writes the experts as the model has them, [experts, inputs, outputs]."""
    expected = gpt_oss_models.write(tmp_path / "q", torch.bfloat16)
    assert main(["verify", str(tmp_path / "q")]) == 0
    assert main(["dequantize", str(tmp_path / "q"), str(tmp_path / "d")]) == 0
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "d", dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(found[name], each), name
