"""NF4Experts: the weights of a stack of experts (mixture of experts) in 4 bits, NF4 or FP4."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

import nf4
from nf4 import _convert, _torch
from nf4._prepared import prepare
from nf4.errors import InvalidArgument, shown
from nf4.torch import _operators_grouped, _state, functional
from nf4.torch._checks import require_dense, require_tensor, torch_dtype
from nf4.torch._weight import WeightParts
from nf4.torch.modules.base import FixedBuffers, require_memory, torch_device
from nf4.torch.modules.nf4_linear import SCALES, zeros
from nf4.typing import DTypeLike, FormatName
from nf4.weight import no_weight


class NF4Experts(FixedBuffers):
    """y[i] = x[x_index[i]] W[e]^T + bias[e], for the expert e of each row of y, with frozen W in 4
    bits. The forward pass of 16 bits makes no dense W.

    weight    the packed bytes of all experts, a Parameter uint8 [ceil(E * N * K / 2), 1]
    absmax, nested_absmax, nested_code, nested_offset
              the scales, as in nf4.QuantizedTensor; None where the weight is flat

    E experts of N x K elements each are one weight of shape [E, N, K], in which N * K is a multiple
    of the blocksize, so that each expert begins with a block. The rows of y are sorted by expert.

    from_dense and from_quantized make one. The constructor makes one of zeros, for load_state_dict.
    Its state_dict has the keys of an NF4Linear, for a weight of three dimensions.
    """

    __module__ = "nf4.torch.modules"  # where pickled modules look for it

    _kept: nf4.QuantizedTensor[Tensor] | None = None
    _places: list[int | None] | None = None

    def __init__(
        self,
        experts: int,
        out_features: int,
        in_features: int,
        *,
        format: FormatName = "nf4",
        blocksize: int = 64,
        nested_blocksize: int = 256,
        dtype: DTypeLike | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        sizes = {"experts": experts, "out_features": out_features, "in_features": in_features}
        shape = tuple(_convert.count(name, size) for name, size in sizes.items())
        dtype = torch_dtype(torch.get_default_dtype() if dtype is None else dtype)
        name, where = _torch.dtype_name(dtype), torch_device(device)
        self._take(zeros(shape, format, blocksize, nested_blocksize, name, where))

    @classmethod
    def from_quantized(cls, weight: nf4.QuantizedTensor[Tensor]) -> NF4Experts:
        """Around a weight of three dimensions whose parts are tensors; memory is shared. Raises
        InvalidArgument."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(weight)
        return made

    @classmethod
    def from_dense(
        cls,
        weight: Tensor,
        *,
        transposed: bool = False,
        format: FormatName = "nf4",
        blocksize: int = 64,
        nested_blocksize: int = 256,
    ) -> NF4Experts:
        """Quantizes [experts, out_features, in_features], or with `transposed` [experts,
        in_features, out_features], on its device. Raises what nf4.quantize raises."""
        require_dense("weight", weight)
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
        )
        return cls.from_quantized(made)

    def _take(self, weight: nf4.QuantizedTensor[Tensor]) -> None:
        if not isinstance(weight, nf4.QuantizedTensor):
            raise no_weight("weight", weight, "a QuantizedTensor")
        require_stack(weight.shape, weight.blocksize)
        if weight.codebook is not None:
            raise InvalidArgument("codebook is given; a layer has its format's own")
        parts = WeightParts.of(weight)  # or a part is no tensor
        if _torch.fault(weight.packed) is None:  # which meta and fake tensors have
            prepare(dataclasses.replace(weight, **parts.named()))  # or a part is not as it should
        self.spec, self.dtype_before, self._places = parts.spec, weight.dtype, None
        self.experts, self.out_features, self.in_features = weight.shape
        packed = _state.bytes_of(parts.packed)
        self._buffers.pop("weight", None)  # under FSDP1 it is one
        self.register_parameter("weight", nn.Parameter(packed, requires_grad=False))
        for name in SCALES:
            self.register_buffer(name, getattr(parts, name), persistent=False)

    def parts(self) -> WeightParts:
        """The weight as it is now."""
        scales = (getattr(self, name) for name in SCALES)
        return WeightParts(self.weight, *scales, None, self.spec)

    @property
    def quantized(self) -> nf4.QuantizedTensor[Tensor]:
        """The weight, for the functions of nf4 and nf4.torch. Memory is shared."""
        return self.parts().quantized(self.dtype_before)

    def dequantize(self, dtype: DTypeLike | None = None) -> Tensor:
        """The weight, dense: [experts, out_features, in_features]. dtype: by default that of the
        weight before it was quantized."""
        return functional.dequantize(self.quantized, dtype)

    def forward(
        self,
        x: Tensor,
        ends: Tensor,
        x_index: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """[m, out_features] in the dtype of x, or autocast's; rows behind the last end are
        unspecified. Arguments as those of nf4.torch.linear_grouped; the bias is cast."""
        require_tensor("x", x)
        require_tensor("ends", ends)
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        parts = self.parts()
        made = None if torch.compiler.is_compiling() else self._made(parts)
        return _operators_grouped.linear_grouped(x, ends, x_index, bias, parts, made)

    def _made(self, parts: WeightParts) -> nf4.QuantizedTensor[Tensor] | None:
        """The parts as a QuantizedTensor, which is kept while their memory stays where it is."""
        if _torch.fault(parts.packed) is not None:  # meta and fake tensors have no memory
            return None
        places = [None if part is None else part.data_ptr() for part in parts.tensors]
        if places != self._places:
            self._kept, self._places = parts.quantized(self.dtype_before), places
        return self._kept

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None, "_places": None}

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key, part in _state.save(self.quantized).items():
            destination[f"{prefix}weight.{key}"] = part

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        name = f"{prefix}weight"
        parts = _state.under(state_dict, name)
        if "" not in parts:
            missing_keys.append(name)
            return
        try:
            loaded = _state.load(parts)
            if loaded.weight is None:
                raise InvalidArgument(
                    f"weight is of {parts[''].dtype} and has no quant_state beside it; expected "
                    f"the keys of a quantized weight: NF4Experts.from_dense quantizes a dense one"
                )
            unexpected_keys += [f"{name}.{key}" for key in parts.keys() - loaded.keys]
            self._load(loaded.weight, local_metadata.get("assign_to_params_buffers", False))
        except InvalidArgument as error:
            error_msgs.append(f"{prefix.rstrip('.')}: {error}")

    def _load(self, weight: nf4.QuantizedTensor[Tensor], assign: bool) -> None:
        """Takes over a weight: its tensors (`assign`), or a copy on this module's device."""
        if weight.shape != self.spec.shape:
            raise InvalidArgument(f"weight is of shape {weight.shape}; expected {self.spec.shape}")
        if not assign:
            require_memory(self.weight, weight.packed)
            parts = WeightParts.of(weight).named()
            moved = {
                key: None if part is None else part.to(self.weight.device, copy=True)
                for key, part in parts.items()
            }
            weight = dataclasses.replace(weight, **moved)
        self._take(weight)

    def extra_repr(self) -> str:
        return (
            f"experts={self.experts}, out_features={self.out_features}, "
            f"in_features={self.in_features}"
        )


def require_stack(shape: tuple[int, ...], blocksize: int) -> None:
    """A weight of this shape is one of experts that each begin with a block."""
    if len(shape) != 3:
        raise InvalidArgument(
            f"weight is of shape {shown(shape)}; expected 3 dimensions: experts, rows and columns"
        )
    experts, rows, cols = shape
    if experts > 1 and rows * cols % blocksize != 0:
        raise InvalidArgument(
            f"an expert has {rows * cols} elements; expected a multiple of the blocksize, "
            f"{blocksize}, so that each begins with a block"
        )
