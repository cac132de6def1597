"""A weight made ready for the C library: its nf4_tensor or nf4_int4_tensor, filled in and checked
once.

The first use of a weight reads its parts. Later uses only ask tensors whether their
memory has moved. The extension module _nf4_fast, where it was built, does that and calls
dequantize for common and faultless arguments.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from ctypes import Structure
from typing import TYPE_CHECKING, Any

from nf4 import _call, _convert
from nf4._args import GRAD_NAMES, PRODUCT_NAMES, matmul_args
from nf4._load import Functions, functions
from nf4._operand import Operand, locate, read
from nf4.errors import InvalidArgument
from nf4.typing import CudaStreamLike, DTypeLike
from nf4.weight import PREPARED, PREPARED_STACK, Weight, no_weight

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

try:
    import _nf4_fast
except ImportError:  # built without Python's headers
    _nf4_fast = None


class Prepared:
    """What is known of a weight. Nothing in it changes, so threads may share it.

    parts             the weight's Operands
    located           one of them that says where they are, which a raw address does not
    torch             the device of torch where `packed` is a tensor, else None
    argument          the nf4_tensor or nf4_int4_tensor, as a pointer
    functions         of C for this kind of weight
    in_place()        is the memory of each tensor where it was?
    launch(out, dtype, stream)
                      dequantizes; gives the status, or None where nothing was done and the
                      arguments have to be checked one by one
    matmul_workspace(dtype, m, x_stride, y_stride, rank=0, gradient=False)
                      bytes of workspace that matmul or matmul_grad needs on a GPU
    """

    __slots__ = (
        "_descriptor",
        "_new_default",
        "argument",
        "cols",
        "dtype",
        "elements",
        "functions",
        "in_place",
        "launch",
        "located",
        "matmul_workspace",
        "parts",
        "rows",
        "shape",
        "torch",
    )

    def __init__(self, weight: Weight[Any]) -> None:
        self.shape, self.dtype, self.elements = weight.shape, weight.dtype, weight.elements
        self._descriptor = weight.descriptor()
        self.functions = functions(weight.prefix)
        # A c_void_p passes as it is; byref() would be converted in each call.
        self.argument = ctypes.c_void_p(ctypes.addressof(self._descriptor))
        self.rows, self.cols = self._descriptor.rows, self._descriptor.cols
        self.parts = _read_parts(weight)
        for part in self.parts:
            setattr(self._descriptor, part.name, part.address)
        self.located = locate(self.parts)
        self.torch = self.parts[0].torch
        self._new_default = None
        if self.torch is not None:
            self._new_default = self.torch.maker(self.shape, self.dtype)
        size_of = functools.partial(_matmul_workspace, self.functions, self._descriptor)
        self.matmul_workspace = functools.lru_cache(maxsize=64)(size_of)
        # torch.nn.Module.to() gives tensors other memory. Each part is watched: a large one may
        # well get its old address back, and the small ones not.
        tensors = [part for part in self.parts if part.torch is not None]
        fast = self._fast(tensors)
        if fast is not None:
            self.in_place, self.launch = fast.in_place, fast.launch
        else:
            addresses = tuple((part.owner.data_ptr, part.address) for part in tensors)
            self.in_place, self.launch = functools.partial(_in_place, addresses), _no_launch

    def _fast(self, tensors: list[Operand]) -> Any:
        """An _nf4_fast.Weight, or None where that is of no use."""
        if _nf4_fast is None or bool(tensors) != (self.torch is not None):
            return None
        device = self.located.on_device is not False
        function = self.functions.dequant.launch if device else self.functions.dequant.cpu
        try:
            return _nf4_fast.Weight(
                self._descriptor,
                self.argument.value,
                ctypes.cast(function, ctypes.c_void_p).value,
                self.elements,
                _convert.DTYPES[self.dtype],
                device,
                self.torch.numbers if self.torch else _convert.DTYPES,
                self.torch.tensor_type if self.torch else None,
                tuple(part.owner for part in tensors),
                tuple(part.address for part in tensors),
            )
        except (AttributeError, BufferError, RuntimeError):  # torch without DLPack's exchange
            return None

    def new_output(
        self, dtype: DTypeLike | None, stream: CudaStreamLike | None
    ) -> np.ndarray | Tensor:
        """An output of the weight's shape where the weight is, for work on `stream`."""
        if self._new_default is not None and dtype is None:
            if stream is None or not self.located.on_device:
                return self._new_default()
        name = self.dtype if dtype is None else _convert.dtype_name(dtype)
        handle = None if stream is None else _call.stream_handle(stream)
        return _call.new_output(self.shape, name, self.torch, self.located.on_device, handle)


def _in_place(addresses: Iterable[tuple[Callable[[], int], int]]) -> bool:
    for address_now, address in addresses:  # all() of a generator takes twice as long
        if address_now() != address:
            return False
    return True


def _no_launch(_out: object, _dtype: object, _stream: object) -> None:
    """Prepared.launch without the extension module."""


def _matmul_workspace(
    functions: Functions,
    descriptor: Structure,
    dtype: int,
    m: int,
    x_stride: int,
    y_stride: int,
    rank: int = 0,
    gradient: bool = False,
) -> int:
    args = matmul_args(descriptor, dtype, m, x_stride, y_stride, rank)
    arguments = ctypes.byref(descriptor), ctypes.byref(args)
    if gradient:
        return _call.workspace_bytes(functions.matmul_grad, arguments, GRAD_NAMES)
    return _call.workspace_bytes(functions.matmul, arguments, PRODUCT_NAMES)


def _read_parts(weight: Weight[Any]) -> list[Operand]:
    """The parts of a weight, each checked for dtype and size."""
    parts: list[Operand] = []
    for part in weight.parts():
        torch = parts[0].torch if parts else None
        found = read(part.name, getattr(weight, part.name), torch)
        if part.shape is not None:
            found.expect_shape(part.shape)
        parts.append(found.expect(part.dtype, part.elements))
    return parts


def prepare(weight: Weight[Any], name: str = "weight") -> Prepared:
    """The Prepared of a weight: made at its first use, and anew where its memory has moved.
    Threads that come here at once may each make one; they are alike. `name` is the argument's,
    for messages. Raises InvalidArgument for a part of another dtype or size than the weight
    says, and for what is not a weight."""
    try:
        found = weight.__dict__.get(PREPARED)
    except AttributeError:
        raise no_weight(name, weight) from None
    if found is None or not found.in_place():
        if not isinstance(weight, Weight):
            raise no_weight(name, weight)
        if weight.is_stack:
            raise InvalidArgument(
                f"{name} is of shape {weight.shape}, a stack of experts; expected one expert"
            )
        found = weight.__dict__[PREPARED] = Prepared(weight)
    return found


def prepare_stack(weight: Weight[Any]) -> Prepared:
    """The same of a stack of experts, of either kind."""
    if not weight.is_stack:
        return prepare(weight)
    found = weight.__dict__.get(PREPARED_STACK)
    if found is None or not found.in_place():
        found = weight.__dict__[PREPARED_STACK] = Prepared(weight)
    return found
