"""Registers libnf4's kernels for bitsandbytes' operators, on the devices where libnf4 can run."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import nf4
from nf4 import _paths as nf4_paths
from nf4._versions import OLDEST_BITSANDBYTES
from nf4.torch import _kernels, _private
from nf4.torch._state import as_bytes
from nf4.torch._weight import Spec, WeightParts
from nf4.torch.bitsandbytes import own_kernels

NESTED_BLOCKSIZE = 256
_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
_GEMM = (
    "A", "B", "shapeB", "absmax", "blocksize", "quant_type",
    "bias", "absmax_8bit", "absmax_code", "absmax_offset",
)  # fmt: skip
_DEQUANTIZE = ("A", "absmax", "blocksize", "quant_type", "shape", "dtype")


FORMATS = ("nf4", "fp4")


def takes(shape: Sequence[int], quant_type: str, nested_blocksize: int) -> bool:
    """Tells if gemm_4bit accepts such a weight. nested_blocksize is 0 if flat."""
    known = quant_type in FORMATS and nested_blocksize in (0, NESTED_BLOCKSIZE)
    return known and len(shape) == 2


# ---- Where libnf4 can run --------------------------------------------------------------


_usable_gpus: dict[int, bool] = {}
ready = {torch.device("cpu")}  # devices for which is_ours was True


@_private.constant_in_traces
def _usable_gpu(index: int) -> bool:
    """Tells if libnf4 has kernels for this GPU. It is asked at the first call and not when
    bitsandbytes is imported, because asking initialises CUDA."""
    known = _usable_gpus.get(index)
    # A Dynamo that traces this function instead of calling it could not trace the query.
    if known is not None or torch.compiler.is_dynamo_compiling():
        return bool(known)
    found = nf4.device_info(index)
    if not found.usable:
        warnings.warn(
            f"libnf4 leaves GPU {index} to bitsandbytes' own kernels: {found.reason}", stacklevel=2
        )
    _usable_gpus[index] = found.usable
    if found.usable:
        ready.add(torch.device("cuda", index))
    return found.usable


def is_ours(tensor: Tensor) -> bool:
    device = tensor.device
    return device.type == "cpu" or (device.type == "cuda" and _usable_gpu(device.index))


_many_rows: dict[int, bool] = {}


@_private.constant_in_traces
def _fuses_many_rows(index: int) -> bool:
    known = _many_rows.get(index)
    if known is not None or torch.compiler.is_dynamo_compiling():  # like _usable_gpu
        return bool(known)
    _many_rows[index] = found = nf4_paths.fused_rows("nf4", index) is None
    return found


def is_for_graphs(tensor: Tensor) -> bool:
    """Tells if a compiled graph gets libnf4's operator for any number of rows. It does not on a GPU
    that multiplies many rows by a dense weight: there it gets bitsandbytes' operator, which chooses
    in every call."""
    device = tensor.device
    return device.type == "cpu" or _fuses_many_rows(device.index)


def device_types() -> list[str]:
    has_cuda = nf4.build_info().get("cuda", "none") != "none" and torch.version.hip is None
    return ["cpu", "cuda"] if has_cuda and torch.cuda.is_available() else ["cpu"]


# ---- The operators ---------------------------------------------------------------------


def _gemm_4bit(original: Callable[..., Any]) -> Callable[..., Tensor]:
    def gemm_4bit(
        A: Tensor,
        B: Tensor,
        shapeB: Sequence[int],
        absmax: Tensor,
        blocksize: int,
        quant_type: str,
        bias: Tensor | None = None,
        absmax_8bit: Tensor | None = None,
        absmax_code: Tensor | None = None,
        absmax_offset: Tensor | None = None,
    ) -> Tensor:
        given = (
            A, B, shapeB, absmax, blocksize, quant_type,
            bias, absmax_8bit, absmax_code, absmax_offset,
        )  # fmt: skip
        # bitsandbytes' own CPU kernel computes forward-mode derivatives.
        if not is_ours(A) or _private.in_forward_ad():
            return original(*given)
        if absmax_8bit is None:
            scales, nested_blocksize = (absmax, None, None, None), 0
        else:
            scales = (absmax_8bit, absmax, absmax_code, absmax_offset)
            nested_blocksize = NESTED_BLOCKSIZE
        spec = Spec.of(shapeB, quant_type, blocksize, nested_blocksize)
        weight = WeightParts(as_bytes(B), *scales, None, spec)
        y = own_kernels.linear(A, bias, weight)
        if y is not None:
            return y
        if A.is_cuda and _kernels.takes_dense(A, weight):
            return original(*given)
        return _kernels.general_linear(A, bias, weight.with_float_scales())

    return gemm_4bit


def _dequantize_4bit(original: Callable[..., Any]) -> Callable[..., Tensor | None]:
    """Also serves the overload with `out`, which returns nothing."""

    def dequantize_4bit(
        A: Tensor,
        absmax: Tensor,
        blocksize: int,
        quant_type: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        *out: Tensor,
    ) -> Tensor | None:
        if is_ours(A):
            spec = Spec.of(shape, quant_type, blocksize, 0)
            flat = WeightParts(as_bytes(A), absmax, None, None, None, None, spec)
            made = _kernels.dequantize(flat.with_float_scales(), dtype, *out)
        else:
            made = original(A, absmax, blocksize, quant_type, shape, dtype, *out)
        return None if out else made

    return dequantize_4bit


OPERATORS = {
    "gemm_4bit": (_GEMM, _gemm_4bit),
    "dequantize_4bit": (_DEQUANTIZE, _dequantize_4bit),
    "dequantize_4bit.out": ((*_DEQUANTIZE, "out"), _dequantize_4bit),
}


def _problem(name: str, expected: Sequence[str], version: str) -> str | None:
    """Says why an operator of the imported bitsandbytes cannot be served; None if it can."""
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.bitsandbytes, base, None)
    if packet is None or (overload or "default") not in packet.overloads():
        return f"bitsandbytes {version} has none; {OLDEST_BITSANDBYTES} and later have"
    found = _private.argument_names(getattr(packet, overload or "default"))
    if found != list(expected):
        others = ", ".join(found) if found else "unknown to this torch"
        return f"that of bitsandbytes {version} takes other arguments: {others}"
    return None


def _no_kernel(*_arguments: Any) -> None:
    raise NotImplementedError("bitsandbytes has no kernel of its own here")


def _original(name: str, key: str) -> Callable[..., Any]:
    """Returns the kernel that was registered before."""
    try:
        kernel = torch.library.get_kernel(f"bitsandbytes::{name}", key)
    except RuntimeError:
        return _no_kernel
    return functools.partial(kernel.call_boxed, _private.keyset(key))


def serve(library: torch.library.Library, name: str, device: str) -> None:
    key = _DISPATCH_KEYS[device]
    kernel = OPERATORS[name][1](_original(name, key))
    with warnings.catch_warnings():
        # torch warns of every kernel that replaces another. These do so on purpose.
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        library.impl(name, _kernels.uncompiled(kernel), key, allow_override=True)


def left_alone(version: str) -> dict[str, str]:
    """Returns why operators cannot be served, by name."""
    problems = {
        name: _problem(name, expected, version) for name, (expected, _) in OPERATORS.items()
    }
    return {name: problem for name, problem in problems.items() if problem is not None}
