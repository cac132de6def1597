"""bitsandbytes' layers and matmul_4bit without bitsandbytes' Python: the same results, and what is
left to it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch_cases
from torch_cases import ALLOWED, IN, OUT, error

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "bitsandbytes", "_nf4_fast")

import bitsandbytes as bnb  # noqa: E402
import torch  # noqa: E402
from bitsandbytes_cases import (  # noqa: E402
    DTYPES,
    Seen,
    both,
    layer,
    packed_of,
    with_gradients,
)
from nf4.torch import _fast  # noqa: E402
from nf4.torch import bitsandbytes as backend  # noqa: E402
from nf4.torch._weight import Spec  # noqa: E402
from nf4.torch.bitsandbytes import eager  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

if not _fast.registered:
    pytest.skip("this torch has not what C++ needs", allow_module_level=True)

MatMul4Bit = bnb.autograd._functions.MatMul4Bit


# ---- The same results ------------------------------------------------------------------


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_the_bits_of_the_operators(
    format, nested, dtype, storage, bias, served, calls, dense_gradients
):
    made = layer(
        dtype, bias, weights=DTYPES[dtype], nested=nested, quant_type=format, quant_storage=storage
    )
    x, grad_y = (torch.randn(2, 5, n).to(DTYPES[dtype]) for n in (IN, OUT))
    with torch.no_grad():
        alone = made(x)
    ours = with_gradients(made, x, made, grad_y)
    assert calls.count == 0
    with Seen():
        theirs = with_gradients(made, x, made, grad_y)
    assert calls.count == 1
    assert torch.equal(alone, theirs[0]) and alone.dtype == DTYPES[dtype]
    assert all(a is b or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    backend.unregister()
    off = with_gradients(made, x, made, grad_y)
    for found, expected in zip(ours, off, strict=True):
        assert found is expected or error(found, expected) <= 2 * ALLOWED[dtype]


@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_weight_of_another_dtype(weights, dtype, served, dense_gradients):
    """bitsandbytes rounds the weight to the dtype that it had, and only then to the gradient's."""
    made = layer(dtype, weights=DTYPES[weights])
    x, grad_y = (torch.randn(3, n).to(DTYPES[dtype]) for n in (IN, OUT))
    _, grad_x, grad_bias = with_gradients(made, x, made, grad_y)
    dense = bnb.functional.dequantize_4bit(*packed_of(made))
    assert torch.equal(grad_x, grad_y @ dense.to(grad_y.dtype))
    assert torch.equal(grad_bias, grad_y.sum(0))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_that_need_no_dense_weight(nested, dtype, served, monkeypatch):
    made = layer(dtype, weights=DTYPES[dtype], nested=nested)
    x, grad_y = (torch.randn(2, 5, n).to(DTYPES[dtype]) for n in (IN, OUT))
    dense = bnb.functional.dequantize_4bit(*packed_of(made)).double()
    monkeypatch.setattr(_fast, "dequantize", None)
    _, grad_x, grad_bias = with_gradients(made, x, made, grad_y)
    assert error(grad_x, grad_y.double() @ dense) <= 2 * ALLOWED[dtype]
    assert torch.equal(grad_bias, grad_y.sum(0).sum(0))
    assert torch.equal(with_gradients(made, x, made, grad_y)[1], grad_x)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_x_of_another_dtype_than_the_layers(x_dtype, dtype, served, calls, dense_gradients):
    made = layer(dtype)
    x = torch.randn(3, IN).to(DTYPES[x_dtype])
    ours = with_gradients(made, x, made, torch.ones(3, OUT, dtype=x.dtype))
    assert calls.count == 0
    with Seen():
        theirs = with_gradients(made, x, made, torch.ones(3, OUT, dtype=x.dtype))
    assert ours[0].dtype == ours[1].dtype == x.dtype
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shape", [(IN,), (0, IN), (3, 0, IN), (1, IN), (2, 1, 3, IN)])
def test_x_of_any_shape(shape, served, dense_gradients):
    made = layer()
    x = torch.randn(shape)
    found, grad_x = [], []
    for mode in (None, Seen()):
        leaf = x.clone().requires_grad_()
        made.bias.requires_grad_(len(shape) > 1)  # bitsandbytes' own cannot sum over nothing
        if mode:
            with mode:
                y = made(leaf)
        else:
            y = made(leaf)
        y.sum().backward()
        found.append(y.detach())
        grad_x.append(leaf.grad)
    assert found[0].shape == (*shape[:-1], OUT) and torch.equal(*found)
    assert torch.equal(*grad_x)


def test_rows_of_x_with_gaps(served, calls):
    made, wide = layer(), torch.randn(4, 3 * IN)
    x = wide[:, IN : 2 * IN]
    assert torch.equal(made(x), made(x.contiguous())) and calls.count == 0
    made(x.T.contiguous().T)  # the general way takes these strides
    assert calls.count == 1


@pytest.mark.parametrize("orientation", [lambda packed: packed, lambda packed: packed.t()])
@pytest.mark.parametrize("grad", [False, True])
def test_matmul_4bit_and_its_function(orientation, grad, served, calls):
    made = layer()
    packed, state = packed_of(made)
    x = torch.randn(3, IN, requires_grad=grad)
    y = bnb.matmul_4bit(x, orientation(packed), state, bias=made.bias)
    by_function = MatMul4Bit.apply(x, orientation(packed), None, made.bias, state)
    assert calls.count == 0
    assert torch.equal(y, by_function) and torch.equal(y, made(x))
    assert y.grad_fn.name() == "MatMul4BitBackward"
    assert bnb.autograd._functions.matmul_4bit is bnb.matmul_4bit


def test_a_packed_weight_that_requires_grad():
    """y requires grad by it, though there is no gradient of a weight."""

    def call(made):
        packed = made.weight.requires_grad_()
        x, state = torch.randn(3, IN).bfloat16(), packed.quant_state
        by_function = MatMul4Bit.apply(x, packed, None, None, state)
        return [y.requires_grad for y in (by_function, bnb.matmul_4bit(x, packed, state), made(x))]

    off, on = both(lambda: layer("bf16", bias=False, quant_storage=torch.bfloat16), call)
    assert on == off == [True] * 3


def test_a_function_of_the_functions_own_is_called(served):
    class Doubled(MatMul4Bit):
        @staticmethod
        def forward(ctx, *arguments):
            return 2 * MatMul4Bit.forward(ctx, *arguments)

    made, x = layer(bias=False), torch.randn(3, IN)
    packed, state = packed_of(made)
    assert torch.equal(Doubled.apply(x, packed, None, None, state), 2 * made(x))


def test_gradients_of_gradients(served):
    made = layer("fp32", bias=False)
    x, grad_y = torch.randn(3, IN, requires_grad=True), torch.randn(3, OUT, requires_grad=True)
    (grad_x,) = torch.autograd.grad(made(x), x, grad_y, create_graph=True)
    v = torch.randn(3, IN)
    (found,) = torch.autograd.grad(grad_x, grad_y, v)
    assert error(found, made(v)) <= ALLOWED["fp32"]
    rows = torch.autograd.grad(made(x), x, torch.eye(OUT)[:, None].expand(-1, 3, -1),
                               is_grads_batched=True)[0]  # fmt: skip
    assert error(rows[:, 0], bnb.functional.dequantize_4bit(*packed_of(made))) <= ALLOWED["fp32"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant, served):
    made, x, grad_y = layer(), torch.randn(3, IN), torch.randn(3, OUT)
    plain = with_gradients(made, x, made, grad_y)
    again = with_gradients(lambda x: checkpoint(made, x, use_reentrant=reentrant), x, made, grad_y)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("after", ["another weight", "released"])
def test_the_backward_pass_has_the_weight_of_the_forward_pass(storage, after, served):
    """A model whose weights are swapped or offloaded in between, as bitsandbytes allows it."""
    made, x, grad_y = layer(quant_storage=storage), torch.randn(3, IN), torch.randn(3, OUT)
    expected = with_gradients(made, x, made, grad_y)
    other = torch.zeros_like(made.weight.data) if after == "another weight" else torch.empty(0)

    def call(x):
        y = made(x)
        made.weight.data = other.to(storage)
        return y

    found = with_gradients(call, x, made, grad_y)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_hooks_of_saved_tensors_see_no_weight(served):
    """One that offloads activations would copy the weight in each call."""
    made, seen = layer(), []
    with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda each: each):
        made(torch.randn(3, IN, requires_grad=True))
    assert seen == []


# ---- What is left to bitsandbytes -------------------------------------------------------


def test_an_out_of_the_callers(served, calls):
    made, x = layer(), torch.randn(3, IN)
    out = torch.empty(3, OUT)
    with torch.no_grad():
        assert bnb.matmul_4bit(x, *packed_of(made), out=out, bias=made.bias) is out
    assert torch.equal(out, made(x)) and calls.count == 1


def test_a_weight_of_the_other_orientation_and_faults():
    wide = layer()
    packed, state = packed_of(wide)
    faults = {
        "orientation": lambda: bnb.matmul_4bit(torch.randn(3, OUT), packed, state),
        "cols": lambda: bnb.matmul_4bit(torch.randn(3, IN + 1), packed, state),
        "no state": lambda: bnb.matmul_4bit(torch.randn(3, IN), packed, None),
        "three dimensions": lambda: bnb.matmul_4bit(torch.randn(3, IN), packed, changed("shape")),
        "nested blocksize": lambda: bnb.matmul_4bit(torch.randn(3, IN), packed, changed("nested")),
    }

    def changed(what):
        made = copy.deepcopy(state)
        if what == "shape":
            made.shape = torch.Size((1, OUT, IN))
        else:
            made.state2.blocksize = 128
        return made

    def outcome(call):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                return call().shape, [each.category for each in caught]
            except (ValueError, NotImplementedError, RuntimeError) as error:
                return type(error).__mro__[-3]

    for name, call in faults.items():
        off, on = both(lambda: None, lambda _, call=call: outcome(call))
        assert off == on, name


@pytest.mark.parametrize("shape", [[OUT, IN], (OUT, IN)])
def test_a_shape_of_another_type(shape, served):
    made, x = layer(), torch.randn(3, IN)
    expected = made(x)
    made.weight.quant_state.shape = shape
    assert torch.equal(made(x), expected)


# ---- What is read of a state ------------------------------------------------------------


def parts(packed, state):
    return _fast.state_parts(packed, state, eager._spec)


@pytest.mark.parametrize("nested", [False, True])
def test_the_parts_of_a_state(nested):
    packed, state = packed_of(layer(nested=nested))
    outer = state.state2
    scales = (outer.absmax, outer.code, state.offset) if nested else (None, None, None)
    *tensors, spec = parts(packed, state)
    expected = [packed, state.absmax, *scales, None]
    assert all(found is each for found, each in zip(tensors, expected, strict=True))
    assert spec == Spec.of((OUT, IN), "nf4", 64, 256 if nested else 0)
    state.packing_format_for_cpu = False
    assert parts(packed, state) is not None


LEFT = {
    **{
        f"no {name}": lambda state, name=name: vars(state).pop(name)
        for name in ("absmax", "shape", "blocksize", "quant_type", "state2", "offset")
    },
    **{
        f"no {name} of scales": lambda state, name=name: vars(state.state2).pop(name)
        for name in ("absmax", "code", "blocksize")
    },
    "repacked": lambda state: setattr(state, "packing_format_for_cpu", True),
    "a list": lambda state: setattr(state, "shape", [OUT, IN]),
    "no dimensions": lambda state: setattr(state, "shape", None),
    "three dimensions": lambda state: setattr(state, "shape", (1, OUT, IN)),
    "another format": lambda state: setattr(state, "quant_type", "int8"),
    "another blocksize of scales": lambda state: setattr(state.state2, "blocksize", 128),
}


@pytest.mark.parametrize("change", LEFT.values(), ids=LEFT)
def test_a_state_without_what_is_read(change):
    packed, state = packed_of(layer())
    change(state)
    assert parts(packed, state) is None


def test_other_exceptions_are_raised():
    packed, state = packed_of(layer())

    def raises(error):
        def spec_of(*_):
            raise error

        return spec_of

    assert _fast.state_parts(packed, state, raises(KeyError())) is None
    with pytest.raises(ZeroDivisionError):
        _fast.state_parts(packed, state, raises(ZeroDivisionError()))
    state.state2 = 1
    with pytest.raises(AttributeError):
        parts(packed, state)


# ---- Under transforms and torch.compile ------------------------------------------------


def test_derivatives_in_forward_mode_are_as_they_were():
    def call(made):
        x = torch.randn(3, IN)
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(made(forward_ad.make_dual(x, x))).tangent

    off, on = both(lambda: layer(bias=False), call)
    assert error(on, off) <= ALLOWED["fp32"]


def test_under_vmap_as_it_was():
    def call(made):
        try:
            return torch.func.vmap(made)(torch.randn(4, 3, IN)).shape
        except RuntimeError as error:
            return str(error)[:40]

    off, on = both(layer, call)
    assert off == on


def test_compiled_as_before(served, dense_gradients):
    torch._dynamo.reset()
    made, packed_state = layer(), None
    packed_state = packed_of(made)
    x = torch.randn(3, IN, requires_grad=True)
    calls = [
        made,
        lambda x: bnb.matmul_4bit(x, *packed_state, bias=made.bias),
        lambda x: MatMul4Bit.apply(x, packed_state[0], None, made.bias, packed_state[1]),
    ]
    for call in calls:
        graphs = []

        def kept(graph, _inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(call, fullgraph=True, backend=kept)
        assert error(compiled(x), made(x)) <= ALLOWED["fp32"]
        assert len(graphs) == 1
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        (found,) = torch.autograd.grad(compiled(x).sum(), x)
        (expected,) = torch.autograd.grad(made(x).sum(), x)
        assert torch.equal(found, expected)
