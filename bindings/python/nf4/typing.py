"""Types of what nf4's functions take, for annotations. Nothing here imports torch.

A torch tensor is an `ArrayLike`, as every tensor exports DLPack.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import (
    TYPE_CHECKING,
    Literal,
    Protocol,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    runtime_checkable,
)

import numpy as np

if TYPE_CHECKING:
    import torch

FormatName: TypeAlias = Literal["nf4", "fp4", "mxfp4", "nvfp4"]
ScaleRuleName: TypeAlias = Literal["floor", "even", "ceil", "factor", "divisor"]
DTypeName: TypeAlias = Literal["fp32", "fp16", "bf16"]
Int4Layout: TypeAlias = Literal["gptq", "gptq_v2", "awq", "compressed-tensors"]
ScalesDTypeName: TypeAlias = Literal["fp16", "bf16"]


@runtime_checkable
class SupportsDLPack(Protocol):
    """An array that exports DLPack, version 0 or 1, such as a tensor of torch or JAX."""

    def __dlpack__(self, *, stream: int | None = ...) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


@runtime_checkable
class SupportsCudaArrayInterface(Protocol):
    """An array in device memory, such as CuPy's or Numba's."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, object]: ...


class SupportsCudaStream(Protocol):
    """A stream of cuda.core: a version and a cudaStream_t."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class _TorchDType(Protocol):
    """A torch.dtype, without torch: typing.get_type_hints finds its name here."""

    @property
    def is_floating_point(self) -> bool: ...
    @property
    def is_complex(self) -> bool: ...


# A name, or the dtype of numpy or torch that it stands for, such as np.float16.
DTypeLike: TypeAlias = DTypeName | np.dtype | type[np.generic] | _TorchDType


class _TorchStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...


class _CupyStream(Protocol):
    @property
    def ptr(self) -> int: ...


# A cudaStream_t as an int or a ctypes.c_void_p, or a stream of torch, CuPy or cuda.core.
CudaStreamLike: TypeAlias = (
    SupportsIndex | ctypes.c_void_p | SupportsCudaStream | _TorchStream | _CupyStream
)

ArrayLike: TypeAlias = np.ndarray | SupportsDLPack | SupportsCudaArrayInterface
# An array, or the address of one.
MemoryLike: TypeAlias = ArrayLike | SupportsIndex

# The result has the type of the argument.
Array = TypeVar("Array", np.ndarray, "torch.Tensor")
Out = TypeVar("Out", bound=MemoryLike)
