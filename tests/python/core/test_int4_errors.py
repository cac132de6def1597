"""What is refused of integer weights, naming which argument; outputs stay as they were."""

import dataclasses

import nf4
import numpy as np
import pytest
from cases import numbers
from fakes import CudaArray, read_only
from int4_cases import Case, tensor_of

ROWS, COLS = 24, 96
SOURCE = numbers(0, (ROWS, COLS))
WEIGHT = tensor_of(Case(0, "gptq", (ROWS, 3), 32, False, "fp16", True).arrays)
PLAIN = dataclasses.replace(WEIGHT, g_idx=None)


def changed(**changes):
    return dataclasses.replace(WEIGHT, **changes)


def of_layout(layout, shape, group_size=32):
    return changed(layout=layout, shape=shape, group_size=group_size, g_idx=None)


def require_refused(message, call):
    with pytest.raises(nf4.InvalidArgument) as caught:
        call()
    assert message in str(caught.value) and caught.value.status == 1


CONSTRUCT = {
    'layout is \'gptq_v3\'; expected "gptq", "gptq_v2", "awq" or "compressed-tensors"': {
        "layout": "gptq_v3"
    },
    "layout is None;": {"layout": None},
    "layout is ['gptq'];": {"layout": ["gptq"]},
    "shape is (2304,); expected (rows, cols)": {"shape": (2304,)},
    "shape is (1, 1, 24, 96); expected (rows, cols)": {"shape": (1, 1, 24, 96)},
    "shape is 5; expected a sequence": {"shape": 5},
    "shape is 1.5; expected an integer": {"shape": (1.5, 96)},
    "group_size is 32.0; expected an integer": {"group_size": 32.0},
    f"group_size is {2**32 + 32}; expected a 32-bit integer": {"group_size": 2**32 + 32},
    'scales_dtype is \'fp32\'; expected "fp16" or "bf16"': {"scales_dtype": "fp32"},
    "scales_dtype is 'int8'; expected": {"scales_dtype": "int8"},
    "scales is of fp32; expected fp16 or bf16": {
        "scales_dtype": None,
        "scales": np.zeros((3, ROWS), np.float32),
    },
    "scales is an address; expected fp16 or bf16, or scales_dtype": {
        "scales_dtype": None,
        "scales": 4096,
    },
    "scales is of type float; expected a numpy array": {"scales_dtype": None, "scales": 0.5},
    "scales is None; expected a numpy array": {"scales_dtype": None, "scales": None},
}


@pytest.mark.parametrize("message", CONSTRUCT)
def test_construct(message):
    require_refused(message, lambda: changed(**CONSTRUCT[message]))


USE = {
    "group_size is 0; expected a multiple of 8, or -1": {"group_size": 0},
    "group_size is -2; expected a multiple of 8, or -1": {"group_size": -2},
    "group_size is 12; expected a multiple of 8, or -1": {"group_size": 12},
    "group_size is 64; expected a divisor of cols, 96, or -1": {"group_size": 64},
    "rows of shape is -8; expected 0 or more": {"shape": (-8, 96)},
    "rows * cols of shape is 1099511627776 * 1099511627776": {"shape": (1 << 40, 1 << 40)},
    "cols of shape is 100; expected a multiple of 8 in the GPTQ layout": {
        "shape": (ROWS, 100),
        "group_size": -1,
    },
    "rows of shape is 20; expected a multiple of 8 in the AWQ layout": {
        "layout": "awq",
        "shape": (20, COLS),
    },
    "packed is of shape (12, 24); expected (96, 3)": {"layout": "awq"},
    "packed is of shape (12, 24); expected (24, 12)": {"layout": "compressed-tensors"},
    "packed is of uint8; expected int32": {"packed": np.zeros((12, ROWS), np.uint8)},
    "packed is of uint32; expected int32": {"packed": WEIGHT.packed.view(np.uint32)},
    "packed is of shape (12, 23); expected (12, 24)": {"packed": np.zeros((12, 23), np.int32)},
    "packed is not contiguous": {"packed": np.zeros((ROWS, 12), np.int32).T},
    "packed is of type list; expected a numpy array": {"packed": [1, 2]},
    "packed is None; expected a numpy array": {"packed": None},
    "scales is of fp32; expected fp16": {"scales": np.zeros((3, ROWS), np.float32)},
    "scales is of bf16; expected fp16": {"scales": nf4.dequantize(WEIGHT, "bf16")[:3, :24].copy()},
    "scales is of fp16; expected bf16": {"scales_dtype": "bf16"},
    "scales is of shape (24, 3); expected (3, 24)": {"scales": np.zeros((ROWS, 3), np.float16)},
    "zeros is of shape (24, 3); expected (3, 3)": {"zeros": np.zeros((ROWS, 3), np.int32)},
    "zeros is of fp16; expected int32": {"zeros": np.zeros((3, 3), np.float16)},
    "g_idx is of int64; expected int32": {"g_idx": np.zeros(COLS, np.int64)},
    "g_idx is of shape (95,); expected (96,)": {"g_idx": np.zeros(95, np.int32)},
    "permutation is of shape (1, 96); expected (96,)": {"permutation": np.zeros((1, 96), np.int32)},
    "packed is in host memory; scales is in device": {"scales": CudaArray(64, "fp16", 3, ROWS)},
    "packed is in host memory; zeros is in device": {"zeros": CudaArray(64, "int32", 3, 3)},
}


@pytest.mark.parametrize("message", USE)
def test_use(message):
    weight, x, out = changed(**USE[message]), SOURCE[:2], np.zeros((2, ROWS), np.float32)
    for _ in range(2):
        require_refused(message, lambda: nf4.dequantize(weight))
        require_refused(message, lambda: nf4.matmul(x, weight, out=out))
    require_refused(f"product 1: {message}", lambda: nf4.matmul_batch(x, [WEIGHT, weight]))
    assert not out.any()


DEQUANTIZE = {
    "dtype is 'int8'; expected": {"dtype": "int8"},
    "out has 2303 elements; expected 2304": {"out": np.zeros(2303, np.float32)},
    "out is of fp32; expected fp16": {"dtype": "fp16", "out": np.zeros(2304, np.float32)},
    "out is not contiguous": {"out": np.zeros((COLS, ROWS), np.float32).T},
    "out is read-only": {"out": read_only(np.zeros(2304, np.float32))},
    "out is in device memory": {"out": CudaArray(4096, "fp32", 2304)},
    "threads is -5;": {"threads": -5},
    "stream is 1; expected None for host memory": {"stream": 1},
}


@pytest.mark.parametrize("message", DEQUANTIZE)
def test_dequantize(message):
    arguments = DEQUANTIZE[message]
    require_refused(message, lambda: nf4.dequantize(WEIGHT, **arguments))
    if isinstance(arguments.get("out"), np.ndarray):
        assert not arguments["out"].any()


def test_out_that_overlaps_the_weight():
    out = np.zeros((ROWS, COLS), np.float32)
    weight = changed(packed=out.view(np.int32).reshape(-1)[: 12 * ROWS].reshape(12, ROWS))
    require_refused("overlaps", lambda: nf4.dequantize(weight, out=out))


QUANTIZE = {
    "array is of float64; expected fp32, fp16 or bf16": (SOURCE.astype(np.float64), {}),
    "array is of type list; expected a numpy array": ([1.0], {}),
    "array is not contiguous": (np.zeros((COLS, ROWS), np.float32).T, {}),
    "the shape of array is (96,); expected (rows, cols)": (SOURCE[0], {}),
    "the shape of array is (1, 1, 24, 96); expected (rows, cols)": (SOURCE[None, None], {}),
    "out is None; expected an Int4Tensor for a raw address": (4096, {}),
    "out is None; expected an Int4Tensor for device memory": (CudaArray(64, "fp32", 8, 64), {}),
    "layout is 'gguf'; expected": (SOURCE, {"layout": "gguf"}),
    "group_size is 128; expected a divisor of cols, 96, or -1": (SOURCE, {"group_size": 128}),
    "group_size is '32'; expected an integer": (SOURCE, {"group_size": "32"}),
    "symmetric is None; expected True or False": (SOURCE, {"symmetric": None}),
    "symmetric is 2; expected True or False": (SOURCE, {"symmetric": 2}),
    "scales_dtype is 'fp32'; expected": (SOURCE, {"scales_dtype": "fp32"}),
    "threads is -1; expected 0 or more": (SOURCE, {"threads": -1}),
    "stream is 0; expected None for host memory": (SOURCE, {"stream": 0}),
    "rows of shape is 23; expected a multiple of 8 in the AWQ": (SOURCE[:23], {"layout": "awq"}),
    "out is of type nf4.tensor.QuantizedTensor; expected an Int4Tensor": (
        SOURCE,
        {"out": nf4.quantize(SOURCE)},
    ),
}


@pytest.mark.parametrize("message", QUANTIZE)
def test_quantize(message):
    source, arguments = QUANTIZE[message]
    given = arguments if "out" in arguments else {"group_size": 32} | arguments
    require_refused(message, lambda: nf4.quantize_int4(source, **given))


QUANTIZE_INTO = {
    "shape is (24, 96), but that of out is (96, 24)": ({"shape": (96, 24)}, {"group_size": None}),
    "layout is 'gptq_v2', but that of out is 'gptq'": ({}, {"layout": "gptq_v2"}),
    "group_size is 96, but that of out is 32": ({}, {"group_size": 96}),
    "scales_dtype is 'bf16', but that of out is 'fp16'": ({}, {"scales_dtype": "bf16"}),
    "symmetric is False; expected True, as out has no zeros": (
        {"zeros": None},
        {"symmetric": False},
    ),
    "out has g_idx; expected one without": ({"g_idx": WEIGHT.g_idx}, {}),
    "out has permutation; expected one without": ({"permutation": WEIGHT.g_idx}, {}),
    "packed is read-only": ({"packed": read_only(WEIGHT.packed)}, {}),
    "scales is read-only": ({"scales": read_only(WEIGHT.scales)}, {}),
    "zeros is read-only": ({"zeros": read_only(WEIGHT.zeros)}, {}),
    "array overlaps packed": (
        {"packed": SOURCE.view(np.int32).reshape(-1)[:288].reshape(12, 24)},
        {},
    ),
}


@pytest.mark.parametrize("message", QUANTIZE_INTO)
def test_quantize_into_out(message):
    changes, arguments = QUANTIZE_INTO[message]
    if "shape" in changes:
        changes = {"shape": (96, 24), "group_size": -1} | {
            "packed": np.zeros((3, 96), np.int32),
            "scales": np.zeros((1, 96), np.float16),
            "zeros": np.zeros((1, 12), np.int32),
        }
    out, source = dataclasses.replace(PLAIN, **changes), SOURCE.copy()
    before = {part.name: np.copy(getattr(out, part.name)) for part in out.parts()}
    require_refused(message, lambda: nf4.quantize_int4(SOURCE, out=out, **arguments))
    assert all((getattr(out, name) == part).all() for name, part in before.items())
    assert (source == SOURCE).all()


REORDERED = nf4.reorder(WEIGHT)
REORDER = {
    "weight has no g_idx; expected g_idx alone": ({"g_idx": None}, {}),
    "weight has a permutation; expected g_idx alone": ({"permutation": WEIGHT.g_idx}, {}),
    "out has g_idx; expected a permutation alone": ({}, {"g_idx": WEIGHT.g_idx}),
    "out has no permutation; expected a permutation alone": ({}, {"permutation": None}),
    "layout is 'gptq', but that of out is 'gptq_v2'": ({}, {"layout": "gptq_v2"}),
    "only one of out and weight has zeros": ({}, {"zeros": None}),
    "packed overlaps packed of out": ({}, {"packed": WEIGHT.packed}),
    "g_idx overlaps permutation of out": ({}, {"permutation": WEIGHT.g_idx}),
    "packed is read-only": ({}, {"packed": read_only(REORDERED.packed)}),
    "permutation is read-only": ({}, {"permutation": read_only(REORDERED.permutation)}),
}


@pytest.mark.parametrize("message", REORDER)
def test_reorder(message):
    changes, changes_of_out = REORDER[message]
    weight, out = changed(**changes), dataclasses.replace(REORDERED, **changes_of_out)
    before = {part.name: np.copy(getattr(weight, part.name)) for part in weight.parts()}
    require_refused(message, lambda: nf4.reorder(weight, out=out))
    assert all((getattr(weight, name) == part).all() for name, part in before.items())


@pytest.mark.parametrize("weight", [None, 5, nf4.quantize(SOURCE)], ids=type)
def test_what_is_no_integer_weight(weight):
    require_refused("; expected an Int4Tensor", lambda: nf4.reorder(weight))
    require_refused("; expected an Int4Tensor", lambda: nf4.reorder(WEIGHT, out=weight or 5))
    require_refused("; expected an Int4Tensor", lambda: nf4.quantize_int4(SOURCE, out=weight or 5))


@pytest.mark.parametrize("arguments", [{"threads": -1}, {"stream": 3}], ids=str)
def test_reorder_in_host_memory(arguments):
    require_refused(*arguments, lambda: nf4.reorder(WEIGHT, **arguments))


def test_a_weight_of_the_other_kind_is_no_out_of_quantize():
    message = "out is of type nf4.int4.Int4Tensor; expected a QuantizedTensor"
    require_refused(message, lambda: nf4.quantize(SOURCE, out=PLAIN))


def test_device_memory_without_a_device():
    info = nf4.device_info(0)
    if info.usable:
        pytest.skip("there is a GPU: addresses that are made up must not reach it")
    weight = nf4.Int4Tensor(
        layout="gptq", shape=(8, 64), group_size=32, packed=4096, scales=8192, scales_dtype="bf16"
    )
    with pytest.raises((nf4.NoCuda, nf4.NoDevice, nf4.UnsupportedDevice)) as caught:
        nf4.dequantize(weight, out=1 << 20)
    assert str(caught.value)
