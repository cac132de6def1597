"""On a GPU, with torch: every bit against the CPU, by every way in, on streams and in graphs."""

import dataclasses

import cases
import nf4
import numpy as np
import oracle
import pytest
from conftest import record_comparison
from gpu_cases import NEEDS_GPU
from nf4._prepared import prepare

pytestmark = [
    pytest.mark.interop,
    pytest.mark.usefixtures("way_to_call"),
    NEEDS_GPU,
]
torch = pytest.importorskip("torch")

import torch_memory as memory  # noqa: E402

DEVICE = "cuda"
CASES = cases.all_layouts(seed=20, elements=40000)
SECOND_IN_CYCLES = 2_000_000_000
SMALL = cases.Case(3, (67, 129), "bf16", "nf4", 64, 256, custom=False, awkward=False)


def compare(kind, on_device, on_host, case=SMALL):
    """A torch tensor with the array that the CPU gave."""
    expected = memory.tensor_of(np.asarray(on_host), DEVICE)
    record_comparison(kind, on_host.size, memory.differing(on_device, expected), case)


def quantize_on_device(case, access="cuda array interface", **arguments):
    """The weight of a case quantized by the GPU, as tensors; and what was handed over."""
    q = memory.empty_like(case.quantized(), DEVICE)
    source = memory.tensor_of(case.source, DEVICE)
    workspace = memory.workspace_for(q, DEVICE)
    nf4.quantize(
        memory.ACCESS[access](source),
        out=memory.accessed(q, access),
        workspace=None if workspace is None else memory.ACCESS[access](workspace),
        **arguments,
    )
    return q, (source, workspace)


def dequantize_on_device(q, dtype, access="cuda array interface", **arguments):
    out = torch.full(q.shape, torch.nan, dtype=memory.DTYPES[dtype], device=DEVICE)
    handed = memory.ACCESS[access](out)
    assert nf4.dequantize(memory.accessed(q, access), dtype, out=handed, **arguments) is handed
    return out


@pytest.mark.parametrize("access", list(memory.ACCESS))
def test_quantize_gives_the_bytes_of_the_cpu(access):
    for case in CASES:
        expected = case.quantized()
        q, handed = quantize_on_device(case, access)
        for name in ("packed", "absmax", "nested_absmax", "nested_offset"):
            if getattr(expected, name) is not None:
                compare(f"quantize {name}", getattr(q, name), getattr(expected, name), case)
        del handed


@pytest.mark.parametrize("access", list(memory.ACCESS))
def test_dequantize_gives_the_bits_of_the_cpu(access):
    for case in CASES:
        expected = case.quantized()
        q = memory.weight_on(expected, DEVICE)
        for dtype in oracle.DTYPES:
            result = dequantize_on_device(q, dtype, access)
            compare(f"dequantize {dtype}", result, nf4.dequantize(expected, dtype), case)


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 1), (1, 31), (33,), (4097, 3), (7, 5, 129)])
@pytest.mark.parametrize("nested_blocksize", [0, 1, 256])
@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_small_and_odd_shapes(shape, nested_blocksize, format):
    case = cases.Case(1, shape, "fp16", format, 64, nested_blocksize, custom=False, awkward=True)
    expected = case.quantized()
    q, handed = quantize_on_device(case)
    compare("quantize packed", q.packed, expected.packed)
    compare("quantize absmax", q.absmax, expected.absmax)
    compare("dequantize fp16", dequantize_on_device(q, "fp16"), nf4.dequantize(expected))
    del handed


def test_no_elements():
    empty = nf4.quantize(np.empty((0, 5), np.float32))
    q = memory.weight_on(empty, DEVICE)
    assert dequantize_on_device(q, "fp32").shape == (0, 5)


def streams():
    side = torch.cuda.Stream()
    return [side, side.cuda_stream]


@pytest.mark.parametrize("which", [0, 1], ids=["object", "integer"])
def test_work_goes_to_the_stream_and_waits_for_nothing(which):
    """Input arrives on the stream after a long delay: work on any other stream reads what
    was there before; and the calls return while the stream is still busy."""
    stream = streams()[which]
    side = torch.cuda.ExternalStream(stream) if isinstance(stream, int) else stream
    expected = SMALL.quantized()
    late = memory.tensor_of(SMALL.source, DEVICE)
    source = torch.zeros_like(late)
    q = memory.empty_like(expected, DEVICE)
    workspace = memory.workspace_for(q, DEVICE)
    out = torch.zeros(SMALL.shape, dtype=torch.bfloat16, device=DEVICE)
    nf4.quantize(source, out=q, workspace=workspace)  # loads the kernels
    nf4.dequantize(q, out=out)
    torch.cuda.synchronize()

    with torch.cuda.stream(side):
        torch.cuda._sleep(SECOND_IN_CYCLES)
        source.copy_(late)
    nf4.quantize(source, out=q, workspace=workspace, stream=stream)
    nf4.dequantize(q, out=out, stream=stream)
    assert not side.query(), "a call waited for the stream"
    side.synchronize()
    compare("on a stream", out, nf4.dequantize(expected))


@pytest.mark.parametrize("handed", ["tensors", "addresses and out", "addresses"])
@pytest.mark.parametrize("default", [True, False], ids=["default", "side"])
def test_no_stream_is_the_current_one(handed, default):
    """torch's where anything is a tensor; for addresses alone the legacy default stream."""
    expected = SMALL.quantized()
    q = memory.weight_on(expected, DEVICE)
    out = torch.zeros(SMALL.shape, dtype=torch.bfloat16, device=DEVICE)
    packed = q.packed.clone()
    q.packed.zero_()
    borrowed = q if handed == "tensors" else memory.accessed(q, "address")
    nf4.dequantize(borrowed, out=out)  # loads the kernels
    torch.cuda.synchronize()
    stale = out.clone()
    side = torch.cuda.default_stream() if default else torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SECOND_IN_CYCLES // 10)
        q.packed.copy_(packed)
        nf4.dequantize(borrowed, out=out.data_ptr() if handed == "addresses" else out)
    if handed == "addresses" and not default:
        torch.cuda.default_stream().synchronize()
        early = not side.query() and torch.equal(out, stale)
        side.synchronize()  # it writes to a tensor of this test
        assert early, "it went to the side stream"
        return
    side.synchronize()
    compare("on the current stream", out, nf4.dequantize(expected))


@pytest.mark.parametrize("which", ["current", "object", "integer", "default"])
def test_new_tensors_are_made_where_the_work_is(which):
    """The memory of a tensor that is still being read by its stream is not handed out again to
    work on another: what is made for a stream belongs to it."""
    side = torch.cuda.Stream()
    stream = {
        "current": None,
        "object": side,
        "integer": side.cuda_stream,
        "default": torch.cuda.default_stream().cuda_stream,
    }[which]
    expected = SMALL.quantized()
    source = memory.tensor_of(SMALL.source, DEVICE)
    for _ in range(5):
        torch.cuda.synchronize()
        q = nf4.quantize(source, stream=stream)
        out = nf4.dequantize(q, stream=stream)
        wide = nf4.dequantize(q, torch.float32, stream=stream)
        torch.cuda.synchronize()
        for name in ("packed", "absmax", "nested_absmax", "nested_code", "nested_offset"):
            compare(f"quantize {name}", getattr(q, name), getattr(expected, name))
        assert out.dtype is torch.bfloat16 and out.shape == SMALL.shape
        compare("dequantize bf16", out, nf4.dequantize(expected))
        compare("dequantize fp32", wide, nf4.dequantize(expected, "fp32"))


def test_the_common_call_is_the_extensions(way_to_call):
    q = memory.weight_on(SMALL.quantized(), DEVICE)
    out = torch.zeros(SMALL.shape, dtype=torch.float16, device=DEVICE)
    stream = torch.cuda.current_stream()
    for arguments in ((out, None, None), (out, "fp16", stream), (out, None, stream.cuda_stream)):
        status = prepare(q).launch(*arguments)
        assert status == {"extension": 0, "ctypes": None}[way_to_call]


def test_tensors_that_move():
    expected = nf4.dequantize(SMALL.quantized())
    module = torch.nn.Module()
    q = memory.weight_on(SMALL.quantized(), DEVICE)
    parts = {name: getattr(q, name) for name in memory.PARTS if getattr(q, name) is not None}
    for name, part in parts.items():
        setattr(module, name, torch.nn.Parameter(part, requires_grad=False))
    q = dataclasses.replace(q, **dict(module.named_parameters()))
    compare("before a move", nf4.dequantize(q), expected)
    module.cpu()
    compare("moved to the host", nf4.dequantize(q).to(DEVICE), expected)
    taken = [torch.empty_like(part) for part in parts.values()]
    module.to(DEVICE)
    compare("moved back", nf4.dequantize(q), expected)
    del taken


@pytest.mark.parametrize("access", list(memory.ACCESS))
@pytest.mark.parametrize("nested_blocksize", [0, 256])
def test_calls_are_captured_in_a_graph(access, nested_blocksize):
    case = dataclasses.replace(SMALL, nested_blocksize=nested_blocksize)
    q = memory.empty_like(case.quantized(), DEVICE)
    source = torch.zeros(case.shape, dtype=torch.bfloat16, device=DEVICE)
    workspace = memory.workspace_for(q, DEVICE)
    out = torch.zeros(case.shape, dtype=torch.float32, device=DEVICE)
    to = memory.ACCESS[access]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream()
        handed = memory.accessed(q, access)
        given = None if workspace is None else to(workspace)
        nf4.quantize(to(source), out=handed, workspace=given, stream=stream)
        nf4.dequantize(handed, "fp32", out=to(out), stream=stream)
    for seed in range(5):
        again = dataclasses.replace(case, seed=seed)
        source.copy_(memory.tensor_of(again.source, DEVICE))
        graph.replay()
        torch.cuda.synchronize()
        compare("in a graph", out, nf4.dequantize(again.quantized(), "fp32"))


def test_more_than_two_to_the_31_elements():
    """A tile repeated past 2^31 elements, and a tail; every element is looked at."""
    tile = dataclasses.replace(SMALL, shape=(1 << 20,), dtype="fp16", nested_blocksize=0)
    tail = dataclasses.replace(tile, shape=((1 << 19) + 7,))
    repeats = (1 << 11) + 1
    needed = repeats * (1 << 20) * 3
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"{needed >> 30} GiB of free device memory are needed")
    weights = [memory.weight_on(each.quantized(), DEVICE) for each in (tile, tail)]
    parts = {
        name: torch.cat([getattr(weights[0], name).repeat(repeats), getattr(weights[1], name)])
        for name in ("packed", "absmax")
    }
    elements = repeats * (1 << 20) + tail.shape[0]
    q = dataclasses.replace(weights[0], shape=(elements,), **parts)
    result = dequantize_on_device(q, "fp16")
    body, end = result[: repeats << 20].view(repeats, -1), result[repeats << 20 :]
    compare("more than 2^31 elements", end, nf4.dequantize(tail.quantized()))
    first = memory.tensor_of(nf4.dequantize(tile.quantized()), DEVICE)
    for row in body:
        count = memory.differing(row, first)
        record_comparison("more than 2^31 elements", row.numel(), count, elements)


def test_the_current_device_stays():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    expected = SMALL.quantized()
    q = memory.weight_on(expected, "cuda:1")
    out = torch.empty(SMALL.shape, dtype=torch.bfloat16, device="cuda:1")
    with torch.cuda.device(0):
        nf4.dequantize(q, out=out, stream=torch.cuda.current_stream(1))
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    compare("on another device", out.to(DEVICE), nf4.dequantize(expected))


def test_what_is_refused():
    expected = SMALL.quantized()
    q = memory.weight_on(expected, DEVICE)
    out = torch.zeros(SMALL.shape, dtype=torch.bfloat16, device=DEVICE)
    host = np.zeros(SMALL.shape, np.float32)
    mixed = dataclasses.replace(q, absmax=expected.absmax)
    with_grad = torch.nn.Parameter(out)
    for message, call in {
        "expected all of them in one place": lambda: nf4.dequantize(mixed, out=out),
        "out is in host memory": lambda: nf4.dequantize(q, out=host),
        "packed is in device memory; out is in host": lambda: nf4.dequantize(q, out=out.cpu()),
        "packed is in host memory; out is in device": lambda: nf4.dequantize(
            memory.weight_on(expected, "cpu"), out=out
        ),
        "out is not contiguous": lambda: nf4.dequantize(q, out=out.t()),
        "out is of bf16; expected fp32": lambda: nf4.dequantize(q, "fp32", out=out),
        "out requires grad": lambda: nf4.dequantize(q, out=with_grad),
        "host memory": lambda: nf4.dequantize(expected, out=out),
    }.items():
        with pytest.raises(nf4.InvalidArgument, match=message):
            call()
    torch.cuda.synchronize()
    assert not out.any() and not host.any()


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
def test_dequantize_gives_the_bits_of_bitsandbytes(format, nested, dtype):
    """Its CUDA kernels, on any packed bytes; the tensors are handed over as they are."""
    functional = pytest.importorskip("bitsandbytes").functional
    rng = np.random.default_rng(7)
    shapes = [(1, 1), (1, 63), (3, 5), (64, 64), (129, 67), (1024, 4096)]
    shapes += [tuple(int(extent) for extent in rng.integers(1, 600, 2)) for _ in range(10)]
    for shape in shapes:
        for blocksize in oracle.BLOCKSIZES:
            source = torch.randn(shape, dtype=memory.DTYPES[dtype], device=DEVICE)
            packed, state = functional.quantize_4bit(
                source, blocksize=blocksize, compress_statistics=nested, quant_type=format
            )
            packed.random_()
            q = nf4.QuantizedTensor(
                packed=packed,
                absmax=state.absmax,
                nested_absmax=state.state2.absmax if nested else None,
                nested_code=state.state2.code if nested else None,
                nested_offset=state.offset if nested else None,
                format=format,
                blocksize=blocksize,
                nested_blocksize=state.state2.blocksize if nested else 0,
                shape=shape,
                dtype=dtype,
            )
            expected = functional.dequantize_4bit(packed, state)
            count = memory.differing(dequantize_on_device(q, dtype), expected)
            kind = f"bitsandbytes {format} {'nested' if nested else 'flat'} {dtype}"
            record_comparison(kind, source.numel(), count, (shape, blocksize))
