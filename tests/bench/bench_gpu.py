"""Dequantize and quantize on the GPU beside their peers and beside the limit, in one run.

Times are of CUDA-graph replays that rotate over more data than L2 holds, in turns, so that
all candidates see the same clocks; the median counts. (bitsandbytes' quantize cannot be
captured, so it is timed as its calls.) The limit is the fastest of our own
stream kernels (stream.cu) that read and write as many bytes and do nothing else. Outputs
are compared bit for bit before anything is timed.

    python tests/bench/bench_gpu.py [--json FILE] [--build DIR] [--shapes 4096x4096,...]

Needs torch. bitsandbytes is a peer if it is installed; if not, it is named as missing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import nf4

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ["4096x1024", "4096x4096", "11008x4096", "14336x4096", "28672x8192"]
ROTATED_BYTES = 200e6  # several times the L2 of an H200
REPLAYS = 15
STREAM_VARIANTS = 6
BLOCKSIZE, NESTED_BLOCKSIZE = 64, 256

Launch = Callable[[int], None]


def load_torch():
    try:
        import torch
    except ImportError as error:
        sys.exit(f"bench_gpu: torch is needed: {error}")
    if not torch.cuda.is_available():
        sys.exit("bench_gpu: torch sees no GPU")
    return torch


def load_bitsandbytes() -> tuple[object | None, str]:
    """bitsandbytes.functional, and its version or why it is missing."""
    try:
        import bitsandbytes
        import bitsandbytes.functional as functional
    except Exception as error:  # an import that fails for any reason is a missing peer
        return None, f"missing: {error}"
    return functional, bitsandbytes.__version__


class Streams:
    """The limits: stream.cu through ctypes."""

    def __init__(self, build: Path) -> None:
        self.library = ctypes.CDLL(str(build / "tests" / "libnf4_bench_stream.so"))
        pointer, int64 = ctypes.c_void_p, ctypes.c_int64
        self.library.nf4_bench_stream.argtypes = [
            ctypes.c_int, pointer, int64, pointer, ctypes.c_int, pointer,
        ]  # fmt: skip
        self.library.nf4_bench_read.argtypes = [pointer, int64, pointer, pointer]

    def dequantize(self, variant: int, packed, out) -> Launch:
        stores = out.element_size() // 2
        return lambda stream: check(
            self.library.nf4_bench_stream(
                variant, packed.data_ptr(), packed.numel() // 4, out.data_ptr(), stores, stream
            )
        )

    def read(self, array, sink) -> Launch:
        vectors = array.numel() * array.element_size() // 16
        return lambda stream: check(
            self.library.nf4_bench_read(array.data_ptr(), vectors, sink.data_ptr(), stream)
        )


def check(error: int) -> None:
    if error != 0:
        raise RuntimeError(f"CUDA error {error} in a stream kernel")


class Weight:
    """One random weight: dense, quantized by us, and a place for outputs."""

    def __init__(self, torch, shape: tuple[int, int], dtype: str, nested: bool) -> None:
        torch_dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
        self.dtype = dtype
        self.dense = torch.randn(shape, device="cuda", dtype=torch_dtype)
        self.out = torch.empty_like(self.dense)
        self.sizes = nf4.sizes(
            shape, blocksize=BLOCKSIZE, nested_blocksize=NESTED_BLOCKSIZE if nested else 0
        )

        def empty(count, element=torch.float32):
            return torch.empty(count, device="cuda", dtype=element)

        self.quantized = nf4.QuantizedTensor(
            packed=empty(self.sizes.packed_bytes, torch.uint8),
            absmax=empty(self.sizes.blocks, torch.uint8 if nested else torch.float32),
            nested_absmax=empty(self.sizes.nested_blocks) if nested else None,
            nested_code=torch.from_numpy(nf4.scale_code().copy()).cuda() if nested else None,
            nested_offset=empty(1) if nested else None,
            codebook=None,
            format="nf4",
            blocksize=BLOCKSIZE,
            nested_blocksize=NESTED_BLOCKSIZE if nested else 0,
            shape=shape,
            dtype=dtype,
        )
        self.workspace = empty(max(self.sizes.workspace_bytes, 16), torch.uint8)
        self.quantize(0)

    def quantize(self, stream: int) -> None:
        nf4.quantize(self.dense, out=self.quantized, workspace=self.workspace, stream=stream)

    def dequantize(self, stream: int) -> None:
        nf4.dequantize(self.quantized, self.dtype, out=self.out, stream=stream)

    def bitsandbytes_state(self, functional):
        """Our bytes as bitsandbytes' QuantState."""
        q = self.quantized
        inner = None
        if q.nested:
            inner = functional.QuantState(
                absmax=q.nested_absmax, blocksize=NESTED_BLOCKSIZE, code=q.nested_code,
                dtype=q.nested_absmax.dtype,
            )  # fmt: skip
        return functional.QuantState(
            absmax=q.absmax, shape=self.dense.shape, dtype=self.dense.dtype, blocksize=BLOCKSIZE,
            code=functional.get_4bit_type("nf4"), quant_type="nf4",
            offset=q.nested_offset.view(()) if q.nested else None, state2=inner,
        )  # fmt: skip

    def bytes(self) -> int:
        """What dequantize has to move."""
        dense = self.dense.numel() * self.dense.element_size()
        return self.sizes.packed_bytes + self.sizes.absmax_bytes + dense


def rotation(torch, shape, dtype: str, nested: bool) -> list[Weight]:
    first = Weight(torch, shape, dtype, nested)
    count = max(2, -(-int(ROTATED_BYTES) // first.bytes()))
    return [first] + [Weight(torch, shape, dtype, nested) for _ in range(count - 1)]


def prepare(torch, stream, launches: list[Launch], eager: bool) -> Callable[[], None]:
    """What enqueues all launches at once: a graph's replay, or for what cannot be captured
    the calls themselves."""
    with torch.cuda.stream(stream):
        for launch in launches:
            launch(stream.cuda_stream)
    stream.synchronize()
    if eager:
        return lambda: [launch(stream.cuda_stream) for launch in launches]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch(stream.cuda_stream)
    return graph.replay


def measure(
    torch, candidates: dict[str, list[Launch]], eager: tuple[str, ...] = ()
) -> dict[str, dict[str, float]]:
    """Microseconds of one launch of each candidate: the median, and the spread between the
    first and the last decile. A candidate is one launch for each member of the rotation;
    those in `eager` are not captured, so their time may be that of the host."""
    stream = torch.cuda.Stream()
    repeats = max(1, 16 // len(candidates["libnf4"]))
    launches = len(candidates["libnf4"]) * repeats
    prepared = {
        name: prepare(torch, stream, each * repeats, name in eager)
        for name, each in candidates.items()
    }
    times: dict[str, list[float]] = {name: [] for name in candidates}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for replay in range(REPLAYS + 2):
        for name, enqueue in prepared.items():
            with torch.cuda.stream(stream):
                begin.record()
                enqueue()
                end.record()
            end.synchronize()
            if replay >= 2:  # the first two warm up
                times[name].append(begin.elapsed_time(end) * 1000 / launches)
    result = {}
    for name, values in times.items():
        deciles = statistics.quantiles(values, n=10)
        result[name] = {
            "us": round(statistics.median(values), 3),
            "spread": [round(deciles[0], 3), round(deciles[-1], 3)],
        }
    return result


def require_equal(torch, what: str, ours, theirs) -> None:
    bits = torch.int32 if ours.element_size() == 4 else torch.int16
    differing = int((ours.view(bits) != theirs.view(bits)).sum())
    if differing:
        sys.exit(f"bench_gpu: {what}: {differing} of {ours.numel()} elements differ; nothing timed")


def with_ratios(row: dict, times: dict, limit: str) -> dict:
    """The row of a table: our time, and every other over it."""
    ours = times.pop("libnf4")
    limits = {name: each for name, each in times.items() if name.startswith(limit)}
    best = min(limits, key=lambda name: limits[name]["us"])
    row |= ours
    row["limit"] = {"kernel": best} | limits[best]
    row["of_limit"] = round(limits[best]["us"] / ours["us"], 4)
    row["peers"] = {
        name: each | {"ratio": round(each["us"] / ours["us"], 3)}
        for name, each in times.items()
        if name not in limits
    }
    return row


def bench_dequantize(torch, functional, streams: Streams, shape, dtype: str, nested: bool) -> dict:
    weights = rotation(torch, shape, dtype, nested)
    candidates = {"libnf4": [w.dequantize for w in weights]}
    for variant in range(STREAM_VARIANTS):
        candidates[f"stream {variant}"] = [
            streams.dequantize(variant, w.quantized.packed, w.out) for w in weights
        ]
    if functional is not None:
        states = [w.bitsandbytes_state(functional) for w in weights]
        weights[0].dequantize(torch.cuda.current_stream().cuda_stream)
        theirs = functional.dequantize_4bit(weights[0].quantized.packed.view(-1, 1), states[0])
        require_equal(torch, f"dequantize {shape} {dtype}", weights[0].out, theirs)
        candidates["bitsandbytes"] = [
            lambda _, w=w, s=s: functional.dequantize_4bit(
                w.quantized.packed.view(-1, 1), s, out=w.out
            )
            for w, s in zip(weights, states, strict=True)
        ]
    times = measure(torch, candidates)
    row = {"work": "dequantize", "shape": list(shape), "dtype": dtype, "nested": nested}
    row["gb_per_s"] = round(weights[0].bytes() / times["libnf4"]["us"] / 1e3, 1)
    return with_ratios(row, times, "stream")


def bench_quantize(torch, functional, streams: Streams, shape, dtype: str) -> dict:
    weights = rotation(torch, shape, dtype, nested=True)
    sink = torch.empty(4, device="cuda", dtype=torch.uint8)
    candidates = {
        "libnf4": [w.quantize for w in weights],
        "read once": [streams.read(w.dense, sink) for w in weights],
    }
    on_cpu = nf4.quantize(weights[0].dense.cpu(), nested_blocksize=NESTED_BLOCKSIZE)
    theirs = torch.from_numpy(on_cpu.packed).cuda()
    require_equal(
        torch, f"quantize {shape}", weights[0].quantized.packed.view(torch.int16),
        theirs.view(torch.int16),
    )  # fmt: skip
    if functional is not None:
        candidates["bitsandbytes"] = [
            lambda _, w=w: functional.quantize_4bit(
                w.dense, blocksize=BLOCKSIZE, compress_statistics=True, quant_type="nf4"
            )
            for w in weights
        ]
    # bitsandbytes copies its codebook from the host in every call, which ends a capture.
    times = measure(torch, candidates, eager=("bitsandbytes",))
    row = {"work": "quantize", "shape": list(shape), "dtype": dtype, "nested": True}
    row["gb_per_s"] = round(weights[0].bytes() / times["libnf4"]["us"] / 1e3, 1)
    return with_ratios(row, times, "read once")


def run(build: Path, shapes: list[tuple[int, int]], report=print) -> dict:
    """All figures, as the record holds them."""
    torch = load_torch()
    torch.manual_seed(0)
    functional, version = load_bitsandbytes()
    streams = Streams(build)
    rows = []
    for shape in shapes:
        for dtype, nested in (("bf16", True), ("fp16", True), ("fp32", True), ("bf16", False)):
            rows.append(bench_dequantize(torch, functional, streams, shape, dtype, nested))
            report(line(rows[-1]))
        rows.append(bench_quantize(torch, functional, streams, shape, "bf16"))
        report(line(rows[-1]))
        torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name(),
        "peers": {"bitsandbytes": version, "torch": torch.__version__},
        "rows": rows,
    }


def line(row: dict) -> str:
    shape = "x".join(map(str, row["shape"]))
    text = (
        f"{row['work']:10} {shape:>11} {row['dtype']} {'nested' if row['nested'] else 'flat  '} "
        f"{row['us']:9.2f} us {row['gb_per_s']:7.1f} GB/s {row['of_limit']:6.3f} of the limit"
    )
    for name, peer in row["peers"].items():
        text += f"  {name} {peer['us']:9.2f} us ({peer['ratio']:.2f}x)"
    return text


def parse_shape(text: str) -> tuple[int, int]:
    try:
        rows, cols = (int(part) for part in text.split("x"))
    except ValueError:
        rows = cols = 0
    if rows <= 0 or cols <= 0 or rows * cols % 1024:
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected ROWSxCOLS, a multiple of 1024 elements"
        )
    return rows, cols


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="the build directory")
    parser.add_argument(
        "--shapes", type=lambda text: [parse_shape(each) for each in text.split(",")],
        default=[parse_shape(each) for each in SHAPES],
        help=f"ROWSxCOLS,...; {','.join(SHAPES)} by default",
    )  # fmt: skip
    arguments = parser.parse_args()
    figures = run(arguments.build, arguments.shapes)
    for peer, version in figures["peers"].items():
        print(f"{peer}: {version}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
