"""Rows and columns cut out of quantized weights: the values of the whole, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import math

import int4_oracle
import nf4
import pytest
import torch_cases
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.interop
torch_cases.require("torch")

import int4_cases  # noqa: E402
import nf4.torch  # noqa: E402
import torch  # noqa: E402
from int4_torch_cases import tensor, weight_of  # noqa: E402
from nf4.torch.distributed._cut_weight import cut  # noqa: E402
from nf4.torch.distributed._cuts_int4 import Int4Cut  # noqa: E402
from nf4.torch.distributed._cuts_nf4 import NF4Cut  # noqa: E402


def bits(weight: nf4.Weight) -> torch.Tensor:
    return nf4.torch.dequantize(weight, torch.float32).view(torch.int32)


def expected(weight: nf4.Weight, dim: int, ranges: list[tuple[int, int]]) -> torch.Tensor:
    dense = bits(weight)
    return torch.cat([dense.narrow(dim, a, b - a) for a, b in ranges], dim)


def quantized(rows: int, cols: int, **given) -> nf4.QuantizedTensor:
    torch.manual_seed(rows * 1000 + cols)
    # Each block has a scale of its own.
    dense = torch.randn(rows, cols) * torch.rand(rows, 1).exp() * torch.rand(cols).exp()
    return nf4.torch.quantize(dense, **given)


@st.composite
def ranges_in(draw, extent: int, unit: int) -> list[tuple[int, int]]:
    """One to three, that begin and end with units, in any order; or all there is."""
    if extent % unit:
        return [(0, extent)]
    count = extent // unit
    found = []
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, count - 1))
        found.append((begin * unit, draw(st.integers(begin + 1, count)) * unit))
    return found


@settings(max_examples=150)
@given(st.data())
def test_nf4_of_any_shape(data: st.DataObject) -> None:
    blocksize = data.draw(st.sampled_from([32, 64, 128]))
    dim = data.draw(st.integers(0, 1))
    rows = data.draw(st.integers(1, 40))
    cols = data.draw(st.integers(1, 12)) * (blocksize if dim else data.draw(st.integers(1, 40)))
    nested = data.draw(st.sampled_from([0, 1, 8, 16, 256]))
    format = data.draw(st.sampled_from(["nf4", "fp4"]))
    weight = quantized(rows, cols, blocksize=blocksize, nested_blocksize=nested, format=format)
    # Rows of whole blocks, and as few as there are.
    unit = blocksize if dim else blocksize // math.gcd(blocksize, cols)
    extent = weight.shape[dim]
    ranges = data.draw(ranges_in(extent, unit))
    part = cut(weight, dim, ranges)
    assert torch.equal(bits(part), expected(weight, dim, ranges))
    assert part.format == format and part.dtype == weight.dtype
    assert part.nested_blocksize <= nested


@settings(max_examples=200)
@given(case=int4_cases.any_int4(), data=st.data())
def test_int4_of_any_layout(case: int4_cases.Case, data: st.DataObject) -> None:
    arrays = case.arrays
    weight = nf4.Int4Tensor(
        layout=arrays.layout,
        shape=(arrays.rows, arrays.cols),
        group_size=arrays.group_size,
        packed=tensor(arrays.packed),
        scales=tensor(arrays.scales, arrays.scale_dtype == "bf16"),
        zeros=None if arrays.zeros is None else tensor(arrays.zeros),
        g_idx=None if arrays.g_idx is None else tensor(arrays.g_idx),
    )
    dim = data.draw(st.integers(0, 1))
    extent = weight.shape[dim]
    groups = int4_oracle.group_count(arrays.cols, arrays.group_size)
    unit = 8 if dim == 0 or groups == 1 else arrays.cols // groups
    if dim == 1 and weight.g_idx is not None:
        unit = 8 * groups
    ranges = data.draw(ranges_in(extent, unit))
    part = cut(weight, dim, ranges)
    assert torch.equal(bits(part), expected(weight, dim, ranges))
    assert part.layout == weight.layout and part.dtype == weight.dtype


@pytest.mark.parametrize(
    ("dim", "ranges", "nested"),
    [
        (0, [(0, 4)], 256),
        (0, [(4, 8)], 256),
        (0, [(2, 8)], 256),  # two rows to a group
        (0, [(1, 8)], 128),
        (0, [(0, 2), (4, 6)], 256),
        (1, [(0, 4096)], 64),
        (1, [(4096, 8192)], 64),
        (1, [(0, 1024)], 16),
        (1, [(0, 64 * 4)], 0),  # made flat
    ],
)
def test_nested_groups_that_a_cut_falls_in(dim, ranges, nested) -> None:
    weight = quantized(8, 8192)
    part = cut(weight, dim, ranges)
    assert part.nested_blocksize == nested
    assert part.absmax.dtype == (torch.uint8 if nested else torch.float32)
    assert torch.equal(bits(part), expected(weight, dim, ranges))


def test_reordered_columns() -> None:
    weight = nf4.reorder(weight_of("gptq symmetric, act order", cols=256))
    for dim, ranges in ((0, [(8, 24)]), (1, [(64, 128)]), (1, [(192, 256)])):
        part = cut(weight, dim, ranges)
        assert torch.equal(bits(part), expected(weight, dim, ranges))


def test_a_part_has_memory_of_its_own() -> None:
    for weight in (quantized(8, 256), weight_of("gptq"), weight_of("compressed-tensors")):
        part = cut(weight, 0, [(0, 8)])
        of_whole = weight.packed.untyped_storage().data_ptr()
        assert part.packed.untyped_storage().data_ptr() != of_whole
        assert part.packed.untyped_storage().nbytes() == part.packed.nbytes


def test_plans_name_the_elements_of_stored_parts() -> None:
    weight = quantized(6, 256, blocksize=64, nested_blocksize=8)
    for dim, ranges in ((0, [(2, 4), (0, 2)]), (1, [(64, 192)])):
        plan = NF4Cut.plan(weight.shape, 64, 8, dim, ranges)
        read = {}
        for name, each in plan.reads.items():
            stored = getattr(weight, name)
            if each is not None and stored is not None:
                flat = stored.reshape(-1)
                read[name] = torch.cat([flat[begin:end] for begin, end in each.runs()])
            else:
                read[name] = stored
        part = plan.assemble(read, weight.format)
        assert torch.equal(bits(part), expected(weight, dim, ranges))


@pytest.mark.parametrize("case", ["gptq", "awq", "compressed-tensors, zeros, act order"])
def test_plans_name_the_elements_of_stored_integer_parts(case) -> None:
    weight = weight_of(case, cols=256)
    order = weight.g_idx is not None
    for dim, ranges in ((0, [(8, 16)]), (1, [(128, 256)])):
        plan = Int4Cut.plan(
            weight.layout, weight.shape, weight.group_size, dim, ranges,
            zeros=weight.zeros is not None, act_order=order,
        )  # fmt: skip
        read = {}
        for name, each in plan.reads.items():
            flat = getattr(weight, name).reshape(-1)
            runs = each.runs() if each else [(0, flat.numel())]
            found = torch.cat([flat[begin:end] for begin, end in runs])
            extents = None if each is None else list(each.view)
            if extents is not None:
                extents[each.dim] = sum(end - begin for begin, end in each.ranges)
            read[name] = found.view(extents or getattr(weight, name).shape)
        assert torch.equal(bits(plan.assemble(read)), expected(weight, dim, ranges))


def test_on_meta() -> None:
    weight = quantized(8, 256)
    parts = {
        name: getattr(weight, name).to("meta")
        for name in ("packed", "absmax", "nested_absmax", "nested_code", "nested_offset")
    }
    for dim, shape in ((0, (4, 256)), (1, (8, 128))):
        part = cut(dataclasses.replace(weight, **parts), dim, [(0, shape[dim])])
        assert part.packed.is_meta and part.shape == shape
        assert part.packed.numel() == math.prod(shape) // 2


@pytest.mark.parametrize(
    ("make", "dim", "ranges", "words"),
    [
        (lambda: quantized(130, 96), 0, [(65, 130)], ["65:130", "(130, 96)", "blocksize 64"]),
        (lambda: quantized(8, 192), 1, [(0, 96)], ["inside a block", "columns 0:96"]),
        (lambda: quantized(8, 96), 1, [(0, 64)], ["across rows", "(8, 96)"]),
        (lambda: quantized(8, 96), 1, [(64, 64)], ["ranges"]),
        (lambda: quantized(8, 96), 0, [(4, 9)], ["ranges", "8 rows"]),
        (lambda: quantized(8, 96), 2, [(0, 1)], ["dim is 2"]),
        (lambda: weight_of("gptq"), 0, [(4, 12)], ["zeros", "gptq", "(24, 64)"]),
        (lambda: weight_of("awq"), 0, [(0, 12)], ["packed", "awq"]),
        (lambda: weight_of("gptq"), 1, [(16, 48)], ["group_size 32", "inside a group"]),
        (lambda: weight_of("gptq"), 1, [(4, 28)], ["packed"]),
        (lambda: weight_of("gptq_v2, act order"), 1, [(0, 24)], ["act order", "24 columns"]),
    ],
)
def test_no_cut(make, dim, ranges, words) -> None:
    with pytest.raises(nf4.InvalidArgument) as found:
        cut(make(), dim, ranges)
    assert all(word in str(found.value) for word in words), str(found.value)


def test_every_tp_of_llama_shapes() -> None:
    """q, k, v, o, gate, up and down of LLaMA-70B, of blocks of 64: nested scales stay nested."""
    for (rows, cols), world in itertools.product(
        [(8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672)], (2, 4, 8)
    ):
        for dim, rank in itertools.product((0, 1), (0, world - 1)):
            size = (rows, cols)[dim] // world
            plan = NF4Cut.plan((rows, cols), 64, 256, dim, [(rank * size, (rank + 1) * size)])
            assert plan.nested_blocksize >= 8, (rows, cols, world, dim)
