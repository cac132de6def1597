"""Adapters beside a weight."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import SupportsFloat

from nf4 import _abi, _call, _convert, _torch
from nf4._operand import Operand, read, read_array
from nf4._prepared import Prepared
from nf4.errors import InvalidArgument, shown
from nf4.typing import ArrayLike, MemoryLike


@dataclass(frozen=True)
class Lora:
    """A low-rank adapter of a weight W [rows, cols], for matmul and matmul_grad, which then use
    W + scale B A.

    a        an array [rank, cols] with a rank of 1 to 128, in the dtype of x, or in fp32, which may
             be rounded to the dtype of x. Each row is contiguous, and all rows have one stride
    b        an array [rows, rank] with such rows, in the dtype of a
    scale    a finite number; in LoRA, alpha / rank
    product  a contiguous array [m, rank] in the dtype of x, for m rows of x, or the address of such
             memory, or None. matmul writes x A^T to it, and matmul_grad writes grad_y B. The
             gradients of B and A need these
    """

    a: ArrayLike
    b: ArrayLike
    scale: SupportsFloat = 1.0
    product: MemoryLike | None = None


def read_lora(
    lora: Lora,
    weight: Prepared,
    dtype: str,
    m: int,
    torch: _torch.Device | None,
    in_device_memory: bool,
) -> tuple[_abi.Lora, list[Operand]]:
    """An nf4_lora, and the operands that are in it."""
    if not isinstance(lora, Lora):
        raise InvalidArgument(f"lora is {shown(lora)}; expected an nf4.Lora")
    a = read_array("lora.a", lora.a, torch, 2)
    b = read_array("lora.b", lora.b, torch, 2)
    rank = a.shape[0]
    if a.shape[1] != weight.cols:
        raise InvalidArgument(f"lora.a is of shape {a.shape}; expected (rank, {weight.cols})")
    b.expect_shape((weight.rows, rank))
    if a.dtype not in (dtype, "fp32"):
        wanted = "fp32" if dtype == "fp32" else f"fp32 or {dtype}"
        raise InvalidArgument(f"lora.a is of {a.dtype}; expected {wanted}, as x is")
    if b.dtype != a.dtype:
        raise InvalidArgument(f"lora.b is of {b.dtype}; expected {a.dtype}, as lora.a is")
    operands, address = [a, b], None
    product = lora.product
    if product is None and not in_device_memory:
        product = _call.new_output((m, rank), dtype, torch, False, None)
    if product is not None:
        operands.append(read("lora.product", product, torch).expect(dtype, m * rank))
        if operands[-1].torch is None:
            operands[-1].require_writable()
        address = operands[-1].address
    made = _abi.Lora(
        ctypes.sizeof(_abi.Lora),
        _convert.DTYPES[a.dtype],
        rank,
        _convert.real("lora.scale", lora.scale),
        0,
        a.address,
        a.row_stride(weight.cols),
        b.address,
        b.row_stride(rank),
        address,
    )
    return made, operands
