"""Tells which way a product is expected to take less time: libnf4's own kernel, or dequantize and a
dense product. The library decides (nf4_matmul_path and its siblings in nf4.h)."""

from __future__ import annotations

import ctypes
from ctypes import Structure
from typing import Any

from nf4 import _abi, _convert, int4, tensor
from nf4._args import SOME, grouped_args, matmul_args
from nf4._load import library
from nf4.typing import DTypeName

# `fused_rows` asks for these numbers of rows of x.
_ROWS = (4096, 1024, 256, 128, 64, 32, 16, 8, 4, 2, 1)


def _answers_dense(name: str, *arguments: Any) -> bool:
    """Returns False for an error, too: the launch finds it again, and names it."""
    path = _abi.Path()
    status = getattr(library(), name)(*arguments, ctypes.byref(path))
    return status == _abi.STATUS_OK and path.value == _abi.PATH_DENSE


def matmul_is_dense(
    weight: Structure,
    dtype: DTypeName,
    m: int,
    device: int,
    *,
    rank: int = 0,
    gradient: bool = False,
) -> bool:
    """Tells if the dense way is faster for y = x W^T, or for the gradient dX = dY W.

    weight  an nf4_tensor or an nf4_int4_tensor; its pointers are not read
    device  the index of a GPU, or _abi.DEVICE_CPU
    rank    the rank of an adapter; 0 if there is none
    """
    columns, outputs = (weight.rows, weight.cols) if gradient else (weight.cols, weight.rows)
    args = matmul_args(weight, _convert.DTYPES[dtype], m, columns, outputs, rank)
    name = f"{_prefix(weight)}matmul_{'grad_' if gradient else ''}path"
    return _answers_dense(name, ctypes.byref(weight), ctypes.byref(args), device)


def grouped_is_dense(
    weight: Structure,
    shape: tuple[int, int, int],
    dtype: DTypeName,
    m: int,
    device: int,
    *,
    x_rows: int,
    gathers: bool,
    gradient: bool = False,
) -> bool:
    """Tells if the dense way is faster for m products of a stack of experts of this shape.
    `gathers` says that there is an x_index."""
    experts, rows, cols = shape
    outputs, columns = (cols, rows) if gradient else (rows, cols)
    args = grouped_args(
        _convert.DTYPES[dtype], experts, m, x_rows, columns, outputs, indexed=gathers
    )
    name = f"{_prefix(weight)}matmul_grouped_{'grad_' if gradient else ''}path"
    return _answers_dense(name, ctypes.byref(weight), ctypes.byref(args), device)


def lora_grad_is_dense(dtype: DTypeName, rank: int, device: int) -> bool:
    """Tells if the dense way is faster for dA and dB of an adapter."""
    number, some = _convert.DTYPES[dtype], 4096
    args = _abi.LoraGradArgs(
        struct_size=ctypes.sizeof(_abi.LoraGradArgs),
        dtype=number,
        grad_dtype=number,
        rank=rank,
        m=some,
        rows=some,
        cols=some,
        x_stride=some,
        dy_stride=some,
        da=SOME,
        da_stride=some,
        db=SOME,
        db_stride=rank,
    )
    return _answers_dense("nf4_lora_grad_path", ctypes.byref(args), device)


def _prefix(weight: Structure) -> str:
    return "nf4_int4_" if isinstance(weight, _abi.Int4Tensor) else "nf4_"


def typical(kind: str) -> Structure:
    """Describes a weight of 4096 x 4096 as checkpoints have it. `kind` is "nf4" or "int4"."""
    if kind == "nf4":
        return tensor.descriptor((4096, 4096), "nf4", 64, 256)
    return int4.descriptor("gptq", (4096, 4096), 128, "fp16", True)


def fused_rows(kind: str, device: int) -> int | None:
    """Returns up to how many rows of x in fp16 libnf4's own kernels multiply a typical weight.
    None means any number of them."""
    weight = typical(kind)
    dense = (matmul_is_dense(weight, "fp16", m, device) for m in _ROWS)
    most = next((m for m, is_dense in zip(_ROWS, dense, strict=True) if not is_dense), 0)
    return None if most == _ROWS[0] else most


def fused_from(kind: str, device: int) -> int:
    """Returns from how many rows of x in fp16 on libnf4's own kernels multiply a typical weight,
    where they multiply it at all."""
    weight = typical(kind)
    fused = (m for m in range(1, _ROWS[0]) if not matmul_is_dense(weight, "fp16", m, device))
    return next(fused, _ROWS[0])
