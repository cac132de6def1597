"""Calls bitsandbytes' own CUDA matmul kernels where libnf4 expects its own to be slower than a
dense product (nf4_matmul_path of nf4.h). bitsandbytes itself says for how many rows of x its
kernels are faster than dequantize and a dense product on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nf4.torch import _fast, _kernels, _private
from nf4.torch._replacing import is_known
from nf4.torch._state import as_bytes
from nf4.torch._weight import WeightParts

# The first digits of the SHA-256 of the source of the function that launches a kernel.
_LAUNCH = ("a4b8c79eb7197a8c",)
_FORMATS = ("nf4", "fp4")
_NESTED_BLOCKSIZE = 256  # bitsandbytes' kernels take no other


class _Own(NamedTuple):
    """Functions of bitsandbytes.backends.cuda.ops.

    is_faster(device_index, dtype, M, N, K)  whether a kernel is faster than a dense product
    most_rows                                the most rows of x for which is_faster is asked
    launch                                   the kernel, with the arguments of gemm_4bit
    """

    is_faster: Any
    most_rows: int
    launch: Any


_own: list[_Own] = []


def take(bitsandbytes: Any) -> None:
    """Finds the functions of the imported bitsandbytes, if they are known ones, for its layers and
    for those of nf4.torch."""
    backends = getattr(bitsandbytes, "backends", None)
    ops = getattr(getattr(backends, "cuda", None), "ops", None)
    launch = getattr(ops, "_gemm_4bit_kernel_impl", None)
    is_faster = getattr(ops, "_gemm_4bit_use_custom_fn", None)
    most_rows = getattr(ops, "_gemm_4bit_custom_max_m", None)
    give_back()
    if is_known(launch, _LAUNCH) and callable(is_faster) and type(most_rows) is int:
        _own.append(_Own(is_faster, most_rows, launch))
        _kernels.peer = multiply


def give_back() -> None:
    _own.clear()
    _kernels.peer = None


def multiply(x: Tensor, bias: Tensor | None, weight: Any) -> Tensor | None:
    """Computes y = x W^T + bias by bitsandbytes' kernel; None if a dense product is faster, or no
    kernel accepts the operands. weight: a WeightParts, or the fields of one."""
    if not _own or len(weight) != len(WeightParts._fields):
        return None
    own = _own[0]
    packed, absmax, nested_absmax, code, offset, codebook, spec = weight
    rows, cols, _, blocksize, nested_blocksize = spec[:5]
    m = x.numel() // cols
    if m > own.most_rows or cols % blocksize != 0 or codebook is not None:
        return None
    if spec[6] not in _FORMATS:
        return None
    if nested_blocksize not in (0, _NESTED_BLOCKSIZE):
        return None
    if not own.is_faster(x.device.index, x.dtype, m, rows, cols):
        return None
    scales = absmax if nested_absmax is None else nested_absmax
    if scales.dtype != torch.float32 or (bias is not None and bias.dtype != x.dtype):
        return None
    nested = () if nested_absmax is None else (absmax, code, offset)
    with _private.no_torch_function():  # a Params4bit has one
        packed = as_bytes(packed.data)
    return own.launch(x, packed, (rows, cols), scales, blocksize, spec[6], bias, *nested)


def _multiply_or_leave(x: Tensor, bias: Tensor | None, weight: Any) -> Any:
    """Like multiply, but returns NotImplemented for a bitsandbytes whose kernels are unknown."""
    return multiply(x, bias, weight) if _own else NotImplemented


def linear(x: Tensor, bias: Tensor | None, weight: Any) -> Tensor | None:
    """Computes y = x W^T + bias in the way that is expected to be fastest: by libnf4's kernel, by
    bitsandbytes', or by a dense weight. None if nothing was done, as in _fast.linear, or if
    bitsandbytes has to choose by itself."""
    y = _fast.linear(x, bias, weight, _multiply_or_leave)
    return None if y is NotImplemented else y
