"""Linear layers of an engine in 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

import nf4
from nf4.vllm.arrivals import Expected, Quantizer
from nf4.vllm.cuts import Ranges, can_join, join, merged
from nf4.vllm.loading import Loading, describe, drop, local, register
from nf4.vllm.products import linear

# A weight of a layer: where its rows begin in the layer's output, and its local part.
Placed = tuple[int, nf4.QuantizedTensor | Tensor]


class LinearMethod(Loading):
    """The weight of a layer: in 4 bits where the checkpoint's is, or where `quantize` is given;
    else dense. dense: the engine's method for a weight that is wholly dense."""

    def __init__(self, quantize: Quantizer | None, expected: Expected, dense: Any):
        self.quantize, self.expected, self._dense = quantize, expected, dense

    def create_weights(
        self,
        layer: Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        layer.nf4_sizes = (sum(output_partition_sizes), input_size_per_partition, input_size)
        layer.nf4_dtype, layer.nf4_placed = params_dtype, []
        layer.nf4_loader = extra_weight_attrs["weight_loader"].__func__
        self.expect(layer, ["weight"], params_dtype)
        if self.expected[""] is None:  # without these vLLM's Falcon does not reorder the rows
            layer.weight.input_dim, layer.weight.output_dim = 1, 0

    def arrive(self, layer: Module, part: str, tensor: Tensor, loaded_shard_id: Any = None) -> None:
        shard = () if loaded_shard_id is None else (loaded_shard_id,)
        name = " ".join([layer.prefix, *(f"({each})" for each in shard)])
        weight = self.completed(layer, shard, name, part, tensor)
        if weight is not None:
            start, ranges = _place(layer, shard, weight.shape)
            dim = 1 if layer.nf4_sizes[1] != layer.nf4_sizes[2] else 0
            made = local(layer.prefix, weight, dim, ranges, layer.nf4_device)
            made = made.to(layer.nf4_dtype) if isinstance(made, Tensor) else made
            layer.nf4_placed.append((start, made))

    def process_weights_after_loading(self, layer: Module) -> None:
        drop(layer)
        weights = _joined(layer.nf4_placed, layer.nf4_sizes[0], layer.prefix)
        layer.nf4_placed = []
        specs = (register(layer, f"weight{i or ''}", weight) for i, weight in enumerate(weights))
        describe(layer, "nf4_specs", tuple(specs))
        if layer.nf4_specs == (None,):
            self._dense.process_weights_after_loading(layer)

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if layer.nf4_specs == (None,):
            return self._dense.apply(layer, x, bias)
        return linear(layer, x, bias)


def _place(layer: Module, shard: tuple[Any, ...], shape: tuple[int, int]) -> tuple[int, Ranges]:
    """Returns where a shard's rows begin in the layer, and the ranges of rows or, where a layer has
    fewer columns than its weight, of columns that go there. vLLM's own loader tells: it is given
    the numbers of the rows, or columns, as a weight."""
    local_rows, local_cols, cols = layer.nf4_sizes
    if shape[1] != cols:
        raise ValueError(f"{layer.prefix}: its weight has {shape[1]} columns; expected {cols}")
    by_column = local_cols != cols
    size = (1, local_cols) if by_column else (local_rows, 1)
    index = Parameter(torch.full(size, -1, device="cpu"), requires_grad=False)
    index.input_dim, index.output_dim = (1, None) if by_column else (None, 0)
    numbers = torch.arange(shape[1] if by_column else shape[0], device="cpu")
    layer.nf4_loader(layer, index, numbers[None] if by_column else numbers[:, None], *shard)
    found = index.flatten().tolist()
    places = [i for i, number in enumerate(found) if number >= 0]
    if places != list(range(places[0], places[-1] + 1)):
        raise ValueError(f"{layer.prefix}: vLLM puts the rows of one weight apart")
    return places[0], merged((found[i], found[i] + 1) for i in places)


def _joined(placed: list[Placed], rows: int, prefix: str) -> list[nf4.QuantizedTensor | Tensor]:
    """Returns the weights in the order of their rows, joined where they can be. Raises ValueError
    if they lack a row or have it twice."""
    made: list[nf4.QuantizedTensor | Tensor] = []
    end = 0
    for start, weight in sorted(placed, key=lambda each: each[0]):
        if start != end:
            problem = f"has row {start} twice" if start < end else f"lacks row {end}"
            raise ValueError(f"{prefix}: the checkpoint {problem}")
        end += weight.shape[0]
        made.append(join([made.pop(), weight]) if made and can_join(made[-1], weight) else weight)
    if end != rows:
        raise ValueError(f"{prefix}: the checkpoint has {end} of its {rows} rows")
    return made
