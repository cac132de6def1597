"""What a matmul on device memory passes to the C library, and to which stream: a fake of it and a
fake torch, no GPU needed."""

import ctypes
import sys

import fake_torch
import nf4
import numpy as np
import pytest
from fakes import CudaArray
from nf4 import _abi

HIGH = 0x7F12_0000_0000_0000
ROWS, COLS = 48, 100
SIZES = nf4.sizes((ROWS, COLS), nested_blocksize=0)
OTHER = 0x2000


@pytest.fixture
def raw(last):
    """A flat weight of addresses."""
    return nf4.QuantizedTensor(packed=HIGH, absmax=HIGH + 16, shape=(ROWS, COLS), dtype="bf16")


@pytest.fixture
def workspace_needed(fake):
    """A function: how many bytes each row of x needs from now on."""
    needed = ctypes.c_size_t.in_dll(fake, "fake_workspace_per_row")

    def need(bytes_per_row):
        needed.value = bytes_per_row

    yield need
    needed.value = 0


def array(offset, *shape, dtype="bf16", **more):
    return CudaArray(HIGH + offset, dtype, *shape, **more)


def test_everything_is_passed_at_full_width(last, raw):
    wide = nf4.QuantizedTensor(packed=HIGH, absmax=HIGH + 16, shape=(5 << 20, 3 << 12))
    m = 3 << 33
    x = array(32, 3, 1 << 33, 3 << 12, dtype="fp16", strides=(1 << 49, 1 << 16, 2))
    out = array(48, 3, 1 << 33, 5 << 20, dtype="fp16")
    bias = array(64, 5 << 20, dtype="fp16")
    workspace = array(80, 5 << 32, dtype="uint8")
    result = nf4.matmul(x, wide, bias=bias, out=out, workspace=workspace, stream=HIGH + 96)
    assert result is out and last.count == 1
    args = last.matmul
    assert args.struct_size == ctypes.sizeof(_abi.MatmulArgs)
    assert (args.dtype, args.reserved, args.m) == (_abi.DTYPE_FP16, 0, m)
    assert (args.x - HIGH, args.x_stride) == (32, 1 << 15)
    assert (args.y - HIGH, args.y_stride) == (48, 5 << 20)
    assert args.bias - HIGH == 64
    assert (last.workspace - HIGH, last.workspace_bytes) == (80, 5 << 32)
    assert last.stream == HIGH + 96
    weight = last.weight
    assert (weight.packed, weight.absmax) == (HIGH, HIGH + 16)
    assert (weight.rows, weight.cols) == (5 << 20, 3 << 12)


def test_addresses_and_what_is_left_out(last, raw):
    x = array(32, COLS)
    assert nf4.matmul(x, raw, bias=HIGH + 64, out=HIGH + 48) == HIGH + 48
    args = last.matmul
    assert (args.m, args.x_stride, args.y_stride) == (1, COLS, ROWS)
    assert (args.dtype, args.y, args.bias) == (_abi.DTYPE_BF16, HIGH + 48, HIGH + 64)
    assert (last.workspace, last.workspace_bytes, last.stream) == (None, 0, None)
    nf4.matmul(x, raw, out=HIGH + 48)
    assert last.matmul.bias is None


def test_a_workspace_is_asked_for(last, raw, workspace_needed):
    workspace_needed(1 << 33)
    assert nf4.matmul_workspace_bytes(raw, 3, "bf16") == 3 << 33
    x, out = array(32, 2, COLS), array(48, 2, ROWS)
    with pytest.raises(nf4.InvalidArgument, match="workspace is None; expected 17179869184 bytes"):
        nf4.matmul(x, raw, out=out)
    assert last.count == 0
    nf4.matmul(x, raw, out=out, workspace=HIGH + 80)
    assert (last.workspace, last.workspace_bytes) == (HIGH + 80, 1 << 34)


def test_the_size_of_a_workspace_is_asked_for_once(last, raw, workspace_needed):
    sizes = []
    for needed in (32, 64):
        workspace_needed(needed)
        sizes.append(nf4.matmul_workspace_bytes(raw, 5, "bf16"))
    assert sizes == [160, 160]


FAULTS = {
    "out is None; expected an array of device memory": {"out": None},
    "out is in host memory": {"out": np.zeros(ROWS, np.float16), "x": array(0, COLS, dtype="fp16")},
    "x is in host memory": {"x": np.zeros(COLS, np.float16), "out": HIGH},
    "bias is in host memory": {
        "bias": np.zeros(ROWS, np.float16),
        "x": array(0, COLS, dtype="fp16"),
        "out": HIGH,
    },
    "out is read-only": {"out": array(0, ROWS, read_only=True)},
    "workspace is in host memory": {"workspace": np.zeros(64, np.uint8)},
    "workspace is of bf16; expected uint8": {"workspace": array(0, 64)},
    "threads is 2; expected 0 for device memory": {"threads": 2},
    "stream is 'a'; expected": {"stream": "a"},
}


@pytest.mark.parametrize("message", FAULTS)
def test_what_is_refused(last, message):
    parts = {"packed": array(0, SIZES.packed_bytes, dtype="uint8")}
    parts["absmax"] = array(0, SIZES.blocks, dtype="fp32")
    weight = nf4.QuantizedTensor(**parts, shape=(ROWS, COLS))
    arguments = {"x": array(32, COLS), "out": array(48, ROWS)} | FAULTS[message]
    with pytest.raises(nf4.InvalidArgument, match=message):
        nf4.matmul(arguments.pop("x"), weight, **arguments)
    assert last.count == 0


def test_what_the_library_refuses_has_the_names_of_the_caller():
    """It checks its arguments before it asks for a GPU."""
    weight = nf4.QuantizedTensor(packed=HIGH, absmax=HIGH + (1 << 20), shape=(48, 128))
    out, workspace = HIGH + (3 << 20), HIGH + (4 << 20)
    x = array(2 << 20, 17, 128, dtype="fp32")
    refused = r"the dtype of x is 1 \(fp32\) and m is 17; expected m of at most 16, or dtype 2"
    with pytest.raises(nf4.InvalidArgument, match=f"^{refused}"):
        nf4.matmul(x, weight, out=out, workspace=workspace)
    with pytest.raises(nf4.InvalidArgument, match=f"^product 1: {refused}"):
        few = array(2 << 20, 1, 128, dtype="fp32")
        nf4.matmul_batch([few, x], [weight] * 2, out=[HIGH + (5 << 20), out], workspace=workspace)
    x, small = array(2 << 20, 300, 128), array(4 << 20, 16, dtype="uint8")
    with pytest.raises(
        nf4.InvalidArgument, match="^the size of workspace in bytes is 16; expected"
    ):
        nf4.matmul(x, weight, out=out, workspace=small)


@pytest.mark.parametrize("status, error", [(3, nf4.NoDevice), (5, nf4.CudaError), (77, nf4.Error)])
def test_a_status_is_an_exception(fake, raw, status, error):
    ctypes.c_int32.in_dll(fake, "fake_status").value = status
    with pytest.raises(error, match="^what the fake says is wrong$"):
        nf4.matmul(array(32, COLS), raw, out=HIGH)


@pytest.mark.parametrize("threads", [0, 3])
def test_threads_are_passed_on_the_host(last, threads):
    q = nf4.QuantizedTensor(
        packed=np.zeros(SIZES.packed_bytes, np.uint8),
        absmax=np.zeros(SIZES.blocks, np.float32),
        shape=(ROWS, COLS),
    )
    x = np.zeros((2, COLS), np.float32)
    out = nf4.matmul(x, q, threads=threads)
    assert (last.threads, last.matmul.y, last.matmul.m) == (threads, out.ctypes.data, 2)


class TestTensors:
    """On torch tensors of a device."""

    @pytest.fixture(autouse=True)
    def torch(self, monkeypatch):
        module = fake_torch.Torch()
        monkeypatch.setitem(sys.modules, "torch", module)
        return module

    def on(self, dtype, *shape, index=1):
        return fake_torch.Tensor(shape, dtype, fake_torch.Device("cuda", index))

    @pytest.fixture
    def weight(self, torch):
        return nf4.QuantizedTensor(
            packed=self.on(torch.uint8, SIZES.packed_bytes),
            absmax=self.on(torch.float32, SIZES.blocks),
            shape=(ROWS, COLS),
        )

    def test_makes_a_tensor_on_the_current_stream(self, torch, last, weight):
        x = self.on(torch.bfloat16, 2, 3, COLS)
        out = nf4.matmul(x, weight)
        assert [out] == torch.made and out.stream == 0x1000
        assert (out.shape, out.dtype, out.device.index) == ((2, 3, ROWS), torch.bfloat16, 1)
        args = last.matmul
        assert (args.m, args.x, args.y) == (6, x.address, out.address)
        assert (args.dtype, last.stream, last.workspace) == (_abi.DTYPE_BF16, 0x1000, None)
        torch.current[1] = OTHER
        nf4.matmul(x, weight, out=out)
        assert last.stream == OTHER and torch.made == [out]

    @pytest.mark.parametrize(
        "stream, belongs_to", [(None, 0x1000), (OTHER, OTHER), (0, 0), (1, 0)], ids=str
    )
    def test_what_is_made_belongs_to_the_stream_of_the_work(
        self, torch, last, weight, workspace_needed, stream, belongs_to
    ):
        workspace_needed(256)
        out = nf4.matmul(self.on(torch.float16, 4, COLS), weight, stream=stream)
        workspace = torch.made[-1]
        assert torch.made == [out, workspace]
        assert (workspace.shape, workspace.dtype) == ((1024,), torch.uint8)
        assert (last.workspace, last.workspace_bytes) == (workspace.address, 1024)
        assert {tensor.stream for tensor in torch.made} == {belongs_to}
        assert (last.stream or 0) == (0x1000 if stream is None else stream)

    def test_a_tensor_beside_addresses_says_the_stream_and_what_is_made(self, torch, last, raw):
        out = nf4.matmul(self.on(torch.float16, COLS), raw)
        assert (out.shape, out.dtype, last.stream) == ((ROWS,), torch.float16, 0x1000)

    def test_autograd_hears_of_what_was_written(self, torch, last, weight, workspace_needed):
        x, out = self.on(torch.float16, 4, COLS), self.on(torch.float16, 4, ROWS)
        nf4.matmul(x, weight)
        assert torch.written == []
        workspace_needed(256)
        workspace = self.on(torch.uint8, 4096)
        nf4.matmul(x, weight, out=out, workspace=workspace)
        assert torch.written == [out, workspace]
        assert last.workspace_bytes == 4096

    def test_a_call_that_failed_wrote_nothing(self, torch, fake, weight):
        ctypes.c_int32.in_dll(fake, "fake_status").value = 5
        with pytest.raises(nf4.CudaError):
            nf4.matmul(self.on(torch.float16, COLS), weight, out=self.on(torch.float16, ROWS))
        assert torch.written == []

    def test_gaps_of_tensors(self, torch, last, weight, monkeypatch):
        x = self.on(torch.float16, 4, COLS)
        monkeypatch.setattr(x, "is_contiguous", lambda: False, raising=False)
        monkeypatch.setattr(x, "stride", lambda: (COLS + 28, 1), raising=False)
        nf4.matmul(x, weight)
        assert (last.matmul.x_stride, last.matmul.y_stride) == (COLS + 28, ROWS)


# ---- The gradient, and adapters ----------------------------------------------------------


def adapter(**options):
    a, b = array(0x100, 8, COLS), array(0x200, ROWS, 8)
    return nf4.Lora(a, b, **{"scale": 0.5} | options)


def test_a_gradient_and_its_adapter_are_passed(last, raw, workspace_needed):
    workspace_needed(16)
    grad_y, out = array(32, 3, ROWS), array(48, 3, COLS)
    assert nf4.matmul_workspace_bytes(raw, 3, "bf16", rank=8, gradient=True) == 3 * 16 + 8
    lora = adapter(product=HIGH + 0x300)
    result = nf4.matmul_grad(grad_y, raw, lora=lora, out=out, workspace=HIGH + 80, stream=HIGH + 96)
    assert result is out and last.gradient == 1
    args, passed = last.matmul, last.lora
    assert (args.m, args.x_stride, args.y_stride) == (3, ROWS, COLS)
    assert (args.x - HIGH, args.y - HIGH, args.bias) == (32, 48, None)
    assert (last.workspace - HIGH, last.workspace_bytes, last.stream) == (80, 56, HIGH + 96)
    assert passed.struct_size == ctypes.sizeof(_abi.Lora)
    assert (passed.dtype, passed.rank, passed.scale, passed.reserved) == (
        _abi.DTYPE_BF16,
        8,
        0.5,
        0,
    )
    assert (passed.a - HIGH, passed.a_stride) == (0x100, COLS)
    assert (passed.b - HIGH, passed.b_stride) == (0x200, 8)
    assert passed.product - HIGH == 0x300


def test_an_adapter_beside_a_product(last, raw):
    x, out = array(32, 3, COLS), array(48, 3, ROWS)
    nf4.matmul(x, raw, lora=adapter(), out=out)
    assert (last.gradient, last.lora.rank, last.lora.product) == (0, 8, None)
    nf4.matmul(x, raw, out=out)
    assert last.matmul.lora is None


def test_a_gradient_of_many_rows_of_fp32(last, raw):
    nf4.matmul_grad(array(32, 17, ROWS, dtype="fp32"), raw, out=array(48, 17, COLS, dtype="fp32"))
    assert (last.matmul.dtype, last.matmul.m) == (_abi.DTYPE_FP32, 17)


@pytest.mark.parametrize("name", ["a", "b", "product"])
def test_an_adapter_in_host_memory_is_named(name, last, raw):
    shape = {"a": (8, COLS), "b": (ROWS, 8), "product": (3, 8)}[name]
    fields = {"a": array(0, 8, COLS, dtype="fp16"), "b": array(0, ROWS, 8, dtype="fp16")}
    lora = nf4.Lora(**fields | {name: np.zeros(shape, np.float16)})
    x, out = array(32, 3, COLS, dtype="fp16"), array(48, 3, ROWS, dtype="fp16")
    with pytest.raises(nf4.InvalidArgument, match=f"lora.{name} is in host memory"):
        nf4.matmul(x, raw, lora=lora, out=out)
    assert last.count == 0
