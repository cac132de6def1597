"""What torch's dispatcher sees to before a kernel of nf4.torch has plain memory before it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import nf4
import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
from nf4.torch import _operators  # noqa: E402
from nf4.torch._weight import PARTS, WeightParts  # noqa: E402
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vmap  # noqa: E402

ROWS, COLS = 6, 80


def weight_of():
    return nf4.torch.quantize(torch.randn(ROWS, COLS))


def linear(x, bias, *weight):
    """What layers call, with an operator's arguments."""
    return _operators.linear(x, bias, WeightParts.of_arguments(*weight))


class Wrapped(torch.Tensor):
    """A subclass without memory of its own, as DTensor is."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=held.device, strides=held.stride()
        )

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        args = [each.held if isinstance(each, cls) else each for each in args]
        made = function(*args, **(kwargs or {}))
        return cls(made) if function is torch.ops.aten.detach.default else made


@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("call", [torch.ops.nf4.linear, linear])
def test_a_part_of_a_subclass_gets_the_operators(part, call, way):
    weight = list(WeightParts.of(weight_of()).arguments())
    x = torch.randn(2, COLS, requires_grad=True)
    (expected,) = torch.autograd.grad(call(x, None, *weight).sum(), x)
    Wrapped.seen.clear()
    weight[part] = Wrapped(weight[part])
    (grad,) = torch.autograd.grad(call(x, None, *weight).sum(), x)
    assert torch.equal(grad, expected)
    assert {"nf4._linear.default", "nf4._linear_grad.default"} <= set(Wrapped.seen)


@pytest.mark.parametrize("call", [torch.ops.nf4.linear, linear])
def test_a_bias_of_a_subclass_gets_the_operators(call, way):
    weight = WeightParts.of(weight_of()).arguments()
    x, bias = torch.randn(2, COLS, requires_grad=True), torch.randn(ROWS)
    Wrapped.seen.clear()
    assert torch.equal(call(x, Wrapped(bias), *weight), call(x, bias, *weight))
    assert "nf4._linear.default" in Wrapped.seen


def test_zeros_that_torch_has_not_made_yet(way):
    weight, zeros = weight_of(), torch._efficientzerotensor(2, COLS)
    bias = torch.randn(ROWS, requires_grad=True)
    assert torch.equal(nf4.torch.linear(zeros, weight, bias), bias.expand(2, ROWS))
    no_bias = torch._efficientzerotensor(ROWS)
    x = torch.randn(2, COLS)
    assert torch.equal(nf4.torch.linear(x, weight, no_bias), nf4.torch.linear(x, weight))
    back = torch.ops.nf4.linear_backward(
        torch._efficientzerotensor(2, ROWS), *WeightParts.of(weight).arguments()
    )
    assert torch.equal(back + 0.0, torch.zeros(2, COLS))


@pytest.mark.parametrize("grad", [False, True])
def test_a_part_that_is_negated_lazily(grad):
    weight = list(WeightParts.of(weight_of()).arguments())
    x = torch.randn(2, COLS, requires_grad=grad)
    expected = torch.ops.nf4.linear(x, None, *weight)
    negated = [*weight[:4], torch._neg_view(-weight[4]), *weight[5:]]
    y = torch.ops.nf4.linear(x, None, *negated)
    assert torch.equal(y, expected)
    if grad:
        assert torch.equal(*(torch.autograd.grad(each.sum(), x)[0] for each in (y, expected)))
    back = torch.ops.nf4.linear_backward
    assert torch.equal(back(y.detach(), *negated), back(y.detach(), *weight))


@pytest.mark.parametrize("part", PARTS[1:5])
@pytest.mark.parametrize("nested_blocksize", [0, 256])
def test_a_weight_with_a_part_that_is_negated_lazily(part, nested_blocksize, way):
    weight = nf4.torch.quantize(torch.randn(ROWS, COLS), nested_blocksize=nested_blocksize)
    given = getattr(weight, part)
    if given is None:
        pytest.skip("a flat weight has none")
    negated = dataclasses.replace(weight, **{part: torch._neg_view(-given)})
    x, dense = torch.randn(2, COLS), nf4.torch.dequantize(weight)
    expected = nf4.torch.linear(x, weight)
    assert torch.equal(nf4.torch.linear(x, negated), expected)
    assert torch.equal(nf4.torch.dequantize(negated), dense)
    layer = nf4.torch.NF4Linear.from_quantized(negated)
    assert torch.equal(layer(x), expected) and torch.equal(layer.dequantize(), dense)


def test_a_compiled_graph_gets_a_part_that_is_negated_lazily():
    weight, x = weight_of(), torch.randn(2, COLS)

    def run(x, part):
        negated = dataclasses.replace(weight, nested_absmax=torch._neg_view(part))
        return nf4.torch.linear(x, negated), nf4.torch.dequantize(negated)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected = nf4.torch.linear(x, weight), nf4.torch.dequantize(weight)
    for run_as in (run, compiled):
        found = run_as(x, -weight.nested_absmax)
        assert all(map(torch.equal, found, expected))


class Counted(torch.Tensor):
    """A subclass with memory, which handles torch's functions itself."""

    seen: ClassVar[list[object]] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs)


@pytest.mark.parametrize("name", ["bias", *PARTS[:5]])
def test_a_subclass_with_memory_handles_the_operators(name, way):
    weight, x, bias = weight_of(), torch.randn(2, COLS), torch.randn(ROWS)
    expected, dense = nf4.torch.linear(x, weight, bias), nf4.torch.dequantize(weight)
    if name == "bias":
        bias = bias.as_subclass(Counted)
    else:
        weight = dataclasses.replace(weight, **{name: getattr(weight, name).as_subclass(Counted)})
    Counted.seen.clear()
    assert torch.equal(nf4.torch.linear(x, weight, bias), expected)
    assert {torch.ops.nf4.linear, torch.ops.nf4._linear.default} & set(Counted.seen)
    Counted.seen.clear()
    assert torch.equal(nf4.torch.dequantize(weight), dense)
    assert (torch.ops.nf4.dequantize.default in Counted.seen) == (name != "bias")


def test_gradients_on_meta():
    weight = [
        part.to("meta") if isinstance(part, torch.Tensor) else part
        for part in WeightParts.of(weight_of()).arguments()
    ]
    x = torch.empty(2, COLS, device="meta", requires_grad=True)
    torch.ops.nf4.linear(x, None, *weight).sum().backward()
    assert x.grad.is_meta and x.grad.shape == x.shape


# ---- torch.func ------------------------------------------------------------------------


def _cubed(multiply):
    return lambda x: multiply(x).pow(3).sum()


def _gradient_twice(multiply):
    return grad(lambda x: grad(_cubed(multiply))(x).square().sum())


TRANSFORMS = {
    "grad": lambda multiply: grad(_cubed(multiply)),
    "grad of grad": _gradient_twice,
    "vmap of grad": lambda multiply: vmap(grad(_cubed(multiply))),
    "grad of vmap": lambda multiply: grad(_cubed(vmap(multiply))),
    "vmap of grad of grad": lambda multiply: vmap(_gradient_twice(multiply)),
    "jacrev of jacrev": lambda multiply: jacrev(jacrev(_cubed(multiply))),
    "functionalize": lambda multiply: functionalize(grad(_cubed(multiply))),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_functions(transform, way):
    weight, x = weight_of(), torch.randn(3, COLS)
    dense = nf4.torch.dequantize(weight)
    found = transform(lambda x: nf4.torch.linear(x, weight))(x)
    expected = transform(lambda x: torch.nn.functional.linear(x, dense))(x)
    assert expected.abs().max() > 0
    assert torch_cases.error(found, expected) <= 1e-5


def test_transforms_inside_of_autograd():
    weight, x = weight_of(), torch.randn(3, COLS, requires_grad=True)
    dense = nf4.torch.dequantize(weight)
    found, expected = (
        torch.autograd.grad(grad(_cubed(multiply))(x).square().sum(), x)[0]
        for multiply in (
            lambda x: nf4.torch.linear(x, weight),
            lambda x: torch.nn.functional.linear(x, dense),
        )
    )
    assert torch_cases.error(found, expected) <= 1e-5


def _without_grad(multiply):
    """Of x, the sum of its products with what torch.no_grad() makes a constant."""

    def constant_times(x):
        with torch.no_grad():
            constant = multiply(x)
        return (constant * x[..., :ROWS]).sum()

    return constant_times


def _derivative_without_grad(multiply):
    """The same, where the constant is made inside of a derivative by something else."""

    def derivative(x):
        def product(other):
            with torch.no_grad():
                constant = multiply(x)
            return (constant * other).sum()

        ones = torch.ones(*x.shape[:-1], ROWS)
        return jvp(product, (ones,), (ones,))[1] + x.sum()

    return derivative


NO_GRAD = {
    "grad": lambda multiply: grad(_without_grad(multiply)),
    "grad of grad": lambda multiply: grad(lambda x: grad(_without_grad(multiply))(x).sum()),
    "grad of jvp": lambda multiply: grad(_derivative_without_grad(multiply)),
}


@pytest.mark.parametrize("transform", NO_GRAD.values(), ids=NO_GRAD)
def test_no_grad_holds_for_all_transforms_around_it(transform, way):
    weight, x = weight_of(), torch.randn(3, COLS, requires_grad=True)
    dense = nf4.torch.dequantize(weight)
    found = transform(lambda x: nf4.torch.linear(x, weight))(x)
    expected = transform(lambda x: torch.nn.functional.linear(x, dense))(x)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transform", [jacfwd, hessian])
def test_forward_mode_around_gradients_is_refused(transform):
    """Rather than that a derivative is taken for zero."""
    weight = weight_of()
    with pytest.raises(NotImplementedError, match="jvp"):
        transform(_cubed(lambda x: nf4.torch.linear(x, weight)))(torch.randn(COLS))
