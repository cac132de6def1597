"""Puts libnf4's kernels behind bitsandbytes' operators: code built on bitsandbytes (transformers'
load_in_4bit, PEFT, TRL) runs on them unchanged.

When bitsandbytes is imported, it calls nf4's entry point bitsandbytes.backends, which calls
`register`.

Served, on the CPU and on GPUs that libnf4 has kernels for:
    gemm_4bit           x W^T + bias, flat or nested. On a GPU where libnf4's own kernel is not
                        expected to be faster (nf4_matmul_path in nf4.h), bitsandbytes' kernel
                        where it has one for so many rows of x, else a dense product with libnf4's
                        dequantize
    dequantize_4bit     and its .out: bit-equal to bitsandbytes' CUDA kernels
    functional.dequantize_4bit
                        the function that takes a QuantState. bitsandbytes dequantizes nested scales
                        in two launches of their own first; here one fused kernel does all,
                        bit-equal
    nn.modules.Linear4bit.forward, matmul_4bit, autograd._functions.MatMul4Bit.apply
                        the path to gemm_4bit in eager mode, with the host overhead of an NF4Linear;
                        libnf4's operators where torch.compile traces
    nn.modules.has_avx512bf16
                        returns False, so that a Linear4bit in eval mode on the CPU keeps its bytes.
                        bitsandbytes would repack them, and round the scales to bf16. A layer that
                        is repacked already stays with bitsandbytes
Scales in fp16 or bf16 are cast to float32.

Left alone:
    quantize_4bit       bitsandbytes' backends disagree on the codes of ties and of zero blocks
    gemv_4bit           on CPUs it takes the repacked layout; on GPUs no layer calls it any more
    the 8-bit operators, optimizers and quantize_blockwise
    functions whose source replacements.py does not know, and patched ones

Files: operators.py (kernels), replacements.py (which functions), eager.py, traced.py and
dequantize.py (what takes their place), own_kernels.py (bitsandbytes' own kernels).
"""

from __future__ import annotations

import importlib.metadata
import warnings
from typing import Any, NamedTuple

import _nf4_quiet
import torch

from nf4.torch import _operators, _private, _schemas  # noqa: F401  kernels are registered
from nf4.torch.bitsandbytes import operators, replacements


class Served(NamedTuple):
    """The operators and functions that libnf4 serves in this process.

    operators   the devices of each, by name
    left_alone  why each of the other operators and functions is not served, by name
    functions   bitsandbytes' Python functions that were replaced
    """

    operators: dict[str, list[str]]
    left_alone: dict[str, str]
    functions: list[str]


class _Active(NamedTuple):
    library: torch.library.Library  # deleting it removes its registrations
    served: Served
    replaced: list[replacements.Replaced]


_active: _Active | None = None


def served() -> Served | None:
    """Returns what libnf4 serves; None if bitsandbytes runs on its own kernels."""
    return None if _active is None else _active.served


def _version() -> str:
    try:
        return importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def register() -> Served:
    """Puts libnf4's kernels behind bitsandbytes' operators in this process, and returns what is
    served. A second call changes nothing. An operator that this bitsandbytes lacks, or that has
    other arguments, is left alone, with a warning; so are functions whose source is unknown.

    Raises LibraryNotFound, and ImportError if bitsandbytes is missing.
    """
    global _active
    if _active is None:
        _nf4_quiet.hold_back()
        try:
            import bitsandbytes

            # Importing it may have called this function already, through the entry point.
            if _active is None:
                _active = _activated(bitsandbytes)
        finally:
            served = _active is not None and "gemm_4bit" in _active.served.operators
            _nf4_quiet.release(served)
    return _active.served


def _left_alone(bitsandbytes: Any) -> dict[str, str]:
    """Returns why each operator and function cannot be served, and warns of them."""
    version = _version()
    found = operators.left_alone(version)
    for name, problem in found.items():
        warnings.warn(f"libnf4 does not serve {name}: {problem}", stacklevel=4)
    unknown = replacements.unknown(bitsandbytes, version)
    if unknown:
        why = next(iter(unknown.values()))
        warnings.warn(f"libnf4 leaves {', '.join(unknown)} alone: {why}", stacklevel=4)
    return found | unknown


def _activated(bitsandbytes: Any) -> _Active:
    devices = operators.device_types()
    left_alone = _left_alone(bitsandbytes)
    served = {name: devices for name in operators.OPERATORS if name not in left_alone}
    library = torch.library.Library("bitsandbytes", "IMPL")
    replaced: list[replacements.Replaced] = []
    try:
        for name in served:
            for device in devices:
                operators.serve(library, name, device)
        if "gemm_4bit" in served:
            replacements.replace(bitsandbytes, left_alone, replaced)
    except BaseException:
        _give_back(library, replaced)  # all of it or nothing
        raise
    names = [each.name for each in replaced]
    return _Active(library, Served(served, left_alone, names), replaced)


def _give_back(library: torch.library.Library, replaced: list[replacements.Replaced]) -> None:
    replacements.give_back(replaced)
    _private.destroy(library)


def unregister() -> None:
    """Restores bitsandbytes' own kernels, for example to compare. Layers made meanwhile keep their
    bytes, and patches made since stay."""
    global _active
    if _active is not None:
        _give_back(_active.library, _active.replaced)
        _active = None
