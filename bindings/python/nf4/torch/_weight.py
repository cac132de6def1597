"""A weight as nf4.torch hands it from function to function: WeightParts, or Int4Parts
(_int4_weight.py), which has the same methods.

Operators have it taken apart. The public ones have ten arguments for it: the six tensors, shape,
format, blocksize, nested_blocksize, which mean what they mean in nf4.QuantizedTensor. Those that a
compiled graph has, _linear and _dense_like, have eleven: the six tensors, then rows, cols, the
format's number, blocksize, nested_blocksize.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import nf4
from nf4 import _convert
from nf4.torch._checks import require_tensor
from nf4.weight import no_weight

PARTS = ("packed", "absmax", "nested_absmax", "nested_code", "nested_offset", "codebook")
_OF_EVERY_WEIGHT = frozenset(PARTS[:2])


def tensors_of(
    weight: nf4.Weight, names: Sequence[str], needed: frozenset[str]
) -> list[Tensor | None]:
    """The parts of a weight, which are tensors, or InvalidArgument is raised. A part with its
    negative bit set is copied, as no kernel reads that bit, and one that torch.inference_mode made
    is another tensor on its memory, as no backward pass takes it. Dynamo cannot trace the
    questions, and operators in its graphs ask the first themselves."""
    tensors, eager = [], not torch.compiler.is_dynamo_compiling()
    for name in names:
        tensor = getattr(weight, name)
        if tensor is not None or name in needed:
            require_tensor(name, tensor)
            if eager and tensor.is_neg():
                tensor = tensor.resolve_neg()
            if eager and tensor.is_inference():
                tensor = outside_inference(tensor)
        tensors.append(tensor)
    return tensors


def outside_inference(tensor: Tensor) -> Tensor:
    """A tensor on the memory of one that torch.inference_mode made, which autograd takes."""
    with torch.inference_mode(False):
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )


# A NamedTuple's own __new__ takes twice as long, and these are made in each call.
_new = tuple.__new__


class Spec(NamedTuple):
    """How the bytes of a weight are read. C++ (_nf4_ops.cpp) takes the first five, in this order:
    rows is the product of all dimensions of shape but the last, which is cols."""

    rows: int
    cols: int
    format_code: int
    blocksize: int
    nested_blocksize: int
    shape: tuple[int, ...]
    format: str

    @classmethod
    def of(cls, shape: Sequence[int], format: str, blocksize: int, nested_blocksize: int) -> Spec:
        """Raises InvalidArgument for a format that is none."""
        code = _convert.FORMATS.get(format) or _convert.format_code(format)
        if len(shape) == 2:
            rows, cols = shape
        else:
            rows, cols = math.prod(shape[:-1]), shape[-1] if shape else 1
        return _new(cls, (rows, cols, code, blocksize, nested_blocksize, tuple(shape), format))


class WeightParts(NamedTuple):
    """The tensors of a weight, as they are at the time of a call, and its Spec."""

    packed: Tensor
    absmax: Tensor
    nested_absmax: Tensor | None
    nested_code: Tensor | None
    nested_offset: Tensor | None
    codebook: Tensor | None
    spec: Spec

    names = PARTS

    @classmethod
    def of(cls, weight: nf4.QuantizedTensor) -> WeightParts:
        """Of a weight whose parts are tensors, or InvalidArgument is raised."""
        if not isinstance(weight, nf4.QuantizedTensor):
            raise no_weight("weight", weight, "a QuantizedTensor")
        tensors = tensors_of(weight, PARTS, _OF_EVERY_WEIGHT)
        spec = Spec.of(weight.shape, weight.format, weight.blocksize, weight.nested_blocksize)
        return _new(cls, (*tensors, spec))

    @classmethod
    def of_arguments(
        cls,
        packed: Tensor,
        absmax: Tensor,
        nested_absmax: Tensor | None,
        nested_code: Tensor | None,
        nested_offset: Tensor | None,
        codebook: Tensor | None,
        shape: Sequence[int],
        format: str,
        blocksize: int,
        nested_blocksize: int,
    ) -> WeightParts:
        """Of the ten of a public operator."""
        spec = Spec.of(shape, format, blocksize, nested_blocksize)
        tensors = (packed, absmax, nested_absmax, nested_code, nested_offset, codebook)
        return _new(cls, (*tensors, spec))

    @classmethod
    def of_numbers(cls, *numbers: Any) -> WeightParts:
        """Of the eleven of a compiled graph's operator. The weight is a matrix then."""
        *tensors, rows, cols, code, blocksize, nested_blocksize = numbers
        name = next((name for name, each in _convert.FORMATS.items() if each == code), code)
        return cls.of_arguments(*tensors, (rows, cols), name, blocksize, nested_blocksize)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:6]

    def with_float_scales(self) -> WeightParts:
        """With scales in float32, which the kernels read: bitsandbytes casts those in 16 bits
        likewise. Memory is shared where they are float32."""
        first = 1 if self.nested_absmax is None else 2
        narrow = {
            name: part.float()
            for name, part in zip(PARTS[first:5], self[first:5], strict=True)
            if part is not None and part.dtype != torch.float32
        }
        return self._replace(**narrow) if narrow else self

    def arguments(self) -> tuple[Any, ...]:
        """The ten of a public operator."""
        spec = self.spec
        return *self[:6], list(spec.shape), spec.format, spec.blocksize, spec.nested_blocksize

    def numbers(self) -> tuple[Any, ...]:
        """The eleven of a compiled graph's operator."""
        return *self[:6], *self.spec[:5]

    def named(self) -> dict[str, Tensor | None]:
        """The tensors by their names."""
        return dict(zip(PARTS, self, strict=False))

    def quantized(self, dtype: str = "fp32") -> nf4.QuantizedTensor:
        """For package nf4; memory is shared. dtype: that of the weight before it was quantized."""
        detached = {
            name: None if part is None else part.detach() for name, part in self.named().items()
        }
        spec = self.spec
        return nf4.QuantizedTensor(
            **detached,
            shape=spec.shape,
            format=spec.format,
            blocksize=spec.blocksize,
            nested_blocksize=spec.nested_blocksize,
            dtype=dtype,
        )
