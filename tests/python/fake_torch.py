"""As much of torch as nf4 looks at, with CUDA tensors of no memory: streams without a GPU."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

_addresses = itertools.count(0x7F56_0000_0000_0000, 1 << 40)


class Device(NamedTuple):
    type: str
    index: int


class Tensor:
    """A tensor on a device. `stream` is what was current when it was made."""

    layout = "strided"
    requires_grad = False

    def __init__(self, shape: tuple[int, ...], dtype: str, device: Device, stream: int = 0):
        self.shape, self.dtype, self.device, self.stream = shape, dtype, device, stream
        self.address = next(_addresses)

    def __torch_dispatch__(self) -> None:
        raise AssertionError("nobody calls this")

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_contiguous(self) -> bool:
        return True

    def is_neg(self) -> bool:
        return False

    def is_inference(self) -> bool:
        return False

    def expand(self, shape: Any) -> Tensor:
        return Tensor(tuple(shape), self.dtype, self.device)

    def to(self, device: Device) -> Tensor:
        return Tensor(self.shape, self.dtype, device)


class Torch:
    """The module. `current` is the current stream of each device by its index, `made` each
    tensor that `empty` has given but for single elements, `written` each that autograd was told
    of. Without `getter` it is a torch that has no raw getter."""

    Tensor = Tensor
    strided = "strided"
    contiguous_format = "contiguous"
    float32, float16, bfloat16, uint8, int32 = (
        f"torch.{name}" for name in ("float32", "float16", "bfloat16", "uint8", "int32")
    )

    def __init__(self, getter: bool = True) -> None:
        self.current = {0: 0, 1: 0x1000}
        self.made: list[Tensor] = []
        self.written: list[Tensor] = []
        self.capturing = False
        graph = SimpleNamespace(increment_version=self.written.append)
        self.autograd = SimpleNamespace(graph=graph)
        self.cuda = SimpleNamespace(
            ExternalStream=lambda handle, device: (handle, device),
            stream=self._stream,
            is_current_stream_capturing=lambda: self.capturing,
            current_stream=lambda device: SimpleNamespace(cuda_stream=self.current[device.index]),
        )
        raw = {"_cuda_getCurrentRawStream": self.current.__getitem__} if getter else {}
        self._C = SimpleNamespace(**raw)

    @contextlib.contextmanager
    def _stream(self, stream: tuple[int, Device]) -> Iterator[None]:
        handle, device = stream
        before = self.current[device.index]
        self.current[device.index] = handle
        yield
        self.current[device.index] = before

    def empty(self, shape: Any, *, dtype: str, device: Device) -> Tensor:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        tensor = Tensor(shape, dtype, device, self.current[device.index])
        if shape:
            self.made.append(tensor)
        return tensor

    def empty_like(self, example: Tensor, *, memory_format: str) -> Tensor:
        assert memory_format == self.contiguous_format
        return self.empty(example.shape, dtype=example.dtype, device=example.device)

    def from_numpy(self, array: Any) -> Tensor:
        return Tensor(array.shape, f"torch.{array.dtype}", Device("cpu", 0))
