"""Integers of GPTQ, AWQ and compressed-tensors on the CPU: a kernel among those that vLLM chooses
from, before its own general one (docs/vllm.md says why)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS, MPLinearKernel
from vllm.platforms import CpuArchEnum, PlatformEnum, current_platform
from vllm.scalar_type import scalar_types

from nf4.torch._int4_weight import Int4Spec


class NF4IntegerKernel(MPLinearKernel):
    """Multiplies by the words that vLLM has loaded, as they are."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        is_served = (
            c.weight_type in (scalar_types.uint4, scalar_types.uint4b8)
            and c.act_type in (torch.bfloat16, torch.float16)
            and not any(size % 8 for size in (*c.partition_weight_shape, max(c.group_size, 0)))
            and current_platform.get_cpu_architecture() == CpuArchEnum.X86
            and not torch.cpu._is_amx_tile_supported()
        )
        return is_served, "libnf4 takes 4 bits in bf16 and fp16, on x86 without AMX"

    def process_weights_after_loading(self, layer: Any) -> None:
        if not self.config.zero_points and self.w_zp_name is not None:
            setattr(layer, self.w_zp_name, None)  # all are 8
        packed, *others = (each for each in self._get_weight_params(layer) if each is not None)
        for each in others:
            if each.output_dim != packed.output_dim:
                each.data = each.data.t().contiguous()
        shape = self.config.partition_weight_shape[::-1]
        layout = "gptq_v2" if packed.output_dim else "compressed-tensors"
        self._numbers = Int4Spec.of(shape, layout, self.config.group_size)[:5]

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = *self._get_weight_params(layer), None, None
        return torch.ops.nf4._linear_int4(x.contiguous(), bias, *parts, *self._numbers)


_POSSIBLE_KERNELS[PlatformEnum.CPU].insert(-1, NF4IntegerKernel)
