"""nf4.quantize_int4 and nf4.reorder: the bytes that nf4.h defines, what is new, what is shared."""

import dataclasses

import int4_cases
import int4_oracle
import nf4
import numpy as np
import oracle
import pytest
from cases import AWKWARD, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from int4_cases import Case, any_int4, arrays_of, tensor_of

PARTS = ("packed", "scales", "zeros")


def source_of(case: Case, dtype: str) -> np.ndarray:
    """Normal numbers of a scale of their own; awkward ones among them, and rows of zeros."""
    rng = np.random.default_rng(case.seed)
    values = rng.standard_normal(case.shape).astype(np.float32)
    values *= np.float32(np.exp2(rng.uniform(-30, 10)))
    if case.awkward:
        places = rng.integers(0, values.size, 1 + values.size // 16)
        values.reshape(-1)[places] = rng.choice(AWKWARD, places.size)
        values[:: rng.integers(2, 5)] = 0
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(oracle.DTYPES[dtype])


def require_same_arrays(q: nf4.Int4Tensor, expected: int4_oracle.Int4Arrays) -> None:
    found = arrays_of(q)
    assert found[:4] == expected[:4]
    for name in PARTS:
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, name
            assert ours.tobytes() == theirs.tobytes(), name


@given(any_int4(), st.sampled_from(list(oracle.DTYPES)), st.integers(0, 4))
@settings(max_examples=300)
def test_bytes_are_those_of_the_header(case, dtype, threads):
    source = source_of(case, dtype)
    fixed = (case.layout, case.group_size, case.symmetric, case.scale_dtype)
    expected = int4_cases.quantize(source, *fixed)
    q = nf4.quantize_int4(
        source,
        layout=case.layout,
        group_size=case.group_size,
        symmetric=case.symmetric,
        scales_dtype=case.scale_dtype,
        threads=threads,
    )
    require_same_arrays(q, expected)


@pytest.mark.parametrize("symmetric, steps", [(True, 0.505), (False, 1.01)])
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_error_is_within_a_step(symmetric, steps, group_size):
    """Half a step, as much again where zeros are rounded, and a little for scales in fp16."""
    source = numbers(2, (24, 384))
    q = nf4.quantize_int4(source, group_size=group_size, symmetric=symmetric)
    scales = int4_oracle.scales_of(arrays_of(q))[:, int4_oracle.groups_of(arrays_of(q))]
    assert (np.abs(nf4.dequantize(q, "fp32") - source) <= steps * scales).all()


def test_defaults():
    source = numbers(0, (16, 256))
    q = nf4.quantize_int4(source)
    assert (q.layout, q.group_size, q.scales_dtype, q.groups) == ("gptq", 128, "fp16", 2)
    assert (int4_oracle.zeros_of(arrays_of(q)) == 8).all()
    assert q.zeros.view(np.uint32).tolist() == [[0x77777777] * 2] * 2
    assert repr(q) == (
        "Int4Tensor(layout='gptq', shape=(16, 256), group_size=128, scales_dtype='fp16')"
    )
    for dtype in ("fp16", "bf16"):
        assert nf4.quantize_int4(source.astype(oracle.DTYPES[dtype])).scales_dtype == dtype


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("layout", int4_oracle.LAYOUTS)
def test_sizes(layout, symmetric):
    q = nf4.quantize_int4(numbers(0, (24, 96)), layout=layout, group_size=32, symmetric=symmetric)
    assert (q.zeros is None) == (symmetric and layout == "compressed-tensors")
    arrays = [each for each in (q.packed, q.scales, q.zeros) if each is not None]
    assert q.nbytes == sum(each.nbytes for each in arrays)
    assert q.bits_per_weight == 8 * q.nbytes / (24 * 96)
    ordered = dataclasses.replace(q, g_idx=np.zeros(96, np.int32))
    assert ordered.nbytes == q.nbytes + 4 * 96


@given(any_int4(), st.sampled_from(list(oracle.DTYPES)))
@settings(max_examples=100)
def test_out_is_overwritten(case, dtype):
    source = source_of(case, dtype)
    a = case._replace(act_order=False).arrays
    out = tensor_of(a)
    assert nf4.quantize_int4(source, out=out, symmetric=case.symmetric) is out
    expected = int4_cases.quantize(
        source, case.layout, case.group_size, case.symmetric, case.scale_dtype
    )
    require_same_arrays(out, expected)


@given(any_int4(act_order=st.just(True), layout=st.sampled_from(["gptq", "compressed-tensors"])))
@settings(max_examples=200)
def test_reorder_sorts_columns_by_group(case):
    a = case.arrays
    q = tensor_of(a)
    before = q.packed.copy()
    r = nf4.reorder(q)
    assert (q.packed == before).all() and r.g_idx is None
    assert r.scales is q.scales and r.zeros is q.zeros
    order = np.argsort(a.g_idx, kind="stable")
    assert r.permutation.dtype == np.int32 and r.permutation.tolist() == order.tolist()
    sorted_codes = int4_oracle.codes_of(a)[:, order]
    assert (int4_oracle.codes_of(arrays_of(r)) == sorted_codes).all()
    for dtype in oracle.DTYPES:
        assert oracle.differing(nf4.dequantize(r, dtype), nf4.dequantize(q, dtype)) == 0


def test_reorder_into_out():
    q = tensor_of(Case(3, "gptq", (5, 4), 32, False, "fp16", True).arrays)
    expected = nf4.reorder(q)
    out = dataclasses.replace(
        expected, packed=np.zeros_like(q.packed), permutation=np.zeros(128, np.int32)
    )
    assert nf4.reorder(q, out=out) is out
    assert (out.packed == expected.packed).all()
    assert (out.permutation == expected.permutation).all()


@pytest.mark.interop
class TestTensors:
    @pytest.fixture(autouse=True)
    def torch(self):
        return pytest.importorskip("torch")

    @pytest.mark.parametrize("dtype", list(oracle.DTYPES))
    @pytest.mark.parametrize("layout", int4_oracle.LAYOUTS)
    def test_tensors_give_tensors_of_the_same_bytes(self, torch, layout, dtype):
        import torch_memory

        source = numbers(1, (16, 96), dtype)
        given = {"layout": layout, "group_size": 32, "symmetric": False}
        expected = nf4.quantize_int4(source, **given)
        tensor = torch_memory.tensor_of(source, "cpu")
        q = nf4.quantize_int4(tensor, **given)
        for name in PARTS:
            ours, theirs = getattr(q, name), getattr(expected, name)
            assert torch_memory.differing(ours, torch_memory.tensor_of(theirs, "cpu")) == 0
        versions = [getattr(q, name)._version for name in PARTS]
        nf4.quantize_int4(tensor, out=q, symmetric=False)
        assert all(
            getattr(q, name)._version > old for name, old in zip(PARTS, versions, strict=True)
        )

    def test_reorder(self, torch):
        import torch_memory

        q = torch_memory.weight_on(
            tensor_of(Case(4, "gptq", (5, 4), 32, False, "bf16", True).arrays), "cpu"
        )
        r = nf4.reorder(q)
        assert r.packed.dtype == r.permutation.dtype == torch.int32
        assert torch.equal(nf4.dequantize(r), nf4.dequantize(q))


def test_a_stack_by_address_and_by_dlpack_alone():
    """It has 16 bits there, as out's scales; what cannot be indexed is refused."""
    stack = numbers(3, (3, 16, 64)).astype(np.float16)
    expected = nf4.quantize_int4(stack, group_size=32)
    parts = {n: np.zeros_like(getattr(expected, n)) for n in ("packed", "scales", "zeros")}
    out = dataclasses.replace(expected, **parts)
    assert nf4.quantize_int4(stack.ctypes.data, out=out) is out
    for name in parts:
        assert np.array_equal(getattr(out, name), getattr(expected, name)), name

    class Exporter:
        def __dlpack__(self, **options):
            return stack.__dlpack__(**options)

        def __dlpack_device__(self):
            return stack.__dlpack_device__()

    with pytest.raises(nf4.InvalidArgument, match=r"array is of type .*Exporter of shape \(3, 16"):
        nf4.quantize_int4(Exporter(), out=out)
