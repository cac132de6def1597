"""What test_data_parallel.py has two processes check: DDP, FSDP1 and replicate around quantized
layers, PEFT's adapters, and layers that were bitsandbytes'."""

import itertools
import os
import tempfile

import nf4.torch
import pytest
import torch
from fsdp_cases import (
    KINDS,
    Block,
    OfExperts,
    all_ranks,
    grads_of,
    inputs,
    model,
    require_same,
    shard,
    step,
)
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def check_ddp(rank, world):
    for kind in KINDS:
        expected = step(model(kind), inputs())
        made = DistributedDataParallel(model(kind))
        for _ in range(2):
            y, grad, grads = step(made, inputs())
            grads = {name.removeprefix("module."): each for name, each in grads.items()}
            require_same((y, grad, grads), expected)
            made.zero_grad()


def check_ddp_of_several_forwards(rank, world):
    """Whose buffers' broadcasts autograd must not take for changes, and which may be off."""
    ways = ((False, True), (False, False), (True, True))
    kinds = ("nested", "flat", "gptq", "act order")
    for kind, (compiles, broadcasts) in itertools.product(kinds, ways):
        made = model(kind)
        _, expected, of_parameters = step(made, inputs())
        of_parameters = {name: 2 * grad for name, grad in of_parameters.items()}
        made.zero_grad()
        if compiles:
            made.compile(backend="aot_eager")
        wrapped = DistributedDataParallel(made, broadcast_buffers=broadcasts)
        x = inputs().requires_grad_()
        ys = [wrapped(x), wrapped(x)]
        sum(y.square().sum() for y in ys).backward()
        torch.testing.assert_close(x.grad, 2 * expected)
        torch.testing.assert_close(grads_of(made), of_parameters)
    torch._dynamo.reset()


def check_ddp_begins_alike(rank, world):
    """Its constructor broadcasts all that a layer has, and other modules' buffers in each call."""
    for kind in ("nested", "flat", "gptq"):
        made = nn.Sequential(model(kind, seed=rank), nn.BatchNorm1d(64, affine=False))
        made = DistributedDataParallel(made)
        assert torch.equal(made.module[0](inputs()), model(kind, seed=0)(inputs()))
        names = {name.rpartition(".")[2] for name in made.named_module_buffers}
        assert names == {"running_mean", "running_var", "num_batches_tracked"}


def check_fsdp1(rank, world):
    for kind, originals in itertools.product(KINDS, (True, False)):
        one = model(kind)
        made = FullyShardedDataParallel(
            model(kind),
            use_orig_params=originals,
            device_id=torch.device("cpu"),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
        )
        for _ in range(2):
            x = inputs().requires_grad_()
            y = made(x)
            y.square().sum().backward()
        assert torch.equal(y, one(inputs()))
        found = made.state_dict()
        assert set(found) == set(one.state_dict())
        assert all(torch.equal(found[key], each) for key, each in one.state_dict().items())
        made.load_state_dict(model(kind, seed=7).state_dict())
        assert torch.equal(made(inputs()), model(kind, seed=7)(inputs()))


def check_fsdp1_in_16_bits(rank, world):
    """Its policy casts buffers, but none of ours."""
    dtype = torch.bfloat16
    for kind in KINDS:
        made = FullyShardedDataParallel(
            model(kind),
            device_id=torch.device("cpu"),
            use_orig_params=True,
            mixed_precision=MixedPrecision(dtype, dtype, dtype),
        )
        expected = model(kind).to(dtype)(inputs().to(dtype))
        assert torch.equal(made(inputs()), expected)
        assert torch.equal(made(inputs()), expected)


def check_experts(rank, world):
    """DDP broadcasts them at the beginning only, FSDP1 leaves them whole, FSDP2 where
    it ignores them."""
    expected = step(OfExperts(), inputs())
    made = DistributedDataParallel(OfExperts(seed=rank))
    x = inputs().requires_grad_()
    ys = [made(x), made(x)]
    sum(y.square().sum() for y in ys).backward()
    assert torch.equal(ys[0], expected[0])
    torch.testing.assert_close(x.grad, 2 * expected[1])

    made = FullyShardedDataParallel(OfExperts(), device_id=torch.device("cpu"))
    require_same(step(made, inputs())[:2] + ({"": x},), expected[:2] + ({"": x},))
    state = OfExperts(seed=7).state_dict()
    assert set(made.state_dict()) == set(state)
    made.load_state_dict(state)
    assert torch.equal(made(inputs()), OfExperts(seed=7)(inputs()))

    made = OfExperts()
    fully_shard(made, mesh=all_ranks(), ignored_params={made.experts.weight})
    require_same(step(made, inputs()), expected)


def check_replicate(rank, world):
    from torch.distributed._composable.replicate_with_fsdp import replicate

    for kind in ("nested", "gptq"):
        expected, made = step(model(kind), inputs()), replicate(model(kind), mesh=all_ranks())
        for _ in range(2):
            require_same(step(made, inputs()), expected)
            made.zero_grad()


def check_peft(rank, world):
    """Adapters are sharded and trained beside weights that are not: 50 steps, each rank with its
    part of the batch, beside one process with all of it."""
    for kind in ("nested", "gptq"):
        expected = adapter_losses(adapted(kind), torch.cat)
        made = adapted(kind)
        shard(made.base_model.model.blocks)
        found = torch.tensor(adapter_losses(made, lambda each: each[rank]))
        torch.distributed.all_reduce(found)
        assert expected[-1] < 0.9 * expected[0]
        torch.testing.assert_close((found / world).tolist(), expected, rtol=1e-3, atol=0)
        weights = [each for each in made.parameters() if each.requires_grad]
        assert weights and all(isinstance(each, DTensor) for each in weights)
        block = made.base_model.model.blocks[0]
        block.unshard()
        said = {"nested": "the layer is prepared for fully_shard", "gptq": "into an Int4Linear"}
        with pytest.raises(nf4.InvalidArgument, match=said[kind]):
            made.merge_adapter()
        assert not block.up.merged_adapters


def adapted(kind):
    import peft

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = model(kind)
            self.requires_grad_(False)

        def forward(self, x):
            return self.blocks(x)

    torch.manual_seed(3)
    config = peft.LoraConfig(target_modules=["up", "down"], init_lora_weights=False)
    return peft.get_peft_model(Model(), config)


def adapter_losses(made, batch_of, steps=50, prepare=lambda *given: given):
    """batch_of: of the batches of both ranks."""
    trained = [each for each in made.parameters() if each.requires_grad]
    made, optimizer = prepare(made, torch.optim.AdamW(trained, lr=1e-2))
    found = []
    for at in range(steps):
        x = batch_of([inputs(2 * (at % 4)), inputs(2 * (at % 4) + 1)])
        loss = (made(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def check_accelerate(rank, world):
    """Accelerator.prepare with an FSDP2 plugin, as Trainer calls it, and its checkpoints.
    accelerate has FSDP for GPUs alone, so that it is told here that this is it."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils import fsdp_utils

    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    os.environ |= {name: str(value) for name, value in variables.items()}
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"], cpu_ram_efficient_loading=False,
    )  # fmt: skip
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    expected = adapter_losses(adapted("nested"), torch.cat, steps=8)
    made = adapted("nested")
    losses = adapter_losses(made, lambda each: each[rank], 8, accelerator.prepare)
    found = torch.tensor(losses)
    torch.distributed.all_reduce(found)
    torch.testing.assert_close((found / world).tolist(), expected, rtol=1e-3, atol=0)
    assert made.base_model.model.blocks[0].up.base_layer.is_prepared()
    with tempfile.TemporaryDirectory() as own:
        every = [own]
        torch.distributed.broadcast_object_list(every, src=0)
        folder, y = every[0], made(inputs())
        fsdp_utils.save_fsdp_model(plugin, accelerator, made, folder)
        for each in made.parameters():
            if each.requires_grad:
                each.data.zero_()
        assert not torch.equal(made(inputs()), y)
        fsdp_utils.load_fsdp_model(plugin, accelerator, made, folder)
        assert torch.equal(made(inputs()), y)
        torch.distributed.barrier()


def check_of_bitsandbytes(rank, world):
    import bitsandbytes

    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(64, 130, compute_dtype=torch.float32)
    layer.load_state_dict(nn.Linear(64, 130).state_dict())
    made = nn.Sequential(layer.to("cpu"), nn.Linear(130, 64))
    assert nf4.torch.convert(made) == ["0"]
    expected = step(made, inputs())
    made.zero_grad()
    require_same(step(shard(made), inputs()), expected)
