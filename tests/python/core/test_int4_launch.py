"""What reaches the C library of integer weights in device memory, seen by a fake of it."""

import ctypes
import dataclasses
import sys

import fake_torch
import nf4
import pytest
from fakes import CudaArray
from nf4 import _abi

pytestmark = pytest.mark.usefixtures("way_to_call")
HIGH = 0x7F12_0000_0000_0000
ROWS, COLS = 1 << 20, 6 << 12
GROUPS = COLS // 128
PARTS = ("packed", "scales", "zeros", "g_idx", "permutation")
SHAPES = {
    "gptq": ((COLS // 8, ROWS), (GROUPS, ROWS), (GROUPS, ROWS // 8)),
    "gptq_v2": ((COLS // 8, ROWS), (GROUPS, ROWS), (GROUPS, ROWS // 8)),
    "awq": ((COLS, ROWS // 8), (GROUPS, ROWS), (GROUPS, ROWS // 8)),
    "compressed-tensors": ((ROWS, COLS // 8), (ROWS, GROUPS), (ROWS // 8, GROUPS)),
}
NUMBERS = {"gptq": (1, 1), "gptq_v2": (1, 0), "awq": (2, 0), "compressed-tensors": (3, 0)}


def device_weight(layout="gptq", **changes):
    """A weight of more than 2^34 elements at made-up device addresses."""
    packed, scales, zeros = SHAPES[layout]
    parts = {
        "packed": CudaArray(HIGH, "int32", *packed),
        "scales": CudaArray(HIGH + 0x10, "bf16", *scales),
        "zeros": CudaArray(HIGH + 0x20, "int32", *zeros),
        "g_idx": CudaArray(HIGH + 0x30, "int32", COLS),
        "permutation": CudaArray(HIGH + 0x40, "int32", COLS),
    }
    fields = {"layout": layout, "shape": (ROWS, COLS), "group_size": 128}
    return nf4.Int4Tensor(**parts | fields | changes)


def offsets(tensor):
    return [getattr(tensor, name) and getattr(tensor, name) - HIGH for name in PARTS]


@pytest.mark.parametrize("layout", SHAPES)
def test_dequantize_passes_everything_at_full_width(last, layout):
    out = CudaArray(HIGH + 0x60, "fp16", ROWS, COLS)
    assert nf4.dequantize(device_weight(layout), out=out, stream=HIGH + 0x70) is out
    weight = last.int4[0]
    assert last.count == 1 and weight.struct_size == ctypes.sizeof(_abi.Int4Tensor)
    assert (weight.layout, weight.zero_offset) == NUMBERS[layout]
    assert (weight.scales_dtype, weight.group_size) == (_abi.DTYPE_BF16, 128)
    assert (weight.rows, weight.cols) == (ROWS, COLS)
    assert offsets(weight) == [0, 0x10, 0x20, 0x30, 0x40]
    assert (last.out, last.dtype, last.stream) == (HIGH + 0x60, _abi.DTYPE_FP16, HIGH + 0x70)


def test_parts_that_are_not_there_are_null(last):
    nf4.dequantize(device_weight(zeros=None, g_idx=None, permutation=None), out=HIGH)
    assert offsets(last.int4[0]) == [0, 0x10, None, None, None]
    assert last.int4[0].zero_offset == 0  # without zeros there is nothing to add it to


def test_raw_addresses_are_device_memory(last):
    raw = device_weight(scales_dtype="fp16", **{name: HIGH + 2 * i for i, name in enumerate(PARTS)})
    assert nf4.dequantize(raw, out=HIGH + 64) == HIGH + 64
    assert offsets(last.int4[0]) == [0, 2, 4, 6, 8]
    assert (last.out, last.dtype, last.stream) == (HIGH + 64, _abi.DTYPE_FP16, None)
    plain = dataclasses.replace(raw, g_idx=None, permutation=None)
    assert nf4.quantize_int4(HIGH + 128, out=plain, symmetric=False, stream=7) is plain
    assert (last.input, last.dtype, last.stream) == (HIGH + 128, _abi.DTYPE_FP16, 7)
    assert last.symmetric == 0


def test_quantize_passes_the_dtype_of_the_array(last):
    out = device_weight(g_idx=None, permutation=None)
    source = CudaArray(HIGH + 0x60, "fp32", ROWS, COLS)
    assert nf4.quantize_int4(source, out=out) is out
    assert (last.input, last.dtype, last.symmetric) == (HIGH + 0x60, _abi.DTYPE_FP32, 1)
    assert offsets(last.int4[0]) == [0, 0x10, 0x20, None, None]


def test_reorder_passes_both(last):
    weight = device_weight(permutation=None)
    with pytest.raises(nf4.InvalidArgument, match="out is None; expected an Int4Tensor for device"):
        nf4.reorder(weight)
    out = device_weight(g_idx=None, packed=CudaArray(HIGH + 0x80, "int32", COLS // 8, ROWS))
    assert nf4.reorder(weight, out=out, stream=5) is out
    assert offsets(last.int4[0]) == [0, 0x10, 0x20, 0x30, None]
    assert offsets(last.int4[1]) == [0x80, 0x10, 0x20, None, 0x40]
    assert last.stream == 5


def test_matmul_asks_for_workspace_and_passes_it(fake, last):
    ctypes.c_size_t.in_dll(fake, "fake_workspace_per_row").value = 16
    try:
        weight = device_weight()
        assert nf4.matmul_workspace_bytes(weight, 3, "bf16") == 48
        x = CudaArray(HIGH + 0x60, "bf16", 3, COLS)
        y = CudaArray(HIGH + 0x70, "bf16", 3, ROWS)
        with pytest.raises(nf4.InvalidArgument, match="workspace is None; expected 48 bytes"):
            nf4.matmul(x, weight, out=y)
        space = CudaArray(HIGH + 0x80, "uint8", 64)
        assert nf4.matmul(x, weight, out=y, workspace=space, stream=9) is y
        args = last.matmuls[0]
        assert (args.m, args.x, args.y) == (3, HIGH + 0x60, HIGH + 0x70)
        assert (last.workspace, last.workspace_bytes, last.stream) == (HIGH + 0x80, 64, 9)
        assert offsets(last.int4[0]) == [0, 0x10, 0x20, 0x30, 0x40]
        nf4.matmul_batch(x, [weight, weight], out=[y, y], workspace=CudaArray(HIGH, "uint8", 96))
        assert (last.products, last.workspace_bytes) == (2, 96)
        assert offsets(last.int4[1]) == [0, 0x10, 0x20, 0x30, 0x40]
    finally:
        ctypes.c_size_t.in_dll(fake, "fake_workspace_per_row").value = 0


@pytest.fixture
def torch(monkeypatch):
    module = fake_torch.Torch()
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def test_tensors_are_made_where_the_array_is(torch, last):
    device = fake_torch.Device("cuda", 1)
    source = fake_torch.Tensor((16, 64), torch.float16, device)
    q = nf4.quantize_int4(source, group_size=32, layout="awq")
    assert [each.device for each in (q.packed, q.scales, q.zeros)] == [device] * 3
    assert (q.packed.dtype, q.packed.shape) == (torch.int32, (64, 2))
    assert last.stream == torch.current[1] and len(torch.written) == 3
    made = nf4.dequantize(q)
    assert (made.shape, made.dtype, made.device) == ((16, 64), torch.float16, device)
