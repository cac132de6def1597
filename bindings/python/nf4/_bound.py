"""A weight made ready for the C library: its nf4_tensor, filled in and checked once.

The first use of a QuantizedTensor looks at its parts; all later ones only ask torch tensors
whether their memory has moved, and check what is new: the output.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from nf4 import _convert, _memory, _torch
from nf4._memory import Buffer
from nf4.errors import InvalidArgument
from nf4.tensor import BOUND, QuantizedTensor

_WRITTEN = ("packed", "absmax", "nested_absmax", "nested_offset")


class Bound:
    """What is known of a weight. Nothing in it changes, so threads may share it."""

    __slots__ = (
        "_descriptor",
        "argument",
        "dtype",
        "elements",
        "moving",
        "on_device",
        "parts",
        "shape",
        "torch",
    )

    def __init__(self, weight: QuantizedTensor) -> None:
        self.parts = _parts(weight)
        self.on_device = _memory.place(self.parts)
        self.shape, self.dtype, self.elements = weight.shape, weight.dtype, weight.elements
        self.torch = _torch.device_of(weight.packed)
        self._descriptor = weight.descriptor()
        for part in self.parts:
            setattr(self._descriptor, part.name, part.address)
        # A c_void_p is passed on as it is; byref() would be looked at in each call.
        self.argument = ctypes.c_void_p(ctypes.addressof(self._descriptor))
        # A torch.nn.Module that is moved gives its tensors other memory. Each part is watched:
        # a large one may well be back where it was, and the small ones not.
        self.moving = tuple(
            (part.owner.data_ptr, part.address)
            for part in self.parts
            if _torch.is_tensor(part.owner)
        )

    def require_writable(self) -> None:
        """Raises InvalidArgument if a part that quantize writes is read-only."""
        for part in self.parts:
            if part.name in _WRITTEN:
                part.require_writable()

    def target(self, out: Any, dtype: Any) -> _torch.Target:
        """An `out` that was given, checked. dtype may be None: that of out, or else of the
        weight."""
        if self.torch is not None:
            plain = self.torch.plain_output(out, dtype, self.elements)
            if plain is not None:
                return plain
        return self._checked_target(out, dtype)

    def _checked_target(self, out: Any, dtype: Any) -> _torch.Target:
        wanted = None if dtype is None else _convert.dtype_name(dtype)
        buffer = _memory.buffer("out", out)
        if wanted is None:
            wanted = buffer.dtype if buffer.dtype in _convert.DTYPES else self.dtype
        buffer.expect(wanted, self.elements, written=True)
        on_device = self.on_device
        if on_device is not buffer.on_device:
            on_device = _memory.on_device([*self.parts, buffer])
        return (
            buffer.address,
            _convert.DTYPE_ARGUMENTS[wanted],
            on_device is not False,
            self.torch or _torch.device_of(out),
        )

    def new_output(self, dtype: Any, stream: int | None) -> tuple[Any, _torch.Target]:
        """An output of the weight's shape where the weight lives, for work on `stream`: a torch
        tensor if `packed` is one, or else, in host memory, a numpy array."""
        name = self.dtype if dtype is None else _convert.dtype_name(dtype)
        code = _convert.DTYPE_ARGUMENTS[name]
        if self.torch is not None:
            tensor = self.torch.empty(self.shape, name, stream)
            return tensor, (tensor.data_ptr(), code, self.torch.is_cuda, self.torch)
        if self.on_device is not False:
            raise InvalidArgument("out is None; expected an array of device memory")
        try:
            array = np.empty(self.shape, _convert.NUMPY_DTYPES[name])
        except ValueError as error:
            raise InvalidArgument(f"shape of {len(self.shape)} dimensions: {error}") from None
        return array, (_memory.numpy_address(array), code, False, None)


def _parts(weight: QuantizedTensor) -> list[Buffer]:
    """The buffers of a weight, each checked for type and size."""
    counts = weight.sizes
    expected = [
        ("packed", "uint8", counts.packed_bytes),
        ("absmax", "uint8" if weight.nested else "fp32", counts.blocks),
    ]
    if weight.nested:
        expected += [
            ("nested_absmax", "fp32", counts.nested_blocks),
            ("nested_code", "fp32", 256),
            ("nested_offset", "fp32", 1),
        ]
    if weight.codebook is not None:
        expected.append(("codebook", "fp32", 16))
    return [
        _memory.buffer(name, getattr(weight, name)).expect(dtype, elements)
        for name, dtype, elements in expected
    ]


def bound(weight: QuantizedTensor) -> Bound:
    """The Bound of a weight, made at its first use and anew where its memory has moved. Threads
    that come here at once may each make one; they are alike. Raises InvalidArgument for a part
    that is of another type or size than the weight says."""
    found = weight.__dict__.get(BOUND)
    if found is not None:
        for address_now, address in found.moving:
            if address_now() != address:
                break
        else:
            return found
    found = weight.__dict__[BOUND] = Bound(weight)
    return found
