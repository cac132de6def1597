"""What the layers of a QLoRA step multiply, one product at a time: the gradient of x, and both
passes with an adapter. libnf4's y and dX are checked against float64, then timed in turns with what
they replace; weights rotate as those of matmul do.

    gradient           dX = dY W: libnf4's, dequantize + cuBLAS, bitsandbytes' dequantize + cuBLAS,
                       and cuBLAS on the dense weight
    adapted            y = x W^T + s (x A^T) B^T: in one call, as PEFT computes it around the base
                       product, and the base product alone
    adapted backward   dX with the adapter's part, dA and dB; beside the dense dX alone
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import nf4
import torch
from torch import Tensor

from nf4bench import peers
from nf4bench.matmul_cases import MOST_ERROR, weight_case
from nf4bench.measure import measure
from nf4bench.options import Shape
from nf4bench.product import MOST_PEER_ERROR, require
from nf4bench.rows import Bench, Report
from nf4bench.training_cases import ALPHA, RANK
from nf4bench.training_pages import PRODUCTS
from nf4bench.weights import DTYPES, Weight

DTYPE = "bf16"
REPLAYS = 9
Calls = dict[str, Callable[[int], Any]]


class Operands:
    """Of one weight: x and dY of m rows, an adapter, and room for what is made."""

    def __init__(self, weight: Weight, m: int) -> None:
        (rows, cols), options = weight.case.shape, {"device": weight.place, "dtype": DTYPES[DTYPE]}
        self.weight, self.quantized, self.dense = weight, weight.quantized, weight.dense
        self.x, self.grad_y = torch.randn(m, cols, **options), torch.randn(m, rows, **options)
        self.a = torch.randn(RANK, cols, **options) / cols**0.5
        self.b = torch.randn(rows, RANK, **options) / RANK**0.5
        self.scale = ALPHA / RANK
        self.y, self.grad_x = torch.empty_like(self.grad_y), torch.empty_like(self.x)
        self.product = torch.empty(m, RANK, **options)
        self.grads = torch.empty_like(self.a), torch.empty_like(self.b)

    def lora(self) -> nf4.Lora:
        return nf4.Lora(self.a, self.b, self.scale, self.product)


def _gradient(each: Operands, bitsandbytes: Any) -> Calls:
    def dequantized(stream: int) -> Tensor:
        return torch.mm(each.grad_y, each.weight.dequantize(stream), out=each.grad_x)

    calls: Calls = {
        "libnf4": lambda stream: nf4.matmul_grad(
            each.grad_y, each.quantized, out=each.grad_x, stream=stream
        ),
        "dequantize + dense": dequantized,
    }
    if bitsandbytes is not None:
        state = bitsandbytes.state(each.weight)
        packed = each.quantized.packed.view(-1, 1)
        dequantize = importlib.import_module("bitsandbytes.functional").dequantize_4bit
        calls["bitsandbytes"] = lambda stream: torch.mm(
            each.grad_y, dequantize(packed, state), out=each.grad_x
        )
    calls["dense"] = lambda stream: torch.mm(each.grad_y, each.dense, out=each.grad_x)
    return calls


def _adapted(each: Operands, bitsandbytes: Any) -> Calls:
    linear = torch.nn.functional.linear

    def base(stream: int) -> Tensor:
        return nf4.matmul(each.x, each.quantized, out=each.y, stream=stream)

    def as_peft(stream: int) -> Tensor:
        return base(stream) + linear(linear(each.x, each.a), each.b) * each.scale

    def libnf4(stream: int) -> Tensor:
        return nf4.matmul(each.x, each.quantized, lora=each.lora(), out=each.y, stream=stream)

    return {"libnf4": libnf4, "as PEFT": as_peft, "base alone": base}


def _adapted_backward(each: Operands, bitsandbytes: Any) -> Calls:
    p = torch.nn.functional.linear(each.x, each.a)

    def libnf4(stream: int) -> Tensor:
        made = nf4.matmul_grad(
            each.grad_y, each.quantized, lora=each.lora(), out=each.grad_x, stream=stream
        )
        nf4.lora_grad(
            each.x, each.grad_y, p, each.product, each.scale, out=each.grads, stream=stream
        )
        return made

    def as_peft(stream: int) -> Tensor:
        scaled = each.grad_y * each.scale
        q = torch.mm(scaled, each.b)
        torch.mm(q.t(), each.x), torch.mm(scaled.t(), p)
        return torch.mm(each.grad_y, each.weight.dequantize(stream)) + torch.mm(q, each.a)

    dense = _gradient(each, None)["dense"]
    return {"libnf4": libnf4, "as PEFT": as_peft, "dense gradient alone": dense}


WORKS: dict[str, Callable[[Operands, Any], Calls]] = {
    "gradient": _gradient, "adapted": _adapted, "adapted backward": _adapted_backward,
}  # fmt: skip


def _expected(work: str, each: Operands) -> Tensor:
    """In float64."""
    weight = peers.dequantized(each.weight, torch.float64)
    if work != "gradient":
        weight = weight + each.scale * (each.b.double() @ each.a.double())
    return each.x.double() @ weight.t() if work == "adapted" else each.grad_y.double() @ weight


def _row(bench: Bench, work: str, all_of: list[Operands], bitsandbytes: Any) -> dict[str, Any]:
    first, calls = all_of[0], [WORKS[work](each, bitsandbytes) for each in all_of]
    expected, m = _expected(work, first), len(first.x)
    most = MOST_ERROR[DTYPE] if work == "gradient" else MOST_PEER_ERROR
    what = f"{work}, {first.weight.case.shape}, {m} rows"
    error = require(what, most, expected, bench.gpu.run(calls[0]["libnf4"]))
    del expected
    work_of = {name: [each[name] for each in calls] for name in calls[0]}
    times = measure(bench.gpu, work_of, bench.replays or REPLAYS)
    forms = {name: each.figures() for name, each in times.items()}
    return {
        "work": work, "shape": list(first.weight.case.shape), "m": m, "dtype": DTYPE,
        "error": float(f"{error:.3e}"), "forms": forms,
    }  # fmt: skip


def rows(
    bench: Bench, found: Mapping[str, Any], sizes: Mapping[Shape, tuple[int, ...]], report: Report
) -> list[dict[str, Any]]:
    """Raises WrongResult before what is wrong is timed."""
    bitsandbytes = None
    if "bitsandbytes" in peers.present(found):
        bitsandbytes = peers.Bitsandbytes(bench.gpu.place)
    made = []
    for shape, ms in sizes.items():
        weights = bench.rotation(weight_case(shape, DTYPE))
        for m in ms:
            operands = [Operands(weight, m) for weight in weights]
            of = (_row(bench, work, operands, bitsandbytes) for work in WORKS)
            made += PRODUCTS.told(of, report)
        bench.gpu.release()
    return made
