"""Where bitsandbytes multiplies fp32 and fp16 in bf16, on CPUs with AVX512-BF16, so does libnf4
behind its layers; nowhere else."""

from __future__ import annotations

import pytest
import torch_cases
from torch_cases import ALLOWED, error

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "bitsandbytes", "_nf4_fast")

import bitsandbytes as bnb  # noqa: E402
import torch  # noqa: E402
from bitsandbytes_cases import DTYPES, both  # noqa: E402
from nf4.torch import bitsandbytes as backend  # noqa: E402

COLS, ROWS = 256, 96
HAS_BF16 = bool(bnb.functional.has_avx512bf16())


@pytest.fixture(params=[True, False], ids=["avx512bf16", "without"])
def has_bf16(request, monkeypatch):
    """What bitsandbytes says of the processor."""
    monkeypatch.setattr(bnb.functional, "has_avx512bf16", lambda: request.param)
    backend.register()
    yield request.param
    backend.unregister()


@pytest.fixture
def rounding(monkeypatch):
    monkeypatch.setattr(bnb.functional, "has_avx512bf16", lambda: True)
    backend.register()
    yield
    backend.unregister()


def layer(compute_dtype=torch.float32, rows=ROWS, cols=COLS, bias=True, **options):
    made = bnb.nn.Linear4bit(
        cols, rows, bias=bias, compute_dtype=compute_dtype, quant_type="nf4", **options
    )
    made.weight.data = torch.randn(rows, cols)
    return made.to("cpu").eval()


def expected(made, x):
    dense = bnb.functional.dequantize_4bit(made.weight.data, made.weight.quant_state).double()
    y = x.detach().double() @ dense.T
    return y if made.bias is None else y + made.bias.detach().double()


def in_bf16(made, x, dtype):
    """The operator's product of x in bf16, then as bitsandbytes goes on."""
    y = bnb.matmul_4bit(x.to(dtype).bfloat16(), made.weight, quant_state=made.weight.quant_state)
    return (y.to(dtype) + made.bias.to(dtype)).to(x.dtype)


@pytest.mark.parametrize("m", [1, 3, 400])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compute", DTYPES)
def test_eval_rounds_where_bitsandbytes_does(compute, dtype, m, rounding):
    made, x = layer(DTYPES[compute]), torch.randn(m, COLS).to(DTYPES[dtype])
    made.bias.data = made.bias.data.to(DTYPES[compute])
    if compute == "bf16":
        x16 = x.bfloat16()
        wanted = bnb.matmul_4bit(x16, made.weight, made.weight.quant_state, bias=made.bias)
        wanted = wanted.to(x.dtype)
    else:
        wanted = in_bf16(made, x, DTYPES[compute])
    assert torch.equal(made(x), wanted)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_processor_without_it_rounds_nothing(dtype, has_bf16):
    made, x = layer(DTYPES[dtype], bias=False), torch.randn(5, COLS).to(DTYPES[dtype])
    found = error(made(x), expected(made, x))
    assert found <= ALLOWED["bf16" if has_bf16 else dtype]
    assert has_bf16 == (found > ALLOWED[dtype])


@pytest.mark.skipif(not HAS_BF16, reason="bitsandbytes rounds nothing on this processor")
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("m", [1, 4, 33])
def test_the_error_is_no_more_than_bitsandbytes_own(dtype, m):
    x = torch.randn(m, 2048).to(DTYPES[dtype])

    def call(made):
        wanted = expected(made, x)  # before bitsandbytes changes the weight's layout
        return error(made(x), wanted)

    theirs, ours = both(lambda: layer(DTYPES[dtype], 256, 2048, bias=False), call)
    assert ours <= theirs <= 2e-2


@pytest.mark.parametrize(
    "change",
    [lambda made, x: made.train(), lambda made, x: x.requires_grad_()],
    ids=["training", "gradients"],
)
def test_what_bitsandbytes_does_not_round_stays_exact(change, rounding):
    made, x = layer(), torch.randn(5, COLS)
    change(made, x)
    assert error(made(x), expected(made, x)) <= ALLOWED["fp32"]


@pytest.mark.parametrize("rows, cols, blocksize", [(24, 64, 64), (32, 96, 64)])
def test_a_shape_that_its_layout_does_not_hold_stays_exact(rows, cols, blocksize, rounding):
    made, x = layer(rows=rows, cols=cols), torch.randn(5, cols)
    assert made.weight.quant_state.blocksize == blocksize
    assert error(made(x), expected(made, x)) <= ALLOWED["fp32"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_call_is_as_the_others(dtype, rounding):
    made, x = layer(None), torch.randn(2, COLS).to(DTYPES[dtype])
    first = made(x)
    assert torch.equal(made(x), first) and first.dtype == x.dtype
    assert made.compute_type_is_set
    assert made.compute_dtype == (None if dtype == "fp16" else x.dtype)


def test_the_bias_has_its_gradient_and_is_cast_for_good(rounding):
    made, x = layer(torch.float16), torch.randn(5, COLS)
    made.bias.requires_grad_()
    y = made(x)
    y.sum().backward()
    assert made.bias.dtype == torch.float16 and torch.equal(
        made.bias.grad, torch.full_like(made.bias, 5)
    )


def test_compiled_as_in_eager_mode(rounding):
    made, x = layer(), torch.randn(5, COLS)
    wanted = made(x)
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), wanted)
    assert error(wanted, expected(made, x)) > ALLOWED["fp32"]


def test_a_layer_that_somebody_kept_gets_its_own_forward_back(rounding):
    made, x = layer(), torch.randn(5, COLS)
    kept = bnb.nn.Linear4bit.forward
    made(x)
    backend.unregister()
    made.support_avx512bf16_for_cpu = False
    assert torch.equal(kept(made, x), made(x))
