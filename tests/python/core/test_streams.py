"""Which stream work on tensors goes to, and which stream new tensors belong to: a fake torch and
a fake library, no GPU needed."""

import sys

import fake_torch
import nf4
import pytest

SHAPE = (48, 100)
SIZES = nf4.sizes(SHAPE)
OTHER = 0x2000


@pytest.fixture(params=[True, False], ids=["raw getter", "no raw getter"])
def torch(request, monkeypatch):
    module = fake_torch.Torch(getter=request.param)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def on(index, dtype, *shape):
    return fake_torch.Tensor(shape, dtype, fake_torch.Device("cuda", index))


def weight(torch, index=1):
    return nf4.QuantizedTensor(
        packed=on(index, torch.uint8, SIZES.packed_bytes),
        absmax=on(index, torch.uint8, SIZES.blocks),
        nested_absmax=on(index, torch.float32, SIZES.nested_blocks),
        nested_code=on(index, torch.float32, 256),
        nested_offset=on(index, torch.float32, 1),
        nested_blocksize=256,
        shape=SHAPE,
        dtype="bf16",
    )


def test_no_stream_is_the_current_one_of_the_tensors_device(torch, last):
    q = weight(torch)
    out = on(1, torch.float16, 4800)
    assert nf4.dequantize(q, out=out) is out
    assert (last.out, last.dtype, last.stream) == (out.address, 2, 0x1000)
    torch.current[1] = OTHER
    nf4.dequantize(q, out=out)
    assert last.stream == OTHER
    nf4.dequantize(q, out=1 << 40)
    assert last.stream == OTHER
    nf4.quantize(on(1, torch.bfloat16, *SHAPE), out=q)
    assert last.stream == OTHER


def test_a_tensor_beside_addresses_says_the_stream_too(torch, last):
    raw = nf4.QuantizedTensor(packed=1 << 40, absmax=1 << 41, shape=SHAPE)
    nf4.dequantize(raw, out=on(1, torch.float32, 4800))
    assert last.stream == 0x1000
    nf4.quantize(on(1, torch.float32, *SHAPE), out=raw)
    assert last.stream == 0x1000


@pytest.mark.parametrize("stream", [0, 1, OTHER])
def test_a_stream_that_is_given_is_taken(torch, last, stream):
    nf4.dequantize(weight(torch), out=on(1, torch.float32, 4800), stream=stream)
    assert (last.stream or 0) == stream


def test_dequantize_makes_a_tensor(torch, last):
    out = nf4.dequantize(weight(torch))
    assert [out] == torch.made
    assert (out.shape, out.dtype, out.device.index) == (SHAPE, torch.bfloat16, 1)
    assert (out.stream, last.stream, last.out) == (0x1000, 0x1000, out.address)
    assert nf4.dequantize(weight(torch), "fp32").dtype == torch.float32


@pytest.mark.parametrize(
    "stream, belongs_to", [(OTHER, OTHER), (0x1000, 0x1000), (0, 0), (1, 0)], ids=hex
)
def test_what_is_made_belongs_to_the_stream_of_the_work(torch, last, stream, belongs_to):
    source = on(1, torch.float16, *SHAPE)
    made_by = [lambda: nf4.dequantize(weight(torch), stream=stream)]
    made_by.append(lambda: nf4.quantize(source, stream=stream))
    for make in made_by:
        torch.made.clear()
        make()
        assert {tensor.stream for tensor in torch.made} == {belongs_to}
        assert (last.stream or 0) == stream
        assert torch.current == {0: 0, 1: 0x1000}


def test_quantize_makes_tensors(torch, last):
    source = on(1, torch.float16, *SHAPE)
    q = nf4.quantize(source)
    packed, absmax = q.packed, q.absmax
    assert (packed.shape, packed.dtype) == ((SIZES.packed_bytes,), torch.uint8)
    assert (absmax.shape, absmax.dtype) == ((SIZES.blocks,), torch.uint8)
    assert (q.nested_offset.shape, q.nested_code.shape) == ((), (256,))
    assert {part.device.index for part in torch.made} == {1}
    workspace = torch.made[-1]
    assert (last.workspace, last.workspace_bytes) == (workspace.address, q.sizes.workspace_bytes)
    assert (last.input, last.dtype, last.weight.packed) == (source.address, 2, packed.address)
    assert nf4.quantize(source).nested_code is q.nested_code
    flat = nf4.quantize(source, nested_blocksize=0)
    assert (flat.absmax.dtype, flat.nested_code) == (torch.float32, None)


def test_autograd_hears_of_what_quantize_wrote(torch, last):
    q = weight(torch)
    workspace = on(1, torch.uint8, q.sizes.workspace_bytes)
    nf4.quantize(on(1, torch.bfloat16, *SHAPE), out=q, workspace=workspace)
    written = [q.packed, q.absmax, q.nested_absmax, q.nested_offset, workspace]
    assert torch.written == written


def test_threads_are_none_of_a_devices(torch, last):
    with pytest.raises(nf4.InvalidArgument, match="threads is 2; expected 0 for device memory"):
        nf4.dequantize(weight(torch), threads=2)
    assert last.count == 0


def test_a_captured_call_keeps_no_memory_of_the_graph(torch, last):
    """What is allocated in a capture belongs to the graph."""
    torch.capturing = True
    captured = weight(torch)
    nf4.dequantize(captured)
    torch.capturing = False
    device = nf4._torch.device_of(captured.packed)
    assert not device._elements
    nf4.dequantize(weight(torch))
    assert list(device._elements) == [captured.dtype]
