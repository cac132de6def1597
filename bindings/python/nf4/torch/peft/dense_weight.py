"""The weight of an NF4Linear or Int4Linear as PEFT's code reads and writes it: dense.

PEFT's tuners read the attribute `weight` of a linear layer for its shape, its dtype and its
numbers: in merges and initialisations, some in each forward pass. They write it by `weight.data = `
and in place. A layer in 4 bits holds packed bytes instead. Functions in PEFT's modules get a
DenseWeight. Code that torch.compile traces gets the dense weight itself if PEFT has read the weight
of the layer. All others get what the layer holds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from nf4.errors import InvalidArgument
from nf4.torch import _private
from nf4.torch._checks import torch_dtype
from nf4.torch.modules import Int4Linear, NF4Linear

Layer = NF4Linear | Int4Linear
_Step = Callable[[Tensor], Tensor]
# PEFT reads the weight of each layer that it gives an adapter. Traced code has no frame to ask.
_READ_BY_PEFT = "_read_by_peft"
_ITSELF = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _dtype(layer: Layer) -> torch.dtype:
    if isinstance(layer, NF4Linear):
        return torch_dtype(layer.dtype_before)
    return layer.compute_dtype or torch.float32  # scales in fp16 would round every product


def whole(layer: Layer) -> Tensor:
    """Returns the dense weight."""
    return layer.dequantize(None if isinstance(layer, NF4Linear) else _dtype(layer))


def require_mergeable(layer: nn.Module) -> None:
    if isinstance(layer, Int4Linear):
        raise InvalidArgument(
            "an adapter cannot be merged into an Int4Linear, whose codes were calibrated and would "
            "only be rounded again; expected adapters that stay beside it"
        )


class DenseWeight(Tensor):
    """The dense weight of `layer`, [out_features, in_features], without memory of its own: an
    operation dequantizes the weight, and one that writes quantizes the result again, which rounds
    to 4 bits. `steps` lead from the weight to a view of it."""

    layer: Layer
    steps: tuple[_Step, ...]

    @staticmethod
    def __new__(
        cls, layer: Layer, steps: tuple[_Step, ...] = (), like: Tensor | None = None
    ) -> DenseWeight:
        """like: a tensor of the shape, strides and dtype of a view."""
        columns = layer.in_features
        made = Tensor._make_wrapper_subclass(
            cls,
            (layer.out_features, columns) if like is None else like.shape,
            strides=(columns, 1) if like is None else like.stride(),
            storage_offset=0 if like is None else like.storage_offset(),
            dtype=_dtype(layer) if like is None else like.dtype,
            device=layer.weight.device,
        )
        made.layer, made.steps = layer, steps
        return made

    @property
    def data(self) -> DenseWeight:
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if not self._is_same(value):  # else an operation in place has written it, such as +=
            self._write(_dense(value))

    def data_ptr(self) -> int:
        """Returns the address of what the layer holds. PEFT finds tied weights by it."""
        return self.layer.weight.data_ptr()

    @property
    def requires_grad(self) -> bool:
        return Tensor.requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> DenseWeight:
        if requires_grad:
            raise InvalidArgument(
                f"the weight of {self.layer} cannot have a gradient; expected it to stay frozen, "
                f"as all 4-bit weights do"
            )
        return self

    @property
    def quant_state(self) -> Any:
        raise AttributeError(
            f"{type(self.layer).__name__} has no quant_state, which PEFT's layers for bitsandbytes "
            f"read; expected nf4.torch.convert before PEFT adds adapters"
        )

    def _is_same(self, other: Any) -> bool:
        """Is it the same view of the same weight?"""
        return isinstance(other, DenseWeight) and (
            (self.layer, self.shape, self.stride(), self.storage_offset())
            == (other.layer, other.shape, other.stride(), other.storage_offset())
        )

    def _write(self, dense: Tensor) -> None:
        require_mergeable(self.layer)
        try:
            self.layer.requantize(dense.float() if dense.dtype == torch.float64 else dense)
        except InvalidArgument as error:
            raise InvalidArgument(f"PEFT changes the weight of {self.layer}: {error}") from None

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}({tuple(self.shape)}, of {self.layer})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """This stops torch's fast paths, which would read memory that a DenseWeight has not."""
        with _private.no_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return _view(func, args, kwargs)
        written = _written(func, args, kwargs)
        if written is None:
            return func(*_private.tree_map(_dense, args), **_private.tree_map(_dense, kwargs))
        if func is torch.ops.aten.copy_.default and written._is_same(args[1]):
            return written  # weight[i] += x ends so, and has written already
        dense = whole(written.layer)
        part = _stepped(dense, written.steps)

        def taken(value: Any) -> Any:
            return part if value is written else _dense(value)

        func(*_private.tree_map(taken, args), **_private.tree_map(taken, kwargs))
        written._write(dense)
        return written


def _stepped(dense: Tensor, steps: Sequence[_Step]) -> Tensor:
    return functools.reduce(lambda made, step: step(made), steps, dense)


def _dense(value: Any) -> Any:
    return _stepped(whole(value.layer), value.steps) if isinstance(value, DenseWeight) else value


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns a view, or a list of them, so that nothing is lost that PEFT writes into one."""
    of, *rest = args
    if func in _ITSELF:
        return DenseWeight(of.layer, of.steps, of)

    def step(dense: Tensor) -> Any:
        return func(dense, *rest, **kwargs)

    shape = of.layer.out_features, of.layer.in_features
    meta = torch.empty(shape, dtype=of.dtype, device="meta")
    like = step(meta.as_strided(of.size(), of.stride(), of.storage_offset()))
    if isinstance(like, Tensor):
        return DenseWeight(of.layer, (*of.steps, step), like)
    return [
        DenseWeight(of.layer, (*of.steps, step, lambda made, at=at: made[at]), each)
        for at, each in enumerate(like)
    ]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenseWeight | None:
    """Returns the argument that the operator writes, if it is a DenseWeight."""
    for at, argument in enumerate(_private.arguments_of(func) or ()):
        given = args[at] if at < len(args) else kwargs.get(argument.name)
        if isinstance(given, DenseWeight) and argument.is_write:
            return given
    return None


class WeightOfLayer:
    """The attribute `weight` of a class of layers. It has no __set__, so that what others put into
    a layer's __dict__ under this name is found."""

    def __init__(self, stored: Any) -> None:
        self.stored = stored  # the class's own property, or None

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        if is_dynamo_compiling():
            if _READ_BY_PEFT in layer.__dict__:
                return whole(layer)
        elif sys._getframe(1).f_globals.get("__name__", "").startswith("peft."):
            layer.__dict__[_READ_BY_PEFT] = True
            return DenseWeight(layer)
        if self.stored is not None:
            return self.stored.__get__(layer, owner)
        return nn.Module.__getattr__(layer, "weight")
