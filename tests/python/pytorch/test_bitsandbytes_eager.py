"""bitsandbytes' layers and matmul_4bit without bitsandbytes' Python: the same results, and what is
left to it."""

from __future__ import annotations

import copy
import logging
import pickle
import warnings

import pytest
import torch_cases
from torch_cases import ALLOWED, IN, OUT, error, linear4bit

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "bitsandbytes", "_nf4_fast")

import bitsandbytes as bnb  # noqa: E402
import torch  # noqa: E402
from nf4.cli import doctor_bitsandbytes  # noqa: E402
from nf4.torch import _fast  # noqa: E402
from nf4.torch import bitsandbytes as backend  # noqa: E402
from nf4.torch.bitsandbytes import replacements  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

if not _fast.registered:
    pytest.skip("this torch has not what C++ needs", allow_module_level=True)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MatMul4Bit = bnb.autograd._functions.MatMul4Bit


@pytest.fixture
def served():
    yield backend.register()
    backend.unregister()


class Seen(TorchDispatchMode):
    """A mode, which is to see bitsandbytes' operators: calls go its own way."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def layer(dtype="fp32", bias=True, weights=torch.float32, nested=True, **options):
    """Its bias is of this dtype already; `weights` is of what was quantized."""
    made = bnb.nn.Linear4bit(
        IN, OUT, bias=bias, compute_dtype=DTYPES[dtype], compress_statistics=nested,
        **{"quant_type": "nf4"} | options,
    )  # fmt: skip
    made.support_avx512bf16_for_cpu = False
    made.weight.data = torch.randn(OUT, IN).to(weights)
    if bias:
        made.bias.data = torch.randn(OUT).to(DTYPES[dtype])
    return made.to("cpu")


def packed_of(made):
    return made.weight.data, made.weight.quant_state


class Calls(TorchFunctionMode):
    """Counts calls of the operator gemm_4bit by Python, without changing their way."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.bitsandbytes.gemm_4bit.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def calls():
    with Calls() as counted:
        yield counted


def with_gradients(call, x, made, grad_y):
    """y, and the gradients of x and of the layer's bias."""
    x = x.clone().requires_grad_()
    made.zero_grad()
    y = call(x)
    y.backward(grad_y)
    return y.detach(), x.grad, None if made.bias is None else made.bias.grad.clone()


# ---- The same results ------------------------------------------------------------------


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_the_bits_of_the_operators(format, nested, dtype, storage, bias, served, calls):
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
def test_gradients_of_a_weight_of_another_dtype(weights, dtype, served):
    """bitsandbytes rounds the weight to the dtype that it had, and only then to the gradient's."""
    made = layer(dtype, weights=DTYPES[weights])
    x, grad_y = (torch.randn(3, n).to(DTYPES[dtype]) for n in (IN, OUT))
    _, grad_x, grad_bias = with_gradients(made, x, made, grad_y)
    dense = bnb.functional.dequantize_4bit(*packed_of(made))
    assert torch.equal(grad_x, grad_y @ dense.to(grad_y.dtype))
    assert torch.equal(grad_bias, grad_y.sum(0))


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_x_of_another_dtype_than_the_layers(x_dtype, dtype, served, calls):
    made = layer(dtype)
    x = torch.randn(3, IN).to(DTYPES[x_dtype])
    ours = with_gradients(made, x, made, torch.ones(3, OUT, dtype=x.dtype))
    assert calls.count == 0
    with Seen():
        theirs = with_gradients(made, x, made, torch.ones(3, OUT, dtype=x.dtype))
    assert ours[0].dtype == ours[1].dtype == x.dtype
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shape", [(IN,), (0, IN), (3, 0, IN), (1, IN), (2, 1, 3, IN)])
def test_x_of_any_shape(shape, served):
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


def test_hooks_of_saved_tensors_see_no_weight(served):
    """One that offloads activations would copy the weight in each call."""
    made, seen = layer(), []
    with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda each: each):
        made(torch.randn(3, IN, requires_grad=True))
    assert seen == []


# ---- What a layer does beside ---------------------------------------------------------


def both(make, call):
    """What `call` gives of a new layer, with the drop-in off and on."""
    found = []
    for on in (False, True):
        torch.manual_seed(3)
        if on:
            backend.register()
        try:
            found.append(call(make()))
        finally:
            backend.unregister()
    return found


def test_the_bias_is_cast_for_good():
    def call(made):
        y = made(torch.randn(3, IN))
        return y, made.bias.dtype

    for y, dtype in both(lambda: linear4bit(compute_dtype=torch.bfloat16), call):
        assert y.dtype == torch.float32 and dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_compute_dtype_is_chosen_once(dtype, caplog):
    def call(made):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            x = torch.randn(1, IN).to(DTYPES[dtype])
            ys = [made(x), made(x), made(torch.randn(2, IN))]
        said = [record.message for record in caplog.records]
        return [y.dtype for y in ys], made.compute_dtype, made.compute_type_is_set, said

    off, on = both(linear4bit, call)
    assert off == on
    assert len(on[3]) == (dtype == "fp16")


def test_autocast_changes_nothing(served):
    made, x = layer("fp32"), torch.randn(3, IN, requires_grad=True)
    expected = made(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = made(x)
    assert y.dtype == torch.float32 and torch.equal(y, expected)


def test_hooks_and_subclasses_run(served, calls):
    class Doubling(bnb.nn.Linear4bit):
        def forward(self, x):
            return 2 * super().forward(x)

    made, seen = layer(), []
    x = torch.randn(3, IN)
    expected = made(x)
    made.__class__ = Doubling
    made.register_forward_pre_hook(lambda module, arguments: seen.append("before"))
    made.register_forward_hook(lambda module, arguments, y: seen.append("after"))
    assert torch.equal(made(x), 2 * expected) and seen == ["before", "after"]
    assert calls.count == 0


def test_adapters_of_peft():
    peft = pytest.importorskip("peft")

    def call(made):
        config = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
        model = peft.get_peft_model(torch.nn.Sequential(made, torch.nn.ReLU()), config)
        x = torch.randn(2, 5, IN)
        y = model(x)
        y.square().sum().backward()
        grads = [each.grad for each in model.parameters() if each.grad is not None]
        return [y.detach(), *grads]

    off, on = both(layer, call)
    assert len(on) == len(off) == 3
    assert all(error(a, b) <= ALLOWED["fp32"] for a, b in zip(on, off, strict=True))


def test_a_state_that_got_lost_is_taken_from_the_layer(served):
    made, x = layer(), torch.randn(3, IN)
    expected = made(x)
    made.weight = torch.nn.Parameter(made.weight.data, requires_grad=False)
    assert torch.equal(made(x), expected)
    assert type(made.weight) is bnb.nn.Params4bit and made.weight.quant_state is made.quant_state


def test_a_layer_that_is_not_quantized_says_so(caplog):
    def call(made):
        with pytest.raises(Exception) as caught, caplog.at_level(logging.WARNING):
            made(torch.randn(3, IN))
        return type(caught.value), str(caught.value)

    off, on = both(lambda: bnb.nn.Linear4bit(IN, OUT, compute_dtype=torch.float32), call)
    assert off == on


def test_a_weight_is_followed_where_it_goes(served):
    made, other, x = layer(), layer(), torch.randn(3, IN)
    expected = other(x) - other.bias + made.bias
    made(x)
    made.weight.data = other.weight.data.clone()
    made.weight.quant_state.absmax = other.weight.quant_state.absmax.clone()
    made.weight.quant_state.state2.absmax = other.weight.quant_state.state2.absmax
    made.weight.quant_state.offset = other.weight.quant_state.offset
    assert error(made(x), expected) <= ALLOWED["fp32"]
    moved = copy.deepcopy(made).to("cpu")
    assert torch.equal(moved(x), made(x))
    assert b"nf4.torch" not in pickle.dumps(made)


def test_a_parametrized_bias(served):
    made, x = layer(), torch.randn(3, IN)
    expected = made(x) + made.bias

    class Doubled(torch.nn.Module):
        def forward(self, bias):
            return 2 * bias

    torch.nn.utils.parametrize.register_parametrization(made, "bias", Doubled())
    assert error(made(x), expected) <= ALLOWED["fp32"]


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


def test_compiled_as_before(served):
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


# ---- Which functions are known ----------------------------------------------------------


def test_given_back(calls):
    owners = {bnb: "matmul_4bit", bnb.autograd._functions: "matmul_4bit",
              bnb.nn.Linear4bit: "forward", bnb.functional: "dequantize_4bit"}  # fmt: skip
    before = {owner: vars(owner)[name] for owner, name in owners.items()}
    backend.register()
    assert all(vars(owner)[name] is not before[owner] for owner, name in owners.items())
    assert "apply" in vars(MatMul4Bit)
    made, x = layer(), torch.randn(3, IN)
    kept, _ = made.forward, made(x)
    backend.unregister()
    kept(x)
    assert calls.count == 1
    assert all(vars(owner)[name] is before[owner] for owner, name in owners.items())
    assert "apply" not in vars(MatMul4Bit)


@pytest.mark.parametrize(
    "changed, alone",
    [
        ("nn.modules.Linear4bit.forward", {"nn.modules.Linear4bit.forward"}),
        ("autograd._functions.MatMul4Bit.backward", set(replacements.RELIES_ON)
         - {"functional.dequantize_4bit"}),
    ],
)  # fmt: skip
def test_a_function_of_unknown_source_is_left_alone(changed, alone, monkeypatch, calls):
    monkeypatch.setitem(replacements.KNOWN, changed, ())
    monkeypatch.setattr(backend, "_version", lambda: "0.99.0")
    with pytest.warns(UserWarning, match="libnf4 leaves") as caught:
        served = backend.register()
    try:
        assert len(caught) == 1
        assert set(served.left_alone) == alone and alone.isdisjoint(served.functions)
        assert set(served.operators) and "functional.dequantize_4bit" in served.functions
        made, x = layer(), torch.randn(3, IN)
        made(x)
        assert calls.count == (len(alone) > 1)
    finally:
        backend.unregister()
    (line, *_) = served.left_alone.values()
    assert (
        line == f"{changed} is of bitsandbytes 0.99.0, whose source is not that of 0.50.0 to 0.50.2"
    )
    report = {"active": True, "reason": None, **served._asdict()}
    lines = doctor_bitsandbytes.lines(report)
    assert f"nn.modules.Linear4bit.forward left alone: {line}" in lines
