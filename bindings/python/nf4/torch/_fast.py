"""The fast way: nf4.torch's operators in C++ (bindings/python/_nf4_*.cpp).

The functions here are its entry for Python. They take plain tensors without a fault. For anything
else, or without the extension module, they do nothing and say so. Its entry for torch's dispatcher
is torch.ops.nf4._linear, ._linear_batch2, ._linear_batch3 and ._dense_like, those with _int4, and
._linear_grad.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nf4 import _prepared
from nf4._load import library
from nf4.errors import LibraryNotFound
from nf4.torch._schemas import Parts  # C++ has kernels for operators that are defined


def linear(
    x: Tensor, bias: Tensor | None, weight: Parts, peer: Callable[..., Any] | None = None
) -> Tensor | None:
    """y = x W^T + bias; None if nothing was done.

    peer(x, bias, weight) is called where a dense weight is expected to be faster than libnf4's
    kernel; what it returns is returned, unless that is None."""
    return None


def versions(tensors: tuple[Any, ...]) -> int:
    """Returns a number that each in-place write to one of these tensors increases. The last element
    of the tuple is not a tensor."""
    return 0


def dequantize(out: Tensor, weight: Parts) -> bool:
    """Writes the weight to `out`; False if nothing was done."""
    return False


def linear_adapted(
    x: Tensor, bias: Tensor | None, weight: Parts, a: Tensor, b: Tensor, scale: float
) -> tuple[Tensor, Tensor] | None:
    """y = x W^T + bias + scale p B^T, and p = x A^T, [rows of x, rank]; None if nothing was
    done, and where a dense weight is expected to be faster."""
    return None


def linear_grad(
    grad_y: Tensor,
    weight: Parts,
    a: Tensor | None = None,
    b: Tensor | None = None,
    scale: float = 1.0,
) -> Any:
    """dX = dY W; with A and B dX = dY W + scale q A, and q = dY B. None if nothing was done."""
    return None


def lora_grads(
    grad_y: Tensor, x: Tensor, p: Tensor, q: Tensor, a: Tensor, b: Tensor, scale: float
) -> tuple[Tensor, Tensor] | None:
    """Computes dA = scale q^T x and dB = scale dY^T p on a GPU, in the dtype of A and B. None if
    nothing was done."""
    return None


def adapted_grads(
    grad_y: Tensor,
    x: Tensor,
    p: Tensor,
    weight: Parts,
    a: Tensor,
    b: Tensor,
    scale: float,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns dX, dA and dB for y and p of a 16-bit linear_adapted on a GPU; None if nothing was
    done. fused: no dense weight is made."""
    return None


def linear_grouped(
    x: Tensor, ends: Tensor, x_index: Tensor | None, bias: Tensor | None, weight: Parts
) -> Tensor | None:
    """Computes the products of a stack of experts; None if nothing was done."""
    return None


def state_parts(
    packed: Tensor, state: Any, spec_of: Callable[[Any, Any, Any, Any], Any]
) -> tuple[Any, ...] | None:
    """Returns the fields of a WeightParts for a bitsandbytes QuantState. Its Spec is spec_of(shape,
    quant_type, blocksize, nested_blocksize). None if spec_of returns None, an attribute is missing,
    or reading them raises a KeyError or TypeError."""
    return None


def take_packed(kind: type[Tensor]) -> None:
    """Makes `linear` and `dequantize` accept packed bytes of this class, in any dtype. After
    several calls they accept the first class and the last."""


def _address(libraries: Sequence[ctypes.CDLL], name: str) -> int:
    """Returns the address of the function of this name; 0 if there is none."""
    for each in libraries:
        if hasattr(each, name):
            return ctypes.cast(getattr(each, name), ctypes.c_void_p).value or 0
    return 0


def _register() -> bool:
    """Tells if torch accepted the C++ operators for all devices that it has."""
    module = _prepared._nf4_fast
    if module is None:
        return False
    try:
        own = library()
        of_torch = [ctypes.CDLL("libtorch_cpu.so")]  # torch has loaded it
        if torch.version.cuda:
            of_torch.append(ctypes.CDLL("libtorch_cuda.so"))
    except (LibraryNotFound, OSError):
        return False
    names, own_names, blas_names = module.operator_functions()
    addresses = [_address(of_torch, name) for name in names]
    blas: list[int] = []  # torch without CUDA has none
    if torch.version.cuda:
        blas = [_address(of_torch, name) for name in blas_names]  # libtorch_cuda links to cuBLAS
    if not all([*(addresses if torch.version.cuda else addresses[:-1]), *blas]):
        return False
    try:
        own_addresses = [_address([own], name) for name in own_names]
        module.register_operators(Tensor, torch.nn.Parameter, addresses, own_addresses, blas)
    except (AttributeError, BufferError):  # torch without DLPack's exchange
        return False
    return True


registered = _register()
if registered:
    linear, dequantize = _prepared._nf4_fast.linear, _prepared._nf4_fast.dequantize
    versions = _prepared._nf4_fast.versions
    linear_adapted = _prepared._nf4_fast.linear_adapted
    linear_grad = _prepared._nf4_fast.linear_grad
    lora_grads = _prepared._nf4_fast.lora_grads
    adapted_grads = _prepared._nf4_fast.adapted_grads
    linear_grouped = _prepared._nf4_fast.linear_grouped
    state_parts = _prepared._nf4_fast.state_parts
    take_packed = _prepared._nf4_fast.take_packed
