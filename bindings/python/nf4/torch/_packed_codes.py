"""The classes of a layer's codes in its attribute `weight`: PackedCodes in NF4Linear and
NF4Experts, PackedWords in Int4Linear.

Codes have another shape than the weight. torch's C++ fast paths, such as that of
TransformerEncoderLayer, and code that multiplies by a layer's `weight` itself would take them for a
dense weight. The classes have a __torch_function__, which keeps the fast paths away and refuses, by
name, a function that is given codes beside floating-point numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nf4.errors import InvalidArgument
from nf4.torch import _fast, _private, _schemas

# These check their arguments themselves.
_OPERATORS = (type(_schemas.quantize), type(_schemas.quantize.overloadpacket))
# These copy values or ask for a dtype, and combine nothing.
_STORES = frozenset((Tensor.copy_, Tensor.to, Tensor.type_as, torch.result_type))


def _takes_lists(func: Callable[..., Any]) -> bool:
    """Tells if a function treats each tensor of a list by itself, such as all parameters of a
    model."""
    name = getattr(func, "__name__", "")
    return name.startswith("_foreach_") or name == "flatten_dense_tensors"


def _floats(arguments: Sequence[Any]) -> Iterator[Tensor]:
    for each in arguments:
        if isinstance(each, (list, tuple)):
            yield from _floats(each)
        elif isinstance(each, Tensor) and not isinstance(each, (PackedCodes, PackedWords)):
            if each.is_floating_point():
                yield each


def _called(
    _kind: type[Tensor],
    func: Callable[..., Any],
    types: Any,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    kwargs = kwargs or {}
    if torch.compiler.is_dynamo_compiling():  # Dynamo traces this, and knows only this context
        with _private.no_torch_function():
            return func(*args, **kwargs)
    if not (func in _STORES or isinstance(func, _OPERATORS) or _takes_lists(func)):
        if next(_floats((*args, *kwargs.values())), None) is not None:
            raise InvalidArgument(
                f"{getattr(func, '__name__', func)} is given the packed codes of a 4-bit layer as "
                f"if they were its weight; expected a call of the layer, or its dequantize(): skip "
                f"of quantize_model and --skip of nf4 quantize keep a layer dense"
            )
    return nn.Parameter.__torch_function__(func, types, args, kwargs)


class PackedCodes(nn.Parameter):
    """A uint8 Parameter that requires no gradient."""

    __module__ = "nf4.torch.modules"  # where pickled layers look for it

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> PackedCodes:
        return super().__new__(cls, data.detach(), requires_grad)

    __torch_function__ = classmethod(_called)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(self), (self.data, self.requires_grad)


class PackedWords(Tensor):
    """A byte view of a buffer. Codes of either kind are uint8, because models look for that
    dtype."""

    @classmethod
    def of(cls, words: Tensor) -> PackedWords:
        view = words.contiguous().view(torch.uint8).as_subclass(cls)
        vars(view).update(vars(words))  # transformers' marks of loaded parameters
        return view

    __torch_function__ = classmethod(_called)


_fast.take_packed(PackedCodes)
