"""What is refused, with which exception, naming which argument; outputs stay as they were."""

import dataclasses
import gc
import pickle
import weakref

import nf4
import numpy as np
import pytest
from fakes import CudaArray, read_only

RNG = np.random.default_rng(0)
SOURCE = RNG.standard_normal((6, 64)).astype(np.float32)


# Neither equal to a number nor different from it.
PAIR = np.array([0, 0])


def quantized(nested_blocksize=256):
    return nf4.quantize(SOURCE, nested_blocksize=nested_blocksize)


def changed(**changes):
    return dataclasses.replace(quantized(), **changes)


QUANTIZE = {
    "array is of float64; expected fp32, fp16 or bf16": (SOURCE.astype(np.float64), {}),
    "array is of uint8": (SOURCE.view(np.uint8), {}),
    "array is of type list; expected a numpy array": ([1.0, 2.0], {}),
    "array is not contiguous": (SOURCE.T, {}),
    "out is None; expected a QuantizedTensor for a raw address": (4096, {}),
    "out is None; expected a QuantizedTensor for device memory": (CudaArray(64, "fp32", 3), {}),
    'format is \'nf5\'; expected "nf4", "fp4", "mxfp4" or "nvfp4"': (SOURCE, {"format": "nf5"}),
    'format is \'int4\'; expected "nf4", "fp4", "mxfp4" or "nvfp4"; nf4.quantize_int4 makes': (
        SOURCE,
        {"format": "int4"},
    ),
    "blocksize is 48; expected a power of two from 32 to 4096": (SOURCE, {"blocksize": 48}),
    "blocksize is 0;": (SOURCE, {"blocksize": 0}),
    "blocksize is -64;": (SOURCE, {"blocksize": -64}),
    "blocksize is 8192;": (SOURCE, {"blocksize": 8192}),
    "blocksize is 64.0; expected an integer": (SOURCE, {"blocksize": 64.0}),
    f"blocksize is {2**32 + 64}; expected a 32-bit integer": (SOURCE, {"blocksize": 2**32 + 64}),
    "nested_blocksize is 3; expected 0": (SOURCE, {"nested_blocksize": 3}),
    f"nested_blocksize is {2**32}; expected a 32-bit": (SOURCE, {"nested_blocksize": 2**32}),
    "codebook has 15 elements; expected 16": (SOURCE, {"codebook": np.zeros(15, np.float32)}),
    "codebook is of float64; expected fp32": (SOURCE, {"codebook": np.zeros(16)}),
    "codebook is in device memory": (SOURCE, {"codebook": CudaArray(4096, "fp32", 16)}),
    "threads is -1; expected 0 or more": (SOURCE, {"threads": -1}),
    f"threads is {2**32 + 1}; expected a 32-bit integer": (SOURCE, {"threads": 2**32 + 1}),
    "stream is 0; expected None for host memory": (SOURCE, {"stream": 0}),
    "threads is array([0, 0]); expected an integer": (SOURCE, {"threads": PAIR}),
    "workspace is of fp32; expected uint8": (SOURCE, {"workspace": np.zeros(99, np.float32)}),
    "the size of workspace in bytes is 7; expected at least 40": (
        SOURCE,
        {"workspace": np.zeros(7, np.uint8)},
    ),
    "workspace is in device memory": (SOURCE, {"workspace": CudaArray(4096, "uint8", 99)}),
}


@pytest.mark.parametrize("message", QUANTIZE)
def test_quantize(message):
    source, arguments = QUANTIZE[message]
    with pytest.raises(nf4.InvalidArgument) as caught:
        nf4.quantize(source, **arguments)
    assert message in str(caught.value)
    assert caught.value.status == 1 and isinstance(caught.value, ValueError)


QUANTIZE_INTO = {
    "shape is (6, 64), but that of out is (64, 6)": ({"shape": (64, 6)}, {}),
    "dtype is 'fp32', but that of out is 'bf16'": ({"dtype": "bf16"}, {}),
    "blocksize is 128, but that of out is 64": ({}, {"blocksize": 128}),
    "format is 'fp4', but that of out is 'nf4'": ({}, {"format": "fp4"}),
    "nested_blocksize is 64, but that of out is 256": ({}, {"nested_blocksize": 64}),
    "blocksize is array([0, 0]); expected an integer": ({}, {"blocksize": PAIR}),
    "blocksize is 64.0; expected an integer": ({}, {"blocksize": 64.0}),
    "nested_blocksize is array([0, 0]); expected an integer": ({}, {"nested_blocksize": PAIR}),
    "format is array([0, 0]); expected": ({}, {"format": PAIR}),
    "codebook is array(": ({}, {"codebook": np.zeros(16, np.float32)}),
    "packed is read-only": ({"packed": read_only(np.zeros(192, np.uint8))}, {}),
    "absmax is read-only": ({"absmax": read_only(np.zeros(6, np.uint8))}, {}),
    "nested_absmax is read-only": ({"nested_absmax": read_only(np.zeros(1, np.float32))}, {}),
    "nested_offset is read-only": ({"nested_offset": read_only(np.zeros(1, np.float32))}, {}),
    "array overlaps packed": ({"packed": SOURCE.view(np.uint8).reshape(-1)[:192]}, {}),
}


@pytest.mark.parametrize("message", QUANTIZE_INTO)
def test_quantize_into_out(message):
    changes, arguments = QUANTIZE_INTO[message]
    out, before = changed(**changes), SOURCE.copy()
    parts = {name: np.copy(getattr(out, name)) for name in ("packed", "absmax", "nested_absmax")}
    with pytest.raises(nf4.InvalidArgument) as caught:
        nf4.quantize(SOURCE, out=out, **arguments)
    assert message in str(caught.value)
    assert all((getattr(out, name) == part).all() for name, part in parts.items())
    assert (before == SOURCE).all()


DEQUANTIZE = {
    "packed has 191 elements; expected 192": ({"packed": np.zeros(191, np.uint8)}, {}),
    "packed is of fp32; expected uint8": ({"packed": np.zeros(192, np.float32)}, {}),
    "absmax is of fp32; expected uint8": ({"absmax": np.zeros(6, np.float32)}, {}),
    "absmax has 5 elements; expected 6": ({"absmax": np.zeros(5, np.uint8)}, {}),
    "nested_absmax has 2 elements; expected 1": ({"nested_absmax": np.zeros(2, np.float32)}, {}),
    "nested_code has 255 elements": ({"nested_code": np.zeros(255, np.float32)}, {}),
    "nested_offset has 2 elements; expected 1": ({"nested_offset": np.zeros(2, np.float32)}, {}),
    "nested_offset is of type float; expected a numpy array": ({"nested_offset": 0.5}, {}),
    "packed is in host memory; absmax is in device": ({"absmax": CudaArray(64, "uint8", 6)}, {}),
    "blocksize is 65;": ({"blocksize": 65}, {}),
    "format is None;": ({"format": None}, {}),
    "shape is (6, -64); expected dimensions of 0 or more": ({"shape": (6, -64)}, {}),
    "rows * cols of shape is 1099511627776 * 1099511627776": ({"shape": (1 << 40, 1 << 40)}, {}),
    f"the number of rows of shape is {1 << 80}; expected a 64-bit integer": (
        {"shape": (1 << 40, 1 << 40, 1)},
        {},
    ),
    "dtype is 'int8'; expected": ({}, {"dtype": "int8"}),
    "dtype is 'nonsense'; expected": ({}, {"dtype": "nonsense"}),
    "out has 383 elements; expected 384": ({}, {"out": np.zeros(383, np.float32)}),
    "out is of fp32; expected fp16": ({}, {"dtype": "fp16", "out": np.zeros(384, np.float32)}),
    "out is of float64; expected fp32": ({}, {"out": np.zeros(384)}),
    "out is not contiguous": ({}, {"out": np.zeros((64, 6), np.float32).T}),
    "out is read-only": ({}, {"out": read_only(np.zeros(384, np.float32))}),
    "out is in device memory": ({}, {"out": CudaArray(4096, "fp32", 384)}),
    "threads is array([0, 0]); expected an integer": ({}, {"threads": PAIR}),
    "threads is -5;": ({}, {"threads": -5}),
    "stream is 1; expected None for host memory": ({}, {"stream": 1}),
}


@pytest.mark.parametrize("message", DEQUANTIZE)
def test_dequantize(message):
    changes, arguments = DEQUANTIZE[message]
    with pytest.raises(nf4.InvalidArgument) as caught:
        nf4.dequantize(changed(**changes), **arguments)
    assert message in str(caught.value)
    if isinstance(arguments.get("out"), np.ndarray):
        assert not arguments["out"].any()


class Layer:
    quantized = None


NO_WEIGHTS = {
    "None; expected a QuantizedTensor": None,
    "of type int; expected a QuantizedTensor": 5,
    "of type str; expected": "weight",
    "of type numpy.ndarray; expected": np.ones(4, np.uint8),
    "of type object; expected": object(),
    "of type ValueError; expected": ValueError(),
    "of type module; expected": nf4,
    "of type test_errors.Layer; expected its .quantized": Layer(),
}


@pytest.mark.parametrize("message", NO_WEIGHTS)
def test_what_is_no_weight(message):
    value, x = NO_WEIGHTS[message], np.ones((2, 64), np.float32)
    calls = {
        "tensor": lambda: nf4.dequantize(value),
        "weight": lambda: nf4.matmul(x, value),
        "product 1: weight": lambda: nf4.matmul_batch(x, [quantized(), value]),
        "weights[1]": lambda: nf4.matmul_batch_workspace_bytes([quantized(), value], 1, "fp16"),
    }
    if value is not None:
        calls["out"] = lambda: nf4.quantize(x, out=value)
    for name, call in calls.items():
        with pytest.raises(nf4.InvalidArgument) as caught:
            call()
        assert f"{name} is {message}" in str(caught.value)


class Dtyped:
    dtype = np.dtype(np.float32)


@pytest.mark.parametrize("value", [Dtyped(), np.float32(1), SOURCE, True, int, np.str_, "f8"])
def test_what_is_no_dtype(value):
    assert nf4.dequantize(quantized(), np.float32).dtype == np.float32  # and no answer is reused
    with pytest.raises(nf4.InvalidArgument, match='dtype is .*; expected "fp32", "fp16" or "bf16"'):
        nf4.dequantize(quantized(), value)


def test_what_is_no_dtype_is_not_kept():
    value = Dtyped()
    gone = weakref.ref(value)
    with pytest.raises(nf4.InvalidArgument):
        nf4.dequantize(quantized(), value)
    del value
    gc.collect()
    assert gone() is None


def test_a_long_value_is_cut():
    with pytest.raises(nf4.InvalidArgument) as caught:
        nf4.dequantize(quantized(), np.zeros(900))
    assert len(str(caught.value)) < 200 and "..." in str(caught.value)


def test_a_class_is_no_address():
    with pytest.raises(nf4.InvalidArgument, match="out is <class 'int'>; expected an address"):
        nf4.dequantize(quantized(), out=int)


class Protocol:
    def __init__(self, given):
        self.__cuda_stream__ = given


@pytest.mark.parametrize("given", [5, (1, 2, 3), (0, "a"), (0, None)], ids=repr)
def test_a_stream_of_another_protocol(given):
    flat = nf4.QuantizedTensor(packed=4096, absmax=8192, shape=(5,))
    with pytest.raises(nf4.InvalidArgument, match="stream.__cuda_stream__ is .*; expected a vers"):
        nf4.dequantize(flat, out=1 << 20, stream=Protocol(given))


def test_out_that_overlaps_the_weight():
    storage = np.zeros(384 * 4 + 192, np.uint8)
    q = changed(packed=storage[:192])
    with pytest.raises(nf4.InvalidArgument, match="overlaps"):
        nf4.dequantize(q, out=storage[: 384 * 4].view(np.float32))
    assert not storage.any()


@pytest.mark.parametrize("missing", ["nested_absmax", "nested_code", "nested_offset"])
def test_a_nested_weight_has_all_its_parts(missing):
    with pytest.raises(nf4.InvalidArgument, match=f"{missing} is None, but nested_blocksize is"):
        changed(**{missing: None})
    with pytest.raises(nf4.InvalidArgument, match="nested_absmax is given, but nested_blocksize"):
        changed(nested_blocksize=0)


@pytest.mark.parametrize("name", ["blocksize", "nested_blocksize"])
@pytest.mark.parametrize("value", [PAIR, 64.0, None, "64"], ids=repr)
def test_a_weights_blocksizes_are_integers(name, value):
    with pytest.raises(nf4.InvalidArgument, match=f"{name} is .*; expected an integer"):
        changed(**{name: value})


def test_device_memory_needs_out_and_workspace_and_no_threads():
    device = nf4.QuantizedTensor(
        packed=4096, absmax=8192, nested_absmax=4, nested_code=4, nested_offset=4,
        nested_blocksize=256, shape=(6, 64),
    )  # fmt: skip
    for message, call in {
        "out is None; expected an array of device memory": lambda: nf4.dequantize(device),
        "workspace is None; expected": lambda: nf4.quantize(64, out=device),
        "threads is 2; expected 0 for device memory": lambda: nf4.dequantize(
            device, out=64, threads=2
        ),
    }.items():
        with pytest.raises(nf4.InvalidArgument, match=message):
            call()


def test_device_memory_without_a_device():
    """The status is that of the machine: no CUDA in this build, or no GPU."""
    info = nf4.device_info(0)
    if info.usable:
        pytest.skip("there is a GPU: addresses that are made up must not reach it")
    flat = nf4.QuantizedTensor(packed=4096, absmax=8192, shape=(5,))
    with pytest.raises((nf4.NoCuda, nf4.NoDevice, nf4.UnsupportedDevice)) as caught:
        nf4.dequantize(flat, out=1 << 20)
    names = {2: "NF4_STATUS_NO_CUDA", 3: "NF4_STATUS_NO_DEVICE", 4: "NF4_STATUS_UNSUPPORTED_DEVICE"}
    assert names[caught.value.status] == info.status
    assert str(caught.value) and info.reason


def test_no_elements_need_no_device():
    empty = nf4.QuantizedTensor(packed=0, absmax=0, shape=(0, 7))
    assert nf4.dequantize(empty, out=0) == 0
    assert nf4.quantize(0, out=empty) is empty


def test_every_exception_is_an_error_and_pickles():
    for name in ("InvalidArgument", "NoCuda", "NoDevice", "UnsupportedDevice", "CudaError"):
        error = getattr(nf4, name)("what")
        again = pickle.loads(pickle.dumps(error))
        assert isinstance(again, nf4.Error) and type(again) is type(error)
        assert (str(again), again.status) == ("what", error.status)
    assert issubclass(nf4.LibraryNotFound, ImportError) and nf4.LibraryNotFound.status is None


def test_tables_that_are_read_only_are_read():
    table = read_only(nf4.codebook("fp4"))
    q = changed(nested_code=read_only(nf4.scale_code()), codebook=table)
    assert nf4.quantize(SOURCE, out=q) is q
    expected = nf4.quantize(SOURCE, codebook=table)
    assert (q.packed == expected.packed).all() and (q.absmax == expected.absmax).all()


@pytest.mark.parametrize(
    "shape", [(-1, -1, 4), (0, -1, 4), (-2, 4), ("a", "b"), (1.5, 4), (None, None), 5, None]
)
def test_shape(shape):
    with pytest.raises(nf4.InvalidArgument, match="shape is "):
        nf4.sizes(shape)


@pytest.mark.parametrize("format", [["nf4"], {}, None, 4])
def test_format_of_another_type(format):
    with pytest.raises(nf4.InvalidArgument, match="format is "):
        nf4.sizes((4, 4), format=format)


def test_shape_of_more_dimensions_than_numpy_has():
    weight = changed(shape=(1,) * 65 + (6, 64))
    with pytest.raises(nf4.InvalidArgument, match=r"out of shape \(1, 1, .*\): "):
        nf4.dequantize(weight)
    flat = np.empty(6 * 64, np.float32)
    assert (nf4.dequantize(weight, out=flat) == nf4.dequantize(quantized()).reshape(-1)).all()
