"""Integers, shapes, formats and dtypes as C takes them.

ctypes truncates an integer that is too wide; here it is an error.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from nf4 import _abi
from nf4._formats import FORMATS, ROWS, SCALE_RULES
from nf4.errors import InvalidArgument, shown

# The nf4_int4_layout, and what is added to the zeros that it stores.
INT4_LAYOUTS = {
    "gptq": (_abi.INT4_GPTQ, 1),
    "gptq_v2": (_abi.INT4_GPTQ, 0),
    "awq": (_abi.INT4_AWQ, 0),
    "compressed-tensors": (_abi.INT4_COMPRESSED_TENSORS, 0),
}
DTYPES = {"fp32": _abi.DTYPE_FP32, "fp16": _abi.DTYPE_FP16, "bf16": _abi.DTYPE_BF16}
NUMPY_DTYPES = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "uint8": np.dtype(np.uint8),
    "int32": np.dtype(np.int32),
}
_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}


def integer(name: str, value: Any, bits: int) -> int:
    """An int that fits a signed C integer of this many bits."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name} is {shown(value)}; expected an integer") from None
    limit = 1 << bits - 1
    if not -limit <= number < limit:
        raise InvalidArgument(f"{name} is {number}; expected a {bits}-bit integer")
    return number


def real(name: str, value: Any) -> float:
    """A float."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"{name} is {shown(value)}; expected a number") from None


def count(name: str, value: Any) -> int:
    """An integer of 0 or more."""
    number = integer(name, value, 64)
    if number < 0:
        raise InvalidArgument(f"{name} is {number}; expected 0 or more")
    return number


def shape(value: Any) -> tuple[int, ...]:
    """The dimensions of a weight, each a 64-bit int."""
    try:
        dimensions = tuple(value)
    except TypeError:
        raise InvalidArgument(f"shape is {shown(value)}; expected a sequence of integers") from None
    return tuple(integer("shape", extent, 64) for extent in dimensions)


def format_code(value: Any) -> int:
    """The nf4_format of a name."""
    if not isinstance(value, str) or value not in FORMATS:
        hint = (
            "; nf4.quantize_int4 makes integers"
            if isinstance(value, str) and value == "int4"
            else ""
        )
        raise InvalidArgument(f"format is {shown(value)}; expected {_one_of(FORMATS)}{hint}")
    return FORMATS[value]


def scale_rule(format: str, value: Any) -> int:
    """The scale_rule of an nf4_tensor of this format; None is the default."""
    rules = SCALE_RULES.get(format, {})
    if value is None:
        return 0
    if not isinstance(value, str) or value not in rules:
        expected = f"None or {_one_of(rules)}" if rules else f'None for "{format}"'
        raise InvalidArgument(f"scale_rule is {shown(value)}; expected {expected}")
    return rules[value]


def blocksizes(format: Any, blocksize: Any, nested_blocksize: Any) -> tuple[int, int]:
    """Both as 32-bit integers. None is the format's default."""
    format_code(format)
    given = {"blocksize": blocksize, "nested_blocksize": nested_blocksize}
    defaults = ROWS[format].blocksizes[0], ROWS[format].nested_blocksize
    first, second = (
        default if value is None else integer(name, value, 32)
        for (name, value), default in zip(given.items(), defaults, strict=True)
    )
    return first, second


def _one_of(names: Iterable[str]) -> str:
    *first, last = (f'"{name}"' for name in names)
    return f"{', '.join(first)} or {last}"


def int4_layout(value: Any) -> tuple[int, int]:
    """The nf4_int4_layout of a name, and the zero_offset."""
    if not isinstance(value, str) or value not in INT4_LAYOUTS:
        raise InvalidArgument(f"layout is {shown(value)}; expected {_one_of(INT4_LAYOUTS)}")
    return INT4_LAYOUTS[value]


def numpy_dtype_name(dtype: np.dtype) -> str:
    """Our name of a dtype, such as "fp32", or else numpy's."""
    return _NAMES.get(dtype) or str(dtype)


def dtype_name(value: Any, argument: str = "dtype") -> str:
    """The name "fp32", "fp16" or "bf16" of that name or of a dtype of numpy or torch.
    `argument` is the caller's, for messages."""
    try:
        return _dtype_name(value)
    except TypeError:  # raised as well for what cannot be hashed, and every dtype can
        raise InvalidArgument(
            f'{argument} is {shown(value)}; expected "fp32", "fp16" or "bf16"'
        ) from None


@functools.lru_cache(maxsize=64, typed=True)
def _dtype_name(value: Any) -> str:
    """Raises TypeError for what is not one of these dtypes, so that no other value is cached and
    kept alive. An array has a dtype and is none."""
    if isinstance(value, str) and value in DTYPES:
        return value
    if type(value).__module__ == "torch":
        value = str(value).removeprefix("torch.")
    if not isinstance(value, (str, type, np.dtype)):
        raise TypeError
    try:
        name = numpy_dtype_name(np.dtype(value))
    except (ValueError, SyntaxError):
        raise TypeError from None
    if name not in DTYPES:
        raise TypeError
    return name
