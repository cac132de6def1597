"""NF4Experts: the NF4, FP4, MXFP4 or NVFP4 weights of a stack of experts (mixture of experts)."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

import nf4
from nf4 import _convert, _torch
from nf4.errors import InvalidArgument, shown
from nf4.torch import _operators_grouped, functional
from nf4.torch._checks import require_dense, require_finite, require_tensor, torch_dtype
from nf4.torch._weight import WeightParts
from nf4.torch.modules.base import torch_device
from nf4.torch.modules.nf4_weight import NF4Weight, zeros
from nf4.typing import DTypeLike, FormatName, ScaleRuleName


class _Adapter(Protocol):
    """An ExpertAdapter (_expert_adapters.py, which imports torch._dynamo)."""

    def added(self, y: Tensor, x: Tensor, ends: Tensor, x_index: Tensor | None) -> Tensor: ...


class _Stack(NF4Weight):
    """The attributes of NF4Experts that have types. typing.get_type_hints finds the types where
    __module__ says, which is another file for NF4Experts."""

    # The adapter that PEFT adds during a forward pass (nf4/torch/peft/experts.py).
    adapters: tuple[_Adapter, ...] = ()

    _kept: nf4.QuantizedTensor[Tensor] | None = None
    _places: list[int | None] | None = None


class NF4Experts(_Stack):
    """y[i] = x[x_index[i]] W[e]^T + bias[e], where e is the expert of row i, with frozen 4-bit W.
    In 16 bits the forward pass makes no dense W.

    weight    the packed bytes of all experts, a Parameter uint8 [ceil(E * N * K / 2), 1]
    absmax, nested_absmax, nested_code, nested_offset
              the scales, as in nf4.QuantizedTensor; the nested ones are None if the weight is flat

    E experts of N x K elements are one weight of shape [E, N, K]. N * K is a multiple of the
    blocksize, so that each expert begins with a block. The rows of y are sorted by expert.

    Make a module with from_dense or from_quantized. The constructor makes a module of zeros, for
    load_state_dict. The state_dict has the keys of an NF4Linear's, for a weight of three
    dimensions.
    """

    __module__ = "nf4.torch.modules"  # pickled modules refer to it
    _of_dense = "NF4Experts.from_dense"

    def __init__(
        self,
        experts: int,
        out_features: int,
        in_features: int,
        *,
        format: FormatName = "nf4",
        blocksize: int | None = None,
        nested_blocksize: int | None = None,
        scale_rule: ScaleRuleName | None = None,
        dtype: DTypeLike | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        sizes = {"experts": experts, "out_features": out_features, "in_features": in_features}
        shape = tuple(_convert.count(name, size) for name, size in sizes.items())
        dtype = torch_dtype(torch.get_default_dtype() if dtype is None else dtype)
        name, where = _torch.dtype_name(dtype), torch_device(device)
        self._take_weight(
            zeros(shape, format, blocksize, nested_blocksize, name, where, scale_rule)
        )

    @classmethod
    def from_quantized(cls, weight: nf4.QuantizedTensor[Tensor]) -> NF4Experts:
        """Makes a module of a weight of three dimensions whose parts are tensors; memory is shared.
        Raises InvalidArgument."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take_weight(weight)
        return made

    @classmethod
    def from_dense(
        cls,
        weight: Tensor,
        *,
        transposed: bool = False,
        format: FormatName = "nf4",
        blocksize: int | None = None,
        nested_blocksize: int | None = None,
        scale_rule: ScaleRuleName | None = None,
        allow_nonfinite: bool = False,
    ) -> NF4Experts:
        """Quantizes [experts, out_features, in_features], or with `transposed` [experts,
        in_features, out_features], on its device. The other arguments are those of
        NF4Linear.from_linear. Raises what nf4.quantize raises, and InvalidArgument for NaN and
        Inf."""
        require_dense("weight", weight)
        if not allow_nonfinite:
            require_finite("weight", weight)
        if weight.dim() != 3:
            raise InvalidArgument(
                f"weight is of shape {tuple(weight.shape)}; expected 3 dimensions: experts, rows "
                f"and columns"
            )
        dense = weight.detach()
        made = functional.quantize(
            dense.transpose(1, 2) if transposed else dense,
            format=format,
            blocksize=blocksize,
            nested_blocksize=nested_blocksize,
            scale_rule=scale_rule,
        )
        return cls.from_quantized(made)

    @staticmethod
    def require_shape(shape: tuple[int, ...], blocksize: int) -> None:
        """Requires each expert to begin with a block."""
        if len(shape) != 3:
            raise InvalidArgument(
                f"weight is of shape {shown(shape)}; expected 3 dimensions: experts, rows and "
                f"columns"
            )
        experts, rows, cols = shape
        if experts > 1 and rows * cols % blocksize != 0:
            raise InvalidArgument(
                f"an expert has {rows * cols} elements; expected a multiple of the blocksize, "
                f"{blocksize}, so that each begins with a block"
            )

    def _take_sizes(self, shape: tuple[int, ...]) -> None:
        self.experts, self.out_features, self.in_features = shape
        self.forget()

    def forget(self) -> None:
        self._kept = self._places = None

    def forward(
        self,
        x: Tensor,
        ends: Tensor,
        x_index: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Returns [m, out_features] in the dtype of x, or autocast's; rows past the last end are
        unspecified. Takes the arguments of nf4.torch.linear_grouped, and casts the bias."""
        require_tensor("x", x)
        require_tensor("ends", ends)
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        parts = self.parts()
        keeps = not (torch.compiler.is_compiling() or self.is_prepared())
        made = self._made if keeps else None
        y = _operators_grouped.linear_grouped(x, ends, x_index, bias, parts, made)
        for adapter in self.adapters:
            y = adapter.added(y, x, ends, x_index)
        return y

    def _made(self, parts: WeightParts) -> nf4.QuantizedTensor[Tensor] | None:
        """Returns the parts as a QuantizedTensor, which is cached until their memory moves."""
        if _torch.fault(parts.packed) is not None:  # meta and fake tensors have no memory
            return None
        places = [None if part is None else part.data_ptr() for part in parts.tensors]
        if places != self._places:
            self._kept, self._places = parts.quantized(self.dtype_before), places
        return self._kept

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None, "_places": None}

    def extra_repr(self) -> str:
        return (
            f"experts={self.experts}, out_features={self.out_features}, "
            f"in_features={self.in_features}, {self.format_repr()}"
        )
