"""Int4Linear: a linear layer with a 4-bit integer weight of GPTQ, AWQ or compressed-tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

import nf4
from nf4 import _convert, _torch
from nf4._prepared import prepare
from nf4.errors import InvalidArgument
from nf4.int4 import int4_shapes
from nf4.torch import _foreign_int4, _int4_columns, functional
from nf4.torch._checks import torch_dtype
from nf4.torch._int4_weight import KEYS, Int4Parts, Int4Spec
from nf4.torch._packed_codes import PackedWords
from nf4.torch.modules.base import (
    QuantizedLinear,
    dense_weight,
    new_bias,
    require_memory,
    torch_device,
)
from nf4.torch.modules.frozen_part import FrozenPart
from nf4.typing import DTypeLike, Int4Layout
from nf4.weight import no_weight

_SHAPE = "weight_shape"  # compressed-tensors also has this key


def _zeros(
    layout: Int4Layout, shape: tuple[int, int], group_size: int, symmetric: bool,
    scales_dtype: torch.dtype, device: torch.device | None,
) -> nf4.Int4Tensor[Tensor]:  # fmt: skip
    """Returns a weight whose parts are zeros."""
    shapes = int4_shapes(layout, shape, group_size)
    has_zeros = not symmetric or layout != "compressed-tensors"

    def words(size: tuple[int, int]) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    return nf4.Int4Tensor(
        layout=layout,
        shape=shape,
        group_size=group_size,
        packed=words(shapes.packed),
        scales=torch.zeros(shapes.scales, dtype=scales_dtype, device=device),
        zeros=words(shapes.zeros) if has_zeros else None,
    )


class Int4Linear(QuantizedLinear):
    """y = x W^T + bias, with a frozen 4-bit integer W. The forward pass makes no dense W.

    layout    "gptq", "gptq_v2", "awq" or "compressed-tensors", which names the buffers as in
              checkpoints, with the shapes of nf4.Int4Tensor: the first three      qweight, scales,
              qzeros, g_idx (awq has no g_idx) compressed-tensors   weight_packed, weight_scale,
              weight_zero_point, weight_g_idx,
                                   weight_shape
              A part that the weight lacks is None. No cast changes them
    group_size, bits
              columns that share a scale (-1: all), and 4
    bias      a Parameter [out_features], or None. It may be trained
    compute_dtype
              as for NF4Linear

    Make a layer with from_linear, from_quantized or from_module. The constructor makes a layer of
    zeros, for load_state_dict. The state_dict has the keys of the layout's checkpoints. A g_idx
    that is column / group_size is not kept in memory, and is written only for GPTQ. A state_dict
    does not tell if its zeros are those of "gptq" or "gptq_v2"; config.json does.

    For adapters see NF4Linear. They cannot be merged into an Int4Linear.
    """

    __module__ = "nf4.torch.modules"  # pickled layers refer to it
    bits = 4

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        layout: Int4Layout = "gptq",
        group_size: int = 128,
        symmetric: bool = True,
        scales_dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        dtype: DTypeLike | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        nn.Module.__init__(self)
        in_features = _convert.count("in_features", in_features)
        out_features = _convert.count("out_features", out_features)
        _convert.int4_layout(layout)
        group_size = _convert.integer("group_size", group_size, 32)
        dtype = torch_dtype(torch.get_default_dtype() if dtype is None else dtype)
        device = torch_device(device)
        wanted = functional.int4_scales_dtype(scales_dtype, dtype)
        weight = _zeros(layout, (out_features, in_features), group_size, symmetric, wanted, device)
        self.adopt(weight)
        self._take_bias(new_bias(bias, out_features, dtype, device), out_features, compute_dtype)

    def adopt(self, weight: nf4.Int4Tensor[Tensor]) -> None:
        """Takes over a weight whose parts are tensors, and checks them; memory is shared. Raises
        InvalidArgument."""
        if not isinstance(weight, nf4.Int4Tensor):
            raise no_weight("weight", weight, "an Int4Tensor")
        parts = Int4Parts.of(weight)  # raises if a part is not a tensor
        if _torch.fault(weight.packed) is None:  # meta and fake tensors have one
            weight = _int4_columns.without_plain_g_idx(dataclasses.replace(weight, **parts.named()))
            parts = Int4Parts.of(weight)
            prepare(weight)  # raises if a part has the wrong size or type
        self.spec, keys = parts.spec, KEYS[weight.layout]
        self.out_features, self.in_features = weight.shape
        for name, tensor in parts.named().items():
            self.register_buffer(keys.get(name, name), tensor, persistent=name in keys)
        if weight.layout == "compressed-tensors":
            shape = torch.tensor(weight.shape, device=weight.packed.device)
            self.register_buffer(_SHAPE, shape)
        self.took_weight()

    @classmethod
    def from_quantized(
        cls,
        weight: nf4.Int4Tensor[Tensor],
        bias: nn.Parameter | None = None,
        *,
        compute_dtype: DTypeLike | None = None,
    ) -> Int4Linear:
        """Makes a layer of a weight whose parts are tensors; memory is shared. Checks g_idx. Raises
        InvalidArgument."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.adopt(weight)
        layer._take_bias(bias, layer.out_features, compute_dtype)
        return layer

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        layout: Int4Layout = "gptq",
        group_size: int = 128,
        symmetric: bool = True,
        scales_dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        allow_nonfinite: bool = False,
    ) -> Int4Linear:
        """Quantizes the weight of a dense layer on its device, by rounding to nearest, and shares
        the bias. allow_nonfinite: quantize NaN as 0 and Inf as the largest value of its group.
        Raises what nf4.quantize_int4 raises, and InvalidArgument for NaN and Inf."""
        weight = functional.quantize_int4(
            dense_weight(linear, allow_nonfinite),
            layout=layout,
            group_size=group_size,
            symmetric=symmetric,
            scales_dtype=scales_dtype,
        )
        made = cls.from_quantized(weight, linear.bias, compute_dtype=compute_dtype)
        made.dtype_before = _torch.dtype_name(linear.weight.dtype)
        return made.train(linear.training)

    @classmethod
    def from_module(cls, layer: nn.Module) -> Int4Linear:
        """Makes a layer on the memory of a quantized linear layer of GPTQModel, AutoAWQ or
        compressed-tensors that nf4.torch.convert accepts. Raises InvalidArgument."""
        weight, bias = _foreign_int4.weight_and_bias(layer)
        return cls.from_quantized(weight, bias).train(layer.training)

    @property
    def layout(self) -> str:
        return self.spec.layout

    @property
    def group_size(self) -> int:
        return self.spec.group_size

    @property
    def weight(self) -> Tensor:
        """The bytes of the codes. PEFT reads a layer's device from this attribute, and some models
        recognise a 4-bit layer by its dtype."""
        words = self._buffers[KEYS[self.spec.layout]["packed"]]
        return PackedWords.of(words) if type(words) is Tensor else words

    def parts(self) -> Int4Parts:
        made = self.plain_parts(self._parameters, self._buffers, self.spec)
        if made is not None:
            return made
        keys = KEYS[self.spec.layout]
        return Int4Parts(
            *(self.stored(keys.get(name, name)) for name in Int4Parts.names), self.spec
        )

    @staticmethod
    def plain_parts(
        parameters: dict[str, Any], buffers: dict[str, Any], spec: Int4Spec
    ) -> Int4Parts | None:
        keys = KEYS[spec.layout]
        tensors = [buffers[keys.get(name, name)] for name in Int4Parts.names]
        if type(buffers[keys["packed"]]) is not Tensor:
            if not isinstance(buffers[keys["packed"]], FrozenPart):
                return None
            tensors = [each.stored if isinstance(each, FrozenPart) else each for each in tensors]
        return Int4Parts(*tensors, spec)

    def sharded_parts(self) -> dict[str, str]:
        keys = KEYS[self.spec.layout]
        has_zeros = self._buffers[keys["zeros"]] is not None
        names = ("zeros", "scales", "packed") if has_zeros else ("scales", "packed")
        return {name: keys[name] for name in names}

    @property
    def quantized(self) -> nf4.Int4Tensor[Tensor]:
        """The weight, as nf4 and nf4.torch accept it. Memory is shared."""
        return self.parts().quantized()

    def dequantize(self, dtype: DTypeLike | None = None) -> Tensor:
        """Returns the dense weight, [out_features, in_features]. dtype: by default that of the
        scales."""
        return functional.dequantize(self.quantized, dtype)

    def reorder_(self) -> Int4Linear:
        """Sorts the columns of a weight with act order by their groups (nf4.reorder), so that
        kernels read whole groups. Without act order it does nothing. The codes get new memory,
        which is no longer shared with the module that this layer was made of. The state_dict does
        not change, because it sorts a copy back. Returns the layer. Raises InvalidArgument for a
        layer that is prepared for fully_shard."""
        weight = self.quantized
        if weight.g_idx is not None:
            self.require_unprepared()
            self.adopt(nf4.reorder(weight))
        return self

    # ---- state_dict ----------------------------------------------------------------

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_prepared():
            self._save_prepared(destination, prefix)
            return
        weight, keys = self.quantized, KEYS[self.layout]
        if weight.permutation is not None:
            weight = _int4_columns.in_order_of_checkpoint(weight)
            destination[prefix + keys["packed"]] = weight.packed
            destination[prefix + keys["g_idx"]] = weight.g_idx
        elif keys is KEYS["gptq"] and weight.g_idx is None:
            plain = _int4_columns.plain_g_idx(weight, weight.packed.device)
            destination[prefix + keys["g_idx"]] = plain

    def _save_prepared(self, destination: dict[str, Any], prefix: str) -> None:
        keys = KEYS[self.layout]
        if self.permutation is not None:
            raise InvalidArgument(
                f"{prefix.rstrip('.')}: the weight is reordered, whose state_dict sorts the codes "
                f"of all rows back; expected the state_dict before fully_shard"
            )
        for part, tensor in self._shown().items():
            destination[prefix + keys[part]] = tensor
        if keys is KEYS["gptq"] and self.g_idx is None:
            device = self._buffers[keys["packed"]].device
            destination[prefix + keys["g_idx"]] = _int4_columns.plain_g_idx(self.spec, device)

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
        keys = KEYS[self.layout]
        given = {n: state_dict[prefix + k] for n, k in keys.items() if prefix + k in state_dict}
        own = {prefix + key for key in (*keys.values(), _SHAPE)}
        rest = {key: value for key, value in state_dict.items() if key not in own}
        absent: list[str] = []
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, absent, unexpected_keys, error_msgs
        )
        missing_keys += [key for key in absent if key not in own]
        has_zeros = self._buffers[keys["zeros"]] is not None
        needed = ("packed", "scales", "zeros") if has_zeros else ("packed", "scales")
        missing = [prefix + keys[name] for name in needed if name not in given]
        if missing:
            missing_keys += missing
            return
        try:
            self._require_shape(state_dict.get(prefix + _SHAPE))
            self._load_weight(given, local_metadata.get("assign_to_params_buffers"))
        except InvalidArgument as error:
            error_msgs.append(f"{prefix.rstrip('.')}: {error}")

    def _require_shape(self, stored: Tensor | None) -> None:
        shape = [self.out_features, self.in_features]
        if stored is not None and not stored.is_meta and stored.tolist() != shape:
            raise InvalidArgument(f"{_SHAPE} is {stored.tolist()}; expected {shape}")

    def _load_weight(self, given: dict[str, Tensor], assign: bool | None) -> None:
        """Takes over the parts of a weight. `assign`: the tensors themselves. Else copies them into
        this layer's memory, which CUDA graphs refer to, or into new memory on this layer's device
        if it has none."""
        if self.is_prepared():
            self._load_prepared(given, assign)
            return
        own = self.parts()
        if not assign:
            require_memory(own.packed, given["packed"])
        weight = nf4.Int4Tensor(
            layout=self.layout,
            shape=(self.out_features, self.in_features),
            group_size=self.group_size,
            **{name: tensor.detach() for name, tensor in given.items()},
        )
        if _torch.fault(weight.packed) is None:
            weight = _int4_columns.without_plain_g_idx(weight, KEYS[self.layout].get("g_idx", ""))
            prepare(weight)
        if not assign:
            parts = Int4Parts.of(weight).named()
            copies = {name: _copied(own.named()[name], part, own.packed.device)
                      for name, part in parts.items() if part is not None}  # fmt: skip
            weight = dataclasses.replace(weight, **copies)
        self.adopt(weight)

    def _load_prepared(self, given: dict[str, Tensor], assign: bool | None) -> None:
        keys, parts = KEYS[self.layout], dict(given)
        own, index = self._buffers.get(keys.get("g_idx", "")), parts.pop("g_idx", None)
        if self.permutation is not None:
            raise InvalidArgument("the layer is sharded and reordered; expected one as stored")
        if own is not None:
            parts[keys["g_idx"]] = index
        elif index is not None and not index.is_meta:
            plain = _int4_columns.plain_g_idx(self.spec, index.device)
            if not torch.equal(index.to(plain.dtype), plain):
                raise InvalidArgument(
                    f"{keys['g_idx']} has act order, but the sharded layer has none"
                )
        self._load_parts({keys.get(name, name): part for name, part in parts.items()}, assign)

    def extra_repr(self) -> str:
        keys = KEYS[self.layout]
        symmetric = "" if "zeros" in self.sharded_parts() else ", no zeros"
        g_idx = self._buffers.get(keys.get("g_idx", "g_idx"))
        order = ", act order" if g_idx is not None else ""
        order = ", reordered" if self.permutation is not None else order
        return (
            f"{super().extra_repr()}, layout={self.layout}, group_size={self.group_size}"
            f"{symmetric}{order}"
        )


def _copied(own: Tensor | None, given: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor into this layer's memory if that has the same shape and dtype, else into new
    memory."""
    if own is None or own.shape != given.shape or own.dtype != given.dtype:
        return given.to(device, copy=True)
    return own.copy_(given)
