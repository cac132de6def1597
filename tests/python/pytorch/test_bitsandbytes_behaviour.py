"""What users of bitsandbytes' 4-bit functions and layers rely on, on the CPU: each test runs with
libnf4 behind them and without."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch_cases
from torch_cases import error

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "drop_in")]
torch_cases.require("torch", "bitsandbytes")

import bitsandbytes as bnb  # noqa: E402
import torch  # noqa: E402
from nf4.torch import bitsandbytes as backend  # noqa: E402

IN, OUT = 128, 96
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMATS = ("nf4", "fp4")
functional = bnb.functional


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "served"])
def drop_in(request):
    backend.unregister()
    if request.param:
        backend.register()
    yield request.param
    backend.unregister()


@pytest.fixture(params=FORMATS)
def format(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["flat", "nested"])
def nested(request):
    return request.param


def layer(format="nf4", nested=True, dtype=torch.float32, bias=True, **options):
    """Quantized from a layer of torch, which comes with it."""
    dense = torch.nn.Linear(IN, OUT, bias=bias, dtype=dtype)
    made = bnb.nn.Linear4bit(
        IN, OUT, bias=bias, quant_type=format, compress_statistics=nested,
        **{"compute_dtype": dtype} | options,
    )  # fmt: skip
    made.load_state_dict(dense.state_dict())
    return made.to("cpu"), dense


def dense_of(made):
    """Its weight in float64, by bitsandbytes' definition: code times scale."""
    state = made.weight.quant_state
    absmax = state.absmax
    if state.nested:
        absmax = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    packed = made.weight.data.contiguous().view(torch.uint8).view(-1)
    codes = torch.stack((packed >> 4, packed & 15), 1).view(-1)
    values = state.code[codes.long()] * absmax.repeat_interleave(state.blocksize)
    return values.view(state.shape).double()


# ---- quantize_4bit, dequantize_4bit ------------------------------------------------------

# The mean of |w - w'| over that of |w|, of normal weights in blocks of 64; more in larger ones.
MOST_ERROR = {"nf4": 0.1, "fp4": 0.14}


@pytest.mark.parametrize(
    ("blocksize", "dtype"), [(64, DTYPES[0]), (64, DTYPES[1]), (128, DTYPES[2]), (512, DTYPES[2])]
)
def test_there_and_back(format, nested, dtype, blocksize):
    # Of rows that are shorter than a block bitsandbytes' own CPU kernel reads the wrong scales.
    w = torch.randn(16, 4096, dtype=dtype)
    options = {"blocksize": blocksize, "quant_type": format, "compress_statistics": nested}
    packed, state = functional.quantize_4bit(w, **options)
    assert packed.dtype == torch.uint8 and packed.shape == (16 * 4096 // 2, 1)
    assert state.dtype == dtype and state.shape == w.shape and state.nested == nested
    back = functional.dequantize_4bit(packed, state)
    assert back.dtype == dtype and back.shape == w.shape
    off = (back.float() - w.float()).abs().mean() / w.float().abs().mean()
    assert off < MOST_ERROR[format] * (1 + 0.12 * (blocksize // 64).bit_length())


def test_the_short_names(nested):
    w = torch.randn(64, 64)
    for name in FORMATS:
        quantize = getattr(functional, f"quantize_{name}")
        packed, state = quantize(w, compress_statistics=nested)
        back = getattr(functional, f"dequantize_{name}")(packed, state)
        assert torch.equal(back, functional.dequantize_4bit(packed, state, quant_type=name))
        assert state.quant_type == name


def test_into_tensors_of_the_callers(format, nested, drop_in):
    if not drop_in:
        pytest.skip("bitsandbytes has no such operator on the CPU")
    w = torch.randn(64, 64)
    packed, state = functional.quantize_4bit(w, quant_type=format, compress_statistics=nested)
    out = torch.empty_like(w)
    assert functional.dequantize_4bit(packed, state, out=out) is out
    assert torch.equal(out, functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_packed_bytes_of_another_dtype(format, nested, storage):
    w = torch.randn(64, 128)
    options = {"quant_type": format, "compress_statistics": nested}
    packed, state = functional.quantize_4bit(w, quant_storage=storage, **options)
    assert packed.dtype == storage and packed.numel() * packed.itemsize == w.numel() // 2
    plain, plain_state = functional.quantize_4bit(w, **options)
    expected = functional.dequantize_4bit(plain, plain_state)
    assert torch.equal(functional.dequantize_4bit(packed, state), expected)


def test_zeros_stay_zeros(format, nested):
    w = torch.zeros(64, 64)
    packed, state = functional.quantize_4bit(w, quant_type=format, compress_statistics=nested)
    assert functional.dequantize_4bit(packed, state).abs().max() == 0


def test_the_state_as_a_dict_and_back(format, nested):
    w = torch.randn(64, 128, dtype=torch.bfloat16)
    packed, state = functional.quantize_4bit(w, quant_type=format, compress_statistics=nested)
    for is_packed in (False, True):
        made = functional.QuantState.from_dict(state.as_dict(packed=is_packed), device="cpu")
        assert made == state and made.nested == nested
        expected = functional.dequantize_4bit(packed, state)
        assert torch.equal(functional.dequantize_4bit(packed, made), expected)


def test_what_is_not_four_bit_is_refused():
    w = torch.randn(64, 64)
    with pytest.raises(ValueError, match="blocksize"):
        functional.quantize_4bit(w, blocksize=48)
    with pytest.raises(ValueError, match="int4"):
        functional.quantize_4bit(w, quant_type="int4")


# ---- matmul_4bit -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "bias"), [((1, IN), True), ((70, IN), True), ((2, 3, IN), False)]
)
def test_products_and_their_gradients(format, nested, dtype, shape, bias):
    made, _ = layer(format, nested, dtype, bias)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    given = torch.nn.Parameter(made.bias.detach().to(dtype)) if bias else None
    y = bnb.matmul_4bit(x, made.weight.t(), quant_state=made.weight.quant_state, bias=given)
    expected = x.double() @ dense_of(made).T + (given.double() if bias else 0)
    # bitsandbytes' own kernels round the weight to the dtype first.
    most = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[dtype]
    assert y.dtype == dtype and y.shape == (*shape[:-1], OUT)
    assert error(y, expected) < most
    grad = torch.randn_like(y)
    y.backward(grad)
    assert error(x.grad, grad.double() @ dense_of(made)) < most
    if bias:
        assert error(given.grad, grad.double().sum(0)) < most
    assert made.weight.grad is None


def test_products_of_no_rows():
    made, _ = layer()
    y = bnb.matmul_4bit(torch.empty(0, IN), made.weight.t(), quant_state=made.weight.quant_state)
    assert y.shape == (0, OUT)


# ---- Linear4bit ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [False, True])
def test_a_layer(format, nested, dtype, training):
    made, dense = layer(format, nested, dtype)
    made.train(training)
    for rows in (1, 7, 40):
        x = torch.randn(rows, IN, dtype=dtype)
        with torch.set_grad_enabled(training):
            y = made(x)
        assert y.dtype == dtype and error(y, dense(x)) < 0.15


def test_it_is_quantized_when_it_is_moved():
    made = bnb.nn.Linear4bit(IN, OUT, quant_type="nf4")
    assert not made.weight.bnb_quantized and made.weight.dtype == torch.float32
    made = made.to("cpu")
    assert made.weight.bnb_quantized and made.weight.dtype == torch.uint8
    state = made.weight.quant_state
    assert made.to("cpu").weight.quant_state is state or made.weight.quant_state == state


@pytest.mark.parametrize("after_forward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_state_dict_makes_the_same_layer(format, nested, dtype, after_forward):
    made, _ = layer(format, nested, dtype)
    x = torch.randn(3, IN, dtype=dtype)
    expected = made(x)
    if not after_forward:
        made = copy.deepcopy(made)
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    parts = {"absmax", "quant_map", f"quant_state.bitsandbytes__{format}"}
    parts |= {"nested_absmax", "nested_quant_map"} if nested else set()
    assert state.keys() == {"bias", "weight", *(f"weight.{part}" for part in parts)}
    again = bnb.nn.Linear4bit(IN, OUT, quant_type=format, compute_dtype=dtype, device="meta")
    again.weight = bnb.nn.Params4bit.from_prequantized(
        state.pop("weight"),
        {key: state.pop(key) for key in list(state) if key.startswith("weight.")},
        device="cpu",
    )
    again.bias = torch.nn.Parameter(state.pop("bias"))
    assert not state and torch.equal(again(x), expected)
    assert again.weight.quant_state == made.weight.quant_state


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy,
                                    lambda m: pickle.loads(pickle.dumps(m))])  # fmt: skip
def test_copies(format, nested, copied):
    made, _ = layer(format, nested)
    x = torch.randn(3, IN)
    assert torch.equal(copied(made)(x), made(x))
    if copied not in (copy.copy, copy.deepcopy):
        return  # a pickled weight by itself is a torch.nn.Parameter
    weight = copied(made.weight)
    assert type(weight) is bnb.nn.Params4bit and torch.equal(weight.data, made.weight.data)
    assert weight.quant_state == made.weight.quant_state and weight.blocksize == 64
    shares = weight.data.data_ptr() == made.weight.data.data_ptr()
    assert shares == (copied is copy.copy)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_in_float32(dtype):
    made, dense = layer(compute_dtype=dtype)
    assert made.bias.dtype == torch.float32
    x = torch.randn(3, IN, dtype=dtype)
    y = made(x)
    assert y.dtype == dtype and error(y, dense(x.float())) < 0.15


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_y_is_of_the_dtype_of_x(x_dtype, compute):
    made, dense = layer(compute_dtype=compute)
    x = torch.randn(3, IN, dtype=x_dtype)
    y = made(x)
    assert y.dtype == x_dtype and error(y, dense(x.float())) < 0.15


def test_casts_of_a_module_leave_the_bytes():
    made, _ = layer(dtype=torch.float32)
    bytes_before = made.weight.data.clone()
    for cast in (made.half, made.bfloat16, made.float):
        cast()
        assert made.weight.dtype == torch.uint8 and torch.equal(made.weight.data, bytes_before)
        assert made.weight.quant_state.absmax.dtype in (torch.uint8, torch.float32)


def test_training_what_is_around_it():
    made, _ = layer()
    net = torch.nn.Sequential(torch.nn.Linear(8, IN), made, torch.nn.Linear(OUT, 4))
    x, wanted = torch.randn(32, 8), torch.randn(32, 4)
    before = made.weight.data.clone()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.05)
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.mse_loss(net(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(made.weight.data, before) and made.weight.grad is None


def test_a_state_that_only_the_layer_has():
    """FSDP makes new parameters, without the attributes of the old."""
    made, _ = layer()
    x = torch.randn(2, IN)
    expected = made(x)
    made.weight = torch.nn.Parameter(made.weight.data, requires_grad=False)
    assert torch.equal(made(x), expected)


@pytest.mark.parametrize("split", [torch.chunk, torch.split])
def test_pieces_of_a_weight_are_weights(split):
    made, _ = layer(quant_storage=torch.float32)
    pieces = split(made.weight, 2 if split is torch.chunk else made.weight.shape[0] // 2)
    assert len(pieces) == 2
    for piece in pieces:
        assert type(piece) is bnb.nn.Params4bit
        assert piece.quant_state is made.weight.quant_state


@pytest.mark.parametrize("backend_name", ["eager", "aot_eager"])
@pytest.mark.parametrize("grad", [False, True])
def test_compiled(backend_name, grad):
    torch._dynamo.reset()
    made, _ = layer()
    net = torch.nn.Sequential(made, torch.nn.ReLU()).train()
    compiled = torch.compile(net, backend=backend_name)
    x = torch.randn(4, IN, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        assert error(compiled(x), net(x)) < 1e-6
    if grad:
        compiled(x).sum().backward()
        found, x.grad = x.grad, None
        net(x).sum().backward()
        assert error(found, x.grad) < 1e-6


@pytest.mark.parametrize("kind", ["LinearNF4", "LinearFP4"])
def test_the_classes_of_one_format(kind):
    made = getattr(bnb.nn, kind)(IN, OUT).to("cpu")
    assert made.weight.quant_state.quant_type == kind[-3:].lower()
    assert made(torch.randn(2, IN)).shape == (2, OUT)


# ---- Embedding4bit, parametrizations -----------------------------------------------------


@pytest.mark.parametrize("kind", ["EmbeddingNF4", "EmbeddingFP4"])
def test_an_embedding(kind):
    dense = torch.nn.Embedding(50, 128)
    made = getattr(bnb.nn, kind)(50, 128)
    made.load_state_dict(dense.state_dict())
    made = made.to("cpu")
    tokens = torch.tensor([[0, 3], [49, 3]])
    y = made(tokens)
    assert y.dtype == torch.float32 and y.shape == (2, 2, 128)
    assert error(y, dense(tokens)) < 0.15
    assert torch.equal(y[0, 1], y[1, 1])


def test_an_expert_as_a_parametrization(format, nested):
    replace = pytest.importorskip("bitsandbytes.nn.parametrize").replace_parameter_4bit
    module = torch.nn.Module()
    module.experts = torch.nn.Parameter(torch.randn(3, 32, 64))
    dense = module.experts.detach().clone()
    replace(module, "experts", quant_type=format, compress_statistics=nested)
    found = module.experts
    assert found.shape == dense.shape and error(found, dense) < 0.15
    assert torch.equal(module.experts, found)


# ---- torch.ops.bitsandbytes --------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_operators_keep_the_promises_of_an_operator(format, dtype):
    w = torch.randn(64, 128, dtype=dtype)
    ops = torch.ops.bitsandbytes
    quantize = (w, 64, format, torch.uint8)
    packed, absmax = ops.quantize_4bit(*quantize)
    assert packed.shape == (4096, 1) and absmax.shape == (128,) and absmax.dtype == torch.float32
    torch.library.opcheck(ops.quantize_4bit.default, quantize)
    dequantize = (packed, absmax, 64, format, w.shape, dtype)
    assert ops.dequantize_4bit(*dequantize).shape == w.shape
    torch.library.opcheck(ops.dequantize_4bit.default, dequantize)
