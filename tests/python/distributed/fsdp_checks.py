"""What test_fsdp.py has three processes check: quantized layers under FSDP2."""

import copy

import nf4.torch
import pytest
import ranks
import torch
from fsdp_cases import (
    KINDS,
    WIDTH,
    Block,
    OfExperts,
    all_ranks,
    grads_of,
    inputs,
    model,
    quantized,
    require_same,
    shard,
    step,
)
from nf4.torch import Int4Linear, NF4Linear
from nf4.torch.distributed import _copy_engines, gather_by_copy_engines
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint


def check_forward_and_backward(rank, world):
    for kind in KINDS:
        for reshards in (True, False):
            expected = step(model(kind), inputs())
            made = shard(model(kind), reshard_after_forward=reshards)
            for _ in range(2):  # the second goes by memory that was freed
                require_same(step(made, inputs()), expected)
                made.zero_grad()


def check_experts(rank, world):
    """A stack is sharded as one weight, wherever that cuts an expert."""
    for options in ({}, {"format": "fp4", "nested_blocksize": 0}):
        for reshards in (True, False):
            expected = step(OfExperts(**options).to(ranks.place()), inputs())
            made = OfExperts(**options).to(ranks.place())
            whole = made.experts.weight.nbytes
            fully_shard(made, mesh=all_ranks(), reshard_after_forward=reshards)
            assert made.experts.weight.to_local().nbytes <= -(-whole // world)
            for _ in range(2):  # the second goes by memory that was freed
                require_same(step(made, inputs()), expected)
                made.zero_grad()
            other = OfExperts(seed=7, **options).to(ranks.place())
            state = other.state_dict()
            made.reshard()
            found = made.state_dict()
            assert found.keys() == state.keys()
            assert isinstance(found["experts.weight"], DTensor)
            with pytest.raises(nf4.InvalidArgument, match="the weight is sharded"):
                made.experts.dequantize()
            full = {name: each.full_tensor() if isinstance(each, DTensor) else each
                    for name, each in found.items()}  # fmt: skip
            assert all(map(torch.equal, full.values(), OfExperts(**options).state_dict().values()))
            made.load_state_dict({**found, **{n: state[n] for n in state if "experts" in n}})
            trained = made.trained.weight.full_tensor(), made.trained.bias.full_tensor()
            other.trained.weight.data, other.trained.bias.data = trained
            assert torch.equal(made(inputs()), other(inputs()))


def check_experts_of_integers(rank, world):
    for layout, symmetric in (("gptq", True), ("awq", False), ("compressed-tensors", False)):
        options = {"layout": layout, "symmetric": symmetric}
        expected = step(OfExperts(**options).to(ranks.place()), inputs())
        made = OfExperts(**options).to(ranks.place())
        state, whole = made.state_dict(), made.experts.packed.nbytes
        fully_shard(made, mesh=all_ranks())
        assert made.experts.packed.to_local().nbytes <= -(-whole // world)
        for _ in range(2):  # the second goes by memory that was freed
            require_same(step(made, inputs()), expected)
            made.zero_grad()
        made.reshard()
        found = made.state_dict()
        assert found.keys() == state.keys() and isinstance(found["experts.packed"], DTensor)
        full = {name: each.full_tensor() if isinstance(each, DTensor) else each
                for name, each in found.items()}  # fmt: skip
        assert all(torch.equal(full[name], each) for name, each in state.items())
        other = fully_shard(OfExperts(seed=7, **options).to(ranks.place()), mesh=all_ranks())
        other.load_state_dict(found)
        require_same(step(other, inputs()), expected)


def check_two_ranks(rank, world):
    """65 rows each."""
    mesh = DeviceMesh("cpu", [0, 1])
    if rank < 2:
        expected = step(model("nested"), inputs())
        require_same(step(shard(model("nested"), mesh=mesh), inputs()), expected)


def check_a_layer_by_itself(rank, world):
    """Also one with fewer rows than ranks."""
    for rows in (1, 2, 130):
        torch.manual_seed(0)
        one = quantized(nn.Linear(WIDTH, rows), "nested")
        y = one(inputs())
        assert torch.equal(fully_shard(one, mesh=all_ranks())(inputs()), y)
        assert type(one).__name__ == "FSDPNF4Linear"


def check_memory_and_traffic(rank, world):
    """A rank holds its share, gathers 4-bit bytes, and frees them."""
    made = NF4Linear.from_linear(nn.Linear(512, 384, bias=False)).to(ranks.place())
    bytes_before = made.weight.nbytes + made.absmax.nbytes
    fully_shard(made, mesh=all_ranks(), reshard_after_forward=True)
    local = [each.to_local() for each in (made.weight, made.absmax)]
    assert sum(each.nbytes for each in local) == bytes_before // world
    (group,) = [made._get_fsdp_state()._fsdp_param_group]
    made.unshard()
    gathered = [out for each in group.fsdp_params for out in each.all_gather_outputs]
    assert sum(each.nbytes for each in gathered) <= 0.53 * 384 * 512
    # As floats, bytes that are a NaN's would be changed by copies.
    assert {each.dtype for each in gathered} == {torch.uint8}
    stored = [made.stored(name).untyped_storage() for name in ("weight", "absmax")]
    outputs = [each.untyped_storage().data_ptr() for each in gathered]
    assert [each.data_ptr() for each in stored] == outputs  # nothing was copied
    made.reshard()
    assert [each.nbytes() for each in stored] == [0, 0]
    with pytest.raises(nf4.InvalidArgument, match="the weight is sharded"):
        made.dequantize()


def check_new_codes(rank, world):
    """The next reshard would drop them, after unshard() too: they are refused, and y stays."""
    for kind in ("nested", "act order"):
        made = shard(model(kind))
        y, layer = made(inputs()), made[0].up
        made[0].unshard()
        with pytest.raises(nf4.InvalidArgument, match="the layer is prepared for fully_shard"):
            if kind == "nested":
                layer.requantize(layer.dequantize() + 1)
            else:
                layer.reorder_()
        for _ in range(2):
            assert torch.equal(made(inputs()), y)


def check_accumulation(rank, world):
    for syncs in (False, True):
        one, made = model("nested"), shard(model("nested"))
        for at in range(3):
            made.set_requires_gradient_sync(syncs or at == 2)
            y, grad, _ = step(one, inputs(at))
            found = step(made, inputs(at)) if syncs or at == 2 else unsynced(made, inputs(at))
            assert torch.equal(found[0], y) and torch.equal(found[1], grad)
        for name, grad in grads_of(one).items():
            torch.testing.assert_close(grads_of(made)[name], grad, rtol=1e-6, atol=1e-6)


def unsynced(made, x):
    x = x.clone().requires_grad_()
    y = made(x)
    y.square().sum().backward()
    return y.detach(), x.grad


def check_mixed_precision(rank, world):
    """No cast reaches codes and scales, whose float32 would not be what it was."""
    for kind in KINDS:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        one = model(kind).to(torch.bfloat16)
        made = shard(model(kind), mp_policy=policy)
        assert torch.equal(made(inputs()), one(inputs().bfloat16()))
        made.bfloat16()
        assert torch.equal(made(inputs()), one(inputs().bfloat16()))


def check_offload(rank, world):
    for pins in {ranks.place().type == "cuda", False}:  # a GPU's driver pins memory
        made = model("nested")
        made = shard(made, offload_policy=CPUOffloadPolicy(pin_memory=pins))
        require_same(step(made, inputs()), step(model("nested"), inputs()))


def check_copy_engines_are_of_gpus(rank, world):
    for made, said in (
        (model("nested"), "no module that is sharded"),
        (shard(model("nested")), "mesh is"),
    ):
        with pytest.raises(nf4.InvalidArgument, match=said):
            gather_by_copy_engines(made, all_ranks())
    mesh = init_device_mesh("cpu", (1, world))
    engines = _copy_engines._CopyEngines(mesh.get_group(0))
    with pytest.raises(nf4.InvalidArgument, match="mesh is of ranks .*expected the mesh that"):
        engines(torch.empty(2), torch.empty(1), mesh.get_group(1))


def check_checkpointing(rank, world):
    class Checkpointed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    expected, made = step(model("nested"), inputs()), model("nested")
    for block in made:
        block.__class__ = Checkpointed
    require_same(step(shard(made), inputs()), expected)


def check_two_dimensions(rank, world):
    for shape in ((1, world), (world, 1)):
        mesh = init_device_mesh(ranks.place().type, shape, mesh_dim_names=("replicate", "shard"))
        for kind in ("nested", "gptq"):
            expected = step(model(kind), inputs())
            require_same(step(shard(model(kind), mesh=mesh), inputs()), expected)


def check_compiled(rank, world):
    made = model("nested")
    expected = step(made, inputs())
    made.zero_grad()
    for block in made:
        block.compile(backend="aot_eager")
    require_same(step(shard(made), inputs()), expected)
    torch._dynamo.reset()


def check_shared(rank, world):
    """Layers may share a weight, and it stays one."""
    made = model("nested")
    made[1] = copy.copy(made[0])
    made[1].up = NF4Linear.from_quantized(made[0].up.quantized)
    made[1].up.weight, made[1].up.absmax = made[0].up.weight, made[0].up.absmax
    y = made(inputs())
    fully_shard(made, mesh=all_ranks())
    assert torch.equal(made(inputs()), y)
    assert made[0].up.weight is made[1].up.weight and made[0].up.absmax is made[1].up.absmax


def check_ignored(rank, world):
    """What the caller ignores stays as it was."""
    made = model("nested")
    y = made(inputs())
    fully_shard(made, mesh=all_ranks(), ignored_params={made[0].up.weight})
    assert made[0].up.weight.dtype == torch.uint8 and not made[0].up.is_prepared()
    assert made[1].up.is_prepared()
    assert torch.equal(made(inputs()), y)


def check_ranks_disagree(rank, world):
    """All are told, and none waits."""
    for change in ("blocksize", "kind", "shape", "none"):
        torch.manual_seed(0)
        options = {"blocksize": 128} if (rank, change) == (1, "blocksize") else {}
        rows = 66 if (rank, change) == (2, "shape") else 64
        linear = nn.Linear(WIDTH, rows)
        last = NF4Linear.from_linear(linear, **options)
        if change == "kind" and rank == 0:
            last = Int4Linear.from_linear(linear, group_size=32)
        if change == "none" and rank == 1:
            last = linear
        made = nn.Sequential(NF4Linear.from_linear(nn.Linear(WIDTH, WIDTH)), last)
        with pytest.raises(nf4.InvalidArgument, match="ranks disagree about 1: rank 0 has .*rank"):
            fully_shard(made, mesh=all_ranks())


def check_state_dict(rank, world):
    """Under the keys that it had, sharded, and in the shards' memory."""
    for kind in KINDS:
        one, made = model(kind).state_dict(), shard(model(kind))
        found = made.state_dict()
        assert list(found) == list(one)
        for key, value in one.items():
            part = found[key]
            if isinstance(part, DTensor):
                assert part.placements == (Shard(0),) and part.dtype == value.dtype
                part = part.full_tensor()
            assert torch.equal(part, value), key
        sharded = {key for key, value in found.items() if isinstance(value, DTensor)}
        names = ("weight", "absmax", "qweight", "qzeros", "weight_packed", "scale", "scales")
        assert {k for k in one if k.rsplit(".", 1)[-1] in names and "quant" not in k} <= sharded
        y = made(inputs())
        for key in sharded:
            found[key].to_local().view(torch.uint8).zero_()
        assert not torch.equal(made(inputs()), y)


def check_load_state_dict(rank, world):
    for kind in KINDS:
        expected, other = model(kind, 0), shard(model(kind, 7))
        wanted = {key: value.clone() for key, value in shard(model(kind)).state_dict().items()}
        for assign in (False, True):
            made = shard(model(kind, 7))
            assert not torch.equal(made(inputs()), expected(inputs()))
            made.load_state_dict(wanted, assign=assign)
            assert torch.equal(made(inputs()), expected(inputs()))
        del other


def check_load_whole_parts(rank, world):
    """Each rank takes its rows of what every rank has; faults are named."""
    one = quantized(nn.Linear(WIDTH, 130, bias=False), "nested")
    made = quantized(nn.Linear(WIDTH, 130, bias=False), "nested")
    fully_shard(made, mesh=all_ranks())
    made.load_state_dict(one.state_dict())
    assert torch.equal(made(inputs()), one(inputs()))
    other = NF4Linear.from_linear(nn.Linear(WIDTH, 130, bias=False), blocksize=128)
    with pytest.raises(RuntimeError, match=r"scale_rule \('nf4', 128, 256, None\); expected"):
        made.load_state_dict(other.state_dict())
    assert torch.equal(made(inputs()), one(inputs()))


def check_meta(rank, world):
    """A model that is whole in no process: made on meta, sharded, filled."""
    for kind in ("nested", "flat", "gptq"):
        one = model(kind)
        with torch.device("meta"):
            made = model_of_zeros(kind)
        shard(made)
        with pytest.raises(RuntimeError, match="the layer is on meta"):
            made.load_state_dict(shard(model(kind)).state_dict())
        made.to_empty(device=ranks.place())
        made.load_state_dict(shard(model(kind)).state_dict())
        assert torch.equal(made(inputs()), one(inputs()))


def check_what_a_load_refuses(rank, world):
    """What a copy would cast, or has no place, is named, and y stays."""
    cases = [
        ("gptq", "scales", lambda each: each.bfloat16(), "scales is of torch.bfloat16; expected"),
        ("nested", "weight.nested_absmax", lambda each: each[:0], "nested_absmax"),
        ("act order", "g_idx", None, "g_idx is missing; expected one"),
        ("compressed-tensors", "weight_zero_point", None, None),
    ]
    for kind, key, change, said in cases:
        linear = nn.Linear(WIDTH, 160, bias=False)
        one = quantized(linear, kind)
        made = quantized(linear, kind)
        if kind == "compressed-tensors":  # zero points for a layer without
            made = Int4Linear.from_linear(linear, layout=kind, group_size=32)
            said = "weight_zero_point is given; expected none"
        made = fully_shard(made, mesh=all_ranks())
        y, state = made(inputs()), one.state_dict()
        if kind != "compressed-tensors":
            before = state.pop(key)
            if change is not None:
                state[key] = change(before)
        for assign in (False, True):
            with pytest.raises(RuntimeError, match=said):
                made.load_state_dict(state, assign=assign)
            assert torch.equal(made(inputs()), y)


def check_what_a_load_keeps(rank, world):
    """Only a rank's rows of whole tensors; and a table that layers share stays what it was."""
    linear = nn.Linear(WIDTH, 160, bias=False)
    made, other = (NF4Linear.from_linear(linear).to(ranks.place()) for _ in range(2))
    other.nested_code = code = made.nested_code
    fully_shard(made, mesh=all_ranks())
    state = {key: each.clone() for key, each in other.state_dict().items()}
    y = other(inputs())
    made.load_state_dict(state, assign=True)
    local = made.weight.to_local().stored
    assert local.untyped_storage().nbytes() < state["weight"].nbytes / 2
    assert torch.equal(made(inputs()), y)
    made.nested_code = code
    state["weight.nested_quant_map"] = code / 2
    made.load_state_dict(state)
    assert torch.equal(other(inputs()), y) and not torch.equal(made(inputs()), y)


def model_of_zeros(kind):
    def layer(before):
        bias = before.bias is not None
        shape = before.in_features, before.out_features, bias
        if isinstance(before, NF4Linear):
            return NF4Linear(*shape, format=before.format, nested_blocksize=before.nested_blocksize)
        return Int4Linear(*shape, group_size=32, scales_dtype=before.scales.dtype)

    with torch.device("cpu"):
        made = model(kind)
    for block in made:
        block.up, block.down = layer(block.up), layer(block.down)
        block.trained = nn.Linear(block.trained.in_features, block.trained.out_features)
    return made
