"""How the weights of a layer arrive: its parameters are placeholders until the tensors of a
checkpoint are there."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import nf4
from nf4.torch._weight import PARTS as TENSORS
from nf4.torch._weight import WeightParts
from nf4.vllm.arrivals import PARTS, Arrivals, Expected, Quantizer
from nf4.vllm.cuts import Ranges, cut, flat

# More than the tensors that arrive for a layer. vLLM counts one element for each when it reloads
# weights, and processes a layer that has fewer elements than it expects at the end.
_MANY = 1 << 20
# Devices where scales become fp32. A CPU multiplies few rows by nested scales a seventh slower.
FLAT_ON = ("cpu",)


class Loading:
    """A quantization method of an engine, whose weights are put together. quantize: makes a 4-bit
    weight of a dense one; None: dense weights stay dense. arrive() takes a tensor of the checkpoint
    with the arguments of the engine's loader. It may tell whether this rank needs the weight."""

    arrive: Callable[..., bool | None]
    quantize: Quantizer | None
    expected: Expected

    def expect(self, layer: Any, stems: Iterable[str], dtype: torch.dtype) -> None:
        """Registers a placeholder for each part of the weights of these names. dtype: of the
        model."""
        layer.nf4_device = torch.empty(0).device
        layer.nf4_arrivals, layer.nf4_placeholders = {}, []
        for stem, part in itertools.product(stems, PARTS):
            expected = self.expected.get(part, torch.float32) or dtype
            value = torch.empty(1, dtype=expected).expand(_MANY)
            made = Parameter(value, requires_grad=False)
            made.weight_loader = _loader(self.arrive, weakref.ref(layer), part)
            layer.nf4_placeholders.append(f"{stem}_{part}" if part else stem)
            layer.register_parameter(layer.nf4_placeholders[-1], made)

    def completed(
        self, layer: Any, key: Any, name: str, part: str, tensor: Tensor
    ) -> nf4.QuantizedTensor | Tensor | None:
        """Returns the weight that this part makes complete, or None. name: of the weight."""
        weight = layer.nf4_arrivals.setdefault(key, Arrivals(name)).add(part, tensor)
        if weight is not None:
            del layer.nf4_arrivals[key]
        if isinstance(weight, Tensor) and self.quantize:
            return self.quantize(weight.to(layer.nf4_device))
        return weight


def drop(layer: Any) -> None:
    """Removes the placeholders. Raises ValueError for a weight that is not complete."""
    for arrivals in layer.nf4_arrivals.values():
        raise ValueError(f"{arrivals.name}: the checkpoint lacks {arrivals.missing()}")
    for name in layer.nf4_placeholders:
        delattr(layer, name)


def local(
    name: str, weight: nf4.QuantizedTensor | Tensor, dim: int, ranges: Ranges, device: torch.device
) -> nf4.QuantizedTensor | Tensor:
    """Returns this rank's part of a weight, on its device, with fp32 scales if the device is in
    FLAT_ON. name: of the layer, for errors."""
    if isinstance(weight, Tensor):
        parts = [weight.narrow(dim, begin, end - begin) for begin, end in ranges]
        return torch.cat(parts, dim).to(device)
    try:
        made = cut(weight, dim, ranges)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    tensors = ((each, getattr(made, each)) for each in TENSORS)
    moved = {k: torch.empty_like(t, device=device).copy_(t) for k, t in tensors if t is not None}
    made = dataclasses.replace(made, **moved)
    return flat(made) if device.type in FLAT_ON else made


def register(layer: Any, name: str, weight: nf4.QuantizedTensor | Tensor) -> Any:
    """Registers the tensors of a weight. Returns the names of its tensors, or None for those that
    it lacks, and its numbers; None for a dense weight."""
    if isinstance(weight, Tensor):
        layer.register_parameter(name, Parameter(weight, requires_grad=False))
        return None
    parts = WeightParts.of(weight)
    names: list[str | None] = []
    for part, tensor in zip(TENSORS, parts.tensors, strict=True):
        names.append(None if tensor is None else name if part == "packed" else f"{name}_{part}")
        if tensor is not None:
            layer.register_parameter(names[-1], Parameter(tensor, requires_grad=False))
    return tuple(names), tuple(parts.spec[:5])


def describe(layer: Any, name: str, description: Any) -> None:
    """Keeps what describes weights of a layer. Raises ValueError if weights that are loaded again
    differ in it, since compiled graphs have it as constants."""
    if getattr(layer, name, description) != description:
        raise ValueError("the weights are loaded again in another format, blocksize or shape")
    setattr(layer, name, description)


def _loader(
    arrive: Callable[..., bool | None], layer_of: Callable[[], Any], part: str
) -> Callable[..., bool | None]:
    """Returns vLLM's weight_loader of a part's placeholder."""

    def weight_loader(
        param: Tensor, loaded_weight: Tensor, *args: Any, return_success: bool = False, **named: Any
    ) -> bool | None:
        param.data[:1].copy_(torch.zeros_like(param.data[:1]))  # vLLM counts the arrival
        # On meta vLLM only counts, and loads the tensor again later.
        found = param.is_meta or arrive(layer_of(), part, loaded_weight, *args, **named)
        return found if return_success else None

    return weight_loader
