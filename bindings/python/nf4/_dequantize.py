"""dequantize: a quantized weight as fp32, fp16 or bf16."""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from nf4 import _call, _convert
from nf4._load import check
from nf4._operand import on_device, plain_memory, read
from nf4._options import Run, Unpack
from nf4._prepared import Prepared, prepare
from nf4._torch import Device
from nf4.typing import Array, CudaStreamLike, DTypeLike, MemoryLike, Out
from nf4.weight import Weight


def _target(
    weight: Prepared, out: Any, dtype: DTypeLike | None
) -> tuple[int, int, bool, Device | None]:
    """The address and nf4_dtype of an output, whether it is in device memory, and the device of
    torch where it or the weight is a tensor."""
    torch = weight.torch
    # The common case, in less time: a plain tensor beside the weight's.
    plain = None if torch is None else plain_memory(out, torch)
    if torch is not None and plain is not None and out.numel() == weight.elements:
        address, name = plain
        if name in _convert.DTYPES and (dtype is None or type(dtype) is str and dtype == name):
            return address, _convert.DTYPES[name], torch.is_cuda, torch
    wanted = None if dtype is None else _convert.dtype_name(dtype)
    target = read("out", out, torch)
    if wanted is None:
        wanted = target.dtype if target.dtype in _convert.DTYPES else weight.dtype
    # Also what was made here: a mode of torch may make another tensor than it is asked for.
    target.expect(wanted, weight.elements)
    if not target.writable:
        target.require_writable()
    in_device_memory = on_device(weight.located, target)
    return target.address, _convert.DTYPES[wanted], in_device_memory, torch or target.torch


@overload  # the first that fits is taken: tensors are MemoryLike, too
def dequantize(  # type: ignore[overload-overlap]
    tensor: Weight[Array], dtype: DTypeLike | None = ..., *, out: None = ..., **options: Unpack[Run]
) -> Array: ...


@overload
def dequantize(
    tensor: Weight[MemoryLike],
    dtype: DTypeLike | None = ...,
    *,
    out: None = ...,
    **options: Unpack[Run],
) -> np.ndarray: ...


@overload
def dequantize(
    tensor: Weight[Any], dtype: DTypeLike | None = ..., *, out: Out, **options: Unpack[Run]
) -> Out: ...


def dequantize(
    tensor: Weight[Any],
    dtype: DTypeLike | None = None,
    *,
    out: MemoryLike | None = None,
    threads: int = 0,
    stream: CudaStreamLike | None = None,
) -> MemoryLike:
    """Dequantizes a weight to fp32, fp16 or bf16.

    tensor   a QuantizedTensor or an Int4Tensor
    dtype    "fp32", "fp16", "bf16", or a numpy or torch dtype. The default is the dtype of `out`;
             without `out`, the dtype of the weight before it was quantized, or the dtype of an
             Int4Tensor's scales
    out      a contiguous array with as many elements as the weight, or an address. By default the
             result is new memory of the weight's shape: a torch tensor on the device of `packed`
             if that is a torch tensor, or else a numpy array in host memory. (A large numpy array
             is a view that begins at a huge page. torch uses huge pages if the environment has
             THP_MEM_ALLOC_ENABLE=1.) Required for device memory that is not in torch tensors
    threads  on the CPU: the most threads to use; 0: one for each processor
    stream   for device memory, as for quantize

    torch is not told that an `out` has changed, because this takes a sixth of the time of a call.
    If autograd may have saved `out` for a backward pass, which would then use the new values, call
    torch.autograd.graph.increment_version(out).

    Returns `out`, or the new memory. Raises the errors of quantize.
    """
    weight = prepare(tensor, "tensor")
    if out is None:
        out = weight.new_output(dtype, stream)
    # 0.0 equals 0 and is no number of threads; an array cannot even be compared.
    usual = type(threads) is int and threads == 0
    status = weight.launch(out, dtype, stream) if usual else None
    if status is not None:
        check(status)
        return out
    threads, handle = _call.read_options(threads, stream)
    address, number, in_device_memory, torch = _target(weight, out, dtype)
    arguments = weight.argument, address, number
    problem = _call.Problem(weight.functions.dequant, arguments, in_device_memory, torch, out)
    return _call.run(problem, threads, handle)
