"""torch tensors as memory: what they are, where more of it comes from, and the current stream.

torch is never imported here: whoever hands over a tensor has done so.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import numpy as np

from nf4 import _convert
from nf4.errors import kind_of
from nf4.info import scale_code

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "uint8": "uint8"}


def is_tensor(value: Any) -> bool:
    # Another thread may be in the middle of importing torch.
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def dtype_name(dtype: Any) -> str:
    """The name "fp32", "fp16", "bf16" or "uint8"; any other dtype by torch's name for it."""
    name = str(dtype).removeprefix("torch.")
    return next((ours for ours, theirs in _DTYPES.items() if theirs == name), name)


def fault(tensor: Any) -> str | None:
    """Why a tensor is not plain memory, as what follows its name; None if it is."""
    torch = sys.modules["torch"]
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"is {kind_of(tensor)}; expected a tensor with memory of its own"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"is on {tensor.device}; expected the CPU or CUDA"
    if tensor.layout is not torch.strided:
        return f"is of layout {tensor.layout}; expected torch.strided"
    if tensor.requires_grad:
        return "requires grad; expected it detached, since nothing here is differentiated"
    if tensor.is_neg():
        return "has its negative bit set; expected what resolve_neg() gives"
    return None


def tell_of_writes(values: Iterable[Any]) -> None:
    """Lets autograd know that these, where they are tensors, were written to: a backward pass
    that is to use one of them as it was before is then an error of torch's."""
    for tensor in filter(is_tensor, values):
        if not tensor.is_inference():  # which no backward pass ever uses
            sys.modules["torch"].autograd.graph.increment_version(tensor)


# Where to dequantize to: an address, an nf4_dtype, whether that is device memory, and the
# device of torch if the weight or the output is a tensor. A tuple, for it is made in each call.
Target = tuple[int, Any, bool, "Device | None"]


class Device:
    """A device of torch: outputs on it, new tensors, its current stream."""

    def __init__(self, torch: ModuleType, device: Any) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.dtypes = {name: getattr(torch, theirs) for name, theirs in _DTYPES.items()}
        self._index = device.index
        self._torch = torch
        self.tensor_type = torch.Tensor
        # our name by torch's dtype; nf4_dtype by both
        self._names = {self.dtypes[name]: name for name in _convert.DTYPES}
        self.codes = dict(_convert.DTYPES)
        self.codes |= {dtype: self.codes[name] for dtype, name in self._names.items()}
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._elements: dict[str, Any] = {}
        # Products are of a few shapes, again and again.
        self._known_maker = functools.lru_cache(maxsize=64)(self.maker)

    def plain(self, tensor: Any) -> tuple[int, str] | None:
        """The address and the dtype of what is as common and faultless as can be: a contiguous
        tensor of no subclass, here, and of dense data. None for all else, for which somebody has
        to look closer."""
        if type(tensor) is not self.tensor_type:
            return None
        try:
            name = self._names.get(tensor.dtype)
            if (
                name is not None
                and tensor.device == self.device
                and tensor.is_contiguous()
                and not tensor.requires_grad
                and not tensor.is_neg()
            ):
                return tensor.data_ptr(), name
        except RuntimeError:  # no storage
            pass
        return None

    def plain_output(self, out: Any, dtype: Any, elements: int) -> Target | None:
        """The target that `out` is, where it is plain and of this dtype (None: any) and size."""
        plain = self.plain(out)
        try:
            if plain is not None and out.numel() == elements:
                address, name = plain
                code = self.codes[name]
                if dtype is None or self.codes.get(dtype) == code:
                    return address, code, self.is_cuda, self
        except TypeError:  # a dtype that cannot be hashed
            pass
        return None

    def current_stream(self) -> int:
        """The cudaStream_t that torch enqueues on."""
        # torch makes no promise of the getter, which is 40 times as fast as the other way.
        if self._raw_stream is not None:
            return self._raw_stream(self._index)
        return self._torch.cuda.current_stream(self.device).cuda_stream

    def _allocating_on(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        """What is allocated in this context belongs to that stream: torch hands out memory
        that earlier work on the stream may still be using, and takes it back before what is
        enqueued there has run."""
        if stream == self.current_stream():
            return contextlib.nullcontext()
        # torch knows the legacy default stream by the first of its two names only.
        legacy = 1
        external = self._torch.cuda.ExternalStream(0 if stream == legacy else stream, self.device)
        return self._torch.cuda.stream(external)

    def empty(self, shape: Any, dtype: str, stream: Any) -> Any:
        """A new tensor for work on `stream`, which means nothing on the CPU."""
        if stream is None or not self.is_cuda:
            return self._torch.empty(shape, dtype=self.dtypes[dtype], device=self.device)
        with self._allocating_on(_convert.stream_address(stream)):
            return self._torch.empty(shape, dtype=self.dtypes[dtype], device=self.device)

    def _is_capturing(self) -> bool:
        return self.is_cuda and self._torch.cuda.is_current_stream_capturing()

    def maker(self, shape: Any, dtype: str) -> Callable[[], Any]:
        """What makes new tensors of one shape and dtype, for work on torch's current stream.

        torch.empty_like has its answers in an example, here one element that is seen as often
        as needed, and takes half the time of torch.empty, which reads three arguments."""
        element = self._elements.get(dtype)
        if element is None:
            element = self.empty((), dtype, None)
            # Not what a mode gives for now, nor memory that belongs to a graph.
            if type(element) is not self.tensor_type or self._is_capturing():
                return functools.partial(self.empty, shape, dtype, None)
            self._elements[dtype] = element
        return functools.partial(
            self._torch.empty_like,
            element.expand(shape),
            memory_format=self._torch.contiguous_format,
        )

    def known_maker(self, shape: Any, dtype: str) -> Callable[[], Any]:
        """The same, kept for the last shapes once there is an example to keep it for."""
        return (self._known_maker if dtype in self._elements else self.maker)(shape, dtype)

    @functools.cached_property
    def scale_code(self) -> Any:
        """nf4.scale_code() on this device: one tensor, which all weights made here share."""
        return self._torch.from_numpy(np.asarray(scale_code())).to(self.device)


@functools.cache
def _device(torch: ModuleType, device: Any) -> Device:
    return Device(torch, device)


def device_of(value: Any) -> Device | None:
    """The device of a tensor; None for what is none."""
    return _device(sys.modules["torch"], value.device) if is_tensor(value) else None
