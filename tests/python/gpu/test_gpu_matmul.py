"""nf4.matmul on a GPU, with torch: against binary64, by every way in, on streams and in graphs."""

import dataclasses

import cases
import nf4
import numpy as np
import oracle
import pytest
from gpu_cases import NEEDS_GPU

pytestmark = [
    pytest.mark.interop,
    NEEDS_GPU,
]
torch = pytest.importorskip("torch")

import torch_memory as memory  # noqa: E402

DEVICE = "cuda"
DELAY_IN_CYCLES = 200_000_000
NESTED = cases.Case(3, (200, 320), "fp32", "nf4", 64, 256, custom=False, awkward=False)
FLAT = dataclasses.replace(NESTED, nested_blocksize=0, blocksize=128)


def operands(case, dtype, m, gap=0):
    """A weight on the host, x and a bias of random numbers on the device; what the product is in
    binary64, and how far from it it may be."""
    q = case.quantized()
    rng = np.random.default_rng(m)
    wide = rng.standard_normal((m, case.shape[1] + gap)).astype(oracle.DTYPES[dtype])
    bias = rng.standard_normal(case.shape[0]).astype(oracle.DTYPES[dtype])
    cols = slice(0, case.shape[1])
    expected = oracle.matmul(q, case.codebook_in_use, wide[:, cols], bias)
    return q, memory.tensor_of(wide, DEVICE)[:, cols], memory.tensor_of(bias, DEVICE), *expected


def require_close(y, expected, allowed):
    off = np.abs(y.double().cpu().numpy() - expected) > allowed
    assert not off.any(), f"{off.sum()} of {off.size} products are too far off"


@pytest.mark.parametrize("case", [NESTED, FLAT], ids=["nested", "flat"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("m, gap", [(1, 0), (3, 0), (17, 8), (64, 1), (130, 0)])
def test_matmul(case, dtype, m, gap):
    q, x, bias, expected, allowed = operands(case, dtype, m, gap)
    on_device = memory.weight_on(q, DEVICE)
    y = nf4.matmul(x, on_device, bias=bias)
    assert (y.shape, y.dtype) == ((m, case.shape[0]), memory.DTYPES[dtype])
    require_close(y, expected, allowed)
    wide = torch.full((m, case.shape[0] + 5), 7, dtype=y.dtype, device=DEVICE)
    nf4.matmul(x, on_device, bias=bias, out=wide[:, :-5])
    assert torch.equal(wide[:, :-5], y) and bool((wide[:, -5:] == 7).all())
    assert torch.equal(nf4.matmul(x[None, :, None], on_device, bias=bias)[0, :, 0], y)


def test_matmul_takes_addresses_and_dlpack():
    q, x, bias, _, _ = operands(NESTED, "bf16", 3)
    on_device = memory.weight_on(q, DEVICE)
    y = nf4.matmul(x, on_device, bias=bias)
    out = torch.zeros_like(y)
    addresses = memory.accessed(on_device, "address")
    arguments = {"bias": bias.data_ptr(), "out": out.data_ptr()}
    nf4.matmul(memory.DlpackOnly(x), addresses, **arguments)
    torch.cuda.synchronize()
    assert torch.equal(out, y)


def test_matmul_on_a_stream_and_in_a_graph():
    q, x, bias, expected, allowed = operands(NESTED, "fp16", 4)
    on_device = memory.weight_on(q, DEVICE)
    given, late = torch.zeros_like(x), x.clone()
    nf4.matmul(given, on_device)  # loads the kernels
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(DELAY_IN_CYCLES)
        given.copy_(late)
        y = nf4.matmul(given, on_device, bias=bias)
        assert not side.query(), "a call waited for the stream"
    side.synchronize()
    require_close(y, expected, allowed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = nf4.matmul(given, on_device, bias=bias)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, y)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("m", [1, 2, 7, 16, 40])
def test_matmul_batch(dtype, m):
    weights = [dataclasses.replace(NESTED, shape=(rows, 320)) for rows in (200, 48, 48, 7, 130)]
    found = [operands(case, dtype, m) for case in weights]
    x, on_device = found[0][1], [memory.weight_on(q, DEVICE) for q, *_ in found]
    ys = nf4.matmul_batch(x, on_device)
    assert [y.shape for y in ys] == [(m, case.shape[0]) for case in weights]
    for y, q in zip(ys, on_device, strict=True):
        assert torch.equal(y, nf4.matmul(x, q))
    biases = [bias for _, _, bias, _, _ in found]
    columns = torch.full((m, 440), 7, dtype=x.dtype, device=DEVICE).split([200, 48, 48, 7, 137], 1)
    outs = [*columns[:-1], columns[-1][:, :-7]]
    nf4.matmul_batch([x for _, x, *_ in found], on_device, bias=biases, out=outs)
    for y, (_, _, _, expected, allowed) in zip(outs, found, strict=True):
        require_close(y, expected, allowed)
    assert bool((columns[-1][:, -7:] == 7).all())


def test_matmul_batch_in_a_graph():
    found = [operands(dataclasses.replace(NESTED, seed=seed), "bf16", 2) for seed in (3, 4)]
    x, on_device = found[0][1], [memory.weight_on(q, DEVICE) for q, *_ in found]
    expected = nf4.matmul_batch(x, on_device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = nf4.matmul_batch(x, on_device)
    for _ in range(3):
        for y in captured:
            y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        for y, wanted in zip(captured, expected, strict=True):
            assert torch.equal(y, wanted)


def test_what_matmul_refuses():
    q, x, _, _, _ = operands(NESTED, "fp16", 4)
    on_device = memory.weight_on(q, DEVICE)
    out = torch.zeros(4, 200, dtype=torch.float16, device=DEVICE)
    for message, call in {
        "the dtype of x is 1 .fp32. and m is 20; expected m of at most 16": lambda: nf4.matmul(
            x.float().repeat(5, 1), on_device
        ),
        "x is in host memory": lambda: nf4.matmul(x.cpu(), on_device, out=out),
        "x is in device memory": lambda: nf4.matmul(x, q),
        "overlaps out": lambda: nf4.matmul(x[:, :320], on_device, out=x[:, :200]),
        "threads is 1; expected 0": lambda: nf4.matmul(x, on_device, out=out, threads=1),
    }.items():
        with pytest.raises(nf4.InvalidArgument, match=message):
            call()
    torch.cuda.synchronize()
    assert not out.any()
