"""NF4Linear: a linear layer with an NF4, FP4, MXFP4 or NVFP4 weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import nf4
from nf4 import _convert, _torch
from nf4.errors import InvalidArgument, kind_of
from nf4.torch import _state, functional
from nf4.torch._checks import torch_dtype
from nf4.torch.modules.base import QuantizedLinear, dense_weight, new_bias, torch_device
from nf4.torch.modules.nf4_weight import NF4Weight, zeros
from nf4.typing import DTypeLike, FormatName, ScaleRuleName


class NF4Linear(NF4Weight, QuantizedLinear):
    """y = x W^T + bias, with a frozen 4-bit W. The forward pass makes no dense W.

    weight    the packed bytes, a Parameter uint8 [ceil(out_features * in_features / 2), 1]
    absmax, nested_absmax, nested_code, nested_offset
              the scales, as in nf4.QuantizedTensor; the nested ones are None if the weight is flat.
              No cast changes them: .half() changes only the bias. In MXFP4 and NVFP4 absmax is
              uint8, and nested_absmax has the global scales
    bias      a Parameter [out_features], or None. It may be trained
    compute_dtype
              "fp32", "fp16", "bf16" or torch's: x and bias are cast to it, and y is cast back to
              the dtype of x. None: the dtype of x. Under torch.autocast, autocast's dtype is used
              instead

    Make a layer with from_linear, from_quantized or from_bitsandbytes. The constructor makes a
    layer of zeros, for load_state_dict. The state_dict has the keys of bitsandbytes' Linear4bit,
    and a Linear4bit's can be loaded. A Linear4bit's own load_state_dict accepts no quantized
    weight, but transformers' from_pretrained does. For that the saved model's quantization_config
    must name bnb_4bit_compute_dtype, which no state_dict holds; without it the reloaded model
    computes in fp32.

    PEFT adds adapters to it as to any torch.nn.Linear, and nf4.torch fuses the layer's product with
    the adapter's (nf4/torch/peft). Merging an adapter quantizes the sum again.
    """

    __module__ = "nf4.torch.modules"  # pickled layers refer to it

    _of_dense = "NF4Linear.from_linear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: FormatName = "nf4",
        blocksize: int | None = None,
        nested_blocksize: int | None = None,
        scale_rule: ScaleRuleName | None = None,
        compute_dtype: DTypeLike | None = None,
        dtype: DTypeLike | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        nn.Module.__init__(self)
        in_features = _convert.count("in_features", in_features)
        out_features = _convert.count("out_features", out_features)
        dtype = torch_dtype(torch.get_default_dtype() if dtype is None else dtype)
        device = torch_device(device)
        made = new_bias(bias, out_features, dtype, device)
        shape, name = (out_features, in_features), _torch.dtype_name(dtype)
        self._take_weight(
            zeros(shape, format, blocksize, nested_blocksize, name, device, scale_rule)
        )
        self._take_bias(made, out_features, compute_dtype)

    @staticmethod
    def require_shape(shape: tuple[int, ...], blocksize: int) -> None:
        if len(shape) != 2:
            raise InvalidArgument(f"weight is of shape {shape}; expected two dimensions")

    def _take_sizes(self, shape: tuple[int, ...]) -> None:
        self.out_features, self.in_features = shape

    @classmethod
    def from_quantized(
        cls,
        weight: nf4.QuantizedTensor[Tensor],
        bias: nn.Parameter | None = None,
        *,
        compute_dtype: DTypeLike | None = None,
    ) -> NF4Linear:
        """Makes a layer of a weight of two dimensions whose parts are tensors; memory is shared.
        Raises InvalidArgument."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take_weight(weight)
        layer._take_bias(bias, layer.out_features, compute_dtype)
        return layer

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        format: FormatName = "nf4",
        blocksize: int | None = None,
        nested_blocksize: int | None = None,
        compute_dtype: DTypeLike | None = None,
        scale_rule: ScaleRuleName | None = None,
        allow_nonfinite: bool = False,
    ) -> NF4Linear:
        """Quantizes the weight of a dense layer on its device, and shares the bias. format,
        blocksize, nested_blocksize, scale_rule: as for nf4.quantize, with the same defaults.
        allow_nonfinite: quantize NaN as 0 and Inf as the largest value of its block. Raises what
        nf4.quantize raises, and InvalidArgument for NaN and Inf."""
        weight = functional.quantize(
            dense_weight(linear, allow_nonfinite, ": from_bitsandbytes takes a Linear4bit"),
            format=format,
            blocksize=blocksize,
            nested_blocksize=nested_blocksize,
            scale_rule=scale_rule,
        )
        made = cls.from_quantized(weight, linear.bias, compute_dtype=compute_dtype)
        return made.train(linear.training)

    @classmethod
    def from_bitsandbytes(cls, layer: nn.Linear) -> NF4Linear:
        """Makes a layer on the memory of a quantized bitsandbytes Linear4bit. Only 16-bit scales
        are copied. Raises InvalidArgument."""
        packed = getattr(layer, "weight", None)
        state = getattr(packed, "quant_state", None) or getattr(layer, "quant_state", None)
        if not isinstance(layer, nn.Linear) or state is None:
            has_none = " without a quant_state" if isinstance(layer, nn.Linear) else ""
            raise InvalidArgument(
                f"layer is {kind_of(layer)}{has_none}; expected a Linear4bit that .to(device) or "
                f"a checkpoint has quantized: from_linear takes a dense torch.nn.Linear"
            )
        _state.require_quant_state("layer's quant_state", state)
        weight = _state.of_bitsandbytes(layer.weight.data, state)
        made = cls.from_quantized(weight, layer.bias, compute_dtype=layer.compute_dtype)
        return made.train(layer.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.format_repr()}"
