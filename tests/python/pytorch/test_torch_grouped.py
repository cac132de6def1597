"""torch.ops.nf4.linear_grouped: values, gradients, compilers, and what is refused."""

import nf4
import pytest

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")

import nf4.torch  # noqa: E402
from nf4.torch import _fast  # noqa: E402
from nf4.torch._weight import Spec, WeightParts  # noqa: E402

EXPERTS, ROWS, COLS, TOKENS, TOP_K = 5, 24, 64, 6, 2
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ALLOWED = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def stack(dtype=torch.float32, nested_blocksize=256, rows=ROWS, **options):
    weight = torch.randn(EXPERTS, rows, COLS, generator=torch.Generator().manual_seed(1))
    return nf4.torch.quantize(weight.to(dtype), nested_blocksize=nested_blocksize, **options)


def routing(seed=2):
    """The ends, the token of each row of y, and its expert."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K]] * TOKENS)
    chosen[::2] = (chosen[::2] + 1) % EXPERTS
    experts, order = chosen.flatten().sort(stable=True)
    ends = torch.bincount(experts, minlength=EXPERTS).cumsum(0).int()
    return ends, (order // TOP_K).int(), experts


def operands(dtype, requires_grad=True):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, COLS, generator=generator).to(dtype)
    bias = torch.randn(EXPERTS, ROWS, generator=generator).to(dtype)
    return x.requires_grad_(requires_grad), bias.requires_grad_(requires_grad)


def expected_of(weight, x, x_index, experts, bias):
    dense = nf4.torch.dequantize(weight, torch.float32).double()
    return torch.einsum("mk,mnk->mn", x.double()[x_index.long()], dense[experts]) + bias[experts]


def error(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("nested_blocksize", [0, 32, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(dtype, nested_blocksize):
    weight = stack(dtype, nested_blocksize)
    ends, x_index, experts = routing()
    x, bias = operands(dtype)
    y = nf4.torch.linear_grouped(x, weight, ends, x_index=x_index, bias=bias)
    expected = expected_of(weight, x, x_index, experts, bias)
    assert y.dtype == dtype and error(y, expected) <= ALLOWED[dtype]
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    found = torch.autograd.grad(y, (x, bias), grad)
    for each, exact in zip(
        found, torch.autograd.grad(expected, (x, bias), grad.double()), strict=True
    ):
        assert each.dtype == dtype and error(each, exact) <= 2 * ALLOWED[dtype]


def test_sorted_rows_need_no_index():
    weight = stack()
    ends, x_index, _ = routing()
    x, bias = operands(torch.float32)
    gathered = nf4.torch.linear_grouped(x, weight, ends, x_index=x_index, bias=bias)
    rows = x[x_index.long()]
    y = nf4.torch.linear_grouped(rows, weight, ends, bias=bias)
    assert torch.equal(y, gathered)
    grad = torch.randn_like(y)
    for one, other in zip(
        torch.autograd.grad(y, (x, bias), grad),
        torch.autograd.grad(gathered, (x, bias), grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_second_order_and_rows_of_no_expert():
    weight = stack()
    ends, x_index, _ = routing()
    ends = (ends - 3).clamp(min=0)  # the last rows have no expert
    x_index = x_index.clone()
    x_index[1] = -1
    x, _ = operands(torch.float32)
    inside = (torch.arange(len(x_index)) < ends[-1])[:, None]
    y = nf4.torch.linear_grouped(x, weight, ends, x_index=x_index)
    assert not y[1].any()
    grad = torch.randn(y.shape, requires_grad=True)
    (grad_x,) = torch.autograd.grad(y, x, grad, create_graph=True)
    direction = torch.randn_like(x)
    (back,) = torch.autograd.grad(grad_x, grad, direction)
    # grad_x is linear in grad: what comes back is the product of the direction.
    forward = nf4.torch.linear_grouped(direction, weight, ends, x_index=x_index)
    torch.testing.assert_close(back, torch.where(inside, forward, 0))
    assert not back[~inside.flatten()].any()


def require_torchs_checks(parts, kind=""):
    """Of linear_grouped and its gradient, for a weight with these parts."""
    ends, x_index, _ = routing()
    x, bias = operands(torch.float32)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    op = getattr(torch.ops.nf4, f"linear_grouped{kind}").default
    torch.library.opcheck(op, (x, ends, x_index, bias, *parts), test_utils=tests)
    grad_y = torch.randn(len(x_index), ROWS, requires_grad=True)
    op = getattr(torch.ops.nf4, f"linear_grouped_backward{kind}").default
    torch.library.opcheck(op, (grad_y, ends, x_index, TOKENS, *parts), test_utils=tests)


def test_the_operator_passes_torchs_checks():
    require_torchs_checks(nf4.torch._weight.WeightParts.of(stack()).arguments())


def test_compiled_with_gradients():
    weight = stack()
    x, bias = operands(torch.float32)

    def loss(x, bias, ends, x_index):
        y = nf4.torch.linear_grouped(x, weight, ends, x_index=x_index, bias=bias)
        return (y * y).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for seed in (2, 5):
        ends, x_index, _ = routing(seed)
        expected = torch.autograd.grad(loss(x, bias, ends, x_index), (x, bias))
        found = torch.autograd.grad(compiled(x, bias, ends, x_index), (x, bias))
        torch.testing.assert_close(found, expected)


def test_autocast_casts_x_and_bias():
    weight = stack()
    ends, x_index, _ = routing()
    x, bias = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = nf4.torch.linear_grouped(x, weight, ends, x_index=x_index, bias=bias)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == bias.grad.dtype == torch.float32


def test_the_weight_is_frozen():
    weight = stack(nested_blocksize=0)
    ends, x_index, _ = routing()
    x, _ = operands(torch.float32)
    weight.absmax.requires_grad_()
    with pytest.raises(nf4.InvalidArgument, match="absmax requires grad"):
        nf4.torch.linear_grouped(x, weight, ends, x_index=x_index)


@pytest.mark.parametrize("layout", ["gptq", "compressed-tensors"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_of_integers(dtype, layout):
    dense = torch.randn(EXPERTS, ROWS, COLS, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = nf4.torch.quantize_int4(dense, layout=layout, group_size=32)
    stored = torch.stack([nf4.dequantize(weight.expert(e), "fp32") for e in range(EXPERTS)])
    ends, x_index, experts = routing()
    ends = (ends - 2).clamp(min=0)  # the last rows have no expert
    inside = (torch.arange(len(x_index)) < ends[-1])[:, None]
    experts = torch.searchsorted(ends, torch.arange(len(x_index)), right=True)
    experts = experts.clamp(max=EXPERTS - 1)
    x, bias = operands(dtype)
    y = nf4.torch.linear_grouped(x, weight, ends, x_index=x_index, bias=bias)
    expected = torch.einsum("mk,mnk->mn", x.double()[x_index.long()], stored.double()[experts])
    expected = torch.where(inside, expected + bias[experts], 0)
    y = torch.where(inside, y, 0)
    assert y.dtype == dtype and error(y, expected) <= 2 * ALLOWED[dtype]
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    found = torch.autograd.grad(y, (x, bias), grad)
    exact = torch.autograd.grad(expected, (x, bias), grad.double())
    for each, wanted in zip(found, exact, strict=True):
        assert each.dtype == dtype and error(each, wanted) <= 2 * ALLOWED[dtype]


def test_a_dense_stack_of_integers_is_made_expert_by_expert():
    weight = nf4.quantize_int4(torch.randn(EXPERTS, ROWS, COLS), group_size=32)
    parts = nf4.torch._int4_weight.Int4Stack.of(weight)
    made = nf4.torch._grouped_dense.dense_stack(parts, torch.bfloat16)
    for expert in range(EXPERTS):
        assert torch.equal(made[expert], nf4.dequantize(weight.expert(expert), torch.bfloat16))


def test_the_operators_of_integers_pass_torchs_checks():
    weight = nf4.quantize_int4(torch.randn(EXPERTS, ROWS, COLS), layout="awq", group_size=32)
    require_torchs_checks(nf4.torch._int4_weight.Int4Stack.of(weight).arguments(), "_int4")
    x, _ = operands(torch.float32)
    with pytest.raises(nf4.InvalidArgument, match="expected .rows, cols."):
        nf4.torch.linear(x, weight)
    op, given = torch.ops.nf4.quantize_int4.default, torch.randn(EXPERTS, ROWS, COLS)
    arguments = (given, "compressed-tensors", 32, False, torch.float16)
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


WRONG = {
    "x is of shape": {"x": torch.ones(2, 3, COLS)},
    "x is of torch.int32": {"x": torch.ones(2, COLS, dtype=torch.int32)},
    "ends is torch.int64": {"ends": torch.zeros(EXPERTS, dtype=torch.int64)},
    "ends is torch.int32 of shape .4,.": {"ends": torch.zeros(4, dtype=torch.int32)},
    "ends is None": {"ends": None},
    "x_index is torch.int64": {"x_index": torch.zeros(3, dtype=torch.int64)},
    "bias is torch.float16": {"bias": torch.zeros(EXPERTS, ROWS, dtype=torch.float16)},
    "weight is of shape .24, 64.": {"weight": nf4.torch.quantize(torch.ones(24, 64))},
    "weight is of shape .24, 128.": {"weight": nf4.torch.quantize_int4(torch.ones(24, 128))},
    "ends is on meta": {"ends": torch.zeros(EXPERTS, dtype=torch.int32, device="meta")},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_named(message):
    ends, *_ = routing()
    right = {"x": torch.ones(TOKENS, COLS), "weight": stack(), "ends": ends}
    with pytest.raises(nf4.InvalidArgument, match=message):
        nf4.torch.linear_grouped(**right | WRONG[message])


# ---- The extension module --------------------------------------------------------------

needs_extension = pytest.mark.skipif(not _fast.registered, reason="_nf4_fast is not built")


@needs_extension
@pytest.mark.parametrize("nested_blocksize", [0, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_extension_gives_what_the_core_does(dtype, nested_blocksize):
    weight = stack(dtype, nested_blocksize)
    ends, x_index, _ = routing()
    x, bias = operands(dtype, requires_grad=False)
    wide = torch.cat((x, x), dim=1)[:, :COLS]  # rows further apart than they are long
    given = WeightParts.of(weight)
    for index, b in ((x_index, bias), (x_index, None), (None, bias)):
        rows = wide if index is not None else wide[x_index.long()]
        y = _fast.linear_grouped(rows, ends, index, b, given)
        expected = nf4.matmul_grouped(rows.contiguous(), weight, ends, x_index=index, bias=b)
        assert y is not None and y.is_contiguous() and torch.equal(y, expected)


LEFT = {
    "x of one dimension": {"x": torch.zeros(COLS)},
    "x of other columns": {"x": torch.zeros(TOKENS, COLS + 1)},
    "x in float64": {"x": torch.zeros(TOKENS, COLS, dtype=torch.float64)},
    "x with its negative bit": {"x": torch.zeros(TOKENS, COLS, dtype=torch.complex64).conj().imag},
    "ends in int64": {"ends": torch.zeros(EXPERTS, dtype=torch.int64)},
    "ends of others": {"ends": torch.zeros(EXPERTS + 1, dtype=torch.int32)},
    "ends with gaps": {"ends": torch.zeros(2 * EXPERTS, dtype=torch.int32)[::2]},
    "ends on meta": {"ends": torch.zeros(EXPERTS, dtype=torch.int32, device="meta")},
    "an index in float32": {"x_index": torch.zeros(3)},
    "an index of two dimensions": {"x_index": torch.zeros(3, 1, dtype=torch.int32)},
    "no rows": {"x_index": torch.zeros(0, dtype=torch.int32)},
    "a bias in another dtype": {"bias": torch.zeros(EXPERTS, ROWS, dtype=torch.bfloat16)},
    "a bias of one expert": {"bias": torch.zeros(1, ROWS)},
    "a bias in one dimension": {"bias": torch.zeros(EXPERTS * ROWS)},
    "a transposed bias": {"bias": torch.zeros(ROWS, EXPERTS).t()},
}


@needs_extension
@pytest.mark.parametrize("case", LEFT)
def test_the_extension_leaves_what_it_does_not_know(case):
    parts = WeightParts.of(stack())
    given = {"x": torch.zeros(TOKENS, COLS), "ends": routing()[0], "x_index": None, "bias": None}
    assert _fast.linear_grouped(*given.values(), parts) is not None
    assert _fast.linear_grouped(*{**given, **LEFT[case]}.values(), parts) is None


@needs_extension
def test_the_extension_leaves_weights_without_experts():
    x, ends = torch.zeros(TOKENS, COLS), routing()[0]
    parts = WeightParts.of(stack())
    matrix = parts._replace(spec=Spec.of((EXPERTS * ROWS, COLS), "nf4", 64, 256))
    others = parts._replace(spec=Spec.of((EXPERTS + 1, ROWS, COLS), "nf4", 64, 256))
    short = parts._replace(packed=parts.packed[1:])
    for weight in (matrix, others, short):
        assert _fast.linear_grouped(x, ends, None, None, weight) is None


def test_a_layer_without_the_extension_gives_the_same(way):
    layer = nf4.torch.NF4Experts.from_quantized(stack())
    ends, x_index, _ = routing()
    x, bias = operands(torch.float32, requires_grad=False)
    expected = nf4.matmul_grouped(x, layer.quantized, ends, x_index=x_index, bias=bias)
    assert torch.equal(layer(x, ends, x_index, bias), expected)
    with pytest.raises(nf4.InvalidArgument, match=r"ends is torch.int64"):
        layer(x, ends.long(), x_index, bias)
