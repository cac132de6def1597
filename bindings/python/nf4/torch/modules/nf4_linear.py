"""NF4Linear: a linear layer with a weight in 4 bits, NF4 or FP4."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

import nf4
from nf4 import _convert, _torch
from nf4._prepared import prepare
from nf4.errors import InvalidArgument, kind_of
from nf4.torch import _state, functional
from nf4.torch._checks import torch_dtype
from nf4.torch._weight import WeightParts
from nf4.torch.modules.base import (
    QuantizedLinear,
    dense_weight,
    new_bias,
    require_memory,
    torch_device,
)
from nf4.typing import DTypeLike, FormatName
from nf4.weight import no_weight

SCALES = ("absmax", "nested_absmax", "nested_code", "nested_offset")


def zeros(
    shape: tuple[int, ...],
    format: FormatName,
    blocksize: int,
    nested_blocksize: int,
    dtype: str,
    device: torch.device | None,
) -> nf4.QuantizedTensor[Tensor]:
    """A weight whose parts are zeros."""
    counts = nf4.sizes(shape, format=format, blocksize=blocksize, nested_blocksize=nested_blocksize)
    nested = nested_blocksize != 0

    def made(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return nf4.QuantizedTensor(
        packed=made(counts.packed_bytes, 1, dtype=torch.uint8),
        absmax=made(counts.blocks, dtype=torch.uint8 if nested else torch.float32),
        nested_absmax=made(counts.nested_blocks) if nested else None,
        nested_code=made(256) if nested else None,
        nested_offset=made() if nested else None,
        shape=shape,
        format=format,
        blocksize=blocksize,
        nested_blocksize=nested_blocksize,
        dtype=dtype,
    )


class _Key:
    """Of state_dict: an attribute for each name that may follow."""

    def __getattr__(self, name: str) -> _Key:
        if name.startswith("_"):
            raise AttributeError(name)
        return self


class NF4Linear(QuantizedLinear):
    """y = x W^T + bias, with a frozen W in 4 bits. The forward pass makes no dense W.

    weight    the packed bytes, a Parameter uint8 [ceil(out_features * in_features / 2), 1]
    absmax, nested_absmax, nested_code, nested_offset
              the scales, as in nf4.QuantizedTensor; None where the weight is flat. No cast
              reaches them: .half() changes the bias alone
    bias      a Parameter [out_features], or None. It may be trained
    compute_dtype
              "fp32", "fp16", "bf16" or torch's: x and bias are cast to it, and y back to the dtype
              of x. None: the dtype of x. Under torch.autocast its dtype is used instead

    from_linear, from_quantized and from_bitsandbytes make one. The constructor makes one of zeros,
    for load_state_dict. Its state_dict has the keys of bitsandbytes' Linear4bit, and it loads those
    of a Linear4bit. A Linear4bit's own load_state_dict takes no quantized weight, but transformers'
    from_pretrained does: for that the saved model's quantization_config must name
    bnb_4bit_compute_dtype, which no state_dict holds. Without it the reloaded model computes in
    fp32.

    PEFT puts adapters beside it as beside any torch.nn.Linear, and nf4.torch makes one product of
    both (nf4/torch/peft). Merging an adapter quantizes the sum again.
    """

    __module__ = "nf4.torch.modules"  # where pickled layers look for it

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: FormatName = "nf4",
        blocksize: int = 64,
        nested_blocksize: int = 256,
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
        self._take(
            zeros(shape, format, blocksize, nested_blocksize, name, device),
            made,
            compute_dtype,
        )

    def _take(
        self,
        weight: nf4.QuantizedTensor[Tensor],
        bias: nn.Parameter | None,
        compute_dtype: DTypeLike | None,
    ) -> None:
        self._take_weight(weight)
        self._take_bias(bias, self.out_features, compute_dtype)

    def _take_weight(self, weight: nf4.QuantizedTensor[Tensor]) -> None:
        if not isinstance(weight, nf4.QuantizedTensor):
            raise no_weight("weight", weight, "a QuantizedTensor")
        if len(weight.shape) != 2:
            raise InvalidArgument(f"weight is of shape {weight.shape}; expected two dimensions")
        if weight.codebook is not None:
            raise InvalidArgument("codebook is given; a layer has its format's own")
        parts = WeightParts.of(weight)  # or a part is no tensor
        if _torch.fault(weight.packed) is None:  # which meta and fake tensors have
            prepare(
                dataclasses.replace(weight, **parts.named())
            )  # or a part is of the wrong size or type
        self.spec, self.dtype_before = parts.spec, weight.dtype
        self.out_features, self.in_features = weight.shape
        packed = _state.bytes_of(parts.packed)
        self._buffers.pop("weight", None)  # under FSDP1 it is one
        self.register_parameter("weight", nn.Parameter(packed, requires_grad=False))
        for name in SCALES:
            self.register_buffer(name, getattr(parts, name), persistent=False)

    @classmethod
    def _of(
        cls,
        weight: nf4.QuantizedTensor[Tensor],
        bias: nn.Parameter | None,
        compute_dtype: DTypeLike | None,
    ) -> NF4Linear:
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(weight, bias, compute_dtype)
        return layer

    @classmethod
    def from_quantized(
        cls,
        weight: nf4.QuantizedTensor[Tensor],
        bias: nn.Parameter | None = None,
        *,
        compute_dtype: DTypeLike | None = None,
    ) -> NF4Linear:
        """Around a weight of two dimensions whose parts are tensors; memory is shared. Raises
        InvalidArgument."""
        return cls._of(weight, bias, compute_dtype)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        format: FormatName = "nf4",
        blocksize: int = 64,
        nested_blocksize: int = 256,
        compute_dtype: DTypeLike | None = None,
    ) -> NF4Linear:
        """Quantizes the weight of a dense layer on its device, and shares the bias. Raises what
        nf4.quantize raises."""
        weight = functional.quantize(
            dense_weight(linear, ": from_bitsandbytes takes a Linear4bit"),
            format=format,
            blocksize=blocksize,
            nested_blocksize=nested_blocksize,
        )
        return cls._of(weight, linear.bias, compute_dtype).train(linear.training)

    @classmethod
    def from_bitsandbytes(cls, layer: nn.Linear) -> NF4Linear:
        """Around the memory of a quantized bitsandbytes Linear4bit. Only scales in 16 bits are
        copied. Raises InvalidArgument."""
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
        return cls._of(weight, layer.bias, layer.compute_dtype).train(layer.training)

    @property
    def format(self) -> str:
        return self.spec.format

    @property
    def blocksize(self) -> int:
        return self.spec.blocksize

    @property
    def nested_blocksize(self) -> int:
        return self.spec.nested_blocksize

    @property
    def quantized(self) -> nf4.QuantizedTensor[Tensor]:
        """The weight, for the functions of nf4 and nf4.torch. Memory is shared."""
        return self.parts().quantized(self.dtype_before)

    def dequantize(self, dtype: DTypeLike | None = None) -> Tensor:
        """The weight, dense: [out_features, in_features]. dtype: by default that of the weight
        before it was quantized."""
        return functional.dequantize(self.quantized, dtype)

    def requantize(self, weight: Tensor) -> None:
        """Takes a dense weight, [out_features, in_features], in the format that the layer has, on
        its device. Raises what nf4.quantize raises, and InvalidArgument for a layer that is
        prepared for fully_shard."""
        self.require_unprepared()
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise InvalidArgument(
                f"weight is of shape {tuple(weight.shape)}; expected "
                f"{(self.out_features, self.in_features)}"
            )
        made = functional.quantize(
            weight.detach().to(self.weight.device).contiguous(),
            format=self.format,
            blocksize=self.blocksize,
            nested_blocksize=self.nested_blocksize,
        )
        self._take_weight(dataclasses.replace(made, dtype=self.dtype_before))

    def parts(self) -> WeightParts:
        # As in QuantizedLinear.bias_in: the layer's tensors as they are now, in the shortest way.
        parameters, scales = self._parameters, self._buffers
        absmax = scales["absmax"]
        if type(absmax) is not Tensor:
            return self._prepared_parts()
        weight = (
            parameters["weight"] if "weight" in parameters else self.weight,
            absmax,
            scales["nested_absmax"],
            scales["nested_code"],
            scales["nested_offset"],
            None,
            self.spec,
        )
        return tuple.__new__(WeightParts, weight)

    def sharded_parts(self) -> dict[str, str]:
        return {"packed": "weight", "absmax": "absmax"}

    def _prepared_parts(self) -> WeightParts:
        return WeightParts(*map(self.stored, ("weight", *SCALES)), None, self.spec)

    # torch.distributed.checkpoint.state_dict follows the names in a key, "weight.absmax", from
    # attribute to attribute, and has a module name another to begin with.
    _keys = _Key()

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "_keys"}

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_prepared():
            scales = {name: self._buffers[name] for name in SCALES} | self._shown()
            weight = WeightParts(**scales, codebook=None, spec=self.spec).quantized(
                self.dtype_before
            )
            destination[f"{prefix}weight"] = weight.packed
        else:
            weight = self.quantized
        for key, part in _state.save(weight).items():
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
        loaded, fault = _state.Loaded(set(parts), None), None
        try:
            loaded = _state.load(parts)
            if loaded.weight is None and "" in parts:
                raise InvalidArgument(
                    f"weight is of {parts[''].dtype} and has no quant_state beside it; expected "
                    f"the keys of bitsandbytes: NF4Linear.from_linear quantizes a dense weight"
                )
        except InvalidArgument as error:
            loaded, fault = _state.Loaded(set(parts), None), error
        consumed = {f"{name}.{key}".rstrip(".") for key in loaded.keys}
        rest = {key: value for key, value in state_dict.items() if key not in consumed}
        absent: list[str] = []
        # First, as it calls the hooks, such as FSDP2's that shards the weight again.
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, absent, unexpected_keys, error_msgs
        )
        missing_keys += [key for key in absent if key != name or not parts]
        try:
            if fault is not None:
                raise fault
            if loaded.weight is not None:
                self._load_weight(loaded.weight, local_metadata.get("assign_to_params_buffers"))
        except InvalidArgument as error:
            error_msgs.append(f"{prefix.rstrip('.')}: {error}")

    def _load_weight(self, weight: nf4.QuantizedTensor[Tensor], assign: bool | None) -> None:
        """Takes over a weight: its tensors (`assign`), or a copy in this layer's memory, which CUDA
        graphs hold, or in new memory on this layer's device where it does not fit."""
        shape = (self.out_features, self.in_features)
        if weight.shape != shape:
            raise InvalidArgument(f"weight is of shape {weight.shape}; expected {shape}")
        if self.is_prepared():
            self._load_prepared(weight, assign)
            return
        if assign:
            self._take_weight(weight)
            return
        require_memory(self.weight, weight.packed)
        parts = _tensors(weight)
        if self._has_memory_for(weight):
            prepare(weight)
            own = _tensors(self.quantized)
            for name in parts.keys() - {"nested_code"}:
                own[name].copy_(parts[name].view(own[name].shape))
            self.dtype_before = weight.dtype
        else:
            moved = {name: part.to(self.weight.device, copy=True) for name, part in parts.items()}
            self._take_weight(dataclasses.replace(weight, **moved))

    def _load_prepared(self, weight: nf4.QuantizedTensor[Tensor], assign: bool | None) -> None:
        given = (weight.format, weight.blocksize, weight.nested_blocksize)
        own = (self.format, self.blocksize, self.nested_blocksize)
        if given != own:
            raise InvalidArgument(
                f"weight is of format, blocksize and nested_blocksize {given}; expected {own}"
            )
        parts = _tensors(weight)
        code = None if assign else parts.pop("nested_code", None)
        self._load_parts({"weight": parts.pop("packed"), **parts}, assign)
        if code is not None and not self._has_code(code):
            self.nested_code = code.to(self.nested_code.device, copy=True)
        self.dtype_before = weight.dtype

    def _has_memory_for(self, weight: nf4.QuantizedTensor[Tensor]) -> bool:
        """Is the weight of this layer's layout, with its nested_code?"""
        layout = (weight.format, weight.blocksize, weight.nested_blocksize)
        if self.weight.is_meta or layout != (self.format, self.blocksize, self.nested_blocksize):
            return False
        return not weight.nested or self._has_code(weight.nested_code)

    def _has_code(self, nested_code: Tensor) -> bool:
        """Other weights may share this layer's, so that nothing is written to it."""
        return torch.equal(self.nested_code, nested_code.to(self.nested_code))

    def extra_repr(self) -> str:
        nested = f", nested_blocksize={self.nested_blocksize}" if self.nested_blocksize else ""
        return f"{super().extra_repr()}, format={self.format}, blocksize={self.blocksize}{nested}"


def _tensors(weight: nf4.QuantizedTensor[Tensor]) -> dict[str, Tensor]:
    """Those that the weight has, by their names."""
    parts = {name: getattr(weight, name) for name in ("packed", *SCALES)}
    return {name: part for name, part in parts.items() if part is not None}
