"""Checks the arguments of nf4.torch, and words what is wrong with them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

import torch
from torch import Tensor

from nf4 import _convert, _torch
from nf4._versions import OLDEST_TRANSFORMERS
from nf4.errors import InvalidArgument, kind_of
from nf4.typing import DTypeLike

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BY_NAME = dict(zip(("fp32", "fp16", "bf16"), DTYPES, strict=True))


def torch_dtype(dtype: DTypeLike, argument: str = "dtype") -> torch.dtype:
    """Returns torch's float32, float16 or bfloat16 for any of its names. Messages call it
    `argument`."""
    if isinstance(dtype, torch.dtype) and dtype in DTYPES:
        return dtype
    if isinstance(dtype, str) and dtype in _BY_NAME:  # torch.compile can trace this
        return _BY_NAME[dtype]
    return _BY_NAME[_convert.dtype_name(dtype, argument)]


def require_transformers() -> None:
    """Raises ImportError for a transformers in which models cannot be looked up."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return  # importing it says so
    if int(version.partition(".")[0]) < OLDEST_TRANSFORMERS:
        raise ImportError(
            f"this function needs transformers {OLDEST_TRANSFORMERS}.0 or later, and transformers "
            f"{version} is installed; pip install -U transformers gets one"
        )


def require_tensor(name: str, given: object) -> None:
    if not isinstance(given, Tensor):
        raise InvalidArgument(f"{name} is {kind_of(given)}; expected a torch tensor")
    if given.layout is not torch.strided:
        raise InvalidArgument(f"{name} is of layout {given.layout}; expected torch.strided")


def require_float(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise InvalidArgument(f"{name} is of {dtype}; expected float32, float16 or bfloat16")


def require_dense(name: str, given: object) -> None:
    """Checks that a weight can be quantized."""
    require_tensor(name, given)
    require_float(name, given.dtype)


def is_finite(tensor: Tensor) -> bool:
    """Tells if a tensor has neither NaN nor Inf. A meta or fake tensor has no values, and
    passes."""
    tensor = tensor.detach()
    if _torch.fault(tensor) is not None or tensor.numel() == 0:
        return True
    return all(each.isfinite().item() for each in torch.aminmax(tensor))  # both are NaN for a NaN


def require_finite(name: str, weight: Tensor) -> None:
    """Refuses NaN and Inf, which 4 bits cannot store: NaN would become 0, and Inf the largest value
    of its block or group."""
    if not is_finite(weight):
        raise InvalidArgument(
            f"{name} has NaN or Inf; expected finite numbers, or allow_nonfinite=True"
        )


def require_like(
    name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """A tensor that is not None has this dtype and this shape."""
    if tensor is not None and (tensor.dtype != dtype or tensor.shape != shape):
        raise InvalidArgument(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; expected {dtype} of {shape}"
        )


def require_device(device: torch.device, beside: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Requires each tensor to be on this device, which is that of the tensor named `beside`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise InvalidArgument(
                f"{name} is on {tensor.device}; expected {device}, where {beside} is: move one "
                f"with .to()"
            )
