"""What one Python call costs: the host's share, and a call that is waited for."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import nf4
import torch

from nf4bench import measure, tables
from nf4bench.cases import Case
from nf4bench.measure import in_turns
from nf4bench.peers import described, present
from nf4bench.suite import Bench, Report, fastest_variant
from nf4bench.torch_operator import public_call
from nf4bench.weights import DTYPES, PARTS, Weight

# So small that the GPU is done before the host has come to the next.
HOST_CASE = Case((256, 256))
QUEUED_CALLS, HOST_TURNS = 200, 30
EMPTY, NEW, LAUNCH = "torch.empty", "torch tensors, a new output", "the smallest launch"
WAITED_CASE, WAITED_TURNS = Case((4096, 1024)), 300


def queued(gpu: Any, call: Callable, calls: int = QUEUED_CALLS) -> float:
    return measure.queued(gpu, call, calls)


def waited(gpu: Any, call: Callable) -> float:
    """Microseconds of one call and a device synchronise."""
    began = time.perf_counter()
    call()
    gpu.synchronize()
    return (time.perf_counter() - began) * 1e6


def _by_address(weight: Weight) -> nf4.QuantizedTensor:
    """The same weight with raw addresses for parts."""
    parts = {name: getattr(weight.quantized, name) for name in PARTS}
    addresses = {name: part if part is None else part.data_ptr() for name, part in parts.items()}
    return dataclasses.replace(weight.quantized, **addresses)


def smallest_launch(bench: Bench, weight: Weight) -> Callable[[], None]:
    """What no call can be cheaper than: a kernel that reads 16 bytes, through ctypes."""
    source, sink, stream = weight.quantized.packed.data_ptr(), weight.out.data_ptr(), 0
    pdl = bench.library.has_pdl()
    return lambda: bench.library.read(0, source, 16, sink, pdl, stream)


def host_work(bench: Bench, weight: Weight) -> dict[str, Callable]:
    """The calls whose share of the host is measured, by name."""
    gpu = bench.gpu
    q, out, dtype = weight.quantized, weight.out, DTYPES[weight.case.dtype]
    shape, device, name = weight.case.shape, weight.out.device, weight.case.dtype
    by_address, address = _by_address(weight), out.data_ptr()
    return {
        EMPTY: lambda: torch.empty(shape, dtype=dtype, device=device),
        NEW: public_call(weight),
        "torch tensors, out given": lambda: nf4.dequantize(q, out=out, stream=gpu.current_stream()),
        "addresses, out given": lambda: nf4.dequantize(
            by_address, name, out=address, stream=gpu.current_stream()
        ),
        LAUNCH: smallest_launch(bench, weight),
    }


def _host(bench: Bench) -> dict:
    gpu = bench.gpu
    work = host_work(bench, Weight(HOST_CASE, gpu.place))
    times = in_turns({key: lambda c=each: queued(gpu, c) for key, each in work.items()}, HOST_TURNS)
    return {
        "shape": list(HOST_CASE.shape),
        "calls": {key: timing.figures() for key, timing in times.items()},
        "beyond_empty_us": round(times[NEW].us - times[EMPTY].us, 3),
    }


def _waited(bench: Bench) -> dict:
    gpu, weight = bench.gpu, Weight(WAITED_CASE, bench.gpu.place)
    expected = bench.expected(weight)
    work = {"libnf4": public_call(weight)}
    for name, peer in present(bench.peers).items():
        if name != "torch" and peer.supports(weight):
            work[name] = peer.prepare(weight, fastest_variant(bench, name, peer, weight, expected))
    for name, each in work.items():
        bench.require(f"{name}, one call", weight, expected, lambda stream, call=each: call())
    work[LAUNCH] = smallest_launch(bench, weight)
    times = in_turns(
        {key: lambda c=each: waited(gpu, c) for key, each in work.items()}, WAITED_TURNS
    )
    ours = times["libnf4"].us
    return {
        "shape": list(WAITED_CASE.shape),
        "calls": {
            name: each.figures() | {"ratio": round(each.us / ours, 3)}
            for name, each in times.items()
        },
    }


def run(bench: Bench, report: Report) -> dict:
    """All figures. Raises WrongResult before anything is timed."""
    torch.manual_seed(0)
    figures = {
        "device": bench.gpu.name,
        "peers": described(bench.peers),
        "waited": _waited(bench),
        "host": _host(bench),
    }
    report(tables.call_text(figures))
    return figures
