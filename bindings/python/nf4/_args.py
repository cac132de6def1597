"""The structs of arguments that products take, without their pointers, and the caller's names for
arguments that have others in C."""

from __future__ import annotations

import ctypes
from ctypes import Structure

from nf4 import _abi

SOME = 16  # an address that is not NULL, and aligned; it is not read

PRODUCT_NAMES = {
    "y": "out",
    "dtype": "the dtype of x",
    "count": "the number of weights",
    "workspace_bytes": "the size of workspace in bytes",
    "m * x_stride": "rows * stride of x",
    "m * y_stride": "rows * stride of out",
}
GRAD_NAMES = {
    **PRODUCT_NAMES,
    "x": "grad_y",
    "dtype": "the dtype of grad_y",
    "m * x_stride": "rows * stride of grad_y",
}
GROUPED_NAMES = {**PRODUCT_NAMES, "x_rows * x_stride": "rows * stride of x"}
GROUPED_GRAD_NAMES = {
    **GRAD_NAMES,
    "x_rows * x_stride": "rows * stride of grad_y",
    "x_rows": "rows of grad_y",
    "x_index": "y_index",
}


def matmul_args(
    descriptor: Structure, dtype: int, m: int, x_stride: int, y_stride: int, rank: int = 0
) -> _abi.MatmulArgs:
    """Returns the nf4_matmul_args of a product, with an adapter of `rank`."""
    args = _abi.MatmulArgs(
        struct_size=ctypes.sizeof(_abi.MatmulArgs),
        dtype=dtype,
        m=m,
        x_stride=x_stride,
        y_stride=y_stride,
    )
    if rank:
        args.adapter = _abi.Lora(
            struct_size=ctypes.sizeof(_abi.Lora),
            dtype=dtype,
            rank=rank,
            a_stride=descriptor.cols,
            b_stride=rank,
        )  # lives as long as args
        args.lora = ctypes.addressof(args.adapter)
    return args


def grouped_args(
    dtype: int,
    experts: int,
    m: int,
    x_rows: int,
    x_stride: int,
    y_stride: int,
    indexed: bool,
) -> _abi.GroupedArgs:
    """Returns the nf4_grouped_args of the products of experts. `indexed` says that there is an
    x_index."""
    return _abi.GroupedArgs(
        struct_size=ctypes.sizeof(_abi.GroupedArgs),
        dtype=dtype,
        experts=experts,
        m=m,
        x_stride=x_stride,
        x_rows=x_rows,
        y_stride=y_stride,
        x_index=SOME if indexed else None,
    )
