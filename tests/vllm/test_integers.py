"""Integers of GPTQ, AWQ and compressed-tensors on the CPU: libnf4's kernel among vLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import nf4.torch
import pytest
import torch
from conftest import Engines
from nf4.vllm.integers import NF4IntegerKernel
from vllm.model_executor import parameter
from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel
from vllm.model_executor.layers.quantization.auto_awq import _convert_awq_to_standard_format
from vllm.platforms import CpuArchEnum, current_platform
from vllm.scalar_type import scalar_types

ROWS, COLS, GROUP = 96, 256, 64
BY_COLUMN = {"input_dim": 0, "output_dim": 1}
BY_ROW = {"input_dim": 1, "output_dim": 0}


def config(**changes: Any) -> MPLinearLayerConfig:
    sizes = {"full_weight_shape": (COLS, ROWS), "partition_weight_shape": (COLS, ROWS)}
    rest = {"weight_type": scalar_types.uint4, "act_type": torch.bfloat16}
    return MPLinearLayerConfig(
        **{**sizes, **rest, "group_size": GROUP, "zero_points": True, **changes}
    )


@pytest.fixture(autouse=True)
def x86_without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = type(current_platform)
    monkeypatch.setattr(platform, "get_cpu_architecture", lambda *_: CpuArchEnum.X86)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


@pytest.mark.parametrize("weight_type", [scalar_types.uint4, scalar_types.uint4b8])
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_it_is_chosen(weight_type: Any, group_size: int) -> None:
    chosen = choose_mp_linear_kernel(config(weight_type=weight_type, group_size=group_size))
    assert chosen is NF4IntegerKernel


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_type": scalar_types.int4},
        {"weight_type": scalar_types.uint8b128},
        {"act_type": torch.float32},
        {"partition_weight_shape": (COLS, 100)},
        {"group_size": 20},
    ],
)
def test_what_it_does_not_know_is_left_to_vllm(changes: dict[str, Any]) -> None:
    assert not NF4IntegerKernel.can_implement(config(**changes))[0]


def test_with_amx_vllms_own_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert choose_mp_linear_kernel(config()).__name__ == "CPUWNA16LinearKernel"


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's parameters ask for their rank."""
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)


def layer_of(weight: nf4.Int4Tensor) -> torch.nn.Module:
    """The parameters that vLLM has when a checkpoint is loaded."""
    layer = torch.nn.Module()
    dimensions = BY_ROW if weight.layout == "compressed-tensors" else BY_COLUMN
    for name in ("packed", "scales", "zeros"):
        if getattr(weight, name) is not None:
            param = torch.nn.Parameter(getattr(weight, name).clone(), requires_grad=False)
            param.__dict__.update(dimensions)
            layer.register_parameter(name, param)
    if weight.layout == "awq":
        _convert_awq_to_standard_format(layer, "packed", "zeros", 4)
    return layer


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(
    ("layout", "symmetric"),
    [("gptq", True), ("awq", False), ("compressed-tensors", True), ("compressed-tensors", False)],
)
def test_products(layout: Any, symmetric: bool, rows: int, one_rank: None) -> None:
    dense = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(rows)).bfloat16()
    weight = nf4.torch.quantize_int4(dense, layout=layout, group_size=GROUP, symmetric=symmetric)
    layer = layer_of(weight)
    kernel = NF4IntegerKernel(config(zero_points=not symmetric), "packed", "scales", "zeros")
    kernel.process_weights_after_loading(layer)
    assert symmetric == (layer.zeros is None)
    x, bias = torch.randn(2, rows, COLS).bfloat16(), torch.randn(ROWS).bfloat16()
    y = kernel.apply_weights(layer, x, bias).float()
    exact = x.float() @ nf4.torch.dequantize(weight, "fp32").T + bias.float()
    assert (y - exact).norm() / exact.norm() < 4e-3  # one rounding to bf16


def test_engines(engines: Engines, tmp_path: Path) -> None:
    """In bf16, where tokens may differ once they do: the log-probability of each prompt's first is
    near that in fp32."""
    dense = models.dense(tmp_path / "dense", "qwen3", torch.bfloat16)
    checkpoints = [
        models.quantized(dense, tmp_path / each, format="int4", layout=each, group_size=32)
        for each in ("gptq", "awq", "compressed-tensors")
    ]
    every = engines(*({"model": str(each), "dtype": "bfloat16"} for each in checkpoints))
    for said, checkpoint in zip(every, checkpoints, strict=True):
        assert said.get("error") is None
        expected = models.reference(checkpoint, tmp_path / f"{checkpoint.name}-exact")
        for ours, theirs in zip(said["logprobs"], expected["logprobs"], strict=True):
            assert abs(ours[0] - theirs[0]) < 0.1
        assert [each[0] for each in said["tokens"]] == [each[0] for each in expected["tokens"]]
