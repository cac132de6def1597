"""torch.ops.nf4.*: what they refuse, and in which words."""

from __future__ import annotations

import nf4
import numpy as np
import pytest
import torch_cases

pytestmark = pytest.mark.interop
torch_cases.require("torch")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
from nf4.torch import _kernels, functional  # noqa: E402

ROWS, COLS = 48, 80
X = torch.zeros(3, COLS)


def weight_of(**layout) -> nf4.QuantizedTensor:
    return nf4.torch.quantize(torch.randn(ROWS, COLS), **layout)


def _with(weight, **parts):
    arguments = list(functional.arguments(weight))
    for name, part in parts.items():
        arguments[_kernels.PARTS.index(name)] = part
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


def test_a_tensor_on_another_device_is_named(way):
    weight = weight_of()
    elsewhere = _with(weight, absmax=weight.absmax.to("meta"))
    with pytest.raises(nf4.InvalidArgument, match="absmax is on meta; expected cpu, where x is"):
        _kernels.linear(X, None, *elsewhere)
    with pytest.raises(nf4.InvalidArgument, match="bias is on meta; expected cpu, where x is"):
        _kernels.linear(X, torch.zeros(ROWS, device="meta"), *_with(weight))


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
        _kernels.dense_linear(x, bias, *functional.arguments(weight_of()))
    assert message in str(caught.value)


def test_a_gradient_that_is_refused():
    arguments = functional.arguments(weight_of())
    with pytest.raises(nf4.InvalidArgument, match="grad_y is of torch.float64; expected float32"):
        torch.ops.nf4.linear_backward.default(torch.zeros(3, ROWS).double(), *arguments)
    elsewhere = _with(weight_of(), packed=arguments[0].to("meta"))
    with pytest.raises(nf4.InvalidArgument, match="packed is on meta; expected cpu, where grad_y"):
        _kernels.linear_backward(torch.zeros(3, ROWS), *elsewhere)


@pytest.mark.parametrize("operator", ["linear", "layer", "dequantize"])
def test_a_weight_that_requires_grad_is_refused(operator):
    weight = weight_of(nested_blocksize=0)
    arguments = _with(weight, absmax=weight.absmax.clone().requires_grad_())
    with pytest.raises(nf4.InvalidArgument, match="absmax requires grad, and 4-bit weights are"):
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
    "x is a ndarray; expected a torch tensor": lambda layer: layer(X.numpy()),
    "x is a list; expected a torch tensor": lambda layer: layer([1.0] * COLS),
    "x is a ndarray; expected": lambda layer: nf4.torch.linear(X.numpy(), layer.quantized),
    "bias is a ndarray; expected a torch tensor": lambda layer: nf4.torch.linear(
        X, layer.quantized, np.zeros(ROWS, np.float32)
    ),
    "weight is a NF4Linear; expected its .quantized": nf4.torch.dequantize,
    "weight is a ndarray; expected a torch tensor": lambda layer: nf4.torch.quantize(X.numpy()),
    "codebook is a list; expected a torch tensor": lambda layer: nf4.torch.quantize(
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
    with pytest.raises(nf4.InvalidArgument, match="packed is a ndarray; expected a torch tensor"):
        nf4.torch.linear(torch.zeros(1, 64), weight)
    with pytest.raises(nf4.InvalidArgument, match="weight is a Tensor; expected a QuantizedTensor"):
        nf4.torch.linear(torch.zeros(1, 64), torch.zeros(4, 64))
