"""What the operators do on real tensors, each as one call of the library.

A weight is ten arguments here, as it is in the operators: packed, absmax, nested_absmax,
nested_code, nested_offset and codebook, which are tensors or None, then shape, format, blocksize
and nested_blocksize. They mean what they mean in nf4.QuantizedTensor.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import nf4
from nf4 import _prepared, _torch
from nf4._load import check, library
from nf4.errors import InvalidArgument
from nf4.torch import _native

PARTS = ("packed", "absmax", "nested_absmax", "nested_code", "nested_offset", "codebook")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FUNCTIONS = (
    "nf4_dequant_launch",
    "nf4_dequant_cpu",
    "nf4_matmul_launch",
    "nf4_matmul_cpu",
    "nf4_matmul_workspace_size",
)


def _look_closer(*_arguments: Any) -> None:
    """Where there is no faster way than through a QuantizedTensor."""


@functools.cache
def _calls() -> tuple[Callable[..., int | None], Callable[..., int | None]]:
    """matmul and dequantize without ctypes: each gives the status, or None if it did nothing."""
    if _prepared._nf4_fast is None:
        return _look_closer, _look_closer
    addresses = [_native.address([library()], name) for name in _FUNCTIONS]
    try:
        calls = _prepared._nf4_fast.Calls(Tensor, *addresses)
    except (AttributeError, BufferError):  # torch without DLPack's exchange
        return _look_closer, _look_closer
    return calls.matmul, calls.dequantize


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that torch.compile does not look into, which it would in a frame that it gave up.
    torch._dynamo takes a second to import; without it nothing is compiled."""
    disabled: list[Callable[..., Any]] = []

    def kernel(*arguments: Any) -> Any:
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return function(*arguments)
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*arguments)

    return kernel


def quantized_tensor(*weight: Any) -> nf4.QuantizedTensor:
    """The weight as the core package knows it; tensors are shared."""
    shape, format, blocksize, nested_blocksize = weight[6:]
    parts = {
        name: part if part is None else part.detach()
        for name, part in zip(PARTS, weight, strict=False)
    }
    return nf4.QuantizedTensor(
        **parts,
        shape=tuple(shape),
        format=format,
        blocksize=blocksize,
        nested_blocksize=nested_blocksize,
    )


def require_device(device: torch.device, beside: str, tensors: dict[str, Tensor | None]) -> None:
    """Each tensor is on this device, where the tensor named `beside` is."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise InvalidArgument(
                f"{name} is on {tensor.device}; expected {device}, where {beside} is: move one "
                f"with .to()"
            )


def require_float(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise InvalidArgument(f"{name} is of {dtype}; expected float32, float16 or bfloat16")


def _threads(tensor: Tensor) -> int:
    """As many as torch's own kernels take; on a GPU they mean nothing."""
    return 0 if tensor.is_cuda else torch.get_num_threads()


def parts_of(weight: Sequence[Any]) -> dict[str, Tensor | None]:
    return dict(zip(PARTS, weight, strict=False))


def _scratch(x: Tensor, nbytes: int) -> Tensor:
    return x.new_empty(nbytes, dtype=torch.uint8)


def try_linear(x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor | None:
    """y = x W^T + bias; None if something has to be looked at more closely."""
    packed, absmax, nested_absmax, code, offset, codebook, shape, format, block, nested = weight
    rows, cols = _native.rows_and_cols(shape)
    y = x.new_empty((*x.shape[:-1], rows))
    status = _calls()[0](
        x, y, bias, _scratch, torch.get_num_threads(), packed, absmax, nested_absmax, code, offset,
        codebook, _native.format_code(format), block, nested, rows, cols,
    )  # fmt: skip
    if status is None:
        return None
    check(status)
    return y


def linear(x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
    """y = x W^T + bias, in the dtype of x."""
    y = try_linear(x, bias, *weight)
    return checked_linear(x, bias, *weight) if y is None else y


def require_operands(x: Tensor, bias: Tensor | None, weight: Sequence[Any]) -> None:
    """x and bias fit the weight, and all is on one device."""
    rows, cols = _native.rows_and_cols(weight[6])
    require_float("x", x.dtype)
    if x.dim() == 0 or x.shape[-1] != cols:
        raise InvalidArgument(f"x is of shape {tuple(x.shape)}; expected [..., {cols}]")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (rows,)):
        raise InvalidArgument(
            f"bias is {bias.dtype} of shape {tuple(bias.shape)}; expected {x.dtype} of ({rows},)"
        )
    require_device(x.device, "x", {"bias": bias, **parts_of(weight)})


def checked_linear(x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
    if needs_dense(x):
        return dense_linear(x, bias, *weight)
    require_device(x.device, "x", {"bias": bias, **parts_of(weight)})
    if x.dim() > 0 and not _has_row_stride(x):
        x = x.contiguous()
    bias = None if bias is None else bias.detach().contiguous()
    return nf4.matmul(x.detach(), quantized_tensor(*weight), bias=bias, threads=_threads(x))


def needs_dense(x: Tensor) -> bool:
    """The library's products are of 16 bits on a GPU."""
    return x.is_cuda and x.dtype == torch.float32


def dense_linear(x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
    """The same by torch's product with a dense weight."""
    require_operands(x, bias, weight)
    dense = dequantize(*weight, x.dtype).view(_native.rows_and_cols(weight[6]))
    return torch.nn.functional.linear(x, dense, bias)


def _has_row_stride(x: Tensor) -> bool:
    """Are the rows of x contiguous, and one distance apart that is no less than their length?"""
    cols = x.shape[-1]
    rows = x.shape[:-1].numel()
    if rows <= 1 or cols <= 1:
        return x.is_contiguous()
    try:
        stride = x.view(rows, cols).stride()
    except RuntimeError:
        return False
    return stride[1] == 1 and stride[0] >= cols


def dequantize(*arguments: Any) -> Tensor:
    """The numbers of a weight, whose ten arguments come first, in a dtype, which is the last."""
    *weight, dtype = arguments
    out = torch.empty(weight[6], dtype=dtype, device=weight[0].device)
    dequantize_into(out, *weight)
    return out


def _try_dequantize_into(out: Tensor, *weight: Any) -> bool:
    """False, and nothing written, if something has to be looked at more closely."""
    packed, absmax, nested_absmax, code, offset, codebook, shape, format, block, nested = weight
    rows, cols = _native.rows_and_cols(shape)
    status = _calls()[1](
        out, torch.get_num_threads(), packed, absmax, nested_absmax, code, offset, codebook,
        _native.format_code(format), block, nested, rows, cols,
    )  # fmt: skip
    if status is None:
        return False
    check(status)
    return True


def dequantize_into(out: Tensor, *weight: Any) -> None:
    """Writes the numbers of a weight to a contiguous tensor."""
    if not _try_dequantize_into(out, *weight):
        require_device(weight[0].device, "packed", {"out": out, **parts_of(weight)})
        nf4.dequantize(quantized_tensor(*weight), out=out.detach(), threads=_threads(out))


def dequantize_to(out: Tensor, dtype: torch.dtype, *weight: Any) -> None:
    """The same to what a caller gave, which has to be of this dtype and of the weight's shape."""
    shape = tuple(weight[6])
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise InvalidArgument(
            f"out is {out.dtype} of shape {tuple(out.shape)}; expected {dtype} of {shape}"
        )
    dequantize_into(out, *weight)
    _torch.tell_of_writes([out])


_kept = threading.local()


def _dense(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for one dense weight, until the next is asked for. torch's allocator for GPUs hands
    the same to one layer after the other; that for CPUs gives it back to the system, which takes
    longer to provide it anew than a weight takes to be dequantized."""
    if device.type != "cpu":
        return torch.empty((rows, cols), dtype=dtype, device=device)
    needed = rows * cols * dtype.itemsize
    buffer = getattr(_kept, "buffer", None)
    if buffer is None or buffer.numel() < needed:
        _kept.buffer = None  # the smaller one need not be there beside the larger
        buffer = _kept.buffer = torch.empty(needed, dtype=torch.uint8)
    return buffer[:needed].view(dtype).view(rows, cols)


def _dense_beside(grad_y: Tensor, weight: Sequence[Any]) -> Tensor:
    """Where to dequantize the weight to for a product with grad_y."""
    dtype, device = grad_y.dtype, grad_y.device
    require_float("grad_y", dtype)
    require_device(device, "grad_y", {"packed": weight[0]})
    return _dense(*_native.rows_and_cols(weight[6]), dtype, device)


def try_linear_backward(grad_y: Tensor, *weight: Any) -> Tensor | None:
    """linear_backward; None if something has to be looked at more closely."""
    dense = _dense_beside(grad_y, weight)
    return torch.matmul(grad_y, dense) if _try_dequantize_into(dense, *weight) else None


def linear_backward(grad_y: Tensor, *weight: Any) -> Tensor:
    """The gradient of x: grad_y times the weight, dense for as long as this takes."""
    dense = _dense_beside(grad_y, weight)
    dequantize_into(dense, *weight)
    return torch.matmul(grad_y, dense)


# ---- For the operators of _native where that has no kernels ---------------------------


def numbered_linear(x: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    return checked_linear(x, bias, *_native.words(numbers))


def numbered_dense_like(like: Tensor, *numbers: Any) -> Tensor:
    return dequantize(*_native.words(numbers), like.dtype)


def quantize(
    weight: Tensor, codebook: Tensor | None, format: str, blocksize: int, nested_blocksize: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """packed, absmax, nested_absmax, nested_code and nested_offset; the last three are empty if
    flat."""
    require_device(weight.device, "weight", {"codebook": codebook})
    made = nf4.quantize(
        weight.detach().contiguous(),
        format=format,
        blocksize=blocksize,
        nested_blocksize=nested_blocksize,
        codebook=codebook,
        threads=_threads(weight),
    )
    if not made.nested:
        return made.packed, made.absmax, *(made.absmax.new_empty(0) for _ in range(3))
    # What an operator returns is nobody else's, and the code is everybody's.
    code = made.nested_code.clone()
    return made.packed, made.absmax, made.nested_absmax, code, made.nested_offset
