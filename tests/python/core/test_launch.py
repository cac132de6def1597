"""What reaches the C library for device memory, seen by a fake of it: no GPU needed."""

import ctypes

import nf4
import numpy as np
import pytest
from fakes import CudaArray, DlpackArray
from nf4 import _abi, _dlpack

pytestmark = pytest.mark.usefixtures("way_to_call")
HIGH = 0x7F12_0000_0000_0000


def device_weight(shape=(1 << 20, 6 << 12), **changes):
    """A nested weight of more than 2^34 elements at made-up device addresses."""
    elements = int(np.prod(shape, dtype=np.int64))
    blocks = -(-elements // 64)
    parts = {
        "packed": CudaArray(HIGH, "uint8", -(-elements // 2)),
        "absmax": CudaArray(HIGH + 0x10, "uint8", blocks),
        "nested_absmax": CudaArray(HIGH + 0x20, "fp32", -(-blocks // 256)),
        "nested_code": CudaArray(HIGH + 0x30, "fp32", 256),
        "nested_offset": CudaArray(HIGH + 0x40, "fp32"),
        "codebook": CudaArray(HIGH + 0x50, "fp32", 16),
        "nested_blocksize": 256,
        "shape": shape,
        "dtype": "bf16",
    }
    return nf4.QuantizedTensor(**parts | changes)


def test_dequantize_passes_everything_at_full_width(last):
    out = CudaArray(HIGH + 0x60, "fp16", 1 << 20, 6 << 12)
    assert nf4.dequantize(device_weight(), out=out, stream=HIGH + 0x70) is out
    weight = last.weight
    assert last.count == 1
    assert weight.struct_size == ctypes.sizeof(_abi.Tensor)
    assert (weight.format, weight.blocksize, weight.nested_blocksize) == (_abi.FORMAT_NF4, 64, 256)
    assert (weight.rows, weight.cols, weight.scale_rule) == (1 << 20, 6 << 12, 0)
    names = ["packed", "absmax", "nested_absmax", "nested_code", "nested_offset", "codebook"]
    assert [getattr(weight, name) - HIGH for name in names] == [16 * i for i in range(6)]
    assert (last.out, last.dtype, last.stream) == (HIGH + 0x60, _abi.DTYPE_FP16, HIGH + 0x70)


def test_quantize_passes_everything_at_full_width(last):
    out = device_weight()
    source = CudaArray(HIGH + 0x60, "bf16", *out.shape)
    workspace = CudaArray(HIGH + 0x70, "uint8", 5 << 32)
    assert nf4.quantize(source, out=out, workspace=workspace, stream=7) is out
    assert (last.input, last.dtype, last.stream) == (HIGH + 0x60, _abi.DTYPE_BF16, 7)
    assert (last.workspace, last.workspace_bytes) == (HIGH + 0x70, 5 << 32)
    assert (last.weight.packed, last.weight.rows) == (HIGH, 1 << 20)


def test_raw_addresses_are_device_memory(last):
    names = ["packed", "absmax", "nested_absmax", "nested_code", "nested_offset", "codebook"]
    raw = device_weight(**{name: HIGH + i for i, name in enumerate(names)})
    assert nf4.dequantize(raw, out=HIGH + 8) == HIGH + 8
    assert [getattr(last.weight, name) - HIGH for name in names] == list(range(6))
    assert (last.out, last.dtype, last.stream) == (HIGH + 8, _abi.DTYPE_BF16, None)
    nf4.dequantize(raw, "fp16", out=HIGH + 8)
    assert (last.dtype, last.count) == (_abi.DTYPE_FP16, 2)
    nf4.quantize(HIGH + 9, out=raw, workspace=HIGH + 10)
    assert (last.input, last.workspace) == (HIGH + 9, HIGH + 10)
    assert last.workspace_bytes == raw.sizes.workspace_bytes == 160


def test_flat_parts_are_null(last):
    flat = nf4.QuantizedTensor(packed=HIGH, absmax=HIGH + 64, shape=(5,), format="fp4")
    nf4.dequantize(flat, out=HIGH + 128)
    weight = last.weight
    assert (weight.rows, weight.cols, weight.format) == (1, 5, _abi.FORMAT_FP4)
    assert [weight.nested_absmax, weight.nested_code, weight.nested_offset] == [None] * 3
    assert weight.codebook is None
    nf4.quantize(HIGH + 256, out=flat)
    assert (last.workspace, last.workspace_bytes) == (None, 0)


@pytest.mark.parametrize(
    "shape, rows, cols",
    [((), 1, 1), ((7,), 1, 7), ((3, 4), 3, 4), ((2, 3, 5), 6, 5), ((4, 0), 4, 0), ((0, 4), 0, 4)],
)
def test_rows_and_cols(last, shape, rows, cols):
    nf4.dequantize(nf4.QuantizedTensor(packed=HIGH, absmax=HIGH, shape=shape), out=HIGH)
    assert (last.weight.rows, last.weight.cols) == (rows, cols)


class Attribute:
    """An object with one attribute."""

    def __init__(self, name, value):
        setattr(self, name, value)


@pytest.mark.parametrize(
    "stream, expected",
    [
        (None, None),
        (0, None),
        (2, 2),
        (np.uint64(HIGH), HIGH),
        (ctypes.c_void_p(HIGH), HIGH),
        (ctypes.c_void_p(), None),
        (Attribute("cuda_stream", HIGH), HIGH),
        (Attribute("ptr", HIGH), HIGH),
        (Attribute("__cuda_stream__", lambda: (0, HIGH)), HIGH),
        (Attribute("__cuda_stream__", (0, HIGH)), HIGH),
    ],
)
def test_streams(last, stream, expected):
    flat = nf4.QuantizedTensor(packed=HIGH, absmax=HIGH, shape=(5,))
    nf4.dequantize(flat, out=HIGH, stream=stream)
    assert last.stream == expected
    nf4.quantize(HIGH, out=flat, stream=stream)
    assert (last.stream, last.count) == (expected, 2)


@pytest.mark.parametrize("stream", ["0", 1.5, True, -1, 1 << 64, object()])
def test_what_is_no_stream(last, stream):
    flat = nf4.QuantizedTensor(packed=HIGH, absmax=HIGH, shape=(5,))
    with pytest.raises(nf4.InvalidArgument, match="stream is"):
        nf4.dequantize(flat, out=HIGH, stream=stream)
    assert last.count == 0


def test_dlpack_device_memory(last):
    values = np.zeros(5, np.float32)
    out = DlpackArray(values, 2, device_type=_dlpack.CUDA)
    nf4.dequantize(nf4.QuantizedTensor(packed=HIGH, absmax=HIGH, shape=(5,)), out=out)
    assert (last.out, last.dtype) == (values.ctypes.data, _abi.DTYPE_FP32)


@pytest.mark.parametrize(
    "status, error",
    [
        (1, nf4.InvalidArgument),
        (2, nf4.NoCuda),
        (3, nf4.NoDevice),
        (4, nf4.UnsupportedDevice),
        (5, nf4.CudaError),
        (77, nf4.Error),
    ],
)
def test_every_status_has_its_exception(fake, status, error):
    ctypes.c_int32.in_dll(fake, "fake_status").value = status
    flat = nf4.QuantizedTensor(packed=HIGH, absmax=HIGH, shape=(5,))
    for call in (lambda: nf4.dequantize(flat, out=HIGH), lambda: nf4.quantize(HIGH, out=flat)):
        with pytest.raises(nf4.Error, match="^what the fake says is wrong$") as caught:
            call()
        assert type(caught.value) is error and caught.value.status == status


def test_device_info(fake):
    device = nf4.device_info(2)
    assert device == nf4.Device(
        index=2,
        usable=True,
        reason="",
        status="fake OK",
        device_count=3,
        name="A fake GPU",
        compute_capability=(12, 1),
        multiprocessors=2,
        memory_bytes=5 << 32,
        driver_version=13000,
        runtime_version=13010,
        dequant_variant="sm90",
        shared_memory_bytes=99 << 10,
        timed=False,
    )
    ctypes.c_int32.in_dll(fake, "fake_status").value = _abi.STATUS_UNSUPPORTED_DEVICE
    device = nf4.device_info(0)
    assert (device.usable, device.reason) == (False, "what the fake says is wrong")
    assert (device.status, device.name) == ("fake failure", "A fake GPU")
    ctypes.c_int32.in_dll(fake, "fake_status").value = _abi.STATUS_INVALID_ARGUMENT
    with pytest.raises(nf4.InvalidArgument):
        nf4.device_info(9)
