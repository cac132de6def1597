"""WeightParts: a QuantizedTensor as nf4.torch passes it between functions. Int4Parts
(_int4_weight.py) has the same methods.

Public operators take it as ten arguments: the six tensors, shape, format, blocksize and
nested_blocksize, with the meaning of nf4.QuantizedTensor; the format of a weight with a scale_rule
is "nvfp4:divisor". The operators in compiled graphs, _linear and _dense_like, take eleven: the six
tensors, then rows, cols, the format's number, blocksize and nested_blocksize. The format's number
has that of the scale_rule above its 8 low bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import nf4
from nf4 import _convert
from nf4._formats import FORMATS, SCALE_RULES
from nf4.torch._checks import require_tensor
from nf4.weight import no_weight

PARTS = ("packed", "absmax", "nested_absmax", "nested_code", "nested_offset", "codebook")
_OF_EVERY_WEIGHT = frozenset(PARTS[:2])


def tensors_of(
    weight: nf4.Weight, names: Sequence[str], needed: frozenset[str]
) -> list[Tensor | None]:
    """Returns the parts of a weight. Raises InvalidArgument if one is not a tensor. A part with its
    negative bit set is copied, because no kernel reads that bit. A part that torch.inference_mode
    made is replaced by another tensor on its memory, because no backward pass accepts it. Dynamo
    cannot trace either check; operators in its graphs check the negative bit themselves."""
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
    """Returns a tensor on the memory of one that torch.inference_mode made. autograd accepts it."""
    with torch.inference_mode(False):
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )


# A NamedTuple's own __new__ takes twice as long, and every call makes these.
_new = tuple.__new__


class Spec(NamedTuple):
    """How the bytes of a weight are read. C++ (_nf4_ops.cpp) takes the first five, in this order:
    rows is the product of all dimensions of shape but the last, which is cols. format: as public
    operators have it."""

    rows: int
    cols: int
    format_code: int
    blocksize: int
    nested_blocksize: int
    shape: tuple[int, ...]
    format: str

    @classmethod
    def of(cls, shape: Sequence[int], format: str, blocksize: int, nested_blocksize: int) -> Spec:
        """Raises InvalidArgument for an unknown format."""
        code = FORMATS.get(format) or _code_of(format)
        if len(shape) == 2:
            rows, cols = shape
        else:
            rows, cols = math.prod(shape[:-1]), shape[-1] if shape else 1
        return _new(cls, (rows, cols, code, blocksize, nested_blocksize, tuple(shape), format))

    @property
    def name(self) -> str:
        """The format of nf4.QuantizedTensor."""
        return self.format.partition(":")[0]

    @property
    def scale_rule(self) -> str | None:
        return self.format.partition(":")[2] or None

    @property
    def scale_bytes(self) -> bool:
        """Are the scales floats of 8 bits?"""
        return self.name in SCALE_RULES


_RULE_SHIFT = 8


def with_rule(format: str, scale_rule: str | None) -> str:
    """Returns a format as operators have it, with the scale_rule. Raises InvalidArgument."""
    code = _convert.scale_rule(format, scale_rule)
    return f"{format}:{scale_rule}" if code else format


def _code_of(format: str) -> int:
    """Returns the number of a format that may have a scale_rule."""
    name, _, rule = str(format).partition(":")
    if not rule:
        return _convert.format_code(format)
    return _convert.format_code(name) | _convert.scale_rule(name, rule) << _RULE_SHIFT


def _format_of(code: int) -> Any:
    """Returns the format of a number; the number itself if there is none."""
    names = {number: name for name, number in FORMATS.items()}
    name = names.get(code & (1 << _RULE_SHIFT) - 1, "")
    rules = {number: rule for rule, number in SCALE_RULES.get(name, {}).items()}
    rule = code >> _RULE_SHIFT
    if not name or (rule and rule not in rules):
        return code  # no format has this name; Spec.of says so
    return f"{name}:{rules[rule]}" if rule else name


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
        """Makes it from a weight. Raises InvalidArgument if a part is not a tensor."""
        if not isinstance(weight, nf4.QuantizedTensor):
            raise no_weight("weight", weight, "a QuantizedTensor")
        tensors = tensors_of(weight, PARTS, _OF_EVERY_WEIGHT)
        format = weight.format
        if weight.scale_rule == "divisor":  # the other rules are those of quantize
            format = f"{format}:{weight.scale_rule}"
        spec = Spec.of(weight.shape, format, weight.blocksize, weight.nested_blocksize)
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
        """Makes it from the ten arguments of a public operator."""
        spec = Spec.of(shape, format, blocksize, nested_blocksize)
        tensors = (packed, absmax, nested_absmax, nested_code, nested_offset, codebook)
        return _new(cls, (*tensors, spec))

    @classmethod
    def of_numbers(cls, *numbers: Any) -> WeightParts:
        """Makes it from the eleven arguments of an operator in a compiled graph, as a matrix."""
        *tensors, rows, cols, code, blocksize, nested_blocksize = numbers
        format = _format_of(code)
        return cls.of_arguments(*tensors, (rows, cols), format, blocksize, nested_blocksize)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:6]

    def with_float_scales(self) -> WeightParts:
        """Returns the weight with float32 scales, which the kernels read. bitsandbytes casts 16-bit
        scales likewise. Memory is shared if they are float32."""
        first = 1 if self.nested_absmax is None else 2
        narrow = {
            name: part.float()
            for name, part in zip(PARTS[first:5], self[first:5], strict=True)
            if part is not None and part.dtype != torch.float32
        }
        return self._replace(**narrow) if narrow else self

    def arguments(self) -> tuple[Any, ...]:
        """Returns the ten arguments of a public operator."""
        spec = self.spec
        return *self[:6], list(spec.shape), spec.format, spec.blocksize, spec.nested_blocksize

    def numbers(self) -> tuple[Any, ...]:
        """Returns the eleven arguments of an operator in a compiled graph."""
        return *self[:6], *self.spec[:5]

    def named(self) -> dict[str, Tensor | None]:
        """Returns the tensors by name."""
        return dict(zip(PARTS, self, strict=False))

    def quantized(self, dtype: str = "fp32") -> nf4.QuantizedTensor:
        """Returns the weight as package nf4 has it, on the same memory. dtype: the weight's dtype
        before it was quantized."""
        detached = {
            name: None if part is None else part.detach() for name, part in self.named().items()
        }
        spec = self.spec
        return nf4.QuantizedTensor(
            **detached,
            shape=spec.shape,
            format=spec.name,
            scale_rule=spec.scale_rule,
            blocksize=spec.blocksize,
            nested_blocksize=spec.nested_blocksize,
            dtype=dtype,
        )
