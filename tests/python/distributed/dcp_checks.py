"""Of torch.distributed.checkpoint with quantized layers: saved by some ranks, loaded by others."""

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nf4.torch import Int4Linear, NF4Experts, NF4Linear
from ranks import place
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

DATA = Path(os.environ.get("CHECKPOINTS", ""))
X = torch.linspace(-1, 1, 4 * 64).view(4, 64)
LAYERS = {
    "nested": {"blocksize": 64},
    "flat": {"format": "fp4", "nested_blocksize": 0},
    "gptq": {"layout": "gptq", "group_size": 32, "symmetric": False},
    "compressed": {"layout": "compressed-tensors", "group_size": 32},
}


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = NF4Experts.from_dense(torch.randn(5, 8, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([0, 1, 1, 3, len(x)], dtype=torch.int32, device=x.device)
        return self.experts(x, ends)


class Model(nn.Module):
    """A layer of each kind, of 136 rows, a dense one, what 130 rows of NF4 make uneven, experts."""

    def __init__(self, seed: int = 0, **other) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name, options in LAYERS.items():
            kind = Int4Linear if "layout" in options else NF4Linear
            wanted = options | (other if kind is NF4Linear and name == "nested" else {})
            setattr(self, name, kind.from_linear(nn.Linear(64, 136), **wanted))
        self.dense = nn.Linear(64, 136)
        self.uneven = NF4Linear.from_linear(nn.Linear(64, 130))
        self.stack = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ys = [layer(x) for layer in self.children()]
        return torch.cat(ys, -1)


def made(seed: int = 0, **other) -> Model:
    return Model(seed, **other).to(place())


def mesh_of(count: int) -> DeviceMesh:
    """Of the first ranks. Every rank calls this."""
    return DeviceMesh(place().type, torch.arange(count))


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh)


def folder_of(name: str) -> Path:
    """A new one for every rank."""
    folder = DATA / name
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    return folder


def load(model: nn.Module, folder: Path, **how) -> None:
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder, **how)
    model.load_state_dict(state)


def require_equal(model: nn.Module, expected: nn.Module) -> None:
    state = expected.state_dict()
    for name, each in model.state_dict().items():
        whole = each.full_tensor() if isinstance(each, DTensor) else each
        assert torch.equal(whole, state[name]), name
    assert torch.equal(model(X.to(place())), expected(X.to(place())))


def check_saved_by_three(rank: int, world: int) -> None:
    folder, expected = folder_of("three"), made()
    model = sharded(made(), mesh_of(world))
    for name, each in model.state_dict().items():
        small = name.endswith(("quant_map", "nested_absmax", "g_idx", "_shape", "bitsandbytes__nf4",
                               "bitsandbytes__fp4"))  # fmt: skip
        assert isinstance(each, DTensor) != small, name
    dcp.save(model.state_dict(), checkpoint_id=folder)
    three, two = sharded(made(1), mesh_of(world)), mesh_of(2)
    load(three, folder)
    require_equal(three, expected)
    if rank < 2:
        other = sharded(made(1), two)
        load(other, folder, process_group=two.get_group())
        require_equal(other, expected)
    one = made(1)
    load(one, folder, no_dist=True)
    require_equal(one, expected)


def check_saved_by_two(rank: int, world: int) -> None:
    folder, two = folder_of("two"), mesh_of(2)
    if rank < 2:
        model = sharded(made(), two)
        dcp.save(model.state_dict(), checkpoint_id=folder, process_group=two.get_group())
    dist.barrier()
    other = sharded(made(1), mesh_of(world))
    load(other, folder)
    require_equal(other, made())


def check_saved_by_one(rank: int, world: int) -> None:
    folder = folder_of("one")
    if rank == 0:
        dcp.save(made().state_dict(), checkpoint_id=folder, no_dist=True)
    dist.barrier()
    other = sharded(made(1), mesh_of(world))
    load(other, folder)
    require_equal(other, made())


def check_on_meta(rank: int, world: int) -> None:
    """A model that was on meta has everything from the checkpoint."""
    folder = folder_of("meta")
    dcp.save(sharded(made(), mesh_of(world)).state_dict(), checkpoint_id=folder)
    other = sharded(made(1).to("meta"), mesh_of(world)).to_empty(device=place())
    load(other, folder)
    require_equal(other, made())


def check_functions_of_state_dict(rank: int, world: int) -> None:
    folder = folder_of("functions")
    dcp.save(get_model_state_dict(sharded(made(), mesh_of(world))), checkpoint_id=folder)
    other = sharded(made(1), mesh_of(world))
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    require_equal(other, made())
    whole = StateDictOptions(full_state_dict=True)
    other = sharded(made(1), mesh_of(world))
    set_model_state_dict(other, made().state_dict(), options=whole)
    require_equal(other, made())
    full = get_model_state_dict(other, options=whole)
    for name, each in made().state_dict().items():
        assert torch.equal(full[name], each), name


def adapted(seed: int, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["nested", "flat", "uneven"])
    model = sharded(peft.get_peft_model(made(seed), config), mesh)
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, torch.optim.AdamW(trained, lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(X.to(place())).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def check_adapters_and_optimizer(rank: int, world: int) -> None:
    folder, mesh = folder_of("adapters"), mesh_of(world)
    model, optimizer = adapted(0, mesh)
    step(model, optimizer)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder)
    expected = [step(model, optimizer) for _ in range(2)]
    other, its = adapted(1, mesh)
    states = dict(zip(("model", "optimizer"), get_state_dict(other, its), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        other, its, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    assert [step(other, its) for _ in range(2)] == expected


def failure(model: nn.Module, folder: Path) -> str:
    try:
        load(model, folder)
    except (dcp.api.CheckpointException, RuntimeError) as error:
        return str(error)
    raise AssertionError("it was loaded")


def check_a_missing_file(rank: int, world: int) -> None:
    folder = folder_of("missing")
    dcp.save(sharded(made(), mesh_of(world)).state_dict(), checkpoint_id=folder)
    if rank == 0:
        (folder / "__1_0.distcp").unlink()
    dist.barrier()
    assert "__1_0.distcp" in failure(sharded(made(1), mesh_of(world)), folder)


def check_another_format(rank: int, world: int) -> None:
    folder = folder_of("another")
    dcp.save(sharded(made(), mesh_of(world)).state_dict(), checkpoint_id=folder)
    for other, named in (
        ({"blocksize": 128}, "for nested.weight.absmax"),
        ({"format": "fp4"}, "nested.weight.quant_state.bitsandbytes__fp4"),
        ({"nested_blocksize": 0}, "for nested.weight."),
    ):
        said = failure(sharded(made(1, **other), mesh_of(world)), folder)
        assert named in said, said
