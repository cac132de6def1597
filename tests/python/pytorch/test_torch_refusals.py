"""torch.ops.nf4.*: what they refuse, and in which words."""

from __future__ import annotations

import dataclasses

import nf4
import numpy as np
import pytest
import torch_cases

pytestmark = pytest.mark.interop
torch_cases.require("torch")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
from nf4.torch import _kernels  # noqa: E402
from nf4.torch._weight import PARTS, WeightParts  # noqa: E402

ROWS, COLS = 48, 80
X = torch.zeros(3, COLS)


def weight_of(**layout) -> nf4.QuantizedTensor:
    return nf4.torch.quantize(torch.randn(ROWS, COLS), **layout)


def _with(weight, **parts):
    arguments = list(WeightParts.of(weight).arguments())
    for name, part in parts.items():
        arguments[PARTS.index(name)] = part
    return arguments


FAULTS = {
    "x is of float64; expected fp32, fp16 or bf16": lambda w: (X.double(), None, *_with(w)),
    "x is of shape (3, 40); expected [..., 80]": lambda w: (X[:, ::2], None, *_with(w)),
    "bias is of fp16; expected fp32": lambda w: (X, torch.zeros(ROWS).half(), *_with(w)),
    "bias has 1 elements; expected 48": lambda w: (X, torch.zeros(1), *_with(w)),
    "packed is of int8; expected uint8": lambda w: (
        X, None, *_with(w, packed=w.packed.view(torch.int8)),
    ),
    "packed has 1 elements; expected 1920": lambda w: (X, None, *_with(w, packed=w.packed[:1])),
    "absmax is of fp32; expected uint8": lambda w: (X, None, *_with(w, absmax=w.absmax.float())),
    "nested_absmax is None": lambda w: (X, None, *_with(w, nested_absmax=None)),
    "absmax is not contiguous": lambda w: (
        X, None, *_with(w, absmax=w.absmax.repeat_interleave(2)[::2]),
    ),
    "format is 'int4'; expected": lambda w: (X, None, *_with(w)[:7], "int4", 64, 256),
    "blocksize": lambda w: (X, None, *_with(w)[:7], "nf4", 63, 256),
}  # fmt: skip


@pytest.mark.parametrize("message", FAULTS)
def test_what_is_refused(message, way):
    with pytest.raises(nf4.InvalidArgument) as caught:
        torch.ops.nf4.linear.default(*FAULTS[message](weight_of()))
    assert message in str(caught.value)


@pytest.mark.parametrize("part", ["packed", "absmax"])
def test_a_weight_without_a_part_that_every_weight_has(part, way):
    without = dataclasses.replace(weight_of(), **{part: None})
    for call in (
        lambda: nf4.torch.linear(X, without),
        lambda: nf4.torch.dequantize(without),
        lambda: nf4.torch.NF4Linear.from_quantized(without),
    ):
        with pytest.raises(nf4.InvalidArgument, match=f"^{part} is None; expected a torch tensor"):
            call()


def test_a_tensor_on_another_device_is_named(way):
    weight = weight_of()
    elsewhere = _with(weight, absmax=weight.absmax.to("meta"))
    with pytest.raises(nf4.InvalidArgument, match="absmax is on meta; expected cpu, where x is"):
        _kernels.linear(X, None, WeightParts.of_arguments(*elsewhere))
    with pytest.raises(nf4.InvalidArgument, match="bias is on meta; expected cpu, where x is"):
        _kernels.linear(X, torch.zeros(ROWS, device="meta"), WeightParts.of(weight))


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (X[:, ::2], None, "x is of shape (3, 40); expected [..., 80]"),
        (X, torch.zeros(1), "bias is torch.float32 of shape (1,); expected torch.float32 of (48,)"),
        (X, torch.zeros(ROWS).half(), "bias is torch.float16 of shape (48,); expected torch.floa"),
    ],
)
def test_what_fp32_on_a_gpu_refuses(x, bias, message):
    with pytest.raises(nf4.InvalidArgument) as caught:
        _kernels.dense_linear(x, bias, WeightParts.of(weight_of()))
    assert message in str(caught.value)


def test_a_gradient_that_is_refused():
    arguments = WeightParts.of(weight_of()).arguments()
    with pytest.raises(nf4.InvalidArgument, match="grad_y is of torch.float64; expected float32"):
        torch.ops.nf4.linear_backward.default(torch.zeros(3, ROWS).double(), *arguments)
    elsewhere = _with(weight_of(), packed=arguments[0].to("meta"))
    with pytest.raises(nf4.InvalidArgument, match="packed is on meta; expected cpu, where grad_y"):
        _kernels.linear_grad(torch.zeros(3, ROWS), WeightParts.of_arguments(*elsewhere))


@pytest.mark.parametrize("operator", ["linear", "layer", "dequantize"])
def test_a_weight_that_requires_grad_is_refused(operator):
    weight = weight_of(nested_blocksize=0)
    arguments = _with(weight, absmax=weight.absmax.clone().requires_grad_())
    with pytest.raises(nf4.InvalidArgument, match="absmax requires grad, but 4-bit weights are"):
        if operator == "linear":
            torch.ops.nf4.linear.default(X, None, *arguments)
        elif operator == "layer":
            layer = nf4.torch.NF4Linear.from_quantized(weight)
            layer.absmax.requires_grad_()
            layer(X)
        else:
            torch.ops.nf4.dequantize.default(*arguments, torch.float32)


def test_quantize_of_what_requires_grad_is_refused():
    dense = torch.randn(4, 64, requires_grad=True)
    with pytest.raises(nf4.InvalidArgument, match="weight requires grad"):
        nf4.torch.quantize(dense)
    with torch.no_grad():
        assert nf4.torch.quantize(dense).shape == (4, 64)


NOT_TENSORS = {
    "x is of type numpy.ndarray; expected a torch tensor": lambda layer: layer(X.numpy()),
    "x is of type list; expected a torch tensor": lambda layer: layer([1.0] * COLS),
    "x is of type numpy.ndarray; expected": lambda layer: nf4.torch.linear(
        X.numpy(), layer.quantized
    ),
    "bias is of type numpy.ndarray; expected a torch tensor": lambda layer: nf4.torch.linear(
        X, layer.quantized, np.zeros(ROWS, np.float32)
    ),
    "weight is of type nf4.torch.modules.NF4Linear; expected its .quantized": nf4.torch.dequantize,
    "weight is of type numpy.ndarray; expected a torch tensor": lambda layer: nf4.torch.quantize(
        X.numpy()
    ),
    "codebook is of type list; expected a torch tensor": lambda layer: nf4.torch.quantize(
        X, codebook=[0.0] * 16
    ),
}


@pytest.mark.parametrize("message", NOT_TENSORS)
def test_what_is_no_tensor_is_refused(message):
    with pytest.raises(nf4.InvalidArgument) as caught:
        NOT_TENSORS[message](nf4.torch.NF4Linear.from_quantized(weight_of()))
    assert message in str(caught.value)


def test_a_weight_of_arrays_is_refused():
    weight = nf4.quantize(np.ones((4, 64), np.float32))
    with pytest.raises(
        nf4.InvalidArgument, match="packed is of type numpy.ndarray; expected a torch tensor"
    ):
        nf4.torch.linear(torch.zeros(1, 64), weight)
    with pytest.raises(
        nf4.InvalidArgument, match="weight is of type torch.Tensor; expected a Quan"
    ):
        nf4.torch.linear(torch.zeros(1, 64), torch.zeros(4, 64))


def linear_of(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(COLS, ROWS)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    return linear


DENSE, INTEGERS = torch.zeros(ROWS, COLS), torch.zeros(ROWS, COLS, dtype=torch.int64)
LAYER = nf4.torch.NF4Linear
ARGUMENTS = {
    "in_features is 'a'; expected an integer": lambda: LAYER("a", "b"),
    "out_features is 'b'; expected an integer": lambda: LAYER(64, "b"),
    "in_features is -1; expected 0 or more": lambda: LAYER(-1, 3),
    "out_features is 3.0; expected an integer": lambda: LAYER(64, 3.0),
    "bias is of type torch.Tensor; expected True or False": lambda: LAYER(64, 3, torch.zeros(3)),
    "blocksize is '64'; expected an integer": lambda: LAYER(64, 3, blocksize="64"),
    "compute_dtype is 'int8'; expected": lambda: LAYER(64, 3, compute_dtype="int8"),
    "dtype is torch.float64; expected": lambda: LAYER(64, 3, dtype=torch.float64),
    "dtype is 3; expected": lambda: LAYER(64, 3, dtype=3),
    "device is 'gpu'; expected a torch device: ": lambda: LAYER(64, 3, device="gpu"),
    "device is 1.5; expected a torch device: ": lambda: LAYER(64, 3, device=1.5),
    "linear.weight is of torch.int64; expected float32": lambda: LAYER.from_linear(
        linear_of(INTEGERS)
    ),
    "linear.weight is of layout torch.sparse_coo; expected": lambda: LAYER.from_linear(
        linear_of(DENSE.to_sparse())
    ),
    "linear is None; expected a torch.nn.Linear, whose weight is dense: from_bitsandb": lambda: (
        LAYER.from_linear(None)
    ),
    "format is None; expected": lambda: LAYER.from_linear(linear_of(DENSE), format=None),
    "nested_blocksize is 2.5; expected an": lambda: LAYER.from_linear(
        linear_of(DENSE), nested_blocksize=2.5
    ),
    "compute_dtype is [0]; expected": lambda: LAYER.from_linear(
        linear_of(DENSE), compute_dtype=[0]
    ),
    "weight is None; expected a QuantizedTensor": lambda: LAYER.from_quantized(None),
    "weight is of type nf4.torch.modules.NF4Linear; expected its .quantized": lambda: (
        LAYER.from_quantized(LAYER(64, 3))
    ),
    "bias is of type int; expected a torch.nn.Parameter": lambda: LAYER.from_quantized(
        weight_of(), 3
    ),
    "layer is None; expected a Linear4bit": lambda: LAYER.from_bitsandbytes(None),
    "layer is of type torch.nn.modules.linear.Linear without a quant_state; expected": lambda: (
        LAYER.from_bitsandbytes(torch.nn.Linear(64, 3))
    ),
    "dtype is 'f8'; expected": lambda: LAYER(64, 3).to_linear("f8"),
    "model is None; expected a torch.nn.Module": lambda: nf4.torch.convert(None),
    "model is of type int; expected a torch.nn.Module": lambda: nf4.torch.to_dense(3),
    "dtype is 3; expected ": lambda: nf4.torch.to_dense(torch.nn.Sequential(), 3),
    "weight is of torch.int64; expected": lambda: nf4.torch.quantize(INTEGERS),
    "weight is of layout torch.sparse_coo": lambda: nf4.torch.quantize(DENSE.to_sparse()),
    "codebook is on meta; expected cpu, where weight is": lambda: nf4.torch.quantize(
        DENSE, codebook=torch.zeros(16, device="meta")
    ),
    "format is 4; expected": lambda: nf4.torch.quantize(DENSE, format=4),
    "blocksize is 64.5; expected an integer": lambda: nf4.torch.quantize(DENSE, blocksize=64.5),
    "x is of layout torch.sparse_coo": lambda: nf4.torch.linear(X.to_sparse(), weight_of()),
    "x is of layout torch.sparse_csr": lambda: LAYER(COLS, 3)(X.to_sparse_csr()),
    "W is None; expected a torch tensor": lambda: nf4.torch.unsloth_fast_dequantize(None, 3),
    "quant_state is of type int; expected a QuantState of bitsandbytes": lambda: (
        nf4.torch.unsloth_fast_dequantize(X, 3)
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("message", ARGUMENTS)
def test_the_callers_argument_is_named(message):
    with pytest.raises(nf4.InvalidArgument) as caught:
        ARGUMENTS[message]()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", ["dequantize", "matmul"])
def test_the_core_says_where_a_layer_has_its_weight(name):
    layer = LAYER.from_quantized(weight_of())
    call = {"dequantize": lambda: nf4.dequantize(layer), "matmul": lambda: nf4.matmul(X, layer)}
    with pytest.raises(nf4.InvalidArgument, match="is of type .*NF4Linear; expected its .quant"):
        call[name]()


def test_features_and_dtypes_of_other_kinds_are_taken():
    layer = LAYER(np.int64(64), 3, None, dtype="bf16", compute_dtype=np.float16)
    assert (layer.in_features, layer.out_features, layer.bias) == (64, 3, None)
    assert (layer.dtype_before, layer.compute_dtype) == ("bf16", torch.float16)
    assert LAYER(64, 3, device=torch.device("meta")).weight.is_meta
