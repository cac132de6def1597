"""The operators of _operators below autograd, on real tensors: what a compiler's graph has of them.

    _linear(Tensor x, Tensor? bias, WEIGHT) -> Tensor
    _dense_like(Tensor like, WEIGHT) -> Tensor

WEIGHT is the eleven arguments that `numbers` makes of the ten of _kernels. They are C++ where the
extension module was built, so that a graph's calls run no Python, and otherwise kernels of
_kernels. torch keeps compiled graphs on disk, so what an operator of one of these names does must
never change, nor its arguments.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch

from nf4 import _convert, _prepared
from nf4._load import library
from nf4.errors import LibraryNotFound

_WEIGHT = (
    "Tensor packed, Tensor absmax, Tensor? nested_absmax, Tensor? nested_code, "
    "Tensor? nested_offset, Tensor? codebook, int rows, int cols, int format, int blocksize, "
    "int nested_blocksize"
)
_SCHEMAS = (
    f"_linear(Tensor x, Tensor? bias, {_WEIGHT}) -> Tensor",
    f"_dense_like(Tensor like, {_WEIGHT}) -> Tensor",
)

_library = torch.library.Library("nf4", "FRAGMENT")
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

linear = torch.ops.nf4._linear.default
dense_like = torch.ops.nf4._dense_like.default


def rows_and_cols(shape: Sequence[int]) -> tuple[int, int]:
    """Those of the matrix that a weight of this shape is."""
    if len(shape) == 2:
        return shape[0], shape[1]
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def format_code(format: str) -> int:
    return _convert.FORMATS.get(format) or _convert.format_code(format)


def numbers(weight: Sequence[Any]) -> tuple[Any, ...]:
    """The weight's ten arguments with numbers for its shape and format."""
    packed, absmax, nested_absmax, code, offset, codebook, shape, format, block, nested = weight
    rows, cols = rows_and_cols(shape)
    number = format_code(format)
    return packed, absmax, nested_absmax, code, offset, codebook, rows, cols, number, block, nested


def words(numbers: Sequence[Any]) -> tuple[Any, ...]:
    """The ten arguments that these eleven came from, but for the shape's further dimensions."""
    *parts, rows, cols, number, blocksize, nested_blocksize = numbers
    name = next((name for name, each in _convert.FORMATS.items() if each == number), number)
    return *parts, (rows, cols), name, blocksize, nested_blocksize


def address(libraries: Sequence[ctypes.CDLL], name: str) -> int:
    """Of the function of this name; 0 if there is none."""
    for each in libraries:
        if hasattr(each, name):
            return ctypes.cast(getattr(each, name), ctypes.c_void_p).value or 0
    return 0


def _register() -> bool:
    """Did torch take the kernels in C++, for all devices that it has?"""
    module = _prepared._nf4_fast
    if module is None:
        return False
    try:
        own = library()
        of_torch = [ctypes.CDLL("libtorch_cpu.so")]  # which torch has loaded
        if torch.version.cuda:
            of_torch.append(ctypes.CDLL("libtorch_cuda.so"))
    except (LibraryNotFound, OSError):
        return False
    names, own_names = module.operator_functions()
    addresses = [address(of_torch, name) for name in names]
    needed = addresses if torch.version.cuda else addresses[:-1]
    if not all(needed):
        return False
    module.register_operators(addresses, [address([own], name) for name in own_names])
    return True


registered = _register()
