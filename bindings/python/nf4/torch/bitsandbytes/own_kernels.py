"""bitsandbytes' own CUDA kernels for products, which are called where libnf4 expects its own to be
slower than a dense product (nf4_matmul_path of nf4.h). bitsandbytes says by itself for how many
rows of x its kernels are faster than dequantize and a dense product on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nf4.torch import _fast
from nf4.torch._replacing import is_known
from nf4.torch._state import as_bytes

# What the source of the function that launches a kernel begins with in SHA-256.
_LAUNCH = ("a4b8c79eb7197a8c",)


class _Own(NamedTuple):
    """Functions of bitsandbytes.backends.cuda.ops.

    is_faster(device_index, dtype, M, N, K)  has it a kernel that is faster than a dense product?
    most_rows                                the most rows of x for which it is asked
    launch                                   the kernel, with the arguments of gemm_4bit
    """

    is_faster: Any
    most_rows: int
    launch: Any


_own: list[_Own] = []


def take(bitsandbytes: Any) -> None:
    """Finds the functions of the imported bitsandbytes, where they are those that are known."""
    backends = getattr(bitsandbytes, "backends", None)
    ops = getattr(getattr(backends, "cuda", None), "ops", None)
    launch = getattr(ops, "_gemm_4bit_kernel_impl", None)
    is_faster = getattr(ops, "_gemm_4bit_use_custom_fn", None)
    most_rows = getattr(ops, "_gemm_4bit_custom_max_m", None)
    _own.clear()
    if is_known(launch, _LAUNCH) and callable(is_faster) and type(most_rows) is int:
        _own.append(_Own(is_faster, most_rows, launch))


def _launch(own: _Own, x: Tensor, bias: Tensor | None, weight: Any) -> Tensor | None:
    """y by bitsandbytes' kernel; None where a dense product is faster, or the kernel does not take
    the operands."""
    packed, absmax, nested_absmax, code, offset, _, spec = weight
    rows, cols, _, blocksize = spec[:4]
    m = x.numel() // cols
    if m > own.most_rows or cols % blocksize != 0:
        return None
    if not own.is_faster(x.device.index, x.dtype, m, rows, cols):
        return None
    scales = absmax if nested_absmax is None else nested_absmax
    if scales.dtype != torch.float32:
        return None
    if bias is not None and (bias.dtype != x.dtype or bias.dim() != 1):
        return None
    nested = () if nested_absmax is None else (absmax, code, offset)
    packed = as_bytes(packed.detach())
    return own.launch(x, packed, (rows, cols), scales, blocksize, spec[6], bias, *nested)


def linear(x: Tensor, bias: Tensor | None, weight: Any) -> Tensor | None:
    """y = x W^T + bias in the way that is expected to take least time: by libnf4's kernel, by
    bitsandbytes', or by a dense weight. None where nothing was done, as _fast.linear says, and for
    a bitsandbytes whose kernels are unknown, which chooses by itself."""
    y = _fast.linear(x, bias, weight, True)
    if y is not False:
        return y
    if not _own:
        return None
    y = _launch(_own[0], x, bias, weight)
    return _fast.linear(x, bias, weight) if y is None else y
