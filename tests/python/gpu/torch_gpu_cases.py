"""Weights, layers and x on a GPU, for the tests of nf4.torch there."""

from __future__ import annotations

import gc

import nf4.torch
import torch
from nf4.torch import NF4Linear

DEVICE = "cuda"
DELAY_IN_CYCLES = 200_000_000
ROWS, COLS = 200, 320
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LAYOUTS = {"nested": {}, "flat": {"nested_blocksize": 0}, "fp4": {"format": "fp4"}}


def weight_of(layout="nested", shape=(ROWS, COLS), device=DEVICE):
    return nf4.torch.quantize(torch.randn(shape, device=device), **LAYOUTS[layout])


def layer_of(dtype="bf16", layout="nested", bias=True, shape=(ROWS, COLS), device=DEVICE):
    weight = weight_of(layout, shape, device)
    values = torch.randn(shape[0], device=device, dtype=DTYPES[dtype])
    return NF4Linear.from_quantized(weight, torch.nn.Parameter(values) if bias else None)


def x_of(*shape, dtype="bf16", device=DEVICE, grad=False):
    return torch.randn(shape, device=device, dtype=DTYPES[dtype], requires_grad=grad)


def settle():
    """Before memory is counted: what earlier tests left is collected, and given back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def require_replays(layer):
    """Captured at one row of x, it gives what it gives outside, for whatever x holds then."""
    static, graph = x_of(1, COLS), torch.cuda.CUDAGraph()
    with torch.inference_mode():
        layer(static)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = layer(static)
        for _ in range(3):
            static.copy_(x_of(1, COLS))
            graph.replay()
            assert torch.equal(y, layer(static))
