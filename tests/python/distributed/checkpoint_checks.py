"""Of loading each rank's part of a checkpoint, for test_distributed_checkpoint.py, which writes the
checkpoints to the folder of $CHECKPOINTS."""

import os
from collections.abc import Callable
from pathlib import Path

import dcp_checks
import nf4
import nf4.torch
import torch
import torch.distributed as dist
from nf4.checkpoint import FormatError
from nf4.checkpoint.reader import SafetensorsFile
from nf4.errors import InvalidArgument
from nf4.torch import distributed
from ranks import place
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TOKENS = torch.arange(14).view(2, 7)
DATA = Path(os.environ.get("CHECKPOINTS", ""))


def mesh_of(world: int) -> DeviceMesh:
    return init_device_mesh(place().type, (world,))


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    mesh = mesh_of(dist.get_world_size())
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def load(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    distributed.load_checkpoint(model, folder, device=place())
    return model


def loaded(folder: Path) -> torch.nn.Module:
    return load(sharded(distributed.empty_model(folder)), folder)


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state_dict, gathered."""
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in model.state_dict().items()
    }


def require_equal_logits(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    tokens = TOKENS.to(place())
    assert torch.equal(model(tokens).logits, expected(tokens).logits)


def require_equal(model: torch.nn.Module, folder: Path) -> None:
    """To one that was loaded in one process: in its state_dict, and in results."""
    expected = load(distributed.empty_model(folder), folder)
    found, state = whole(model), expected.state_dict()
    assert found.keys() == state.keys()
    for name, each in state.items():
        assert torch.equal(found[name], each), name
    require_equal_logits(model, expected)


def fails(kind: type[Exception], work: Callable[[], object]) -> str:
    try:
        work()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def check_dense(rank: int, world: int) -> None:
    model = loaded(DATA / "dense")
    parts = [each for each in model.state_dict().values() if isinstance(each, DTensor)]
    assert len(parts) == len(model.state_dict())
    require_equal(model, DATA / "dense")


def check_quantized(rank: int, world: int) -> None:
    for name in ("quantized", "flat", "gptq", "compressed", "mxfp4", "nvfp4"):
        model = loaded(DATA / name)
        require_equal(model, DATA / name)


def check_experts(rank: int, world: int) -> None:
    """In 4 bits, and dense: a rank reads the matrices of the experts that it has."""
    for name in ("experts", "mixture", "matrices", "gpt-oss"):
        model = loaded(DATA / name)
        stacks = [each for key, each in model.state_dict().items() if "experts" in key]
        assert any(isinstance(each, DTensor) for each in stacks)
        require_equal(model, DATA / name)


def check_adapters_of_experts(rank: int, world: int) -> None:
    """PEFT's target_parameters on meta, sharded, filled: results and gradients of one process."""
    import peft

    results = []
    for shards in (False, True):
        model = distributed.empty_model(DATA / "experts")
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=targets, r=4)
        adapted = peft.get_peft_model(model, config)
        if shards:
            sharded(model)
        torch.manual_seed(3)  # what A begins with
        load(adapted, DATA / "experts")
        for name, each in adapted.named_parameters():
            if "lora_B" in name:
                drawn = torch.randn(each.shape).to(each.device)
                own = (
                    distribute_tensor(drawn, each.device_mesh, each.placements) if shards else drawn
                )
                each.data.copy_(own)
        y = adapted(TOKENS.to(place())).logits
        y.square().sum().backward()
        grads = {name: each.grad for name, each in adapted.named_parameters() if "lora" in name}
        results.append((y.detach(), grads))
    (y, grads), (found, theirs) = results
    assert torch.equal(found, y)
    assert len(grads) == 2 * 2 * 3, sorted(grads)
    for name, grad in grads.items():
        torch.testing.assert_close(theirs[name].full_tensor(), grad, rtol=1e-5, atol=1e-6)


def check_each_reads_its_own_bytes(rank: int, world: int) -> None:
    read: dict[str, int] = {}
    into = SafetensorsFile.read_into

    def counted(self, info, begin, view):
        read[info.name] = read.get(info.name, 0) + len(view)
        into(self, info, begin, view)

    SafetensorsFile.read_into = counted
    try:
        model = loaded(DATA / "quantized")
    finally:
        SafetensorsFile.read_into = into
    for name, each in model.state_dict().items():
        if isinstance(each, DTensor):
            assert read.get(name, 0) == each.to_local().nbytes, name


def status(field: str) -> int:
    """Of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def peak(work: Callable[[], object]) -> int:
    """The bytes by which the process was larger at most while it did this."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def check_memory(rank: int, world: int) -> None:
    """A rank's peak is its share of the weights, and one gathered layer more when it computes."""
    if not Path("/proc/self/clear_refs").exists():
        return
    model = sharded(distributed.empty_model(DATA / "large"))
    weights = os.path.getsize(DATA / "large/model.safetensors")
    loaded_peak = peak(lambda: load(model, DATA / "large"))
    computed_peak = peak(lambda: model(TOKENS[:1, :1]))
    slack = 12 << 20
    assert loaded_peak <= weights // world + slack, loaded_peak
    layer = weights // len(model.model.layers)
    assert computed_peak <= 3 * layer + slack, computed_peak


def check_tied(rank: int, world: int) -> None:
    model = loaded(DATA / "tied")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    require_equal(model, DATA / "tied")


def check_dense_layers_that_are_cut_by_columns_too(rank: int, world: int) -> None:
    model = distributed.empty_model(DATA / "dense")
    mesh = mesh_of(world)
    for layer in model.model.layers:
        styles = {"mlp.up_proj": ColwiseParallel(), "mlp.gate_proj": ColwiseParallel()}
        parallelize_module(layer, mesh, styles | {"mlp.down_proj": RowwiseParallel()})
    load(model, DATA / "dense")
    expected = nf4.load(DATA / "dense")["model.layers.1.mlp.down_proj.weight"]
    found = model.model.layers[1].mlp.down_proj.weight
    assert found.to_local().shape[1] < expected.shape[1]
    assert torch.equal(found.full_tensor().cpu(), torch.from_numpy(expected))


def check_cut_layers(rank: int, world: int) -> None:
    """Tensor parallelism of a model on meta: the parts, with their biases, are those of a model
    that was cut when it had its weights."""
    mesh = mesh_of(world)
    for name in ("quantized", "flat", "gptq", "compressed", "mxfp4", "nvfp4"):
        whole, model = (distributed.empty_model(DATA / name) for _ in range(2))
        load(whole, DATA / name)
        for each in (whole, model):
            for layer in each.model.layers:
                up, down = distributed.ColwiseParallel, distributed.RowwiseParallel
                styles = {"mlp.up_proj": up(), "mlp.gate_proj": up(), "mlp.down_proj": down()}
                parallelize_module(layer, mesh, styles)
        load(model, DATA / name)
        state = whole.state_dict()
        for key, each in model.state_dict().items():
            assert torch.equal(each, state[key]), (name, key)
        require_equal_logits(model, whole)


def check_cut_adapters(rank: int, world: int) -> None:
    """Of a model on meta, given their values before the cut, which stay: y and a step's gradients
    are those of the model in one process."""
    import peft

    def adapted(model: torch.nn.Module) -> torch.nn.Module:
        config = peft.LoraConfig(r=4, target_modules=["up_proj", "down_proj"])
        model = peft.get_peft_model(model, config)
        torch.manual_seed(3)
        for layer in model.modules():
            if isinstance(layer, peft.tuners.lora.LoraLayer):
                layer.lora_A.to_empty(device=place())
                layer.lora_B.to_empty(device=place())
                layer.reset_lora_parameters("default", True)
                torch.nn.init.normal_(layer.lora_B.default.weight)
        return model

    whole, model = (adapted(distributed.empty_model(DATA / "quantized")) for _ in range(2))
    for layer in model.base_model.model.model.layers:
        styles = {
            "mlp.up_proj": distributed.ColwiseParallel(output_layouts=Replicate()),
            "mlp.down_proj": distributed.RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(layer, mesh_of(world), styles)
    tokens, grads = TOKENS.to(place()), []
    for each in (whole, model):
        load(each, DATA / "quantized")
        logits = each(tokens).logits
        logits.square().sum().backward()
        mlp = each.base_model.model.model.layers[0].mlp
        grads.append((logits.detach(), mlp.up_proj.lora_A.default.weight.grad))
    for expected, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * expected.abs().max())


def check_cut_and_sharded(rank: int, world: int) -> None:
    mesh = init_device_mesh(place().type, (world, 1), mesh_dim_names=("data", "tensor"))
    for name in ("quantized", "gptq"):
        model = distributed.empty_model(DATA / name)
        for layer in model.model.layers:
            styles = {"mlp.up_proj": distributed.ColwiseParallel()}
            parallelize_module(layer, mesh["tensor"], styles)
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        load(model, DATA / name)
        assert model.model.layers[0].mlp.up_proj.cut_of is not None
        require_equal(model, DATA / name)


def check_a_file_that_one_rank_has_not(rank: int, world: int) -> None:
    """As where each machine has a copy of its own."""
    folder = DATA / "broken" if rank == 1 else DATA / "dense"
    model = sharded(distributed.empty_model(DATA / "dense"))
    said = fails(FormatError, lambda: load(model, folder))
    assert "its shard model-00002-of-00002.safetensors is missing" in said
    assert rank == 1 or "rank 1 failed" in said


def check_ranks_with_different_checkpoints(rank: int, world: int) -> None:
    folder = DATA / "quantized" if rank == world - 1 else DATA / "dense"
    model = sharded(distributed.empty_model(DATA / "dense"))
    said = fails(FormatError, lambda: load(model, folder))
    assert "ranks disagree about the checkpoint: rank 0 has" in said
    assert "4-bit in nf4 of 64" in said


def check_one_rank_alone(rank: int, world: int) -> None:
    """Loads a whole model with experts, and waits for no other."""
    if rank == 0:
        assert nf4.torch.load(DATA / "experts")(TOKENS).logits.isfinite().all()


def check_a_tensor_of_another_shape(rank: int, world: int) -> None:
    model = sharded(distributed.empty_model(DATA / "dense"))
    said = fails(FormatError, lambda: load(model, DATA / "wide"))
    assert "in the model" in said
    assert "its shape is" in said


def check_a_buffer_that_no_checkpoint_has(rank: int, world: int) -> None:
    model = sharded(distributed.empty_model(DATA / "dense"))
    model.model.rotary_emb.to("meta")
    said = fails(InvalidArgument, lambda: load(model, DATA / "dense"))
    assert "model.rotary_emb.inv_freq is on meta" in said


# With them, as each start of processes takes long.
globals().update({n: each for n, each in vars(dcp_checks).items() if n.startswith("check_")})
