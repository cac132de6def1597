"""NF4Linear: a linear layer with a weight in 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import nf4
from nf4 import _convert, _torch
from nf4._prepared import prepare
from nf4.errors import InvalidArgument, kind_of, shown
from nf4.tensor import no_weight
from nf4.torch import _operators, _state, functional
from nf4.torch._checks import require_dense, require_tensor, torch_dtype
from nf4.torch._weight import WeightParts

_SCALES = ("absmax", "nested_absmax", "nested_code", "nested_offset")


def _no_scales(
    shape: tuple[int, int], format: str, blocksize: int, nested_blocksize: int, dtype: str, device
) -> nf4.QuantizedTensor:
    """A weight of zeros."""
    counts = nf4.sizes(shape, format=format, blocksize=blocksize, nested_blocksize=nested_blocksize)
    nested = nested_blocksize != 0

    def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return nf4.QuantizedTensor(
        packed=zeros(counts.packed_bytes, 1, dtype=torch.uint8),
        absmax=zeros(counts.blocks, dtype=torch.uint8 if nested else torch.float32),
        nested_absmax=zeros(counts.nested_blocks) if nested else None,
        nested_code=zeros(256) if nested else None,
        nested_offset=zeros() if nested else None,
        shape=shape,
        format=format,
        blocksize=blocksize,
        nested_blocksize=nested_blocksize,
        dtype=dtype,
    )


def _device(device: Any) -> torch.device | None:
    """None is where torch makes tensors by default."""
    if device is None:
        return None
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise InvalidArgument(f"device is {shown(device)}; expected one of torch: {why}") from None


class NF4Linear(nn.Linear):
    """y = x W^T + bias, with W in 4 bits, frozen, and never dense in the forward pass.

    weight    the packed bytes, a Parameter uint8 [ceil(out_features * in_features / 2), 1]
    absmax, nested_absmax, nested_code, nested_offset
              the scales, as in nf4.QuantizedTensor; None where the weight is flat. No cast
              reaches them: .half() changes the bias alone
    bias      a Parameter [out_features], or None. It may be trained
    compute_dtype
              "fp32", "fp16", "bf16" or torch's: what x and bias are cast to, and y from. None: the
              dtype of x, or autocast's.
              Autocast's goes before either

    Made by from_linear, from_quantized or from_bitsandbytes; one that is made by its sizes is of
    zeros, for load_state_dict. Its state_dict has the keys of bitsandbytes' Linear4bit, and it
    loads one's. A Linear4bit's own load_state_dict takes no quantized weight, not even its own;
    from_pretrained of transformers does. Where it is to load what is saved, the model's
    quantization_config has to name bnb_4bit_compute_dtype, which no state_dict holds: without it
    the reloaded model computes in fp32.

    PEFT puts its adapters beside it as beside any torch.nn.Linear. They cannot be merged into it,
    nor can DoRA's be put there, which read the weight: nf4.torch.to_dense comes first.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: str = "nf4",
        blocksize: int = 64,
        nested_blocksize: int = 256,
        compute_dtype: Any = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        nn.Module.__init__(self)
        in_features = _convert.count("in_features", in_features)
        out_features = _convert.count("out_features", out_features)
        if not isinstance(bias, (bool, int, type(None))):
            raise InvalidArgument(f"bias is {kind_of(bias)}; expected True or False")
        dtype = torch_dtype(torch.get_default_dtype() if dtype is None else dtype)
        device = _device(device)
        made = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        shape, name = (out_features, in_features), _torch.dtype_name(dtype)
        self._take(
            _no_scales(shape, format, blocksize, nested_blocksize, name, device),
            nn.Parameter(made) if bias else None,
            compute_dtype,
        )

    def _take(
        self,
        weight: nf4.QuantizedTensor,
        bias: nn.Parameter | None,
        compute_dtype: Any,
    ) -> None:
        self.compute_dtype = (
            None if compute_dtype is None else torch_dtype(compute_dtype, "compute_dtype")
        )
        self._take_weight(weight)
        if bias is not None and not isinstance(bias, nn.Parameter):
            raise InvalidArgument(f"bias is {kind_of(bias)}; expected a torch.nn.Parameter")
        if bias is not None and bias.shape != (self.out_features,):
            raise InvalidArgument(
                f"bias is of shape {tuple(bias.shape)}; expected ({self.out_features},)"
            )
        self.register_parameter("bias", bias)

    def _take_weight(self, weight: nf4.QuantizedTensor) -> None:
        if not isinstance(weight, nf4.QuantizedTensor):
            raise no_weight("weight", weight)
        if len(weight.shape) != 2:
            raise InvalidArgument(f"weight is of shape {weight.shape}; expected two dimensions")
        if weight.codebook is not None:
            raise InvalidArgument("codebook is given; a layer has its format's own")
        self.spec = WeightParts.of(weight).spec  # or it is not of tensors
        if _torch.fault(weight.packed) is None:  # which meta and fake tensors have
            prepare(weight)  # or a part is of the wrong size or type
        self.out_features, self.in_features = weight.shape
        self.dtype_before = weight.dtype
        packed = _state.bytes_of(weight.packed)
        self.register_parameter("weight", nn.Parameter(packed, requires_grad=False))
        for name in _SCALES:
            self.register_buffer(name, getattr(weight, name), persistent=False)

    @classmethod
    def _of(
        cls,
        weight: nf4.QuantizedTensor,
        bias: nn.Parameter | None,
        compute_dtype: Any,
    ) -> NF4Linear:
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(weight, bias, compute_dtype)
        return layer

    @classmethod
    def from_quantized(
        cls,
        weight: nf4.QuantizedTensor,
        bias: nn.Parameter | None = None,
        *,
        compute_dtype: Any = None,
    ) -> NF4Linear:
        """Around a weight whose parts are tensors, which are shared. Raises InvalidArgument."""
        return cls._of(weight, bias, compute_dtype)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        format: str = "nf4",
        blocksize: int = 64,
        nested_blocksize: int = 256,
        compute_dtype: Any = None,
    ) -> NF4Linear:
        """Quantizes the weight of a dense layer where it is, and shares its bias. Raises what
        nf4.quantize raises."""
        if type(linear) is not nn.Linear:
            raise InvalidArgument(
                f"linear is {kind_of(linear)}; expected a torch.nn.Linear, whose weight is dense: "
                f"from_bitsandbytes takes a Linear4bit"
            )
        require_dense("linear.weight", linear.weight)
        weight = functional.quantize(
            linear.weight.detach(),
            format=format,
            blocksize=blocksize,
            nested_blocksize=nested_blocksize,
        )
        return cls._of(weight, linear.bias, compute_dtype).train(linear.training)

    @classmethod
    def from_bitsandbytes(cls, layer: nn.Linear) -> NF4Linear:
        """Around the memory of a bitsandbytes Linear4bit that is quantized; nothing is copied.
        Raises InvalidArgument."""
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

    def to_linear(self, dtype: Any = None) -> nn.Linear:
        """A dense layer of the numbers, in a dtype, by default that of the weight before it was
        quantized. It has the bias itself, or one that is cast."""
        weight = nn.Parameter(self.dequantize(dtype), requires_grad=False)
        made = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        made.weight = weight
        if self.bias is not None and self.bias.dtype != weight.dtype:
            made.bias = nn.Parameter(self.bias.detach().to(weight.dtype), self.bias.requires_grad)
        else:
            made.bias = self.bias
        return made.train(self.training)

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
    def quantized(self) -> nf4.QuantizedTensor:
        """The weight for the functions of nf4 and nf4.torch. Its parts are the layer's own."""
        return nf4.QuantizedTensor(
            packed=self.weight.detach(),
            **{name: getattr(self, name) for name in _SCALES},
            shape=(self.out_features, self.in_features),
            format=self.format,
            blocksize=self.blocksize,
            nested_blocksize=self.nested_blocksize,
            dtype=self.dtype_before,
        )

    def dequantize(self, dtype: Any = None) -> Tensor:
        """The weight, dense: [out_features, in_features]."""
        return functional.dequantize(self.quantized, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., in_features]; y is [..., out_features] in its dtype, but for autocast's."""
        require_tensor("x", x)
        dtype, wanted = x.dtype, self.compute_dtype
        casts = (
            wanted is not None and wanted != dtype and not torch.is_autocast_enabled(x.device.type)
        )
        if casts:
            x = x.to(wanted)
        # torch.nn.Module looks for an attribute in three places before it comes to these.
        parameters, scales = self._parameters, self._buffers
        try:
            packed, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # DataParallel and parametrizations put others elsewhere
            packed, bias = self.weight, self.bias
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        weight = WeightParts(
            packed,
            scales["absmax"],
            scales["nested_absmax"],
            scales["nested_code"],
            scales["nested_offset"],
            None,
            self.spec,
        )
        y = _operators.linear(x, bias, weight)
        return y.to(dtype) if casts else y

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NF4Linear:
        scales = {id(scale) for scale in self._buffers.values() if scale is not None}

        def moved(tensor: Tensor) -> Tensor:
            if id(tensor) not in scales:
                return fn(tensor)
            # Bytes are moved as floats are, and cast by nothing.
            result = fn(tensor.reshape(-1).view(torch.uint8))
            return result.view(tensor.dtype).view(tensor.shape)

        return super()._apply(moved, recurse)

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
        parts = {
            key.removeprefix(name).removeprefix("."): value
            for key, value in state_dict.items()
            if key == name or key.startswith(f"{name}.")
        }
        try:
            loaded = _state.load(parts)
            if loaded.weight is not None:
                self._load_weight(loaded.weight, local_metadata.get("assign_to_params_buffers"))
            elif "" in parts:
                raise InvalidArgument(
                    f"weight is of {parts[''].dtype} and has no quant_state beside it; expected "
                    f"the keys of bitsandbytes: NF4Linear.from_linear quantizes a dense weight"
                )
        except InvalidArgument as error:
            error_msgs.append(f"{prefix.rstrip('.')}: {error}")
            return
        consumed = {f"{name}.{key}".rstrip(".") for key in loaded.keys}
        rest = {key: value for key, value in state_dict.items() if key not in consumed}
        absent: list[str] = []
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, absent, unexpected_keys, error_msgs
        )
        missing_keys += [key for key in absent if key != name or loaded.weight is None]

    def _load_weight(self, weight: nf4.QuantizedTensor, assign: bool | None) -> None:
        """Takes a weight over: as it is, or copied to this layer's memory, which CUDA graphs and
        other layers may know, or to new memory on its device where that does not fit."""
        shape = (self.out_features, self.in_features)
        if weight.shape != shape:
            raise InvalidArgument(f"weight is of shape {weight.shape}; expected {shape}")
        if assign:
            self._take_weight(weight)
            return
        if self.weight.is_meta and not weight.packed.is_meta:
            raise InvalidArgument(
                "the layer is on meta, where nothing can be copied to; expected "
                "load_state_dict(..., assign=True), or a layer that to_empty() gave memory"
            )
        parts = _tensors(weight)
        if self._has_memory_for(weight):
            prepare(weight)
            own = _tensors(self.quantized)
            for name in parts.keys() - {"nested_code"}:
                own[name].copy_(parts[name].view(own[name].shape))
            self.dtype_before = weight.dtype
        else:
            moved = {name: part.to(self.weight.device, copy=True) for name, part in parts.items()}
            self._take_weight(_with_parts(weight, moved))

    def _has_memory_for(self, weight: nf4.QuantizedTensor) -> bool:
        """Was the weight quantized as this layer's was, with its table of scales? Other weights
        may share that, so nothing is written to it."""
        layout = (weight.format, weight.blocksize, weight.nested_blocksize)
        if self.weight.is_meta or layout != (self.format, self.blocksize, self.nested_blocksize):
            return False
        return not weight.nested or torch.equal(
            self.nested_code, weight.nested_code.to(self.nested_code)
        )

    def extra_repr(self) -> str:
        nested = f", nested_blocksize={self.nested_blocksize}" if self.nested_blocksize else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, format={self.format}, "
            f"blocksize={self.blocksize}{nested}"
        )


def _tensors(weight: nf4.QuantizedTensor) -> dict[str, Tensor]:
    """Those that the weight has, by their names."""
    parts = {name: getattr(weight, name) for name in ("packed", *_SCALES)}
    return {name: part for name, part in parts.items() if part is not None}


def _with_parts(weight: nf4.QuantizedTensor, parts: dict[str, Tensor]) -> nf4.QuantizedTensor:
    return nf4.QuantizedTensor(
        **parts,
        shape=weight.shape,
        format=weight.format,
        blocksize=weight.blocksize,
        nested_blocksize=weight.nested_blocksize,
        dtype=weight.dtype,
    )
