"""Experts of vLLM in 4 bits: the experts of a layer are two stacks, and each product of a stack is
one grouped product, which reads the routing on the device."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

import nf4
from nf4.torch._operators_grouped import linear_grouped
from nf4.torch._weight import WeightParts
from nf4.vllm.arrivals import PARTS, Arrivals, Expected, Quantizer, to_device
from nf4.vllm.cuts import Ranges, can_join, cut, flat, join
from nf4.vllm.linear import counts_only, placeholder, register

_STACKS = {"w13": ("w1", "w3"), "w2": ("w2",)}


class NF4ExpertsMethod(FusedMoEMethodBase):
    """The experts of a layer: in 4 bits where the checkpoint's are, or where `quantize` is given;
    else dense, by vLLM's own method."""

    def __init__(self, moe: Any, quantize: Quantizer | None, expected: Expected):
        super().__init__(moe)
        if moe.has_bias:
            raise ValueError("libnf4 does not serve experts with biases in vLLM")
        self._quantize, self._expected = quantize, expected

    def create_weights(
        self, layer: Any, num_experts: int, hidden_size: int, **attributes: Any
    ) -> None:
        if hidden_size != self.moe.hidden_dim_unpadded:
            raise ValueError("libnf4 does not serve experts of a padded hidden size in vLLM")
        layer.nf4_device = torch.empty(0).device
        layer.nf4_arrivals, layer.nf4_placed = {}, {}
        layer.nf4_sizes = {"num_experts": num_experts, "hidden_size": hidden_size, **attributes}
        expected = self._expected.dtypes(attributes["params_dtype"])
        for stack in _STACKS:
            for part, dtype in expected.items():
                loader = _loader(self, weakref.ref(layer), part)
                layer.register_parameter(_name(stack, part), placeholder(loader, dtype))

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def arrive(
        self, layer: Any, part: str, tensor: Tensor, name: str, shard: str, expert: int
    ) -> bool:
        """Takes a tensor of the checkpoint. Tells if it is of an expert of this rank."""
        is_dense = part == "" and tensor.is_floating_point() and tensor.shape[-1] != 1
        if is_dense and self._quantize is None:
            return _load_dense(layer, tensor, name, shard, expert)
        key = shard, expert
        text = f"{layer.layer_name} (expert {expert}, {shard})"
        weight = layer.nf4_arrivals.setdefault(key, Arrivals(text)).add(part, tensor)
        if weight is None:
            return True
        del layer.nf4_arrivals[key]
        if isinstance(weight, Tensor):
            weight = self._quantize(weight.to(layer.nf4_device))
        if len(weight.shape) == 3:
            return _place_stack(layer, weight, shard)
        return _place(layer, weight, shard, expert)

    def process_weights_after_loading(self, layer: Any) -> None:
        for arrivals in layer.nf4_arrivals.values():
            raise ValueError(f"{arrivals.name}: the checkpoint lacks {arrivals.missing()}")
        placed, layer.nf4_placed = layer.nf4_placed, {}
        experts = layer.nf4_sizes["num_experts"]
        for stack, shards in _STACKS.items():
            for part in PARTS:
                delattr(layer, _name(stack, part))
            made = placed.get(shards[0])
            if made is None:
                made = _stacked(layer, placed, shards)
            made = dataclasses.replace(
                made, shape=(experts, made.shape[0] // experts, made.shape[1])
            )
            names, _ = register(layer, f"{stack}_weight", made)
            tensors = [None if name is None else getattr(layer, name) for name in names]
            spec = WeightParts.of(made).spec
            setattr(layer, f"nf4_{stack}", WeightParts(*tensors, spec))

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        if layer.apply_router_weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        chosen, top_k = topk_ids.reshape(-1).long(), topk_ids.shape[-1]
        experts = layer.nf4_w13.spec.shape[0]
        if layer.expert_map is not None:  # of another rank: -1
            chosen = layer.expert_map[chosen].long()
            chosen = torch.where(chosen < 0, experts, chosen)
        chosen, order = chosen.sort(stable=True)
        every = torch.arange(experts, device=chosen.device)
        ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
        gate_up = linear_grouped(x, ends, (order // top_k).int(), None, layer.nf4_w13)
        hidden = gate_up.new_empty(gate_up.shape[0], layer.nf4_w2.spec.cols)
        apply_moe_activation(layer.activation, hidden, gate_up)
        y = linear_grouped(hidden, ends, None, None, layer.nf4_w2)
        if layer.expert_map is not None:  # rows past the last end are unspecified
            y = y.masked_fill((chosen == experts)[:, None], 0)
        y = torch.empty_like(y).index_copy_(0, order, y).view(*topk_ids.shape, -1)
        return (y * topk_weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def _name(stack: str, part: str) -> str:
    return f"{stack}_weight_{part}" if part else f"{stack}_weight"


def _loader(method: NF4ExpertsMethod, layer_of: Callable[[], Any], part: str) -> Callable[..., Any]:
    """Returns vLLM's weight_loader of a part's parameter."""

    def weight_loader(
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        found = True
        if not counts_only(param):
            found = method.arrive(layer_of(), part, loaded_weight, weight_name, shard_id, expert_id)
        return found if return_success else None

    return weight_loader


def _load_dense(layer: Any, tensor: Tensor, name: str, shard: str, expert: int) -> bool:
    """Hands the layer over to vLLM's method for dense experts, at its first tensor."""
    if layer.nf4_placed or layer.nf4_arrivals:
        raise ValueError(f"{layer.layer_name}: some of its experts are dense, others in 4 bits")
    for stack in _STACKS:
        for part in PARTS:
            delattr(layer, _name(stack, part))
    method = UnquantizedFusedMoEMethod(layer.moe_config)
    with layer.nf4_device:
        method.create_weights(layer, **layer.nf4_sizes)
    layer._replace_quant_method(method)
    param = layer.w2_weight if shard == "w2" else layer.w13_weight
    return param.weight_loader(param, tensor, name, shard, expert, return_success=True)


def _ranges(layer: Any, shape: tuple[int, ...], shard: str) -> tuple[int, tuple[int, int]]:
    """Returns the dimension in which tensor parallelism cuts the matrix of an expert, and this
    rank's range of it."""
    parallel = layer.moe_config.moe_parallel_config
    dim = 1 if shard == "w2" else 0
    size = shape[dim] // parallel.tp_size
    return dim, (parallel.tp_rank * size, (parallel.tp_rank + 1) * size)


def _place(layer: Any, weight: nf4.QuantizedTensor, shard: str, expert: int) -> bool:
    """Keeps this rank's part of the matrix of an expert."""
    local = layer._map_global_expert_id_to_local_expert_id(expert)
    if local != -1:
        dim, own = _ranges(layer, weight.shape, shard)
        layer.nf4_placed[shard, local] = _cut(layer, weight, dim, [own])
    return local != -1


def _place_stack(layer: Any, weight: nf4.QuantizedTensor, shard: str) -> bool:
    """Keeps this rank's parts of a stack. That of gate and up arrives twice, for w1 and w3."""
    if shard == "w3":
        return True
    experts, rows, cols = weight.shape
    halves = 2 if shard == "w1" else 1
    dim, (first, last) = _ranges(layer, (rows // halves, cols), shard)
    matrix = dataclasses.replace(weight, shape=(experts * rows, cols))
    local = [layer._map_global_expert_id_to_local_expert_id(each) for each in range(experts)]
    own = sorted((place, each) for each, place in enumerate(local) if place != -1)
    begins = [each * rows + half * rows // halves for _, each in own for half in range(halves)]
    whole = rows // halves
    part = (first, last) if dim == 0 else (0, whole)
    made = _cut(layer, matrix, 0, [(begin + part[0], begin + part[1]) for begin in begins])
    if dim == 1:
        made = _cut(layer, made, 1, [(first, last)])
    layer.nf4_placed[shard] = made
    return True


def _cut(layer: Any, weight: nf4.QuantizedTensor, dim: int, ranges: Ranges) -> nf4.QuantizedTensor:
    merged = list(ranges[:1])
    for begin, end in ranges[1:]:
        if merged[-1][1] == begin:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((begin, end))
    try:
        return to_device(cut(weight, dim, merged), layer.nf4_device)
    except ValueError as error:
        raise ValueError(f"{layer.layer_name}: {error}") from None


def _stacked(
    layer: Any, placed: dict[Any, nf4.QuantizedTensor], shards: tuple[str, ...]
) -> nf4.QuantizedTensor:
    """Returns the matrices of single experts as one. Their nested scales become fp32 where they
    have offsets of their own, since a weight has one."""
    keys = [(shard, each) for each in range(layer.nf4_sizes["num_experts"]) for shard in shards]
    missing = next((key for key in keys if key not in placed), None)
    if missing is not None:
        raise ValueError(f"{layer.layer_name}: the checkpoint lacks {missing}")
    weights = [placed.pop(key) for key in keys]
    if not all(map(can_join, weights[:-1], weights[1:])):
        weights = [flat(each) for each in weights]
    if not all(map(can_join, weights[:-1], weights[1:])):
        raise ValueError(f"{layer.layer_name}: its experts differ in their format or blocksize")
    return join(weights)
