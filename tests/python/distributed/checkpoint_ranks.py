"""What each of three processes does for test_distributed_checkpoint.py: checks of loading a rank's
part, by name. Started once, as a process takes seconds to import torch and transformers."""

from __future__ import annotations

import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import nf4
import nf4.torch
import torch
import torch.distributed as dist
from nf4.checkpoint import FormatError
from nf4.errors import InvalidArgument
from nf4.torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WORLD = 3
TOKENS = torch.arange(14).view(2, 7)
Check = Callable[[Path], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loaded(folder: Path) -> torch.nn.Module:
    model = sharded(distributed.empty_model(folder))
    distributed.load_checkpoint(model, folder)
    return model


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state_dict, gathered."""
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in model.state_dict().items()
    }


def require_equal(model: torch.nn.Module, folder: Path) -> None:
    """To one that was loaded in one process: in its state_dict, and in results."""
    expected = distributed.empty_model(folder)
    distributed.load_checkpoint(expected, folder)
    found, state = whole(model), expected.state_dict()
    assert found.keys() == state.keys()
    for name, each in state.items():
        assert torch.equal(found[name], each), name
    assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)


def fails(kind: type[Exception], work: Callable[[], object]) -> str:
    try:
        work()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


@check
def dense(data: Path) -> None:
    model = loaded(data / "dense")
    parts = [each for each in model.state_dict().values() if isinstance(each, DTensor)]
    assert len(parts) == len(model.state_dict())
    require_equal(model, data / "dense")


@check
def tied(data: Path) -> None:
    model = loaded(data / "tied")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    require_equal(model, data / "tied")


@check
def dense_layers_that_are_cut_by_columns_too(data: Path) -> None:
    model = distributed.empty_model(data / "dense")
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        styles = {"mlp.up_proj": ColwiseParallel(), "mlp.gate_proj": ColwiseParallel()}
        parallelize_module(layer, mesh, styles | {"mlp.down_proj": RowwiseParallel()})
    distributed.load_checkpoint(model, data / "dense")
    expected = nf4.load(data / "dense")["model.layers.1.mlp.down_proj.weight"]
    found = model.model.layers[1].mlp.down_proj.weight
    assert found.to_local().shape[1] < expected.shape[1]
    assert torch.equal(found.full_tensor(), torch.from_numpy(expected))


@check
def a_file_that_one_rank_has_not(data: Path) -> None:
    """As where each machine has a copy of its own."""
    folder = data / "broken" if dist.get_rank() == 1 else data / "dense"
    model = sharded(distributed.empty_model(data / "dense"))
    said = fails(FormatError, lambda: distributed.load_checkpoint(model, folder))
    assert "its shard model-00002-of-00002.safetensors is missing" in said
    assert dist.get_rank() == 1 or "rank 1 failed" in said


@check
def ranks_with_different_checkpoints(data: Path) -> None:
    folder = data / "quantized" if dist.get_rank() == 2 else data / "dense"
    model = sharded(distributed.empty_model(data / "dense"))
    said = fails(FormatError, lambda: distributed.load_checkpoint(model, folder))
    assert "ranks read different checkpoints" in said
    assert "4-bit in nf4 of 64" in said


@check
def a_tensor_of_another_shape(data: Path) -> None:
    model = sharded(distributed.empty_model(data / "dense"))
    said = fails(FormatError, lambda: distributed.load_checkpoint(model, data / "wide"))
    assert "in the model" in said
    assert "its shape is" in said


@check
def a_buffer_that_no_checkpoint_has(data: Path) -> None:
    model = sharded(distributed.empty_model(data / "dense"))
    model.model.rotary_emb.to("meta")
    said = fails(InvalidArgument, lambda: distributed.load_checkpoint(model, data / "dense"))
    assert "model.rotary_emb.inv_freq is on meta" in said


def main(rank: int, data: Path) -> None:
    """Runs all checks; what went wrong goes to a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(data / "store"), WORLD)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=60)
    )
    outcome = {}
    for name, work in CHECKS.items():
        try:
            work(data)
            outcome[name] = ""
        except BaseException:
            outcome[name] = traceback.format_exc()
        # What one rank alone failed in leaves others waiting: nothing after it is sound.
        (data / f"outcome-{rank}.json").write_text(json.dumps(outcome))
        if outcome[name]:
            break
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
