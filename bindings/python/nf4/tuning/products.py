"""The products that are timed: their weights, and the calls of each way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nf4 import _matmul, _paths
from nf4._dequantize import dequantize
from nf4._lora import Lora
from nf4._quantize import quantize
from nf4._quantize_int4 import quantize_int4

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
STRATEGIES = ("mma", "skinny", "wgmma", "multistage")  # of libnf4's own kernels
DENSE = "dense"
GROUP_SIZE, RANK, SCALE = 128, 16, 2.0

Shape = tuple[int, int]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Product:
    """A product that costs tell apart. `kind` is "nf4", or the layout of integers."""

    name: str
    kind: str
    gradient: bool = False
    rank: int = 0


# The fields have the order of a text of costs.
PRODUCTS = (
    Product("codebook", "nf4"),
    Product("codebook_lora", "nf4", rank=RANK),
    Product("gradient", "nf4", gradient=True),
    Product("gradient_lora", "nf4", gradient=True, rank=RANK),
    Product("gptq", "gptq"),
    Product("awq", "awq"),
    Product("compressed_tensors", "compressed-tensors"),
)


def copies_beyond_cache(nbytes: int, device: torch.device) -> int:
    """Returns how many weights of this size exceed the L2 cache twice: 2 to 256."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(256, max(2, -(-2 * cache // nbytes)))


class Weights:
    """Copies of a weight that together exceed the L2 cache, so that none is there in its turn."""

    def __init__(self, kind: str, shape: Shape, device: torch.device, most_rows: int) -> None:
        self.shape, self.device = shape, device
        dense = torch.randn(shape, dtype=torch.float16, device=device) / shape[1] ** 0.5
        first = (
            quantize(dense)
            if kind == "nf4"
            else quantize_int4(dense, layout=kind, group_size=GROUP_SIZE)
        )
        count = copies_beyond_cache(shape[0] * shape[1] // 2, device)
        self.copies = [first, *(_copied(first) for _ in range(count - 1))]
        self._rows = most_rows
        self._buffers: dict[str, tuple[Tensor, ...]] = {}

    def operands(self, dtype: str) -> tuple[Tensor, ...]:
        """Returns x, y and a dense weight, each with room for the largest product, and an
        adapter."""
        if dtype not in self._buffers:
            self._buffers.clear()
            make = partial(torch.randn, dtype=DTYPES[dtype], device=self.device)
            most = self._rows * max(self.shape)
            adapter = make(RANK, self.shape[1]) / 64, make(self.shape[0], RANK) / 64
            self._buffers[dtype] = (make(most), make(most), make(self.shape), *adapter)
        return self._buffers[dtype]

    def x_and_y(self, product: Product, dtype: str, m: int) -> tuple[Tensor, Tensor]:
        """Returns x [m, columns] and y [m, outputs] of a product. Its rows of x are the first of
        those with more rows."""
        x, y, *_ = self.operands(dtype)
        rows, cols = self.shape
        columns, outputs = (rows, cols) if product.gradient else (cols, rows)
        return x[: m * columns].view(m, columns), y[: m * outputs].view(m, outputs)

    def calls(self, product: Product, dtype: str, m: int) -> tuple[list[Call], list[Call]]:
        """Returns the calls of libnf4's function, and those of dequantize and a dense product, one
        for each copy."""
        *_, dense, a, b = self.operands(dtype)
        x, y = self.x_and_y(product, dtype, m)
        lora = Lora(a, b, SCALE) if product.rank else None
        multiply = _matmul.matmul_grad if product.gradient else _matmul.matmul
        first = self.copies[0]
        size = _matmul.matmul_workspace_bytes(
            first, m, dtype, rank=product.rank, gradient=product.gradient
        )
        space = torch.empty(size, dtype=torch.uint8, device=self.device) if size else None
        options = {"out": y, "workspace": space, **({"lora": lora} if lora else {})}
        fused = [partial(multiply, x, weight, **options) for weight in self.copies]
        return fused, [
            partial(_multiply_dense, product, weight, x, y, dense, a, b) for weight in self.copies
        ]


def _copied(weight: Any) -> Any:
    """Returns a weight with tensors of its own for the parts that are read from memory."""
    parts = ("packed", "absmax", "nested_absmax", "scales", "zeros")
    mine = {
        name: getattr(weight, name).clone()
        for name in parts
        if getattr(weight, name, None) is not None
    }
    return dataclasses.replace(weight, **mine)


def _multiply_dense(
    product: Product, weight: Any, x: Tensor, y: Tensor, dense: Tensor, a: Tensor, b: Tensor
) -> None:
    dequantize(weight, out=dense)
    torch.mm(x, dense if product.gradient else dense.T, out=y)
    if product.rank:
        first, second = (b, a) if product.gradient else (a.T, b.T)
        y.addmm_(torch.mm(x, first), second, alpha=SCALE)


def is_dense(product: Product, weight: Any, dtype: str, m: int, device: int) -> bool:
    """Tells which way the library would go now."""
    return _paths.matmul_is_dense(
        weight.descriptor(), dtype, m, device, rank=product.rank, gradient=product.gradient
    )
