"""Linear layers of vLLM in 4 bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod

import nf4
from nf4.torch._weight import PARTS as TENSORS
from nf4.torch._weight import WeightParts
from nf4.vllm.arrivals import PARTS, Arrivals, Expected, Quantizer, to_device
from nf4.vllm.cuts import Ranges, can_join, cut, join

# A weight of a layer: where its rows begin in the layer's output, and its local part.
Placed = tuple[int, nf4.QuantizedTensor | Tensor]
# More than the tensors that arrive for a layer. vLLM counts one element for each when it reloads
# weights, and processes a layer that has fewer elements than it expects at the end.
_MANY = 1 << 20


def placeholder(
    loader: Callable[..., Any], dtype: torch.dtype, is_dense: bool = False
) -> Parameter:
    """Returns what stands for a part until the weight is complete."""
    made = Parameter(torch.empty(1, dtype=dtype).expand(_MANY), requires_grad=False)
    made.weight_loader = loader
    if is_dense:  # vLLM's Falcon reorders the rows of a tensor only if its parameter says this
        made.input_dim, made.output_dim = 1, 0
    return made


def counts_only(param: Tensor) -> bool:
    """Counts an arrival. Tells if vLLM only counts now, and loads the tensor again later."""
    param.data[:1].copy_(torch.zeros_like(param.data[:1]))
    return param.is_meta


class NF4LinearMethod(LinearMethodBase):
    """The weight of a layer: in 4 bits where the checkpoint's is, or where `quantize` is given;
    else dense."""

    def __init__(self, quantize: Quantizer | None, expected: Expected):
        self._quantize, self._expected = quantize, expected
        self._dense = UnquantizedLinearMethod()

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
        layer.nf4_device, layer.nf4_dtype = torch.empty(0).device, params_dtype
        layer.nf4_arrivals, layer.nf4_placed = {}, []
        own_loader = extra_weight_attrs["weight_loader"]
        for part, dtype in self._expected.dtypes(params_dtype).items():
            name = f"weight_{part}" if part else "weight"
            loader = _loader(self, weakref.ref(layer), part, own_loader.__func__)
            is_dense = part == "" and self._expected.is_dense
            layer.register_parameter(name, placeholder(loader, dtype, is_dense))

    def arrive(self, layer: Module, own_loader: Any, shard: Any, part: str, tensor: Tensor) -> None:
        """Takes a tensor of the checkpoint."""
        name = f"{layer.prefix}{'' if shard is None else f' ({shard})'}"
        arrivals = layer.nf4_arrivals.setdefault(shard, Arrivals(name))
        weight = arrivals.add(part, tensor)
        if weight is None:
            return
        del layer.nf4_arrivals[shard]
        if isinstance(weight, Tensor) and self._quantize:
            weight = self._quantize(weight.to(layer.nf4_device))
        start, ranges = _place(layer, own_loader, shard, weight.shape)
        layer.nf4_placed.append((start, _local(layer, weight, ranges)))

    def process_weights_after_loading(self, layer: Module) -> None:
        for arrivals in layer.nf4_arrivals.values():
            raise ValueError(f"{arrivals.name}: the checkpoint lacks {arrivals.missing()}")
        placed = sorted(layer.nf4_placed, key=lambda each: each[0])
        layer.nf4_placed = []
        _require_all_rows(placed, layer.nf4_sizes[0], layer.prefix)
        placed = _joined(placed)
        for part in PARTS:
            delattr(layer, f"weight_{part}" if part else "weight")
        layer.nf4_specs = tuple(
            register(layer, f"weight{i or ''}", weight) for i, (_, weight) in enumerate(placed)
        )
        if layer.nf4_specs == (None,):
            self._dense.process_weights_after_loading(layer)

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if layer.nf4_specs == (None,):
            return self._dense.apply(layer, x, bias)
        return product(layer, x, bias)


def _loader(
    method: NF4LinearMethod, layer_of: Callable[[], Any], part: str, own_loader: Any
) -> Callable[..., None]:
    """Returns vLLM's weight_loader of a part's parameter."""

    def weight_loader(param: Tensor, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
        if not counts_only(param):
            method.arrive(layer_of(), own_loader, loaded_shard_id, part, loaded_weight)

    return weight_loader


def _place(
    layer: Module, own_loader: Any, shard: Any, shape: tuple[int, int]
) -> tuple[int, Ranges]:
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
    shard_ids = () if shard is None else (shard,)
    own_loader(layer, index, numbers[None] if by_column else numbers[:, None], *shard_ids)
    found = index.flatten().tolist()
    places = [i for i, number in enumerate(found) if number >= 0]
    if places != list(range(places[0], places[-1] + 1)):
        raise ValueError(f"{layer.prefix}: vLLM puts the rows of one weight apart")
    ranges: list[tuple[int, int]] = []
    for number in (found[i] for i in places):
        if ranges and ranges[-1][1] == number:
            ranges[-1] = ranges[-1][0], number + 1
        else:
            ranges.append((number, number + 1))
    return places[0], ranges


def _local(
    layer: Module, weight: nf4.QuantizedTensor | Tensor, ranges: Ranges
) -> nf4.QuantizedTensor | Tensor:
    """Returns this rank's part of a weight, on its device."""
    dim = 1 if layer.nf4_sizes[1] != layer.nf4_sizes[2] else 0
    if isinstance(weight, Tensor):
        parts = [weight.narrow(dim, begin, end - begin) for begin, end in ranges]
        return torch.cat(parts, dim).to(layer.nf4_device, layer.nf4_dtype)
    try:
        return to_device(cut(weight, dim, ranges), layer.nf4_device)
    except ValueError as error:
        raise ValueError(f"{layer.prefix}: {error}") from None


def _require_all_rows(placed: list[Placed], rows: int, prefix: str) -> None:
    """Raises ValueError if the weights, in the order of their rows, lack a row or have it twice."""
    found = sum(weight.shape[0] for _, weight in placed)
    if found != rows:
        raise ValueError(f"{prefix}: the checkpoint has {found} of its {rows} rows")
    end = 0
    for start, weight in placed:
        if start != end:
            problem = f"has row {start} twice" if start < end else f"lacks row {end}"
            raise ValueError(f"{prefix}: the checkpoint {problem}")
        end = start + weight.shape[0]


def _joined(placed: list[Placed]) -> list[Placed]:
    """Returns the weights, which are in the order of their rows, joined where they can be."""
    made: list[Placed] = []
    for start, weight in placed:
        last = made[-1][1] if made else None
        if isinstance(last, Tensor) and isinstance(weight, Tensor):
            made[-1] = made[-1][0], torch.cat((last, weight))
        elif (
            isinstance(last, nf4.QuantizedTensor)
            and isinstance(weight, nf4.QuantizedTensor)
            and can_join(last, weight)
        ):
            made[-1] = made[-1][0], join([last, weight])
        else:
            made.append((start, weight))
    return made


def register(layer: Module, name: str, weight: nf4.QuantizedTensor | Tensor) -> Any:
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


# ---- Products ------------------------------------------------------------------------------


def product(layer: Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """y = x W^T + bias of a layer whose weights are several, side by side in y."""
    x, specs = x.contiguous(), layer.nf4_specs
    rows = [_rows(layer, i) for i in range(len(specs))]
    biases = [None] * len(specs) if bias is None else list(bias.split(rows))
    if any(spec is None for spec in specs):
        outputs = [_one(layer, x, i, biases[i]) for i in range(len(specs))]
    else:
        outputs = [_side_by_side(layer, x, i, biases[i : i + 3]) for i in range(0, len(specs), 3)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def _rows(layer: Module, i: int) -> int:
    spec = layer.nf4_specs[i]
    return getattr(layer, f"weight{i or ''}").shape[0] if spec is None else spec[1][0]


def _arguments(layer: Module, i: int) -> tuple[Any, ...]:
    """The arguments of an operator for weight i."""
    names, numbers = layer.nf4_specs[i]
    return *(None if name is None else getattr(layer, name) for name in names), *numbers


def _one(layer: Module, x: Tensor, i: int, bias: Tensor | None) -> Tensor:
    if layer.nf4_specs[i] is None:
        return torch.nn.functional.linear(x, getattr(layer, f"weight{i or ''}"), bias)
    return torch.ops.nf4._linear(x, bias, *_arguments(layer, i))


def _side_by_side(layer: Module, x: Tensor, first: int, biases: list[Tensor | None]) -> Tensor:
    count = len(biases)
    if count == 1:
        return _one(layer, x, first, biases[0])
    weights = [each for i in range(count) for each in _arguments(layer, first + i)]
    if count == 2:
        return torch.ops.nf4._linear_columns2(x, *biases, *weights)
    return torch.ops.nf4._linear_columns3(x, *biases, *weights)
