"""torch tensors in host memory: in, out, and what is refused of them."""

import dataclasses
import functools

import nf4
import numpy as np
import oracle
import pytest
from fakes import CudaArray
from nf4 import _torch

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("way_to_call")]
torch = pytest.importorskip("torch")

import torch_memory as memory  # noqa: E402

SOURCE = np.random.default_rng(0).standard_normal((5, 77)).astype(np.float32)


@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
def test_quantize_and_dequantize(dtype):
    source = SOURCE.astype(oracle.DTYPES[dtype])
    expected = nf4.quantize(source)
    q = nf4.quantize(memory.tensor_of(source, "cpu"))
    assert q.dtype == dtype and q.shape == (5, 77)
    for name in memory.PARTS:
        part = getattr(expected, name)
        assert part is None or memory.differing(getattr(q, name), torch.from_numpy(part)) == 0
    out = torch.empty(5, 77, dtype=memory.DTYPES[dtype])
    assert nf4.dequantize(q, out=out) is out
    assert memory.differing(out, memory.tensor_of(nf4.dequantize(expected), "cpu")) == 0
    again = nf4.dequantize(q)
    assert (again.shape, again.dtype) == ((5, 77), memory.DTYPES[dtype])
    assert memory.differing(again, out) == 0


def test_every_part_a_tensor():
    expected = nf4.quantize(SOURCE, codebook=nf4.codebook("fp4"))
    q = memory.empty_like(expected, "cpu")
    workspace = memory.workspace_for(q, "cpu")
    nf4.quantize(torch.from_numpy(SOURCE), out=q, workspace=workspace)
    for name in memory.PARTS:
        assert oracle.differing(getattr(q, name).numpy(), np.asarray(getattr(expected, name))) == 0
    assert oracle.differing(nf4.dequantize(q).numpy(), nf4.dequantize(expected)) == 0


@pytest.mark.parametrize("dtype", list(memory.DTYPES.values()), ids=str)
def test_torch_dtypes_are_dtypes(dtype):
    result = nf4.dequantize(nf4.quantize(SOURCE), dtype)
    assert str(result.dtype) == str(dtype).removeprefix("torch.")
    q = nf4.quantize(torch.from_numpy(SOURCE))
    assert nf4.dequantize(q, dtype).dtype is dtype
    out = torch.empty(5, 77, dtype=dtype)
    assert nf4.dequantize(q, dtype, out=out) is out


def test_what_is_refused():
    tensor = torch.from_numpy(SOURCE.copy())
    for message, value in {
        "array is not contiguous": tensor.t(),
        "array is of float64; expected": tensor.double(),
        "array requires grad; expected a detached tensor": torch.nn.Parameter(tensor),
        "array is on meta; expected the CPU or CUDA": tensor.to("meta"),
        "array is of layout torch.sparse_coo": tensor.to_sparse(),
        "array has its negative bit set": torch._neg_view(tensor),
        "array is of type torch._subclasses.fake_tensor.FakeTensor; expected": fake_tensor(),
    }.items():
        with pytest.raises(nf4.InvalidArgument, match=message):
            nf4.quantize(value)


def fake_tensor():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(5, 77)


OUTPUTS = {
    "out is not contiguous": lambda: torch.zeros(77, 5).t(),
    "out is of float64; expected fp32": lambda: torch.zeros(5, 77, dtype=torch.float64),
    "out has 384 elements; expected 385": lambda: torch.zeros(384),
    "out requires grad": lambda: torch.zeros(5, 77, requires_grad=True),
    "out is on meta": lambda: torch.zeros(5, 77, device="meta"),
    "out is of layout torch.sparse_coo": lambda: torch.zeros(5, 77).to_sparse(),
    "out is of layout torch.sparse_csr": lambda: torch.zeros(5, 77).to_sparse_csr(),
    "out has its negative bit set": lambda: torch._neg_view(torch.zeros(5, 77)),
    "out is of type torch._subclasses.fake_tensor.FakeTensor": fake_tensor,
    "out (is NULL|has no memory)": lambda: torch._to_functional_tensor(torch.zeros(5, 77)),
    "out is of type list": lambda: [0.0] * 385,
    "out is in device memory": lambda: CudaArray(4096, "fp32", 385),
    "out is -8; expected an address": lambda: -8,
    f"out is {1 << 64}; expected an address": lambda: 1 << 64,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("message", OUTPUTS)
def test_what_is_refused_as_out(message):
    q = nf4.quantize(torch.from_numpy(SOURCE))
    out = OUTPUTS[message]()
    with pytest.raises(nf4.InvalidArgument, match=message):
        nf4.dequantize(q, out=out)
    if (
        type(out) is torch.Tensor
        and out.device.type == "cpu"
        and not message.startswith("out (is NULL")
    ):
        assert out.detach().to_dense().count_nonzero() == 0


def test_dtype_and_stream_are_checked_for_a_tensor():
    q = nf4.quantize(torch.from_numpy(SOURCE))
    out = torch.zeros(5, 77)
    for message, arguments in {
        "out is of fp32; expected fp16": {"dtype": torch.float16},
        "out is of fp32; expected bf16": {"dtype": "bf16"},
        "dtype is torch.int8; expected": {"dtype": torch.int8},
        "dtype is \\[\\]; expected": {"dtype": []},
        "stream is 0; expected None for host memory": {"stream": 0},
        "threads is 0.0; expected an integer": {"threads": 0.0},
    }.items():
        with pytest.raises(nf4.InvalidArgument, match=message):
            nf4.dequantize(q, out=out, **arguments)
    assert not out.any()


def test_every_kind_of_plain_output():
    q = nf4.quantize(torch.from_numpy(SOURCE))
    expected = nf4.dequantize(q)
    with torch.inference_mode():
        outputs = [torch.zeros(5, 77)]
    outputs += [torch.zeros(385), torch.zeros(3, 5, 77)[1], torch.zeros(1, 5, 77).transpose(0, 1)]
    outputs += [torch.nn.Parameter(torch.zeros(5, 77), requires_grad=False)]
    for out in outputs:
        assert nf4.dequantize(q, out=out) is out
        assert memory.differing(out.detach(), expected) == 0
    array = np.zeros(385, np.float32)
    nf4.dequantize(q, out=array)
    assert oracle.differing(array, expected.numpy().reshape(-1)) == 0
    address = np.zeros(385, np.float32)
    nf4.dequantize(q, out=address.ctypes.data)
    assert oracle.differing(address, array) == 0


WRITTEN = ("packed", "absmax", "nested_absmax", "nested_offset")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_backward_pass_never_uses_a_part_that_was_written_over(name):
    class Save(torch.autograd.Function):
        @staticmethod
        def forward(context, x, part):
            context.save_for_backward(part)
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient * context.saved_tensors[0].sum(), None

    source = torch.from_numpy(SOURCE)
    q = nf4.quantize(source)
    x = torch.ones(3, requires_grad=True)
    Save.apply(x, getattr(q, name)).sum().backward()
    before = Save.apply(x, getattr(q, name)).sum()
    nf4.quantize(source * 2, out=q)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


def test_only_what_quantize_wrote_has_changed_for_torch():
    source = torch.from_numpy(SOURCE)
    with torch.inference_mode():
        inference = nf4.quantize(source)
    q = nf4.quantize(source, codebook=torch.from_numpy(nf4.codebook()))
    parts = {name: getattr(q, name) for name in memory.PARTS}
    before = {name: part._version for name, part in parts.items()}
    with pytest.raises(nf4.InvalidArgument, match="threads is -1"):
        nf4.quantize(source, out=q, threads=-1)
    assert before == {name: part._version for name, part in parts.items()}
    nf4.quantize(source, out=q)
    changed = {name for name, part in parts.items() if part._version != before[name]}
    assert changed == set(WRITTEN)
    assert nf4.quantize(source, out=inference) is inference


@pytest.mark.parametrize("shape", [(0, 5), (1,), (), (2, 3, 65)])
def test_shapes(shape):
    source = torch.randn(shape)
    q = nf4.quantize(source)
    assert q.shape == shape and q.nested_offset.shape == ()
    expected = nf4.dequantize(nf4.quantize(source.numpy()))
    assert oracle.differing(nf4.dequantize(q).numpy(), expected) == 0


def test_new_outputs_are_as_torch_makes_them(monkeypatch):
    """Also where the first of them was asked for in a mode that makes others."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    dense = torch.randn(32, 64, dtype=torch.bfloat16)
    for mode in (torch.inference_mode, FakeTensorMode):
        monkeypatch.setattr(_torch, "_device", functools.cache(_torch.Device))
        q = dataclasses.replace(nf4.quantize(dense))  # not used yet
        _torch._device.cache_clear()
        with mode():
            if mode is FakeTensorMode:
                with pytest.raises(
                    nf4.InvalidArgument,
                    match="out is of type torch._subclasses.fake_tensor.FakeTensor",
                ):
                    nf4.dequantize(q)
            else:
                assert nf4.dequantize(q).is_inference()
        first, second = nf4.dequantize(q), nf4.dequantize(q)
        assert type(first) is torch.Tensor and not first.is_inference()
        assert first.is_contiguous() and first.untyped_storage().nbytes() == 32 * 64 * 2
        assert first.data_ptr() != second.data_ptr()
        assert torch.equal(first, second)
