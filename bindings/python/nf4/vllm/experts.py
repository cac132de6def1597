"""Experts of vLLM in 4 bits: the experts of a layer are two stacks, and each product of a stack is
one grouped product, which reads the routing on the device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG as UNQUANTIZED

import nf4
from nf4.torch._weight import WeightParts
from nf4.vllm.arrivals import Expected, Quantizer, is_dense
from nf4.vllm.cuts import can_join, flat, join, merged
from nf4.vllm.loading import Loading, describe, drop, local, register
from nf4.vllm.products import experts

STACKS = {"w13": ("w1", "w3"), "w2": ("w2",)}


class ExpertsMethod(fused_moe.FusedMoEMethodBase):
    """Multiplies by the two stacks of a layer. nf4_w13 and nf4_w2 have the names of their tensors,
    and their Spec."""

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def activated(self, layer: Any, gate_up: Tensor) -> Tensor:
        hidden = gate_up.new_empty(gate_up.shape[0], layer.nf4_w2[1].cols)
        config = fused_moe.ApplyMoEActivationConfig.from_configs(self.moe, UNQUANTIZED)
        apply = fused_moe.apply_moe_activation
        return apply(layer.activation, hidden, gate_up, activation_config=config)

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
        return experts(layer, x, topk_weights, topk_ids, functools.partial(self.activated, layer))


class NF4ExpertsMethod(Loading, ExpertsMethod):
    """The experts of a layer: in 4 bits where the checkpoint's are, or where `quantize` is given;
    else dense, by vLLM's own method."""

    def __init__(self, moe: Any, quantize: Quantizer | None, expected: Expected):
        super().__init__(moe)
        if moe.has_bias:
            raise ValueError("libnf4 does not serve experts with biases in NF4 or FP4 in vLLM")
        self.quantize, self.expected = quantize, expected

    def create_weights(
        self, layer: Any, num_experts: int, hidden_size: int, **attributes: Any
    ) -> None:
        if hidden_size != self.moe.hidden_dim_unpadded:
            raise ValueError("libnf4 does not serve experts of a padded hidden size in vLLM")
        layer.nf4_placed = {}
        layer.nf4_sizes = {"num_experts": num_experts, "hidden_size": hidden_size, **attributes}
        self.expect(layer, [f"{stack}_weight" for stack in STACKS], attributes["params_dtype"])

    def arrive(
        self, layer: Any, part: str, tensor: Tensor, weight_name: str, shard_id: str, expert_id: int
    ) -> bool:
        if self.quantize is None and part == "" and is_dense(tensor):
            return _load_dense(layer, tensor, weight_name, shard_id, expert_id)
        name = f"{layer.layer_name} (expert {expert_id}, {shard_id})"
        weight = self.completed(layer, (shard_id, expert_id), name, part, tensor)
        return weight is None or _place(layer, weight, shard_id, expert_id)

    def process_weights_after_loading(self, layer: Any) -> None:
        drop(layer)
        placed, layer.nf4_placed = layer.nf4_placed, {}
        count = layer.nf4_sizes["num_experts"]
        for stack, shards in STACKS.items():
            made = placed.get(shards[0])
            if made is None:
                made = _stacked(layer, placed, shards)
            shape = (count, made.shape[0] // count, made.shape[1])
            made = dataclasses.replace(made, shape=shape)
            names, _ = register(layer, f"{stack}_weight", made)
            describe(layer, f"nf4_{stack}", (names, WeightParts.of(made).spec))


def _load_dense(layer: Any, tensor: Tensor, name: str, shard: str, expert: int) -> bool:
    """Hands the layer over to vLLM's method for dense experts, at its first tensor."""
    if layer.nf4_placed or layer.nf4_arrivals:
        raise ValueError(f"{layer.layer_name}: some of its experts are dense, others in 4 bits")
    drop(layer)
    method = fused_moe.UnquantizedFusedMoEMethod(layer.moe_config)
    with layer.nf4_device:
        method.create_weights(layer, **layer.nf4_sizes)
    layer._replace_quant_method(method)
    param = layer.w2_weight if shard == "w2" else layer.w13_weight
    return param.weight_loader(param, tensor, name, shard, expert, return_success=True)


def _place(layer: Any, weight: nf4.QuantizedTensor, shard: str, expert: int) -> bool:
    """Keeps this rank's part of the matrix of an expert, or of a stack: that of gate and up arrives
    twice, for w1 and w3. Tells if there is one."""
    *stack, rows, cols = weight.shape
    if stack and shard == "w3":
        return True
    found = range(stack[0]) if stack else [expert]
    places = [layer._map_global_expert_id_to_local_expert_id(each) for each in found]
    own = sorted((place, i) for i, place in enumerate(places) if place != -1)
    if not own:
        return False
    halves = 2 if stack and shard == "w1" else 1
    whole, parallel = rows // halves, layer.moe_config.moe_parallel_config
    size = (cols if shard == "w2" else whole) // parallel.tp_size
    part = parallel.tp_rank * size, (parallel.tp_rank + 1) * size
    first, last = (0, whole) if shard == "w2" else part
    begins = [i * rows + half * whole for _, i in own for half in range(halves)]
    ranges = merged((begin + first, begin + last) for begin in begins)
    made = dataclasses.replace(weight, shape=(len(found) * rows, cols))
    made = local(layer.layer_name, made, 0, ranges, layer.nf4_device)
    if shard == "w2":
        made = local(layer.layer_name, made, 1, [part], layer.nf4_device)
    layer.nf4_placed[shard if stack else (shard, own[0][0])] = made
    return True


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
