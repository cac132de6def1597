"""libnf4's kernels behind bitsandbytes' operators: code built on bitsandbytes (transformers'
load_in_4bit, PEFT, TRL) runs on them unchanged.

When bitsandbytes is imported, it calls nf4's entry point bitsandbytes.backends, which calls
`register`.

Served, on the CPU and on GPUs that libnf4 has kernels for:
    gemm_4bit           x W^T + bias, flat or nested. fp32 on a GPU stays with bitsandbytes
    dequantize_4bit     and its .out: bit-equal to bitsandbytes' CUDA kernels
    functional.dequantize_4bit
                        the function that is given the QuantState. bitsandbytes dequantizes nested
                        scales in two launches of their own first; here one fused kernel does all,
                        with the same bits
    nn.modules.has_avx512bf16
                        answers no, so that a Linear4bit in eval mode on the CPU keeps its bytes.
                        bitsandbytes would repack them, and round the scales to bf16
Scales in fp16 or bf16 are cast to float32.

Left alone:
    quantize_4bit       bitsandbytes' backends differ in the codes of ties and of zero blocks
    gemv_4bit           on CPUs it takes the repacked layout; on GPUs no layer calls it any more
    the 8-bit operators, optimizers and quantize_blockwise
"""

from __future__ import annotations

import functools
import importlib.metadata
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import nf4
from nf4._versions import OLDEST_BITSANDBYTES
from nf4.torch import _fast, _kernels, _operators, _private, _schemas, _state  # noqa: F401  kernels are registered
from nf4.torch._checks import DTYPES
from nf4.torch._state import as_bytes
from nf4.torch._weight import Spec, WeightParts

_NESTED_BLOCKSIZE = 256
_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
_GEMM = (
    "A", "B", "shapeB", "absmax", "blocksize", "quant_type",
    "bias", "absmax_8bit", "absmax_code", "absmax_offset",
)  # fmt: skip
_DEQUANTIZE = ("A", "absmax", "blocksize", "quant_type", "shape", "dtype")


class Served(NamedTuple):
    """What libnf4 serves in this process.

    operators   the devices of each, by name
    left_alone  why each of the others is not served, by name
    functions   bitsandbytes' Python functions that were replaced
    """

    operators: dict[str, list[str]]
    left_alone: dict[str, str]
    functions: list[str]


# ---- Where libnf4 can run --------------------------------------------------------------


_usable_gpus: dict[int, bool] = {}


def _usable_gpu(index: int) -> bool:
    """Has libnf4 kernels that run on this GPU? Asked at the first call and not when bitsandbytes
    is imported, as the question initialises CUDA."""
    known = _usable_gpus.get(index)
    # Dynamo cannot trace the question: what is compiled before any eager call stays with
    # bitsandbytes.
    if known is not None or torch.compiler.is_compiling():
        return bool(known)
    found = nf4.device_info(index)
    if not found.usable:
        warnings.warn(
            f"libnf4 leaves GPU {index} to bitsandbytes' own kernels: {found.reason}", stacklevel=2
        )
    _usable_gpus[index] = found.usable
    return found.usable


def _is_ours(tensor: Tensor) -> bool:
    device = tensor.device
    return device.type == "cpu" or (device.type == "cuda" and _usable_gpu(device.index))


def _device_types() -> list[str]:
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
        if not _is_ours(A) or (A.is_cuda and A.dtype == torch.float32):
            return original(
                A, B, shapeB, absmax, blocksize, quant_type,
                bias, absmax_8bit, absmax_code, absmax_offset,
            )  # fmt: skip
        if absmax_8bit is None:
            scales, nested_blocksize = (absmax, None, None, None), 0
        else:
            scales = (absmax_8bit, absmax, absmax_code, absmax_offset)
            nested_blocksize = _NESTED_BLOCKSIZE
        spec = Spec.of(shapeB, quant_type, blocksize, nested_blocksize)
        weight = WeightParts(as_bytes(B), *scales, None, spec)
        y = _fast.linear(A, bias, weight)
        return _kernels.general_linear(A, bias, weight.with_float_scales()) if y is None else y

    return gemm_4bit


def _flat(
    A: Tensor, absmax: Tensor, blocksize: int, quant_type: str, shape: Sequence[int]
) -> WeightParts:
    spec = Spec.of(shape, quant_type, blocksize, 0)
    return WeightParts(as_bytes(A), absmax, None, None, None, None, spec).with_float_scales()


def _dequantize_4bit(original: Callable[..., Any]) -> Callable[..., Tensor]:
    def dequantize_4bit(
        A: Tensor,
        absmax: Tensor,
        blocksize: int,
        quant_type: str,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> Tensor:
        if not _is_ours(A):
            return original(A, absmax, blocksize, quant_type, shape, dtype)
        return _kernels.dequantize(_flat(A, absmax, blocksize, quant_type, shape), dtype)

    return dequantize_4bit


def _dequantize_4bit_out(original: Callable[..., Any]) -> Callable[..., None]:
    def dequantize_4bit_out(
        A: Tensor,
        absmax: Tensor,
        blocksize: int,
        quant_type: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        out: Tensor,
    ) -> None:
        if not _is_ours(A):
            original(A, absmax, blocksize, quant_type, shape, dtype, out)
            return
        _kernels.dequantize(_flat(A, absmax, blocksize, quant_type, shape), dtype, out)

    return dequantize_4bit_out


_OPERATORS = {
    "gemm_4bit": (_GEMM, _gemm_4bit),
    "dequantize_4bit": (_DEQUANTIZE, _dequantize_4bit),
    "dequantize_4bit.out": ((*_DEQUANTIZE, "out"), _dequantize_4bit_out),
}


def _problem(name: str, expected: Sequence[str], version: str) -> str | None:
    """Why an operator of the imported bitsandbytes cannot be served; None if it can."""
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
    """The kernel that was there before."""
    try:
        kernel = torch.library.get_kernel(f"bitsandbytes::{name}", key)
    except RuntimeError:
        return _no_kernel
    return functools.partial(kernel.call_boxed, _private.keyset(key))


def _serve(library: torch.library.Library, name: str, device: str) -> None:
    key = _DISPATCH_KEYS[device]
    kernel = _OPERATORS[name][1](_original(name, key))
    with warnings.catch_warnings():
        # torch warns of every kernel that replaces another, which these do on purpose.
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        library.impl(name, _kernels.uncompiled(kernel), key, allow_override=True)


# ---- The functions ---------------------------------------------------------------------


def _is_nested(state: Any) -> bool:
    """Is this a double-quantized QuantState as bitsandbytes makes them?"""
    return (
        getattr(state, "nested", False)
        and state.quant_type in ("nf4", "fp4")
        and state.dtype in DTYPES
        and state.absmax.dtype == torch.uint8
        and state.state2.dtype == torch.float32  # else the scales are rounded on the way
        and all(
            part.dtype in DTYPES for part in (state.offset, state.state2.absmax, state.state2.code)
        )
    )


def _dequantize_function(original: Callable[..., Any]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def dequantize_4bit(
        A: Tensor, quant_state: Any = None, absmax: Any = None, out: Any = None, *rest: Any, **more
    ) -> Tensor:
        if out is not None or not _is_nested(quant_state) or not _is_ours(A):
            return original(A, quant_state, absmax, out, *rest, **more)
        weight = _state.parts_of(A, quant_state)
        result = _operators.dequantize(weight, quant_state.dtype)
        return result.t() if A.shape[0] == 1 else result

    return dequantize_4bit


def _keeps_its_bytes() -> bool:
    """Replaces has_avx512bf16 where a Linear4bit asks whether to repack its weight."""
    return False


class _Replaced(NamedTuple):
    """A function of bitsandbytes' Python: where it is, its name, and what was there."""

    module: Any
    name: str
    original: Any

    @classmethod
    def by(cls, module: Any, name: str, ours: Callable[..., Any]) -> _Replaced:
        original = getattr(module, name)
        setattr(module, name, ours)
        return cls(module, name, original)

    def full_name(self) -> str:
        return f"{self.module.__name__.removeprefix('bitsandbytes.')}.{self.name}"


def _replace_functions(bitsandbytes: Any) -> list[_Replaced]:
    functional, modules = bitsandbytes.functional, bitsandbytes.nn.modules
    dequantize = _dequantize_function(functional.dequantize_4bit)
    replaced = [_Replaced.by(functional, "dequantize_4bit", dequantize)]
    if hasattr(modules, "has_avx512bf16"):
        replaced.append(_Replaced.by(modules, "has_avx512bf16", _keeps_its_bytes))
    return replaced


# ---- Registration ----------------------------------------------------------------------


class _Active(NamedTuple):
    library: torch.library.Library  # takes its registrations along when it goes
    served: Served
    replaced: list[_Replaced]


_active: _Active | None = None


def served() -> Served | None:
    """None where bitsandbytes runs on its own kernels."""
    return None if _active is None else _active.served


def _version() -> str:
    try:
        return importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def register() -> Served:
    """Puts libnf4's kernels behind bitsandbytes' operators in this process, and returns which. A
    second call changes nothing. An operator that this bitsandbytes lacks, or has with other
    arguments, is left alone, with a warning.

    Raises LibraryNotFound, and ImportError without bitsandbytes.
    """
    global _active
    if _active is None:
        import bitsandbytes

        # Its import may have called this function already, by the entry point.
        if _active is None:
            _active = _activated(bitsandbytes)
    return _active.served


def _activated(bitsandbytes: Any) -> _Active:
    devices = _device_types()
    left_alone = _left_alone()
    operators = {name: devices for name in _OPERATORS if name not in left_alone}
    library = torch.library.Library("bitsandbytes", "IMPL")
    try:
        for name in operators:
            for device in devices:
                _serve(library, name, device)
        replaced = _replace_functions(bitsandbytes) if "gemm_4bit" in operators else []
    except BaseException:
        _private.destroy(library)  # all of it or nothing
        raise
    names = [each.full_name() for each in replaced]
    return _Active(library, Served(operators, left_alone, names), replaced)


def _left_alone() -> dict[str, str]:
    """Why each operator that cannot be served is not, with a warning."""
    version = _version()
    problems = {
        name: _problem(name, expected, version) for name, (expected, _) in _OPERATORS.items()
    }
    found = {name: problem for name, problem in problems.items() if problem is not None}
    for name, problem in found.items():
        warnings.warn(f"libnf4 does not serve {name}: {problem}", stacklevel=4)
    return found


def unregister() -> None:
    """Gives bitsandbytes its own kernels back, for a comparison for example. Layers that were made
    meanwhile keep their bytes."""
    global _active
    if _active is None:
        return
    for each in _active.replaced:
        setattr(each.module, each.name, each.original)
    _private.destroy(_active.library)
    _active = None
