"""Makes golden_int4.npz: weights packed by GPTQModel and compressed-tensors, and what they
dequantize them to.

    python tests/golden/make_golden_int4.py      # README.md has the versions and the set-up

Each weight is quantized by rounding to the nearest on a grid made here, then packed and dequantized
by the project's own torch code: GPTQModel's TorchLinear (and its conversions between GPTQ v1 and
v2) and AwqTorchLinear, compressed-tensors' PackedQuantizationCompressor.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.utils import model as conversions
from torch import Tensor

# The last compressed-tensors with weight_g_idx is 0.18.0.
VERSIONS = {"gptqmodel": "7.7.0", "compressed-tensors": "0.18.0"}
# The stored tensors, the dequantized weight, the quantization_config.
Packed = tuple[dict[str, Tensor], Tensor, dict[str, Any]]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Case(NamedTuple):
    layout: str
    rows: int
    cols: int
    group_size: int = -1
    symmetric: bool = False
    scale_dtype: str = "fp16"
    act_order: bool = False

    @property
    def name(self) -> str:
        zeros = "sym" if self.symmetric else "asym"
        order = "-act" if self.act_order else ""
        group = "row" if self.group_size == -1 else self.group_size
        size = f"{self.rows}x{self.cols}"
        return f"{self.layout}-{zeros}-{group}-{self.scale_dtype}{order}-{size}"


def cases() -> list[Case]:
    gptq = [
        case
        for layout in ("gptq", "gptq_v2")
        for case in (
            Case(layout, 8, 32, 32),
            Case(layout, 16, 64, 32, symmetric=True),
            Case(layout, 24, 128, 64, scale_dtype="bf16"),
            Case(layout, 64, 256, 128, symmetric=True, act_order=True),
            Case(layout, 136, 96, 32, act_order=True),
            Case(layout, 16, 192, 64, scale_dtype="bf16", act_order=True),
            Case(layout, 24, 40),
            Case(layout, 64, 128, symmetric=True, scale_dtype="bf16"),
        )
    ]
    awq = [
        Case("awq", 8, 32, 32),
        Case("awq", 16, 64, 32, symmetric=True),
        Case("awq", 24, 128, 64),
        Case("awq", 64, 256, 128),
        Case("awq", 136, 96, 32, scale_dtype="bf16"),
        Case("awq", 24, 13),
        Case("awq", 16, 128, symmetric=True, scale_dtype="bf16"),
    ]
    compressed = [
        Case("compressed-tensors", 8, 32, 32),
        Case("compressed-tensors", 16, 64, 32, symmetric=True),
        Case("compressed-tensors", 24, 128, 64, scale_dtype="bf16"),
        Case("compressed-tensors", 64, 256, 128, symmetric=True, scale_dtype="bf16"),
        Case("compressed-tensors", 136, 96, 32, act_order=True),
        Case("compressed-tensors", 16, 256, 128, True, "bf16", act_order=True),
        Case("compressed-tensors", 5, 13),
        Case("compressed-tensors", 5, 40, symmetric=True, scale_dtype="bf16"),
        Case("compressed-tensors", 13, 96, 32),
    ]
    # A tail of a word of zeros, of which GPTQModel's v1 stores 14 and 15, as 0 - 1 in a word.
    return [*gptq, Case("gptq_v2", 20, 64, 32), *awq, *compressed]


def source(case: Case, generator: torch.Generator) -> Tensor:
    """Normal weights of rows of several sizes: a group of zeros, groups of one sign."""
    size = case.cols if case.group_size == -1 else case.group_size
    weight = torch.randn(case.rows, case.cols, generator=generator)
    weight[2, :size].abs_()
    weight[3, :size].abs_().neg_()
    weight[4, :size] = 0.0
    exponents = torch.randint(-8, 1, (case.rows, 1), generator=generator)
    return weight * torch.exp2(exponents.float())


def group_indices(case: Case, generator: torch.Generator) -> Tensor:
    size = case.cols if case.group_size == -1 else case.group_size
    plain = torch.arange(case.cols, dtype=torch.int32) // size
    if case.act_order:
        return plain[torch.randperm(case.cols, generator=generator)]
    return plain


def grid(case: Case, weight: Tensor, g_idx: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [N, G] (float32 with the bits of scale_dtype) and zeros [N, G] of the smallest range
    that has a group's members and 0. GPTQ v1 has no zero of 0: see README.md."""
    scales, zeros = [], []
    for group in range(int(g_idx.max()) + 1):
        members = weight[:, g_idx == group]
        low, high = members.amin(1).clamp(max=0), members.amax(1).clamp(min=0)
        if case.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        step = (high - low) / 15
        step = torch.where(step > 0, step, 2 / 15).to(DTYPES[case.scale_dtype]).float()
        zero = torch.full_like(step, 8) if case.symmetric else torch.round(-low / step)
        scales.append(step)
        zeros.append(zero.clamp(1 if case.layout == "gptq" else 0, 15))
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def linear_of(weight: Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    return linear


def quant_linear(kind: type, case: Case) -> Any:
    return kind(
        bits=4,
        group_size=case.group_size,
        sym=case.symmetric,
        desc_act=case.act_order,
        in_features=case.cols,
        out_features=case.rows,
        register_buffers=True,
        dtype=DTYPES[case.scale_dtype],
    )


def gptqmodel_config(case: Case, **kinds: str) -> dict[str, Any]:
    config: dict[str, Any] = QuantizeConfig(
        bits=4, group_size=case.group_size, sym=case.symmetric, desc_act=case.act_order, **kinds
    ).to_dict()
    del config["meta"]  # how it was quantized
    return config


def gptq(case: Case, weight: Tensor, scales: Tensor, zeros: Tensor, g_idx: Tensor) -> Packed:
    module = quant_linear(TorchLinear, case)
    module.pack_original(linear_of(weight), scales, zeros, g_idx)
    module.scales = module.scales.to(DTYPES[case.scale_dtype])
    if case.layout == "gptq":
        conversions.convert_gptq_v2_to_v1_format_module(
            module, SimpleNamespace(bits=4, pack_dtype=torch.int32)
        )
    names = ("qweight", "qzeros", "scales", "g_idx")
    stored = {name: getattr(module, name).clone() for name in names}
    if case.layout == "gptq":
        conversions.convert_gptq_v1_to_v2_format_module(module, 4, torch.int32)
    module.post_init()
    config = gptqmodel_config(case, format=case.layout)
    return stored, module.dequantize_weight().T, config


def awq(case: Case, weight: Tensor, scales: Tensor, zeros: Tensor, _: Tensor) -> Packed:
    module = quant_linear(AwqTorchLinear, case)
    module.pack(linear_of(weight), scales.to(DTYPES[case.scale_dtype]), zeros)
    stored = {name: getattr(module, name) for name in ("qweight", "qzeros", "scales")}
    dequantized = dequantize_gemm(**stored, bits=4, group_size=module.group_size)
    return stored, dequantized.T, gptqmodel_config(case, quant_method="awq", format="gemm")


def compressed_tensors(
    case: Case, weight: Tensor, scales: Tensor, zeros: Tensor, g_idx: Tensor
) -> Packed:
    groups = {"strategy": "channel"} if case.group_size == -1 else {"group_size": case.group_size}
    order = {"actorder": "group"} if case.act_order else {}
    weights = QuantizationArgs(num_bits=4, symmetric=case.symmetric, **groups, **order)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    dtype = DTYPES[case.scale_dtype]
    tensors = {
        "weight": weight.to(dtype),
        "weight_scale": scales.to(dtype),
        "weight_zero_point": (zeros - 8).to(torch.int8),
    }
    if case.act_order:
        tensors["weight_g_idx"] = g_idx
    stored = PackedQuantizationCompressor.compress(tensors, scheme)
    dequantized = PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="pack-quantized",
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    return stored, dequantized, config.model_dump(mode="json")


WRITERS = {"gptq": gptq, "gptq_v2": gptq, "awq": awq, "compressed-tensors": compressed_tensors}


def as_numpy(tensor: Tensor) -> np.ndarray:
    """bf16 as its bits, which numpy keeps as they are."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    return tensor.contiguous().numpy()


def golden_case(index: int, case: Case) -> dict[str, np.ndarray]:
    generator = torch.Generator().manual_seed(index)
    weight = source(case, generator)
    g_idx = group_indices(case, generator)
    scales, zeros = grid(case, weight, g_idx)
    stored, dequantized, config = WRITERS[case.layout](case, weight, scales, zeros, g_idx)
    assert dequantized.dtype == DTYPES[case.scale_dtype], dequantized.dtype
    assert dequantized.shape == weight.shape, dequantized.shape
    described = case._asdict() | {"quantization_config": config}
    arrays = {name: as_numpy(tensor) for name, tensor in stored.items()}
    arrays |= {"expected": as_numpy(dequantized), "config": np.array(json.dumps(described))}
    return {f"{case.name}/{name}": array for name, array in arrays.items()}


def main() -> None:
    for package, expected in VERSIONS.items():
        if version(package) != expected:
            sys.exit(f"{package} is {version(package)}; expected {expected}")
    arrays: dict[str, np.ndarray] = {}
    with torch.no_grad():
        for index, case in enumerate(cases()):
            arrays |= golden_case(index, case)
    path = Path(__file__).with_name("golden_int4.npz")
    np.savez_compressed(path, **arrays)
    print(f"{path}: {len(cases())} tensors, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
