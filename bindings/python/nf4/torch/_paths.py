"""Tells which way a product of tensors is expected to take less time: libnf4's own kernel, or
dequantize and torch's dense product. The answers of the library (nf4/_paths.py) are kept. C++ asks
by itself where it multiplies (_nf4_paths.hpp)."""

from __future__ import annotations

import functools
from ctypes import Structure
from typing import Any

import torch
from torch import Tensor

from nf4 import _abi, _paths, _torch, int4, tensor
from nf4._args import SOME
from nf4.torch._int4_weight import Int4Parts, Int4Stack
from nf4.torch._weight import WeightParts

# An answer depends on the kind of weight, its Spec, and which optional parts it has. Addresses
# count as aligned: tensors of a graph that is traced have none.
_Weight = tuple[type, Any, tuple[bool, ...]]


def _described(weight: WeightParts | Int4Parts | Int4Stack) -> _Weight:
    if isinstance(weight, WeightParts):
        return WeightParts, weight.spec, (weight.codebook is not None,)
    optional = (weight.zeros, weight.g_idx, weight.permutation)
    return type(weight), weight.spec, tuple(part is not None for part in optional)


def _descriptor(kind: type, spec: Any, given: tuple[bool, ...]) -> Structure:
    if kind is WeightParts:
        of_weight = (spec.shape, spec.name, spec.blocksize, spec.nested_blocksize)
        made = tensor.descriptor(*of_weight, spec.scale_rule)
        names = ("codebook",)
    else:
        shape = spec.shape[1:] if kind is Int4Stack else (spec.rows, spec.cols)
        made = int4.descriptor(spec.layout, shape, spec.group_size, "fp16", given[0])
        names = ("zeros", "g_idx", "permutation")
    for name, there in zip(names, given, strict=True):
        setattr(made, name, SOME if there else None)
    return made


def _device(of: Tensor) -> int:
    return of.device.index if of.is_cuda else _abi.DEVICE_CPU


@functools.lru_cache(maxsize=4096)
def _is_dense(
    weight: _Weight, dtype: torch.dtype, m: int, rank: int, gradient: bool, device: int
) -> bool:
    name = _torch.dtype_name(dtype)
    made = _descriptor(*weight)
    return _paths.matmul_is_dense(made, name, m, device, rank=rank, gradient=gradient)


def prefers_dense(x: Tensor, weight: WeightParts | Int4Parts) -> bool:
    """Tells if the dense way is faster for y = x W^T. x is [..., columns]."""
    m = x.shape[:-1].numel()
    return _is_dense(_described(weight), x.dtype, m, 0, False, _device(x))


def grad_prefers_dense(grad_y: Tensor, weight: WeightParts, rank: int = 0) -> bool:
    """Tells if the dense way is faster for dX = dY W. dY is [..., rows]. `rank` is an adapter's,
    whose products libnf4 makes beside it; 0 means none."""
    m = grad_y.shape[:-1].numel()
    return _is_dense(_described(weight), grad_y.dtype, m, rank, True, _device(grad_y))


@functools.lru_cache(maxsize=256)
def lora_grad_prefers_dense(dtype: torch.dtype, rank: int, device: int) -> bool:
    """Tells if the dense way is faster for dA and dB of an adapter, on a GPU."""
    return _paths.lora_grad_is_dense(_torch.dtype_name(dtype), rank, device)


@functools.lru_cache(maxsize=4096)
def _is_grouped_dense(
    weight: _Weight,
    dtype: torch.dtype,
    m: int,
    x_rows: int,
    gathers: bool,
    gradient: bool,
    device: int,
) -> bool:
    return _paths.grouped_is_dense(
        _descriptor(*weight),
        weight[1].shape,
        _torch.dtype_name(dtype),
        m,
        device,
        x_rows=x_rows,
        gathers=gathers,
        gradient=gradient,
    )


def grouped_prefers_dense(
    x: Tensor, x_index: Tensor | None, weight: WeightParts | Int4Stack, gradient: bool
) -> bool:
    """Tells if the dense way is faster for the products of a stack of experts, or their gradient,
    which integers have not. While a CUDA graph is captured the answer is no, because the dense way
    may read on the host how many rows each expert has. fp32 is an exception: libnf4 does not
    multiply it."""
    m, gathers = (x if x_index is None else x_index).shape[0], x_index is not None
    described, device = _described(weight), _device(x)
    if not _is_grouped_dense(described, x.dtype, m, x.shape[0], gathers, gradient, device):
        return False
    return x.dtype == torch.float32 or not torch.cuda.is_current_stream_capturing()
