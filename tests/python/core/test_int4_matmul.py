"""nf4.matmul and matmul_batch of Int4Tensor, beside binary64 with the exact weights."""

import int4_oracle
import ml_dtypes
import nf4
import numpy as np
import oracle
import pytest
from cases import numbers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from int4_cases import Case, any_int4, tensor_of
from int4_oracle import Int4Arrays

normal = any_int4(awkward=st.just(False))


def exact(a: Int4Arrays, x: np.ndarray, bias: np.ndarray | None = None) -> tuple:
    """y in binary64, and how far one may be from it: a weight rounded to the dtype of x, a sum in
    binary32, one rounding to that dtype. With zeros x times q - 8 and x times 8 - z may be summed
    apart."""
    weight = int4_oracle.dequantize(a, "fp32").astype(np.float64)
    scales = int4_oracle.scales_of(a)[:, int4_oracle.groups_of(a)].astype(np.float64)
    parts = np.abs(weight) if a.zeros is None else 16 * np.abs(scales)
    wide, added = x.astype(np.float64), 0.0 if bias is None else bias.astype(np.float64)
    y = wide @ weight.T + added
    magnitude = np.abs(wide) @ parts.T + np.abs(added)
    limits = ml_dtypes.finfo(x.dtype)
    unit = float(limits.eps) / 2
    relative = unit + (a.cols + 2) * 2.0**-24
    return y, relative * magnitude + 2 * unit * np.abs(y) + float(limits.smallest_subnormal)


def require_close(y, expected):
    assert (np.abs(y.astype(np.float64) - expected[0]) <= expected[1]).all()


@given(
    normal,
    st.sampled_from(list(oracle.DTYPES)),
    st.lists(st.integers(0, 5), max_size=3),
    st.booleans(),
    st.integers(0, 20),
)
# A weight that is 0, by a code that is not.
@example(Case(0, "compressed-tensors", (9, 1), -1, False, "fp16", True), "fp32", [2], False, 0)
@settings(max_examples=300)
def test_products_are_those_of_the_header(case, dtype, leading, with_bias, gap):
    a = case.arrays
    q = tensor_of(a)
    x = numbers(case.seed, (*leading, a.cols + gap), dtype)[..., : a.cols]
    bias = numbers(case.seed + 1, a.rows, dtype) if with_bias else None
    y = nf4.matmul(x, q, bias=bias)
    assert type(y) is np.ndarray and y.dtype == x.dtype and y.shape == (*leading, a.rows)
    require_close(y, exact(a, x, bias))


@given(normal.filter(lambda case: case.layout != "awq"), st.sampled_from(list(oracle.DTYPES)))
@settings(max_examples=100)
def test_a_reordered_weight_takes_the_same_x(case, dtype):
    a = case._replace(act_order=True).arrays
    x = numbers(case.seed, (3, a.cols), dtype)
    require_close(nf4.matmul(x, nf4.reorder(tensor_of(a))), exact(a, x))


def test_out_threads_and_workspace():
    a = Case(0, "gptq", (40, 4), 32, False, "fp16", False).arrays
    q, x = tensor_of(a), numbers(1, (5, a.cols), "bf16")
    y = nf4.matmul(x, q)
    wide = np.full((5, a.rows + 3), 7, x.dtype)
    out = wide[:, : a.rows]
    assert nf4.matmul(x, q, out=out, threads=2) is out
    assert oracle.differing(np.ascontiguousarray(out), y) == 0 and (wide[:, a.rows :] == 7).all()
    assert nf4.matmul_workspace_bytes(q, 1, "bf16") >= 0
    assert nf4.matmul_batch_workspace_bytes([q, q], 5, "bf16") == nf4.matmul_workspace_bytes(
        q, 5, "bf16"
    )


@given(st.lists(normal.map(lambda case: case._replace(group_size=32)), max_size=5), st.booleans())
@settings(max_examples=50)
def test_a_batch_has_the_bits_of_single_products(cases, with_bias):
    arrays = [case._replace(units=(case.units[0], 3)).arrays for case in cases]
    weights = [tensor_of(a) for a in arrays]
    x = numbers(5, (2, 96), "fp16")
    bias = [numbers(6, a.rows, "fp16") if with_bias else None for a in arrays]
    batch = nf4.matmul_batch(x, weights, bias=bias)
    assert len(batch) == len(weights)
    for y, q, b in zip(batch, weights, bias, strict=True):
        assert oracle.differing(y, nf4.matmul(x, q, bias=b)) == 0


def test_a_batch_is_of_one_kind():
    source = numbers(7, (8, 64))
    kinds = [nf4.quantize_int4(source, group_size=32), nf4.quantize(source)]
    message = r"weights\[1\] is of type nf4.int4.Int4Tensor, but weights\[0\] is of type nf4.tensor"
    with pytest.raises(nf4.InvalidArgument, match=message):
        nf4.matmul_batch(source, kinds[::-1])
    with pytest.raises(nf4.InvalidArgument, match=r"weights\[1\] is of type nf4.tensor.Quantized"):
        nf4.matmul_batch_workspace_bytes(kinds, 1, "fp16")


@pytest.mark.interop
def test_tensors_give_tensors():
    torch = pytest.importorskip("torch")
    import torch_memory

    a = Case(0, "compressed-tensors", (13, 3), 32, False, "bf16", True).arrays
    q = torch_memory.weight_on(tensor_of(a), "cpu")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, a.cols, generator=generator, dtype=torch.bfloat16)
    y = nf4.matmul(x, q)
    assert type(y) is torch.Tensor and y.shape == (2, 3, a.rows) and y.dtype == torch.bfloat16
    dense = nf4.matmul(x.float(), q)
    assert torch.allclose(y.float(), dense, rtol=1e-2, atol=1e-2)
    assert torch.allclose(dense, x.float() @ nf4.dequantize(q, "fp32").T, rtol=1e-4, atol=1e-4)
