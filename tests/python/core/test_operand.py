"""Objects as memory, and what is refused of them: _readers, _dlpack, _operand."""

import array
import gc
import sys
import weakref

import nf4
import numpy as np
import oracle
import pytest
from fakes import CudaArray, DlpackArray
from nf4 import _convert, _dlpack, _operand
from nf4._operand import read

FLOAT, UINT, BFLOAT, INT = 2, 1, 4, 0
MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)


def operand_of(value):
    return read("thing", value).require_contiguous()


def refused(value, message):
    with pytest.raises(nf4.InvalidArgument, match=message):
        operand_of(value)


def test_numpy():
    operand = operand_of(MATRIX)
    assert (operand.address, operand.dtype, operand.shape) == (MATRIX.ctypes.data, "fp32", (3, 4))
    assert (operand.elements, operand.on_device, operand.writable) == (12, False, True)
    fixed = MATRIX.copy()
    fixed.flags.writeable = False
    assert not operand_of(fixed).writable


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "uint8", "int32"])
def test_numpy_dtypes(dtype):
    assert operand_of(np.zeros(3, _convert.NUMPY_DTYPES[dtype])).dtype == dtype


@pytest.mark.parametrize("view", [MATRIX.T, MATRIX[:, 1:], MATRIX[::2]])
def test_numpy_that_is_not_contiguous(view):
    refused(view, "thing is not contiguous in row-major order; expected memory without gaps")


@pytest.mark.parametrize("view", [MATRIX[1:], MATRIX[1:2, 1:], MATRIX[:0].T])
def test_numpy_that_is_contiguous_all_the_same(view):
    assert operand_of(view).elements == view.size


def test_big_endian_is_another_dtype():
    assert operand_of(MATRIX.astype(">f4")).dtype == ">f4"


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "uint8", "int32"])
def test_cuda_array_interface(dtype):
    operand = operand_of(CudaArray(4096, dtype, 5, 7, read_only=True))
    assert (operand.address, operand.dtype, operand.shape) == (4096, dtype, (5, 7))
    assert (operand.on_device, operand.writable) == (True, False)


def test_cuda_array_interface_of_no_elements():
    assert operand_of(CudaArray(None, "fp32", 0, 3)).address == 0


@pytest.mark.parametrize(
    "shape, strides, contiguous",
    [
        ((3, 4), (16, 4), True),
        ((3, 4), (4, 12), False),
        ((3, 4), (32, 4), False),
        ((1, 4), (999, 4), True),
        ((3, 1), (4, 999), True),
        ((0, 4), (1, 1), True),
        ((4,), (-4,), False),
    ],
)
def test_cuda_array_interface_strides(shape, strides, contiguous):
    value = CudaArray(4096, "fp32", *shape, strides=strides)
    if contiguous:
        assert operand_of(value).shape == shape
    else:
        refused(value, "thing is not contiguous")


def test_cuda_array_interface_faults():
    refused(CudaArray(4096, "fp32", 3, mask=object()), "thing has a mask; expected an array")
    refused(CudaArray(4096, "nonsense", 3), "thing: TypeError")
    refused(CudaArray(-1, "fp32", 3), "thing is -1; expected an address")
    incomplete = CudaArray(4096, "fp32", 3)
    del incomplete.__cuda_array_interface__["data"]
    refused(incomplete, "thing: KeyError: 'data'")


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize(
    "dtype, code",
    [("fp32", FLOAT), ("fp16", FLOAT), ("bf16", BFLOAT), ("uint8", UINT), ("int32", INT)],
)
def test_dlpack(dtype, code, versioned):
    values = np.zeros((3, 4), _convert.NUMPY_DTYPES[dtype])
    operand = operand_of(DlpackArray(values, code, versioned))
    assert (operand.address, operand.dtype, operand.shape) == (values.ctypes.data, dtype, (3, 4))
    assert (operand.on_device, operand.writable) == (False, True)


def test_dlpack_details():
    assert not operand_of(DlpackArray(MATRIX, FLOAT, flags=1)).writable
    shifted = operand_of(DlpackArray(MATRIX[1:], FLOAT, byte_offset=16))
    assert shifted.address == MATRIX.ctypes.data + 32
    assert operand_of(DlpackArray(MATRIX, FLOAT, strides=None)).elements == 12
    odd = operand_of(DlpackArray(MATRIX, FLOAT, lanes=2))
    assert odd.dtype == "DLPack type code 2, 32 bits, 2 lanes"


@pytest.mark.parametrize(
    "device_type, on_device, stream",
    [
        (_dlpack.CPU, False, None),
        (_dlpack.CUDA_HOST, False, None),
        (_dlpack.CUDA, True, -1),
        (_dlpack.CUDA_MANAGED, True, -1),
    ],
)
def test_dlpack_devices(device_type, on_device, stream):
    """A CUDA producer is told to synchronise nothing (-1): the order is the caller's."""
    value = DlpackArray(MATRIX, FLOAT, device_type=device_type)
    assert operand_of(value).on_device is on_device
    assert value.streams == [stream]


def test_dlpack_faults():
    refused(DlpackArray(MATRIX.T, FLOAT), "thing is not contiguous")
    refused(DlpackArray(MATRIX, FLOAT, device_type=10), "thing is on DLPack device type 10")
    later = DlpackArray(MATRIX, FLOAT)
    later.managed.major = 2
    refused(later, "thing: BufferError: DLPack version 2.0; expected 1")

    class Empty:
        def __dlpack_device__(self):
            return _dlpack.CPU, 0

        def __dlpack__(self, **_):
            return "no capsule"

    refused(Empty(), "thing: BufferError: __dlpack__ gave 'no capsule'")


def test_what_a_producer_raises_is_named():
    class Refusing:
        def __dlpack_device__(self):
            return _dlpack.CPU, 0

        def __dlpack__(self, **_):
            raise RuntimeError("it requires grad")

    refused(Refusing(), "thing: RuntimeError: it requires grad")


def test_addresses():
    operand = operand_of(np.int64(4096))
    assert (operand.address, operand.dtype, operand.elements) == (4096, None, None)
    assert operand.on_device is None
    refused(-1, "thing is -1; expected an address")
    refused(1 << 64, "expected an address")


OTHERS = {"None": None, "of type bool": True, "of type float": 1.5, "of type str": "text",
          "of type bytes": b"bytes", "of type list": [1.0],
          "of type array.array": array.array("f")}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_other_objects(kind):
    refused(OTHERS[kind], f"thing is {kind}; expected a numpy array")


def test_expect():
    operand = operand_of(MATRIX)
    assert operand.expect("fp32", 12).require_writable() is operand
    for arguments, message in (
        (("fp16", 12), "thing is of fp32; expected fp16"),
        (("fp32", 13), "thing has 12 elements; expected 13"),
    ):
        with pytest.raises(nf4.InvalidArgument, match=message):
            operand.expect(*arguments)
    fixed = operand_of(CudaArray(4096, "fp32", 12, read_only=True))
    assert fixed.expect("fp32", 12) is fixed
    with pytest.raises(nf4.InvalidArgument, match="thing is read-only"):
        fixed.require_writable()
    raw = operand_of(4096)
    assert raw.expect("fp16", 10**15).require_writable() is raw


def test_places():
    host, device, raw = (
        read(name, value)
        for name, value in (("a", MATRIX), ("b", CudaArray(4096, "fp32", 3)), ("c", 4096))
    )
    assert _operand.on_device(host, raw) is False
    assert _operand.on_device(raw, device) is True
    assert _operand.on_device(raw) is True
    with pytest.raises(
        nf4.InvalidArgument, match="a is in host memory; b is in device memory; expected all"
    ):
        _operand.on_device(host, raw, device)


def test_an_operand_keeps_its_owner_alive():
    value = MATRIX.copy()
    finalised = weakref.ref(value)
    operand = operand_of(value)
    del value
    gc.collect()
    assert finalised() is operand.owner
    del operand
    gc.collect()
    assert finalised() is None


def test_a_dlpack_capsule_is_held_and_released():
    value = DlpackArray(MATRIX, FLOAT)
    operand = operand_of(value)
    capsule = operand.owner
    held = sys.getrefcount(capsule)
    del operand
    gc.collect()
    assert sys.getrefcount(capsule) == held - 1


def test_numpy_through_its_own_dlpack():
    """numpy's capsule, as a producer other than the fake, with its deleter run on collection."""

    class Wrapped:
        def __init__(self, values):
            self.values = values

        def __dlpack_device__(self):
            return self.values.__dlpack_device__()

        def __dlpack__(self, **arguments):
            return self.values.__dlpack__(**arguments)

    values = MATRIX.copy()
    references = sys.getrefcount(values)
    q = nf4.quantize(Wrapped(values), nested_blocksize=0)
    assert oracle.differing(q.absmax, np.array([11], np.float32)) == 0
    gc.collect()
    assert sys.getrefcount(values) == references


def test_masked_array():
    refused(np.ma.masked_array(MATRIX, MATRIX > 3), "thing is a masked array")


def test_dlpack_copy_is_not_written_to():
    assert not operand_of(DlpackArray(MATRIX, FLOAT, flags=2)).writable
    assert operand_of(DlpackArray(MATRIX, FLOAT)).writable
