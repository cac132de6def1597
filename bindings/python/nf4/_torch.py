"""torch: its tensors as memory, new tensors, and its current stream.

torch is never imported here: whoever passes a tensor has imported it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from nf4 import _convert
from nf4.errors import InvalidArgument, kind_of
from nf4.info import scale_code

if TYPE_CHECKING:
    import torch

_DTYPES = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "uint8": "uint8",
    "int32": "int32",
}


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    # Another thread may be in the middle of importing torch.
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a dtype, such as "fp32", or else torch's."""
    name = str(dtype).removeprefix("torch.")
    return next((ours for ours, theirs in _DTYPES.items() if theirs == name), name)


def fault(tensor: torch.Tensor) -> str | None:
    """Why a tensor is not plain memory, to be said after its name; None if it is."""
    module = sys.modules["torch"]
    if type(tensor).__torch_dispatch__ is not module.Tensor.__torch_dispatch__:
        return f"is {kind_of(tensor)}; expected a tensor with memory of its own"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"is on {tensor.device}; expected the CPU or CUDA"
    if tensor.layout is not module.strided:
        return f"is of layout {tensor.layout}; expected torch.strided"
    if tensor.requires_grad:
        return "requires grad; expected a detached tensor, as this function has no gradient"
    if tensor.is_neg():
        return "has its negative bit set; expected the result of resolve_neg()"
    return None


def memory_of(
    name: str, value: object
) -> tuple[int, str, tuple[int, ...], tuple[int, ...] | None, bool, Device] | None:
    """Of a tensor its address, dtype, shape, strides (None: contiguous), whether it is in device
    memory, and its Device; None of what is not a tensor. Raises InvalidArgument, by `name`."""
    if not is_tensor(value):
        return None
    why = fault(value)
    address = 0 if why else value.data_ptr()
    if not why and address == 0 and value.numel() != 0:
        why = "has no memory"
    if why:
        raise InvalidArgument(f"{name} {why}")
    strides = None if value.is_contiguous() else tuple(value.stride())
    dtype, shape = dtype_name(value.dtype), tuple(value.shape)
    return address, dtype, shape, strides, value.is_cuda, device_of(value)


def tell_of_writes(values: Iterable[object]) -> None:
    """Tells autograd that those of these that are tensors were written to. A backward pass that
    needs one as it was before then raises torch's RuntimeError."""
    for tensor in values:
        # No backward pass uses a tensor of inference mode.
        if tensor is not None and is_tensor(tensor) and not tensor.is_inference():
            sys.modules["torch"].autograd.graph.increment_version(tensor)


class Device:
    """A device of torch: what tensors on it are, new ones, and its current stream.

    names    our name of a dtype, by torch's dtype
    numbers  the nf4_dtype of a dtype, by our name and by torch's dtype
    """

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.tensor_type = module.Tensor
        self._torch = module
        self._index = device.index
        self._dtypes = {name: getattr(module, theirs) for name, theirs in _DTYPES.items()}
        self.names = {dtype: name for name, dtype in self._dtypes.items()}
        self.numbers = dict(_convert.DTYPES)
        self.numbers |= {self._dtypes[name]: number for name, number in _convert.DTYPES.items()}
        self._raw_stream = getattr(module._C, "_cuda_getCurrentRawStream", None)
        self._elements: dict[str, torch.Tensor] = {}
        # Products are of a few shapes, again and again.
        self._cached_maker = functools.lru_cache(maxsize=64)(self.maker)

    def current_stream(self) -> int:
        """The cudaStream_t that torch enqueues on."""
        # The raw getter is private and takes a fortieth of the time of the public one.
        if self._raw_stream is not None:
            return self._raw_stream(self._index)
        return self._torch.cuda.current_stream(self.device).cuda_stream

    def working_on(self, stream: int | None) -> contextlib.AbstractContextManager[object]:
        """torch's work in this context is enqueued on that stream, or on its current one."""
        if stream is None or not self.is_cuda:
            return contextlib.nullcontext()
        return self._allocating_on(stream)

    def _allocating_on(self, stream: int) -> contextlib.AbstractContextManager[object]:
        """What is allocated in this context belongs to that stream: torch reuses the memory in
        the order of that stream's work."""
        if stream == self.current_stream():
            return contextlib.nullcontext()
        # torch knows the legacy default stream as 0 and not by its other handle, 1.
        legacy = 1
        external = self._torch.cuda.ExternalStream(0 if stream == legacy else stream, self.device)
        return self._torch.cuda.stream(external)

    def empty(self, shape: int | tuple[int, ...], dtype: str, stream: int | None) -> torch.Tensor:
        """A new tensor for work on `stream`, which means nothing on the CPU."""
        with self.working_on(stream):
            return self._torch.empty(shape, dtype=self._dtypes[dtype], device=self.device)

    def _is_capturing(self) -> bool:
        return self.is_cuda and self._torch.cuda.is_current_stream_capturing()

    def maker(self, shape: tuple[int, ...], dtype: str) -> Callable[[], torch.Tensor]:
        """A function that makes tensors of this shape and dtype for work on the current stream.

        torch.empty_like of an example, here one element expanded to the shape, takes half the
        time of torch.empty, which parses three arguments."""
        element = self._elements.get(dtype)
        if element is None:
            element = self.empty((), dtype, None)
            # Neither what a mode gives for now is kept, nor memory that belongs to a graph.
            known = (
                type(element) is self.tensor_type
                and element.dtype == self._dtypes[dtype]
                and element.device == self.device
                and element.shape == ()
            )
            if not known or self._is_capturing():
                return functools.partial(self.empty, shape, dtype, None)
            self._elements[dtype] = element
        return functools.partial(
            self._torch.empty_like,
            element.expand(shape),
            memory_format=self._torch.contiguous_format,
        )

    def new(self, shape: tuple[int, ...], dtype: str, stream: int | None) -> torch.Tensor:
        """What `empty` gives, in less time for the last shapes on the current stream."""
        if stream is not None and self.is_cuda:
            return self.empty(shape, dtype, stream)
        # A maker without an example is not kept.
        return (self._cached_maker if dtype in self._elements else self.maker)(shape, dtype)()

    @functools.cached_property
    def scale_code(self) -> torch.Tensor:
        """nf4.scale_code() on this device: one tensor, which all weights made here share."""
        return self._torch.from_numpy(np.asarray(scale_code())).to(self.device)


@functools.cache
def _device(module: ModuleType, device: torch.device) -> Device:
    return Device(module, device)


def device_of(tensor: torch.Tensor) -> Device:
    """Its device."""
    return _device(sys.modules["torch"], tensor.device)
