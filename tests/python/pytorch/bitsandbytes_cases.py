"""What the tests of bitsandbytes' layers on libnf4 share."""

from __future__ import annotations

import bitsandbytes as bnb
import torch
from nf4.torch import bitsandbytes as backend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_cases import IN, OUT

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# The operators that register serves.
OPERATORS = ["gemm_4bit", "dequantize_4bit", "dequantize_4bit.out"]
FUNCTIONS = [
    "functional.dequantize_4bit",
    "autograd._functions.matmul_4bit",
    "matmul_4bit",
    "autograd._functions.MatMul4Bit.apply",
    "nn.modules.Linear4bit.forward",
    "nn.modules.has_avx512bf16",
]


class Seen(TorchDispatchMode):
    """A mode, which is to see bitsandbytes' operators: calls go its own way."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def layer(dtype="fp32", bias=True, weights=torch.float32, nested=True, **options):
    """Its bias is of this dtype already; `weights` is of what was quantized."""
    made = bnb.nn.Linear4bit(
        IN, OUT, bias=bias, compute_dtype=DTYPES[dtype], compress_statistics=nested,
        **{"quant_type": "nf4"} | options,
    )  # fmt: skip
    made.support_avx512bf16_for_cpu = False
    made.weight.data = torch.randn(OUT, IN).to(weights)
    if bias:
        made.bias.data = torch.randn(OUT).to(DTYPES[dtype])
    return made.to("cpu")


def packed_of(made):
    return made.weight.data, made.weight.quant_state


class Calls(TorchFunctionMode):
    """Counts calls of the operator gemm_4bit by Python, without changing their way."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.bitsandbytes.gemm_4bit.default
        return func(*args, **(kwargs or {}))


def with_gradients(call, x, made, grad_y):
    """y, and the gradients of x and of the layer's bias."""
    x = x.clone().requires_grad_()
    made.zero_grad()
    y = call(x)
    y.backward(grad_y)
    return y.detach(), x.grad, None if made.bias is None else made.bias.grad.clone()


def both(make, call):
    """What `call` gives of a new layer, with the drop-in off and on."""
    found = []
    for on in (False, True):
        torch.manual_seed(3)
        if on:
            backend.register()
        try:
            found.append(call(make()))
        finally:
            backend.unregister()
    return found
