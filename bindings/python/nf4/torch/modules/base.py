"""QuantizedLinear: what a linear layer does whatever its quantized weight is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from nf4.errors import InvalidArgument, kind_of, shown
from nf4.torch import _operators
from nf4.torch._checks import require_dense, require_tensor, torch_dtype
from nf4.torch._schemas import Parts
from nf4.torch.modules.siblings import Siblings
from nf4.typing import DTypeLike

if TYPE_CHECKING:
    from nf4.torch.distributed._cuts import CutOf

_Self = TypeVar("_Self", bound="QuantizedLinear")


def torch_device(device: torch.device | str | int | None) -> torch.device | None:
    """None is where torch makes tensors by default."""
    if device is None:
        return None
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise InvalidArgument(f"device is {shown(device)}; expected one of torch: {why}") from None


def new_bias(
    wanted: bool, features: int, dtype: torch.dtype, device: torch.device | None
) -> nn.Parameter | None:
    """Of zeros, if one is wanted."""
    if not isinstance(wanted, (bool, int, type(None))):
        raise InvalidArgument(f"bias is {kind_of(wanted)}; expected True or False")
    return nn.Parameter(torch.zeros(features, dtype=dtype, device=device)) if wanted else None


def dense_weight(linear: nn.Linear, instead: str = "") -> Tensor:
    """Of a dense layer. `instead` says what other layers are for."""
    if type(linear) is not nn.Linear:
        raise InvalidArgument(
            f"linear is {kind_of(linear)}; expected a torch.nn.Linear, whose weight is dense"
            f"{instead}"
        )
    require_dense("linear.weight", linear.weight)
    return linear.weight.detach()


def require_memory(own: Tensor, given: Tensor) -> None:
    """For what load_state_dict copies `given` to."""
    if own.is_meta and not given.is_meta:
        raise InvalidArgument(
            "the layer is on meta, where nothing can be copied to; expected "
            "load_state_dict(..., assign=True), or a layer that to_empty() gave memory"
        )


class QuantizedLinear(nn.Linear):
    """y = x W^T + bias, with a frozen W that is quantized.

    A derived class holds the codes in the parameter `weight` or in a buffer, and the scales in
    buffers; no cast reaches buffers. It has parts and dequantize, its constructors, which call
    _take_bias, and the keys of its state_dict.
    """

    compute_dtype: torch.dtype | None
    # The group, and the layer's place in it.
    _siblings: tuple[Siblings, int] | None = None
    # Which part of its weight a layer has that tensor parallelism has cut.
    cut_of: CutOf | None = None

    def parts(self) -> Parts:
        """The weight as it is now."""
        raise NotImplementedError

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias in the dtype of x, or autocast's. x and bias are of one dtype."""
        return _operators.linear(x, bias, self.parts())

    def bias_in(self, dtype: torch.dtype) -> Tensor | None:
        """The bias in a dtype."""
        # torch.nn.Module looks for an attribute in three places before it comes to this one.
        # DataParallel and parametrizations put a parameter elsewhere.
        parameters = self._parameters
        bias = parameters["bias"] if "bias" in parameters else self.bias
        return bias if bias is None or bias.dtype == dtype else bias.to(dtype)

    def dequantize(self, dtype: DTypeLike | None = None) -> Tensor:
        """W, dense: [out_features, in_features]."""
        raise NotImplementedError

    def _take_bias(
        self, bias: nn.Parameter | None, features: int, compute_dtype: DTypeLike | None
    ) -> None:
        wanted = None if compute_dtype is None else torch_dtype(compute_dtype, "compute_dtype")
        if bias is not None and not isinstance(bias, nn.Parameter):
            raise InvalidArgument(f"bias is {kind_of(bias)}; expected a torch.nn.Parameter")
        if bias is not None and bias.shape != (features,):
            raise InvalidArgument(f"bias is of shape {tuple(bias.shape)}; expected ({features},)")
        self.compute_dtype = wanted
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., in_features]. y is [..., out_features] in the dtype of x, or autocast's."""
        require_tensor("x", x)
        dtype, wanted, siblings = x.dtype, self.compute_dtype, self._siblings
        casts = (
            wanted is not None and wanted != dtype and not torch.is_autocast_enabled(x.device.type)
        )
        y = None
        if siblings is not None:
            group, place = siblings
            y = group.product(place, self, x, wanted if casts else dtype)
        if y is None:
            x = x.to(wanted) if casts else x
            y = self.multiply(x, self.bias_in(x.dtype))
        return y.to(dtype) if casts else y

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._siblings is not None:
            group, place = self._siblings
            group.join(place, self)

    def to_linear(self, dtype: DTypeLike | None = None) -> nn.Linear:
        """A dense layer of W, in a dtype, by default that of the weight before it was quantized.
        It shares the bias where that is of this dtype, and has it cast elsewhere."""
        weight = nn.Parameter(self.dequantize(dtype), requires_grad=False)
        made = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        made.weight = weight
        if self.bias is not None and self.bias.dtype != weight.dtype:
            made.bias = nn.Parameter(self.bias.detach().to(weight.dtype), self.bias.requires_grad)
        else:
            made.bias = self.bias
        return made.train(self.training)

    def _apply(self: _Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Self:
        scales = {id(scale) for scale in self._buffers.values() if scale is not None}

        def moved(tensor: Tensor) -> Tensor:
            if id(tensor) not in scales:
                return fn(tensor)
            # As bytes, which are moved as floats are, and which nothing casts.
            result = fn(tensor.reshape(-1).view(torch.uint8))
            return result.view(tensor.dtype).view(tensor.shape)

        return super()._apply(moved, recurse)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )
