"""torch tensors in host memory, by DLPack, bfloat16 included."""

import nf4
import numpy as np
import oracle
import pytest

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")

import torch_memory as memory  # noqa: E402

SOURCE = np.random.default_rng(0).standard_normal((5, 77)).astype(np.float32)


@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
def test_quantize_and_dequantize(dtype):
    source = SOURCE.astype(oracle.DTYPES[dtype])
    expected = nf4.quantize(source)
    q = nf4.quantize(memory.tensor_of(source, "cpu"))
    assert q.dtype == dtype and q.shape == (5, 77)
    assert oracle.differing(q.packed, expected.packed) == 0
    out = torch.empty(5, 77, dtype=memory.DTYPES[dtype])
    assert nf4.dequantize(q, out=out) is out
    assert memory.differing(out, memory.tensor_of(nf4.dequantize(expected), "cpu")) == 0


def test_every_part_a_tensor():
    expected = nf4.quantize(SOURCE, codebook=nf4.codebook("fp4"))
    q = memory.empty_like(expected, "cpu")
    workspace = memory.workspace_for(q, "cpu")
    nf4.quantize(torch.from_numpy(SOURCE), out=q, workspace=workspace)
    for name in memory.PARTS:
        assert oracle.differing(getattr(q, name).numpy(), np.asarray(getattr(expected, name))) == 0
    assert oracle.differing(nf4.dequantize(q), nf4.dequantize(expected)) == 0


@pytest.mark.parametrize("dtype", list(memory.DTYPES.values()), ids=str)
def test_torch_dtypes_are_dtypes(dtype):
    result = nf4.dequantize(nf4.quantize(SOURCE), dtype)
    assert str(result.dtype) == str(dtype).removeprefix("torch.")


def test_what_is_refused():
    tensor = torch.from_numpy(SOURCE.copy())
    for message, value in {
        "array is not contiguous": tensor.t(),
        "array is of DLPack type code 2, 64 bits": tensor.double(),
        "array: BufferError: .*require": torch.nn.Parameter(tensor),
    }.items():
        with pytest.raises(nf4.InvalidArgument, match=message):
            nf4.quantize(value)
