"""What test_parallel.py has two processes check: layers cut for tensor parallelism, beside the same
in one process, and beside dense layers that torch's styles cut."""

import copy
import inspect

import nf4.torch
import pytest
import torch
from nf4.torch import Int4Linear, NF4Linear
from nf4.torch.distributed import ColwiseParallel, RowwiseParallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import parallelize_module

KINDS = ("nested", "flat", "gptq", "awq", "compressed-tensors", "act order")
IN, INNER = 128, 256


def quantized(linear, kind="nested"):
    if kind == "nested":
        return NF4Linear.from_linear(linear)
    if kind == "flat":
        return NF4Linear.from_linear(linear, format="fp4", blocksize=32, nested_blocksize=0)
    layout = "gptq" if kind == "act order" else kind
    made = Int4Linear.from_linear(linear, layout=layout, group_size=32, symmetric=kind == "awq")
    if kind != "act order":
        return made
    weight = made.quantized
    groups = linear.in_features // 32
    g_idx = torch.arange(linear.in_features, dtype=torch.int32) % groups
    weight = nf4.Int4Tensor(
        layout=weight.layout, shape=weight.shape, group_size=32, packed=weight.packed,
        scales=weight.scales, zeros=weight.zeros, g_idx=g_idx,
    )  # fmt: skip
    return Int4Linear.from_quantized(weight, made.bias)


class MLP(nn.Module):
    def __init__(self, kind="nested"):
        super().__init__()
        self.up = quantized(nn.Linear(IN, INNER), kind)
        self.down = quantized(nn.Linear(INNER, IN), kind)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def mlp(kind="nested", seed=0):
    torch.manual_seed(seed)
    return MLP(kind)


def mesh_of(world):
    return init_device_mesh("cpu", (world,))


def cut(model, mesh, **plan):
    plan = plan or {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def close(found, expected):
    assert found.shape == expected.shape, (found.shape, expected.shape)
    error = ((found - expected).norm() / expected.norm()).item()
    assert error < 2e-6, error


def inputs(*shape, seed=1):
    torch.manual_seed(seed)
    return torch.randn(*shape)


def mine(tensor, rank, world, dim):
    return tensor.chunk(world, dim)[rank]


def check_mlp(rank, world):
    for kind in KINDS:
        whole, x = mlp(kind), inputs(3, 5, IN)
        made = cut(mlp(kind), mesh_of(world))
        with torch.no_grad():
            close(made(x), whole(x))  # the way without DTensors
        given, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
        y = made(given)
        close(y, whole(expected))
        whole(expected).square().sum().backward()
        y.square().sum().backward()
        close(given.grad, expected.grad)
        close(made.down.bias.grad, whole.down.bias.grad)
        close(made.up.bias.grad, mine(whole.up.bias.grad, rank, world, 0))


def check_each_rank_has_its_part(rank, world):
    for kind in KINDS:
        whole, made = mlp(kind), cut(mlp(kind), mesh_of(world))
        assert type(made.up) is type(whole.up)
        assert (made.up.out_features, made.up.in_features) == (INNER // world, IN)
        assert (made.down.out_features, made.down.in_features) == (IN, INNER // world)
        for name, dim in (("up", 0), ("down", 1)):
            dense = getattr(whole, name).dequantize(torch.float32)
            part = getattr(made, name)
            assert torch.equal(part.dequantize(torch.float32), mine(dense, rank, world, dim))
            packed = part.parts().packed
            held = packed.untyped_storage().nbytes()
            assert held * world == getattr(whole, name).parts().packed.nbytes


def check_columns_have_the_bits_of_the_whole(rank, world):
    x = inputs(4, IN)
    for kind in KINDS:
        whole, made = mlp(kind).up, cut(mlp(kind), mesh_of(world)).up
        with torch.no_grad():
            assert torch.equal(made(x), mine(whole(x), rank, world, -1))


def check_layouts(rank, world):
    """In and out of every layout, beside torch's own styles over dense layers."""
    mesh, x = mesh_of(world), inputs(2, 6, IN)
    rows = ((Replicate(), Replicate()), (Shard(1), Shard(1)), (Shard(-1), Shard(-1)))
    for colwise in (True, False):
        ours, theirs = (
            (ColwiseParallel, torch_parallel.ColwiseParallel)
            if colwise
            else (RowwiseParallel, torch_parallel.RowwiseParallel)
        )
        for into, out in [(None, None), *rows, (Shard(0), Replicate()), (Replicate(), Shard(1))]:
            for local in (True, False):
                options = dict(input_layouts=into, output_layouts=out, use_local_output=local)
                for given in (True, False):
                    pairs = ((mlp().up, ours), (mlp().up.to_linear(), theirs))
                    found, expected = (
                        _through(layer, style(**options), mesh, x, into, colwise, given)
                        for layer, style in pairs
                    )
                    _same(found, expected)


def _through(layer, style, mesh, x, into, colwise, distributed):
    """y and the gradients of x and of the bias, whole ones."""
    layer = parallelize_module(layer, mesh, style)
    into = into or (Replicate() if colwise else Shard(-1))
    given = distribute_tensor(x, mesh, [into])
    given = given.detach().requires_grad_() if distributed else given.to_local().requires_grad_()
    y = layer(given)
    y.square().sum().backward()
    bias = layer.bias.grad
    if isinstance(bias, DTensor):
        bias = bias.redistribute(placements=[Shard(0) if colwise else Replicate()]).to_local()
    grad = given.grad
    return isinstance(y, DTensor), y.detach(), grad.full_tensor() if distributed else grad, bias


def _same(found, expected):
    (distributed, y, *grads), (of_torch, y_of_torch, *grads_of_torch) = found, expected
    assert distributed == of_torch
    if distributed:
        assert y.placements == y_of_torch.placements and y.shape == y_of_torch.shape
        y, y_of_torch = y.full_tensor(), y_of_torch.full_tensor()
    for ours, theirs in zip((y, *grads), (y_of_torch, *grads_of_torch), strict=True):
        close(ours, theirs)


def check_fused_projections(rank, world):
    sections = (128, 64, 64)
    for kind in KINDS:
        whole, x = mlp(kind).up, inputs(3, IN)
        made = parallelize_module(mlp(kind).up, mesh_of(world), ColwiseParallel(sections=sections))
        expected = [mine(each, rank, world, -1) for each in whole(x).split(sections, -1)]
        assert torch.equal(made(x).detach(), torch.cat(expected, -1).detach())
    with pytest.raises(nf4.InvalidArgument, match="Shard"):
        ColwiseParallel(sections=sections, use_local_output=False)
    with pytest.raises(nf4.InvalidArgument, match="256 rows"):
        cut(mlp(), mesh_of(world), up=ColwiseParallel(sections=(128, 64)))


def check_dense_layers_go_the_way_of_torch(rank, world):
    torch.manual_seed(0)
    dense = nn.Linear(IN, INNER)
    x = inputs(3, IN)
    expected = mine(dense(x), rank, world, -1)
    made = parallelize_module(copy.deepcopy(dense), mesh_of(world), ColwiseParallel())
    assert isinstance(made.weight, DTensor)
    close(made(x), expected)


def check_styles_of_torch_are_refused(rank, world):
    for kind in ("nested", "gptq"):
        for style in (torch_parallel.ColwiseParallel, torch_parallel.RowwiseParallel):
            with pytest.raises(nf4.InvalidArgument, match="nf4.torch.distributed.ColwiseParallel"):
                cut(mlp(kind), mesh_of(world), up=style())
        assert inspect.getmembers(mlp(kind).up)  # to others that is no attribute


def check_no_cut(rank, world):
    torch.manual_seed(0)
    odd = NF4Linear.from_linear(nn.Linear(192, 131))
    for style, words in ((ColwiseParallel(), "131"), (RowwiseParallel(), "inside a block")):
        with pytest.raises(nf4.InvalidArgument) as found:
            parallelize_module(odd, mesh_of(world), style)
        for word in (words, "(131, 192)", "blocksize 64", "world size of 2"):
            assert word in str(found.value), str(found.value)
    made = cut(mlp(), mesh_of(world))
    with pytest.raises(nf4.InvalidArgument, match="already"):
        cut(made, mesh_of(world))


def check_ranks_that_disagree(rank, world):
    mesh = mesh_of(world)
    torch.manual_seed(0)
    others = [
        (mlp(seed=rank), "bytes"),
        (nn.ModuleDict({"up": NF4Linear(IN, INNER, format=("nf4", "fp4")[rank])}), "fp4"),
        (nn.ModuleDict({"up": NF4Linear(IN, INNER, blocksize=(64, 128)[rank])}), "128"),
        (nn.ModuleDict({"up": NF4Linear(IN, (256, 512)[rank])}), "512"),
    ]
    for model, word in others:
        with pytest.raises(nf4.InvalidArgument) as found:
            cut(model, mesh, up=ColwiseParallel())
        assert "rank 0" in str(found.value) and "rank 1" in str(found.value)
        assert word in str(found.value), str(found.value)
    # As with torch's styles, None says that each rank's own is meant.
    plan = {"up": ColwiseParallel()}
    parallelize_module(mlp(seed=rank), mesh, plan, src_data_rank=None)


def check_on_meta(rank, world):
    made = cut(mlp().to("meta"), mesh_of(world))
    assert made.up.weight.is_meta and made.down.in_features == INNER // world
    expected = cut(mlp(), mesh_of(world))
    made.load_state_dict(expected.state_dict(), assign=True)
    x = inputs(2, IN)
    assert torch.equal(made(x), expected(x))


def check_compiled(rank, world):
    x = inputs(3, IN)
    made = cut(mlp(), mesh_of(world))
    compiled = torch.compile(cut(mlp(), mesh_of(world)), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        close(compiled(x), made(x))
    given, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled(given).square().sum().backward()
    made(expected).square().sum().backward()
    close(given.grad, expected.grad)
