"""torch.ops.nf4.*_int4: what torch asks of operators, and their results."""

from __future__ import annotations

import dataclasses

import nf4
import pytest
import torch_cases
from torch_cases import ALLOWED, error, reference

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
from int4_torch_cases import CASES, IN, OUT, arrays_of, dense_of, weight_of  # noqa: E402
from nf4.torch import _kernels  # noqa: E402
from nf4.torch._int4_weight import Int4Parts  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.library import opcheck  # noqa: E402

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


# ---- Results ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scale_dtype", ["fp16", "bf16"])
def test_dequantize_is_bit_equal_to_the_oracle(dtype, case, scale_dtype, way):
    weight = weight_of(case, scale_dtype=scale_dtype)
    expected = dense_of(arrays_of(case, scale_dtype=scale_dtype), dtype)
    assert torch.equal(nf4.torch.dequantize(weight, dtype), expected)
    assert nf4.torch.dequantize(weight).dtype == DTYPES[scale_dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_against_float64(dtype, case, with_bias, way):
    weight = weight_of(case)
    x = torch.randn(3, 5, IN).to(DTYPES[dtype])
    bias = torch.randn(OUT).to(DTYPES[dtype]) if with_bias else None
    y = nf4.torch.linear(x, weight, bias)
    assert y.dtype == x.dtype and y.shape == (3, 5, OUT)
    assert error(y, reference(x, weight, bias)) <= ALLOWED[dtype]
    assert torch.equal(y, nf4.matmul(x, weight, bias=bias))


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_is_that_of_the_core(layout, symmetric, dtype):
    dense = torch.randn(OUT, IN).to(DTYPES[dtype])
    options = {"layout": layout, "symmetric": symmetric, "group_size": 32}
    made, core = nf4.torch.quantize_int4(dense, **options), nf4.quantize_int4(dense, **options)
    for name in Int4Parts.names:
        ours, theirs = getattr(made, name), getattr(core, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs), name
    assert (made.layout, made.shape, made.group_size, made.dtype) == (
        core.layout, core.shape, core.group_size, core.dtype,
    )  # fmt: skip


def test_a_reordered_weight_is_the_same(way):
    weight = weight_of("gptq_v2, act order")
    sorted_once = nf4.reorder(weight)
    assert torch.equal(nf4.torch.dequantize(sorted_once), nf4.torch.dequantize(weight))
    x = torch.randn(4, IN)
    assert error(nf4.torch.linear(x, sorted_once), reference(x, weight)) <= ALLOWED["fp32"]


def test_the_way_of_fp32_on_a_gpu():
    weight, x = weight_of("gptq_v2, act order"), torch.randn(2, 3, IN)
    y = _kernels.dense_linear(x, None, Int4Parts.of(weight))
    assert error(y, reference(x, weight)) <= ALLOWED["fp32"]


def test_x_of_any_strides(way):
    weight, x = weight_of(), torch.randn(6, IN)
    expected = nf4.matmul(x, weight)
    assert torch.equal(nf4.torch.linear(x.mT.contiguous().mT, weight), expected)
    assert torch.equal(nf4.torch.linear(torch._neg_view(-x), weight), expected)


# ---- What torch asks -----------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(case, grad):
    weight = Int4Parts.of(weight_of(case)).arguments()
    x = torch.randn(3, IN, requires_grad=grad)
    bias = torch.randn(OUT, requires_grad=grad)
    ops = torch.ops.nf4
    opcheck(ops.linear_int4.default, (x, bias, *weight))
    opcheck(ops.linear_backward_int4.default, (torch.randn(3, OUT, requires_grad=grad), *weight))


@pytest.mark.parametrize("case", CASES)
def test_opcheck_of_what_has_no_gradient(case):
    parts = Int4Parts.of(weight_of(case))
    weight, x, dense = parts.arguments(), torch.randn(3, IN), torch.randn(OUT, IN)
    layout, group_size = weight[-2:]
    ops = torch.ops.nf4
    opcheck(ops.dequantize_int4.default, (*weight, torch.float16))
    opcheck(ops.quantize_int4.default, (dense, layout, group_size, False, torch.float16))
    opcheck(ops.quantize_int4.default, (dense, layout, group_size, True, torch.bfloat16))
    opcheck(ops._linear_int4.default, (x, None, *parts.numbers()))
    opcheck(ops._dense_like_int4.default, (x, *parts.numbers()))


@pytest.mark.parametrize("case", CASES)
def test_numbers_and_arguments_name_the_same_weight(case):
    parts = Int4Parts.of(weight_of(case))
    assert Int4Parts.of_numbers(*parts.numbers()) == parts
    assert Int4Parts.of_arguments(*parts.arguments()) == parts


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_any_order(case, way):
    weight = weight_of(case)
    dense = nf4.dequantize(weight, "fp32").double()
    x = torch.randn(4, IN, requires_grad=True)
    bias = torch.randn(OUT, requires_grad=True)
    grad_y = torch.randn(4, OUT, requires_grad=True)
    y = nf4.torch.linear(x, weight, bias)
    grad_x, grad_bias = torch.autograd.grad(y, (x, bias), grad_y, create_graph=True)
    assert error(grad_x, grad_y.detach().double() @ dense) <= ALLOWED["fp32"]
    assert torch.allclose(grad_bias, grad_y.sum(0))
    along = torch.randn(4, IN)
    (second,) = torch.autograd.grad(grad_x, grad_y, along)
    assert error(second, along.double() @ dense.T) <= ALLOWED["fp32"]


def test_per_sample_gradients_by_torch_func(way):
    weight, x = weight_of("awq"), torch.randn(5, IN)
    each = torch.func.vmap(torch.func.grad(lambda row: nf4.torch.linear(row, weight).sum()))(x)
    dense = nf4.dequantize(weight, "fp32").sum(0)
    assert error(each, dense.expand(5, IN)) <= ALLOWED["fp32"]


# Each kind both ways and with both sorts of sizes; AWQ with every pair of them.
COMPILED = [
    (case, dynamic, way)
    for case in CASES
    for dynamic in (None, True)
    for way in ("extension", "ctypes")
    if case == "awq" or (way == "extension") == bool(dynamic)
]


@pytest.mark.parametrize(("case", "dynamic", "way"), COMPILED, indirect=["way"])
def test_compiled_without_a_graph_break(case, dynamic, way):
    weight = weight_of(case)

    def run(x):
        return torch.relu(nf4.torch.linear(x * 2, weight))

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 5):
        x = torch.randn(rows, IN, requires_grad=True)
        expected = run(x)
        (grad,) = torch.autograd.grad(expected.sum(), x)
        y = compiled(x)
        assert torch.equal(y, expected)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], grad)


def test_compiled_quantize_and_dequantize():
    def run(dense):
        weight = nf4.torch.quantize_int4(dense, layout="awq", group_size=32, symmetric=False)
        return nf4.torch.dequantize(weight, torch.bfloat16)

    dense = torch.randn(OUT, IN)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(dense), run(dense))


def test_fake_tensors_have_the_shapes():
    weight = weight_of("compressed-tensors, zeros, act order")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        parts = {name: getattr(weight, name) for name in Int4Parts.names}
        fakes = {name: each if each is None else mode.from_tensor(each)
                 for name, each in parts.items()}  # fmt: skip
        fake = dataclasses.replace(weight, **fakes)
        assert nf4.torch.linear(torch.empty(2, IN), fake).shape == (2, OUT)
        assert nf4.torch.dequantize(fake, "bf16").dtype == torch.bfloat16


def test_autocast(way):
    weight = weight_of()
    x, bias = torch.randn(3, IN), torch.randn(OUT)
    with torch.autocast("cpu", torch.bfloat16):
        y = nf4.torch.linear(x, weight, bias)
        by_operator = torch.ops.nf4.linear_int4(x, bias, *Int4Parts.of(weight).arguments())
    assert y.dtype == torch.bfloat16 and torch.equal(y, by_operator)
    assert torch.equal(y, nf4.matmul(x.bfloat16(), weight, bias=bias.bfloat16()))


# ---- Refusals ------------------------------------------------------------------------


def changed(**changes):
    return dataclasses.replace(weight_of("gptq_v2, act order"), **changes)


REFUSED = {
    "x is of shape (3, 63); expected [..., 64]": lambda: nf4.torch.linear(
        torch.randn(3, 63), weight_of()
    ),
    "packed is of shape": lambda: nf4.torch.linear(
        torch.randn(3, IN), changed(packed=torch.zeros(3, OUT, dtype=torch.int32))
    ),
    "g_idx": lambda: nf4.torch.dequantize(changed(g_idx=torch.zeros(IN, dtype=torch.int64))),
    "zeros is of type list; expected a torch tensor": lambda: nf4.torch.dequantize(
        changed(zeros=[1])
    ),
    "scales requires grad, but 4-bit weights are frozen": lambda: nf4.torch.linear(
        torch.randn(3, IN), changed(scales=torch.ones(2, OUT).half().requires_grad_())
    ),
    "weight is of type torch.Tensor; expected a QuantizedTensor or an Int4Tensor": lambda: (
        nf4.torch.linear(torch.randn(3, IN), torch.randn(OUT, IN))
    ),
    "layout is 'awq2'; expected": lambda: nf4.torch.quantize_int4(
        torch.randn(OUT, IN), layout="awq2"
    ),
    "group_size is 30": lambda: nf4.torch.quantize_int4(torch.randn(OUT, IN), group_size=30),
    "symmetric is 1; expected True or False": lambda: nf4.torch.quantize_int4(
        torch.randn(OUT, IN), symmetric=1
    ),
    "the shape of": lambda: nf4.torch.quantize_int4(torch.randn(1, 2, OUT, IN)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message, way):
    with pytest.raises(nf4.InvalidArgument) as caught:
        REFUSED[message]()
    assert message in str(caught.value)


WRONG = {
    "packed transposed": {"packed": lambda t: t.mT},
    "packed with a row less": {"packed": lambda t: t[1:]},
    "packed as floats": {"packed": lambda t: t.view(torch.float32)},
    "packed as int64": {"packed": lambda t: t.long()},
    "scales in fp32": {"scales": lambda t: t.float()},
    "scales of another shape": {"scales": lambda t: t.reshape(-1)},
    "g_idx too short": {"g_idx": lambda t: t[:-1]},
    "g_idx as int64": {"g_idx": lambda t: t.long()},
    "permutation too short": {"permutation": lambda _: torch.arange(3, dtype=torch.int32)},
    "group_size 0": {"group_size": lambda _: 0},
    "group_size -2": {"group_size": lambda _: -2},
    "group_size 48": {"group_size": lambda _: 48},
    "layout 9": {"layout": lambda _: 9},
    "zero_offset 3": {"zero_offset": lambda _: 3},
    "rows less than there are": {"rows": lambda n: n - 1},
    "negative cols": {"cols": lambda n: -n},
    "more elements than are counted": {"rows": lambda _: 2**62},
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("op", ["_linear_int4", "_dense_like_int4"])
def test_graph_operators_refuse(wrong, op):
    """Whatever a graph that was kept on disk says: an error, and no memory that is not theirs."""
    names = (*Int4Parts.names, "rows", "cols", "layout", "zero_offset", "group_size")
    numbers = Int4Parts.of(weight_of("gptq_v2, act order")).numbers()
    given = dict(zip(names, numbers, strict=True))
    for name, change in WRONG[wrong].items():
        given[name] = change(given[name])
    x = torch.randn(3, IN)
    operands = (x, None) if op == "_linear_int4" else (x,)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        getattr(torch.ops.nf4, op)(*operands, *given.values())
