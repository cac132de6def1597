"""NF4Weight: the common base of NF4Linear and NF4Experts, with a weight in any format of
nf4.QuantizedTensor."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

import nf4
from nf4 import _convert, _torch
from nf4._formats import SCALE_RULES, has_global_scales, rule_for_models
from nf4._prepared import prepare
from nf4.errors import InvalidArgument
from nf4.torch import _state, functional
from nf4.torch._checks import is_finite
from nf4.torch._global_scales import rescaled
from nf4.torch._packed_codes import PackedCodes
from nf4.torch._weight import Spec, WeightParts
from nf4.torch.modules.base import QuantizedModule, require_memory
from nf4.torch.modules.frozen_part import FrozenPart
from nf4.typing import DTypeLike, FormatName, ScaleRuleName
from nf4.weight import no_weight

SCALES = ("absmax", "nested_absmax", "nested_code", "nested_offset")


def zeros(
    shape: tuple[int, ...],
    format: FormatName,
    blocksize: int | None,
    nested_blocksize: int | None,
    dtype: str,
    device: torch.device | None,
    scale_rule: ScaleRuleName | None = None,
) -> nf4.QuantizedTensor[Tensor]:
    """Returns a weight whose parts are zeros."""
    blocksize, nested_blocksize = _convert.blocksizes(format, blocksize, nested_blocksize)
    counts = nf4.sizes(shape, format=format, blocksize=blocksize, nested_blocksize=nested_blocksize)
    scale_bytes = format in SCALE_RULES
    nested = nested_blocksize != 0 and not scale_bytes
    as_bytes = nested or scale_bytes

    def made(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return nf4.QuantizedTensor(
        packed=made(counts.packed_bytes, 1, dtype=torch.uint8),
        absmax=made(counts.blocks, dtype=torch.uint8 if as_bytes else torch.float32),
        nested_absmax=made(counts.nested_blocks) if counts.nested_blocks else None,
        nested_code=made(256) if nested else None,
        nested_offset=made() if nested else None,
        shape=shape,
        format=format,
        blocksize=blocksize,
        nested_blocksize=nested_blocksize,
        scale_rule=scale_rule,
        dtype=dtype,
    )


def quantize_into(weight: Tensor, out: nf4.QuantizedTensor[Tensor]) -> nf4.QuantizedTensor[Tensor]:
    """Quantizes a dense weight with as many threads as torch has. In NVFP4 `out` has the global
    scales."""
    threads = 0 if weight.is_cuda else torch.get_num_threads()
    return nf4.quantize(weight.contiguous(), out=out, threads=threads)


class _Key:
    """A key of the state_dict, with an attribute for each name that may follow."""

    def __getattr__(self, name: str) -> _Key:
        if name.startswith("_"):
            raise AttributeError(name)
        return self


class NF4Weight(QuantizedModule):
    """A module with a frozen 4-bit weight. NF4Linear describes its parts and keys."""

    spec: Spec
    dtype_before: str
    # The layout of a checkpoint with this weight in MXFP4 or NVFP4 (checkpoint/e2m1_layouts.py).
    stored_layout: str | None = None
    # Messages name this as the way to make a module of a dense weight.
    _of_dense: str

    @staticmethod
    def require_shape(shape: tuple[int, ...], blocksize: int) -> None:
        """Raises InvalidArgument for a weight that the module cannot have."""
        raise NotImplementedError

    def _take_sizes(self, shape: tuple[int, ...]) -> None:
        """Sets the attributes that hold the weight's sizes."""
        raise NotImplementedError

    def _take_weight(self, weight: nf4.QuantizedTensor[Tensor]) -> None:
        if not isinstance(weight, nf4.QuantizedTensor):
            raise no_weight("weight", weight, "a QuantizedTensor")
        self.require_shape(weight.shape, weight.blocksize)
        if weight.codebook is not None:
            raise InvalidArgument("codebook is given; a layer has its format's own")
        parts = WeightParts.of(weight)  # raises if a part is not a tensor
        if _torch.fault(weight.packed) is None:  # meta and fake tensors have one
            prepare(dataclasses.replace(weight, **parts.named()))  # raises if a part is wrong
        self.spec, self.dtype_before = parts.spec, weight.dtype
        self._take_sizes(weight.shape)
        packed = _state.bytes_of(parts.packed)
        self._buffers.pop("weight", None)  # it is a buffer under FSDP1
        self.register_parameter("weight", PackedCodes(packed))
        for name in SCALES:
            self.register_buffer(name, getattr(parts, name), persistent=False)
        self.took_weight()

    def settle(self) -> None:
        super().settle()
        weight = self._parameters.get("weight")
        if type(weight) is nn.Parameter:  # torch makes this of a weight on meta
            self._parameters["weight"] = PackedCodes(weight)

    @property
    def format(self) -> str:
        return self.spec.name

    @property
    def scale_rule(self) -> str | None:
        return self.spec.scale_rule

    @property
    def blocksize(self) -> int:
        return self.spec.blocksize

    @property
    def nested_blocksize(self) -> int:
        return self.spec.nested_blocksize

    def format_repr(self) -> str:
        """Returns the format and the blocksizes, for extra_repr."""
        nested = f", nested_blocksize={self.nested_blocksize}" if self.nested_blocksize else ""
        return f"format={self.format}, blocksize={self.blocksize}{nested}"

    @property
    def quantized(self) -> nf4.QuantizedTensor[Tensor]:
        """The weight, as nf4 and nf4.torch accept it. Memory is shared."""
        return self.parts().quantized(self.dtype_before)

    def dequantize(self, dtype: DTypeLike | None = None) -> Tensor:
        """Returns the dense weight, [out_features, in_features], or [experts, out_features,
        in_features] for experts. dtype: by default that of the weight before it was quantized."""
        return functional.dequantize(self.quantized, dtype)

    def requantize(self, weight: Tensor) -> None:
        """Replaces the weight by quantizing a dense weight of its shape, in its format, on its
        device. MXFP4 gets scales by the rule "even", which has the smallest error. NVFP4 keeps its
        global scales, or gets them times a power of two if that gives the blocks better scales:
        save_pretrained can then give layers that engines fuse one global scale. Raises what
        nf4.quantize raises, and InvalidArgument for NaN and Inf, which 4 bits cannot store, and for
        a module that is prepared for fully_shard."""
        self.require_unprepared()
        if tuple(weight.shape) != self.spec.shape:
            raise InvalidArgument(
                f"weight is of shape {tuple(weight.shape)}; expected {self.spec.shape}"
            )
        if not is_finite(weight):
            raise InvalidArgument("weight has NaN or Inf; expected finite numbers")
        weight, own = weight.detach().to(self.weight.device), self.quantized
        scales = rescaled(own, weight) if has_global_scales(self.format) else None
        if scales is None:
            made = functional.quantize(
                weight.contiguous(),
                format=self.format,
                blocksize=self.blocksize,
                nested_blocksize=self.nested_blocksize,
                scale_rule=rule_for_models(self.format, self.scale_rule),
            )
        else:
            packed, absmax = (torch.empty_like(each.detach()) for each in (own.packed, own.absmax))
            parts = {"packed": packed, "absmax": absmax, "nested_absmax": scales}
            out = dataclasses.replace(own, **parts, dtype=_torch.dtype_name(weight.dtype))
            made = quantize_into(weight, out)
        self._take_weight(dataclasses.replace(made, dtype=self.dtype_before))

    def parts(self) -> WeightParts:
        # This is the fastest way to the layer's current tensors, like QuantizedLinear.bias_in.
        made = self.plain_parts(self._parameters, self._buffers, self.spec)
        return self._prepared_parts() if made is None else made

    @staticmethod
    def plain_parts(
        parameters: dict[str, Any], buffers: dict[str, Any], spec: Spec
    ) -> WeightParts | None:
        """Returns the weight of a module with these parameters and buffers; None if it is
        elsewhere, or sharded."""
        if "weight" not in parameters:
            return None
        packed, absmax = parameters["weight"], buffers["absmax"]
        if type(absmax) is not Tensor:
            if not (isinstance(packed, FrozenPart) and isinstance(absmax, FrozenPart)):
                return None
            packed, absmax = packed.stored, absmax.stored
        weight = (
            packed,
            absmax,
            buffers["nested_absmax"],
            buffers["nested_code"],
            buffers["nested_offset"],
            None,
            spec,
        )
        return tuple.__new__(WeightParts, weight)

    def sharded_parts(self) -> dict[str, str]:
        return {"packed": "weight", "absmax": "absmax"}

    def _prepared_parts(self) -> WeightParts:
        return WeightParts(*map(self.stored, ("weight", *SCALES)), None, self.spec)

    # torch.distributed.checkpoint.state_dict resolves the names in a key, "weight.absmax", from
    # attribute to attribute, and lets a module name another object to begin with.
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
                    f"the keys of bitsandbytes: {self._of_dense} quantizes a dense weight"
                )
        except InvalidArgument as error:
            loaded, fault = _state.Loaded(set(parts), None), error
        consumed = {f"{name}.{key}".rstrip(".") for key in loaded.keys}
        rest = {key: value for key, value in state_dict.items() if key not in consumed}
        absent: list[str] = []
        # This comes first because it calls hooks, such as FSDP2's, which shards the weight again.
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, absent, unexpected_keys, error_msgs
        )
        missing_keys += [key for key in absent if key != name or "" not in parts]
        try:
            if fault is not None:
                raise fault
            if loaded.weight is not None:
                self._load_weight(loaded.weight, local_metadata.get("assign_to_params_buffers"))
        except InvalidArgument as error:
            error_msgs.append(f"{prefix.rstrip('.')}: {error}")

    def _load_weight(self, weight: nf4.QuantizedTensor[Tensor], assign: bool | None) -> None:
        """Takes over a weight. `assign`: its tensors themselves. Else copies it into this layer's
        memory, which CUDA graphs refer to, or into new memory on this layer's device if it does not
        fit."""
        if weight.shape != self.spec.shape:
            raise InvalidArgument(f"weight is of shape {weight.shape}; expected {self.spec.shape}")
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
        given, own = _layout(weight), _layout(self)
        if given != own:
            raise InvalidArgument(
                f"weight is of format, blocksize, nested_blocksize and scale_rule {given}; "
                f"expected {own}"
            )
        parts = _tensors(weight)
        code = None if assign else parts.pop("nested_code", None)
        self._load_parts({"weight": parts.pop("packed"), **parts}, assign)
        if code is not None and not self._has_code(code):
            self.nested_code = code.to(self.nested_code.device, copy=True)
        self.dtype_before = weight.dtype

    def _has_memory_for(self, weight: nf4.QuantizedTensor[Tensor]) -> bool:
        """Tells if the weight fits this layer's memory and has the same nested_code."""
        if self.weight.is_meta or _layout(weight) != _layout(self):
            return False
        return not weight.nested or self._has_code(weight.nested_code)

    def _has_code(self, nested_code: Tensor) -> bool:
        """Tells if the weight has this layer's nested_code. Other weights may share that tensor, so
        nothing is written to it."""
        return torch.equal(self.nested_code, nested_code.to(self.nested_code))


def _layout(weight: nf4.QuantizedTensor[Tensor] | NF4Weight) -> tuple[Any, ...]:
    """Returns what says how the bytes of a weight are read."""
    return weight.format, weight.blocksize, weight.nested_blocksize, weight.scale_rule


def _tensors(weight: nf4.QuantizedTensor[Tensor]) -> dict[str, Tensor]:
    """Returns the tensors that the weight has, by name."""
    parts = {name: getattr(weight, name) for name in ("packed", *SCALES)}
    return {name: part for name, part in parts.items() if part is not None}
