"""Int4Experts: the 4-bit integer weights of a stack of experts (mixture of experts)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import nf4
from nf4.errors import InvalidArgument
from nf4.torch import functional
from nf4.torch._checks import torch_dtype
from nf4.torch._int4_weight import Int4Stack, Int4StackSpec
from nf4.torch.modules.base import QuantizedModule
from nf4.typing import DTypeLike
from nf4.weight import no_weight

_PARTS = ("packed", "scales", "zeros")


class Int4Experts(QuantizedModule):
    """y[i] = x[x_index[i]] W[e]^T + bias[e], where e is the expert of row i, with frozen 4-bit
    integer W. In 16 bits the forward pass makes no dense W; the backward pass does.

    packed, scales, zeros
              buffers, the parts of an nf4.Int4Tensor of shape [experts, out_features, in_features];
              None if symmetric weights have no zeros. No cast changes them

    nf4.torch.load makes them from a checkpoint's matrices, one for each expert.
    """

    __module__ = "nf4.torch.modules"  # pickled modules refer to it

    def __init__(self, weight: nf4.Int4Tensor[Tensor]) -> None:
        """Wraps a weight of three dimensions whose parts are tensors; memory is shared."""
        super().__init__()
        if not isinstance(weight, nf4.Int4Tensor) or len(weight.shape) != 3:
            raise no_weight("weight", weight, "an Int4Tensor of three dimensions")
        if weight.g_idx is not None or weight.permutation is not None:
            raise InvalidArgument("weight has act order; expected columns in order")
        parts = Int4Stack.of(weight).named()
        self.spec = Int4StackSpec(weight.shape, weight.layout, weight.group_size)
        self.experts, self.out_features, self.in_features = weight.shape
        for name in _PARTS:
            self.register_buffer(name, parts[name])

    def parts(self) -> Int4Stack:
        return Int4Stack(*map(self.stored, _PARTS), None, None, self.spec)

    def sharded_parts(self) -> dict[str, str]:
        return {name: name for name in _PARTS if self._buffers[name] is not None}

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_prepared():
            destination.update({prefix + name: part for name, part in self._shown().items()})

    def dequantize(self, dtype: DTypeLike | None = None) -> Tensor:
        """Returns the dense weights, [experts, out_features, in_features]; by default in the dtype
        of the scales."""
        weight = self.parts().quantized()
        wanted = weight.scales.dtype if dtype is None else torch_dtype(dtype)
        return torch.stack([
            functional.dequantize(weight.expert(expert), wanted) for expert in range(self.experts)
        ])  # fmt: skip

    def forward(
        self, x: Tensor, ends: Tensor, x_index: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """See NF4Experts.forward."""
        bias = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
        weight = self.parts().quantized()
        return functional.linear_grouped(x, weight, ends, x_index=x_index, bias=bias)

    def extra_repr(self) -> str:
        return (
            f"experts={self.experts}, out_features={self.out_features}, "
            f"in_features={self.in_features}, layout={self.spec.layout}, "
            f"group_size={self.spec.group_size}"
        )
