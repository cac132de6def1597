"""What test_meshes.py has four processes check: meshes of two dimensions with two ranks each."""

import torch
from fsdp_cases import inputs, model, require_same, shard, step
from parallel_checks import IN, INNER, close, cut, mlp
from parallel_checks import inputs as inputs_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def check_replicas_of_shards(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for kind in ("nested", "gptq"):
        expected, made = step(model(kind), inputs()), shard(model(kind), mesh=mesh)
        assert made[0].up.weight.to_local().shape[0] < model(kind)[0].up.weight.shape[0]
        for _ in range(2):
            require_same(step(made, inputs()), expected)
            made.zero_grad()


def check_cut_and_sharded(rank, world):
    """FSDP2 over one dimension of layers that are cut over the other; each rank of the first has
    an x of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for kind in ("nested", "flat", "gptq", "awq", "compressed-tensors", "act order"):
        whole, made = mlp(kind), mlp(kind)
        cut(made, mesh["tp"])
        fully_shard(made, mesh=mesh["dp"])
        assert made.up.out_features * 2 == INNER and made.up.is_prepared()
        for seed in (0, 2):
            x = inputs_of(3, IN, seed=seed + mesh["dp"].get_local_rank()).requires_grad_()
            y = made(x)
            y.square().sum().backward()
            found, x.grad = x.grad, None
            expected = whole(x)
            expected.square().sum().backward()
            close(y.detach(), expected.detach())
            close(found, x.grad)


def check_replicas_of_shards_of_cuts(rank, world):
    """Three dimensions, of which one has one rank."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    whole, made = mlp(), mlp()
    cut(made, mesh["tp"])
    fully_shard(made, mesh=mesh["replicate", "shard"])
    with torch.no_grad():
        x = inputs_of(3, IN)
        close(made(x), whole(x))
