"""What the tests of nf4.torch share: weights, references, and how to get there."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest


def require(*packages: str) -> None:
    """Skips the module that asks where one of these is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)


# By norm, against float64 products with the unrounded weights.
ALLOWED = {"fp32": 1e-6, "fp16": 5e-4, "bf16": 4e-3}

# Of layers.
IN, OUT = 64, 24


def error(found: Any, expected: Any) -> float:
    """By norm, beside what is expected, in float64."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    assert found.shape == expected.shape
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def reference(x: Any, weight: Any, bias: Any = None) -> Any:
    """x W^T + bias in float64, of an nf4.QuantizedTensor whose parts are tensors."""
    import nf4

    dense = nf4.dequantize(weight, "fp32").double().reshape(-1, weight.shape[-1])
    y = x.detach().double() @ dense.T
    return y if bias is None else y + bias.detach().double()


def linear4bit(
    format: str = "nf4", nested: bool = True, storage: Any = None, bias: bool = True, **options: Any
) -> Any:
    """A bitsandbytes layer on the CPU, quantized."""
    import bitsandbytes as bnb
    import torch

    made = bnb.nn.Linear4bit(
        IN, OUT, bias=bias, quant_type=format, compress_statistics=nested,
        quant_storage=storage or torch.uint8, **options,
    )  # fmt: skip
    made.weight.data = torch.randn(OUT, IN)
    return made.to("cpu")
