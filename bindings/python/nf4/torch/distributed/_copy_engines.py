"""gather_by_copy_engines: runs FSDP2's all-gathers as copies from torch's symmetric memory. NCCL's
kernels take SMs from the compute kernels, which are persistent and wait for their last CTA
(docs/design/fsdp.md).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from nf4.errors import InvalidArgument, kind_of


def gather_by_copy_engines(model: nn.Module, mesh: DeviceMesh) -> None:
    """Turns the all-gathers of all modules that fully_shard was given into copies between GPUs,
    which take no SMs. Results are bit-equal.

    mesh  the one-dimensional mesh that fully_shard was given. Its GPUs must reach each other's
          memory (NVLink, one machine). All its ranks must call this before the first forward pass

    Two buffers of the size of the largest gathered module stay allocated, in symmetric memory.
    Raises InvalidArgument.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is {kind_of(model)}; expected a torch.nn.Module")
    sharded = [each for each in model.modules() if isinstance(each, FSDPModule)]
    if not sharded:
        raise InvalidArgument("model has no module that is sharded; expected fully_shard first")
    if mesh.ndim != 1 or mesh.device_type != "cuda":
        raise InvalidArgument(
            f"mesh is {mesh}; expected the one of GPUs and one dimension that fully_shard was given"
        )
    gather = _CopyEngines(mesh.get_group())
    for each in sharded:
        each.set_custom_all_gather(gather)


class _CopyEngines(AllGather):
    """All-gathers by copies. Each rank's output is in symmetric memory: the rank copies its shard
    into its own output, and the other shards out of the other ranks' outputs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # The outputs, with the tensor that was returned for each. FSDP2 drops that tensor once its
        # streams wait for its last use.
        self._buffers: list[tuple[Tensor, weakref.ref[Tensor] | None]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Every rank calls this in the same order, so that all use the same buffer."""
        needed = math.prod(map(int, size)) * dtype.itemsize
        free = [i for i, (_, given) in enumerate(self._buffers) if given is None or given() is None]
        fits = next((i for i in free if self._buffers[i][0].numel() >= needed), None)
        if fits is None:
            torch.cuda.synchronize(device)  # other ranks no longer read the freed ones
            self._buffers = [e for i, e in enumerate(self._buffers) if i not in free]
            made = symmetric_memory.empty(needed, dtype=torch.uint8, device=device)
            symmetric_memory.rendezvous(made, self._group)
            fits = len(self._buffers)
            self._buffers.append((made, None))
        buffer = self._buffers[fits][0]
        given = buffer[:needed].view(dtype).view(tuple(size))
        self._buffers[fits] = (buffer, weakref.ref(given))
        return given

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        given, own = map(dist.get_process_group_ranks, (group, self._group))
        if given != own:
            raise InvalidArgument(
                f"mesh is of ranks {own}; expected the mesh that fully_shard was given, of {given}"
            )
        start = output_tensor.data_ptr()
        buffer = next(each for each, _ in self._buffers if each.data_ptr() == start)
        memory: Any = symmetric_memory.rendezvous(buffer, self._group)  # torch caches it
        count = input_tensor.numel() * input_tensor.itemsize
        memory.barrier(channel=0)  # every rank's shard is in its place
        for step in range(1, memory.world_size):
            peer = (memory.rank + step) % memory.world_size
            shard = memory.get_buffer(peer, (count,), torch.uint8, peer * count)
            buffer[peer * count :][:count].copy_(shard)
        memory.barrier(channel=1)  # no rank reads this output any more
        return None
