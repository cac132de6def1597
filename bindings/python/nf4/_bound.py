"""A weight made ready for the C library: its nf4_tensor, filled in and checked once.

The first use of a QuantizedTensor looks at its parts; all later ones only ask torch tensors
whether their memory has moved, and check what is new: the output. Where the extension module
_nf4_fast was built, it does both for what is common and faultless.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import Any

from nf4 import _abi, _convert, _memory, _torch
from nf4._load import check, library
from nf4._memory import Buffer, Matrix
from nf4.errors import InvalidArgument
from nf4.tensor import BOUND, QuantizedTensor, no_weight

try:
    import _nf4_fast
except ImportError:  # built without Python's headers
    _nf4_fast = None

# Of a product's arguments that have others in C.
PRODUCT_NAMES = {
    "y": "out",
    "m * x_stride": "rows * stride of x",
    "m * y_stride": "rows * stride of out",
}
_WRITTEN = ("packed", "absmax", "nested_absmax", "nested_offset")


class Bound:
    """What is known of a weight. Nothing in it changes, so threads may share it."""

    __slots__ = (
        "_descriptor",
        "_new_usual",
        "argument",
        "cols",
        "dtype",
        "elements",
        "in_place",
        "launch",
        "on_device",
        "matmul_workspace",
        "parts",
        "rows",
        "shape",
        "torch",
    )

    def __init__(self, weight: QuantizedTensor) -> None:
        self.parts = _parts(weight)
        self.on_device = _memory.place(self.parts)
        self.shape, self.dtype, self.elements = weight.shape, weight.dtype, weight.elements
        self.torch = _torch.device_of(weight.packed)
        self._new_usual = self.torch and self.torch.maker(self.shape, self.dtype)
        self._descriptor = weight.descriptor()
        for part in self.parts:
            setattr(self._descriptor, part.name, part.address)
        # A c_void_p is passed on as it is; byref() would be looked at in each call.
        self.argument = ctypes.c_void_p(ctypes.addressof(self._descriptor))
        self.rows, self.cols = self._descriptor.rows, self._descriptor.cols
        # matmul_workspace(dtype, m, x_stride, y_stride): bytes
        size_of = functools.partial(_matmul_workspace, self._descriptor)
        self.matmul_workspace = functools.lru_cache(maxsize=64)(size_of)
        # A torch.nn.Module that is moved gives its tensors other memory. Each part is watched:
        # a large one may well be back where it was, and the small ones not.
        tensors = [part for part in self.parts if _torch.is_tensor(part.owner)]
        # in_place(): is each tensor's memory where it was? launch(out, dtype, stream): the
        # status, or None if nothing was done, and `target` has to look.
        fast = self._fast(tensors)
        if fast is not None:
            self.in_place, self.launch = fast.in_place, fast.launch
        else:
            addresses = tuple((part.owner.data_ptr, part.address) for part in tensors)
            self.in_place, self.launch = functools.partial(_in_place, addresses), _look_closer

    def _fast(self, tensors: list[Buffer]) -> Any:
        """This weight for _nf4_fast, or None where that is not of use."""
        if _nf4_fast is None or bool(tensors) != (self.torch is not None):
            return None
        on_device = self.on_device is not False
        function = library().nf4_dequant_launch if on_device else library().nf4_dequant_cpu
        try:
            return _nf4_fast.Weight(
                self._descriptor,
                self.argument.value,
                ctypes.cast(function, ctypes.c_void_p).value,
                self.elements,
                _convert.DTYPES[self.dtype],
                on_device,
                self.torch.codes if self.torch else _convert.DTYPES,
                self.torch.tensor_type if self.torch else None,
                tuple(part.owner for part in tensors),
                tuple(part.address for part in tensors),
            )
        except (AttributeError, BufferError, RuntimeError):  # torch without DLPack's exchange
            return None

    def written(self) -> list[Buffer]:
        """The parts that quantize writes. Raises InvalidArgument for one that is read-only."""
        parts = [part for part in self.parts if part.name in _WRITTEN]
        for part in parts:
            part.require_writable()
        return parts

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
            _convert.DTYPES[wanted],
            on_device is not False,
            self.torch or _torch.device_of(out),
        )

    def matrix(self, name: str, value: Any, columns: int, written: bool = False) -> Matrix:
        """As _memory.matrix, in less time for a plain tensor beside the weight."""
        plain = self.torch and self.torch.plain(value)
        if plain is not None:
            (address, dtype), shape = plain, tuple(value.shape)
            if shape[-1:] == (columns,):
                torch = self.torch
                return Matrix(address, dtype, shape, columns, torch.is_cuda, torch, value)
        return _memory.matrix(name, value, columns, written)

    def new_output(self, dtype: Any, stream: Any) -> Any:
        """An output of the weight's shape where the weight lives, for work on `stream`: a torch
        tensor if `packed` is one, or else, in host memory, a numpy array."""
        if self._new_usual is not None and dtype is None:
            if stream is None or not self.torch.is_cuda:
                return self._new_usual()
        name = self.dtype if dtype is None else _convert.dtype_name(dtype)
        if self.torch is not None:
            return self.torch.empty(self.shape, name, stream)
        if self.on_device is not False:
            raise InvalidArgument("out is None; expected an array of device memory")
        try:
            return _memory.new_output(self.shape, _convert.NUMPY_DTYPES[name])
        except ValueError as error:
            raise InvalidArgument(f"shape of {len(self.shape)} dimensions: {error}") from None


def _in_place(addresses: Iterable[tuple[Callable[[], int], int]]) -> bool:
    for address_now, address in addresses:  # all() of a generator takes twice as long
        if address_now() != address:
            return False
    return True


def _look_closer(_out: Any, _dtype: Any, _stream: Any) -> None:
    """Bound.launch where there is no faster way than Bound.target."""


def _matmul_workspace(
    descriptor: _abi.Tensor, dtype: int, m: int, x_stride: int, y_stride: int
) -> int:
    """Bytes of scratch that nf4_matmul_launch needs."""
    args = _abi.MatmulArgs(
        struct_size=ctypes.sizeof(_abi.MatmulArgs),
        dtype=dtype,
        m=m,
        x_stride=x_stride,
        y_stride=y_stride,
    )
    needed = ctypes.c_size_t()
    references = [ctypes.byref(each) for each in (descriptor, args, needed)]
    check(library().nf4_matmul_workspace_size(*references), PRODUCT_NAMES)
    return needed.value


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


def bound(weight: QuantizedTensor, name: str = "weight") -> Bound:
    """The Bound of a weight, made at its first use and anew where its memory has moved. Threads
    that come here at once may each make one; they are alike. `name` is the argument's, for
    messages. Raises InvalidArgument for a part that is of another type or size than the weight
    says, and for what is no weight."""
    try:
        found = weight.__dict__.get(BOUND)
    except AttributeError:
        raise no_weight(name, weight) from None
    if found is None or not found.in_place():
        if not isinstance(weight, QuantizedTensor):
            raise no_weight(name, weight)
        found = weight.__dict__[BOUND] = Bound(weight)
    return found
