"""clip_grad_norm_: computes one norm over all ranks of tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nf4.errors import InvalidArgument, kind_of
from nf4.torch.distributed import _parallel_adapter


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, mesh: DeviceMesh) -> Tensor:
    """Like torch.nn.utils.clip_grad_norm_, over all parameters of a model whose layers the styles
    have cut. Each rank has a part of the gradient of a bias or an adapter matrix that is cut, and
    the norm covers all parts. Gradients that every rank has whole count once. With torch's own
    function each rank would compute its own norm and scale, and whole parameters would drift apart.

    max_norm  the most that the 2-norm of all gradients, as one vector, may be
    mesh      the one-dimensional mesh given to parallelize_module. All its ranks must call this

    Gradients that are DTensors count whole, over any mesh. Returns the norm before clipping, in
    float32, the same on every rank. Raises InvalidArgument.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is {kind_of(model)}; expected a torch.nn.Module")
    if mesh.ndim != 1:
        raise InvalidArgument(f"mesh has {mesh.ndim} dimensions; expected one, as for the styles")
    cut = {id(each) for each in _cut_parameters(model)}
    grads = [(each.grad, id(each) in cut) for each in model.parameters() if each.grad is not None]
    squares = torch.zeros(2, dtype=torch.float64, device=_device(mesh))  # whole ones, parts
    for grad, is_part in grads:
        squares[int(is_part)] += _norm(grad).to(squares).square()
    torch.distributed.all_reduce(squares[1], group=mesh.get_group())
    norm = squares.sum().sqrt().float()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch does the same
    for grad, _ in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(scale.to(local.device))
    return norm


def _cut_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of which each rank has a part, a plain tensor or sharded further."""
    for module in model.modules():
        base = _parallel_adapter.base_of(module)
        if base is None or base.tensor_parallel is None:
            continue
        by_rows = base.tensor_parallel == 0
        if by_rows and base.bias is not None:
            yield base.bias
        if base is not module:
            for half in (module.lora_B if by_rows else module.lora_A).values():
                yield half.weight


def _norm(grad: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(mesh.device_type)
    return torch.device(mesh.device_type, module.current_device())
