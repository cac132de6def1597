"""nf4.dequantize of Int4Tensor: golden tensors, random ones against the numpy oracle, bit for bit,
from each kind of memory."""

import int4_cases
import int4_oracle
import nf4
import numpy as np
import oracle
import pytest
from fakes import DlpackArray
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from int4_cases import any_int4, dequantized, tensor_of

pytestmark = pytest.mark.usefixtures("way_to_call")
GOLDEN = int4_oracle.golden()
INT, FLOAT, BFLOAT = 0, 2, 4
# way_to_call is set for a test, not for an example, which is what is wanted.
each_way = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    golden = GOLDEN[name]
    q = tensor_of(golden.arrays)
    assert q.scales_dtype == golden.arrays.scale_dtype and q.groups == golden.arrays.groups
    result = nf4.dequantize(q)
    assert result.view(np.uint16).tolist() == golden.expected.view(np.uint16).tolist()


@given(any_int4(), st.integers(0, 4))
@each_way
def test_every_layout_is_the_exact_product_rounded_once(case, threads):
    a = case.arrays
    q = tensor_of(a)
    for dtype in oracle.DTYPES:
        result = nf4.dequantize(q, dtype, threads=threads)
        assert result.shape == case.shape and result.flags.c_contiguous
        assert oracle.differing(result, dequantized(a, dtype)) == 0
    assert nf4.dequantize(q).dtype == oracle.DTYPES[case.scale_dtype]


@given(any_int4())
@each_way
def test_an_out_that_is_given_is_filled(case):
    q, a = tensor_of(case.arrays), case.arrays
    rows, cols = case.shape
    out = np.empty((cols, rows), np.float32)  # of as many elements
    assert nf4.dequantize(q, out=out) is out
    assert oracle.differing(out.reshape(rows, cols), dequantized(a, "fp32")) == 0
    address = np.empty(case.shape, oracle.DTYPES[case.scale_dtype])
    assert nf4.dequantize(q, out=address.ctypes.data) == address.ctypes.data
    assert oracle.differing(address, dequantized(a, case.scale_dtype)) == 0


@given(any_int4(layout=st.sampled_from(["gptq", "gptq_v2", "awq"]), symmetric=st.just(True)))
@each_way
def test_without_zeros_all_are_eight(case):
    q = tensor_of(case.arrays)
    without = tensor_of(case.arrays, zeros=None)
    assert oracle.differing(nf4.dequantize(without), nf4.dequantize(q)) == 0
    assert without.nbytes < q.nbytes


@given(any_int4(), st.booleans())
@each_way
def test_dlpack(case, versioned):
    a = case.arrays
    parts = {
        "packed": DlpackArray(a.packed, INT, versioned),
        "scales": DlpackArray(a.scales, BFLOAT if a.scale_dtype == "bf16" else FLOAT, versioned),
        "zeros": None if a.zeros is None else DlpackArray(a.zeros, INT, versioned),
        "g_idx": None if a.g_idx is None else DlpackArray(a.g_idx, INT, versioned),
    }
    q = tensor_of(a, **parts)
    assert q.scales_dtype == case.scale_dtype
    result = nf4.dequantize(q)
    assert type(result) is np.ndarray
    assert oracle.differing(result, dequantized(a, case.scale_dtype)) == 0


@pytest.mark.parametrize("layout", int4_oracle.LAYOUTS)
@pytest.mark.parametrize("shape", [(0, 64), (8, 0), (0, 0)])
def test_no_elements(layout, shape):
    q = nf4.quantize_int4(np.empty(shape, np.float32), layout=layout, group_size=32)
    assert (q.elements, q.bits_per_weight) == (0, 0.0)
    assert nf4.dequantize(q).shape == shape
    assert nf4.matmul(np.ones((2, shape[1]), np.float32), q).tolist() == [[0] * shape[0]] * 2


@pytest.mark.interop
class TestTensors:
    @pytest.fixture(autouse=True)
    def torch(self):
        return pytest.importorskip("torch")

    @pytest.mark.parametrize("act_order", [False, True])
    @pytest.mark.parametrize("scale_dtype", ["fp16", "bf16"])
    @pytest.mark.parametrize("layout", int4_oracle.LAYOUTS)
    def test_tensors_give_tensors(self, torch, layout, scale_dtype, act_order):
        import torch_memory

        case = int4_cases.Case(7, layout, (5, 3), 32, False, scale_dtype, act_order)
        a = case.arrays
        q = torch_memory.weight_on(tensor_of(a), "cpu")
        assert q.packed.dtype == torch.int32
        for _ in range(2):  # prepared, and anew
            result = nf4.dequantize(q)
            expected = torch_memory.tensor_of(dequantized(a, scale_dtype), "cpu")
            assert type(result) is torch.Tensor and torch_memory.differing(result, expected) == 0
        for access in ("dlpack", "address"):
            other = torch_memory.accessed(q, access)
            out = torch.empty(case.shape)
            if access == "dlpack":
                nf4.dequantize(other, out=out)
                wide = torch_memory.tensor_of(dequantized(a, "fp32"), "cpu")
                assert torch_memory.differing(out, wide) == 0
