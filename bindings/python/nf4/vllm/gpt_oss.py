"""gpt-oss's experts in MXFP4: they have biases, and a row of gate and one of up alternate. vLLM's
model cuts them for tensor parallelism while it loads them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.activation import SwigluOAIAndMul
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod

from nf4.checkpoint.e2m1_layouts import BLOCKSIZES, MXFP4
from nf4.torch._weight import Spec
from nf4.vllm.experts import STACKS, ExpertsMethod
from nf4.vllm.loading import describe

_BLOCKSIZE = BLOCKSIZES[MXFP4][0]


class MXFP4ExpertsMethod(ExpertsMethod, GptOssMxfp4MoEMethod):
    """vLLM's parameters, multiplied by libnf4. limit: what SwiGLU clamps to."""

    def __init__(self, moe: Any, limit: float):
        FusedMoEMethodBase.__init__(self, moe)
        self.mxfp4_backend = None  # of vLLM's kernels
        self._swiglu = SwigluOAIAndMul(limit=limit)

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any, **named: Any
    ) -> tuple[int, int]:
        blocks = -(-intermediate_size_per_partition // _BLOCKSIZE)
        return hidden_size, blocks * _BLOCKSIZE

    def create_weights(self, layer: Any, **named: Any) -> None:
        super().create_weights(layer, **named | {"weight_loader": _load})
        for stack in STACKS:  # vLLM's biases are bf16
            bias = layer.get_parameter(f"{stack}_bias")
            bias.data = bias.data.to(named["params_dtype"])

    def process_weights_after_loading(self, layer: Any) -> None:
        for stack in STACKS:
            *shape, row_bytes = layer.get_parameter(f"{stack}_weight").shape
            names = (f"{stack}_weight", f"{stack}_weight_scale", None, None, None, None)
            spec = Spec.of((*shape, 2 * row_bytes), MXFP4, _BLOCKSIZE, 0)
            describe(layer, f"nf4_{stack}", (names, spec))

    def activated(self, layer: Any, gate_up: Tensor) -> Tensor:
        forward = self._swiglu.forward_cuda if gate_up.is_cuda else self._swiglu.forward_native
        return forward(gate_up)


def _load(param: Tensor, loaded_weight: Tensor, *args: Any, **named: Any) -> None:
    """Copies a rank's part of a tensor, which the last rank may have less of."""
    param.data[tuple(map(slice, loaded_weight.shape))].copy_(loaded_weight)
