"""Times one Python call of dequantize, of matmul, and of a layer in decoding: the host overhead of
calls without synchronization, and a call with a device synchronize."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import nf4
import torch

from nf4bench import models_forms, tables
from nf4bench.cases import Case
from nf4bench.matmul_cases import weight_case
from nf4bench.measure import Timing, in_turns, queued
from nf4bench.models_llama import DTYPE, Linears
from nf4bench.peers import present, public_call
from nf4bench.product import Product
from nf4bench.rows import Bench, Report, begin, fastest_variant
from nf4bench.weights import DTYPES, PARTS, Weight

# So small that the GPU is done before the host has come to the next.
HOST_CASE = Case((256, 256))
HOST_CALLS, HOST_TURNS = 200, 30
EMPTY, NEW, LAUNCH = "torch.empty", "torch tensors, a new output", "the smallest launch"
WAITED_CASE, WAITED_TURNS = Case((4096, 1024)), 300
MATMUL_CASE, MATMUL_M = weight_case((4096, 4096)), 1
LAYER = "q_proj"

Calls = Mapping[str, Callable[[], object]]


def waited(gpu: Any, call: Callable) -> float:
    """Microseconds of one call and a device synchronize."""
    began = time.perf_counter()
    call()
    gpu.synchronize()
    return (time.perf_counter() - began) * 1e6


def host_times(gpu: Any, work: Calls) -> dict[str, Timing]:
    """Microseconds of the host a call, nothing waited for."""
    return in_turns({n: partial(queued, gpu, c, HOST_CALLS) for n, c in work.items()}, HOST_TURNS)


def waited_times(gpu: Any, work: Calls) -> dict[str, Timing]:
    return in_turns({n: partial(waited, gpu, c) for n, c in work.items()}, WAITED_TURNS)


def over_ours(times: Mapping[str, Timing], ours: str = "libnf4") -> dict[str, dict]:
    """Each time, and the same over ours."""
    return {
        name: each.figures() | {"ratio": round(each.us / times[ours].us, 3)}
        for name, each in times.items()
    }


def smallest_launch(bench: Bench, weight: Weight) -> Callable[[], None]:
    """What no call can be cheaper than: a kernel that reads 16 bytes, through ctypes."""
    source, sink, stream = weight.quantized.packed.data_ptr(), weight.out.data_ptr(), 0
    pdl = bench.library.has_pdl()
    return lambda: bench.library.launch("read", 0, source, 16, sink, pdl, stream)


# ---- Dequantize -------------------------------------------------------------------------


def host_work(bench: Bench, weight: Weight) -> dict[str, Callable]:
    """The calls whose host overhead is measured, by name."""
    gpu, q, out, name = bench.gpu, weight.quantized, weight.out, weight.case.dtype
    parts = {part: getattr(q, part) for part in PARTS}
    # The same weight with raw addresses for parts.
    by_address = dataclasses.replace(
        q, **{part: each if each is None else each.data_ptr() for part, each in parts.items()}
    )
    shape, device, dtype, address = weight.case.shape, out.device, DTYPES[name], out.data_ptr()
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
    times = host_times(bench.gpu, host_work(bench, Weight(HOST_CASE, bench.gpu.place)))
    return {
        "shape": list(HOST_CASE.shape),
        "calls": {name: timing.figures() for name, timing in times.items()},
        "beyond_empty_us": round(times[NEW].us - times[EMPTY].us, 3),
    }


def _waited(bench: Bench) -> dict:
    weight = Weight(WAITED_CASE, bench.gpu.place)
    expected = bench.expected(weight)
    work = {"libnf4": public_call(weight)}
    for name, peer in present(bench.peers).items():
        if name != "torch" and peer.supports(weight):
            work[name] = peer.prepare(weight, fastest_variant(bench, name, peer, weight, expected))
    for name, each in work.items():
        bench.require(f"{name}, one call", weight, expected, lambda stream, call=each: call())
    work[LAUNCH] = smallest_launch(bench, weight)
    times = waited_times(bench.gpu, work)
    return {"shape": list(WAITED_CASE.shape), "calls": over_ours(times)}


def run(bench: Bench, report: Report) -> dict:
    """All figures of dequantize. Raises WrongResult before anything is timed."""
    figures = begin(bench, bench.peers, report)
    figures |= {"waited": _waited(bench), "host": _host(bench)}
    for line in (line for each in tables.calls(figures) for line in each.lines()):
        report(line)
    report(f"{figures['host']['beyond_empty_us']:.2f} µs beyond torch.empty")
    return figures


# ---- Matmul and layers ------------------------------------------------------------------


def matmul(bench: Bench, peers: Mapping[str, Any]) -> dict:
    """Of a call on torch's current stream, as users make it: "host" and "waited"."""
    product = Product(Weight(MATMUL_CASE, bench.gpu.place), MATMUL_M)
    x, y, weight = product.x, product.y, product.weight
    work: dict[str, Callable] = {
        "libnf4": lambda: nf4.matmul(x, weight.quantized),
        "libnf4, out given": lambda: nf4.matmul(x, weight.quantized, out=y),
    }
    for name, peer in present(peers).items():
        if peer.supports(MATMUL_CASE, MATMUL_M, 0):
            multiply = peer.prepare(weight, 0)
            work[name] = lambda multiply=multiply: multiply(x)
    work[LAUNCH] = smallest_launch(bench, weight)
    return {
        "shape": list(MATMUL_CASE.shape),
        "m": MATMUL_M,
        "host": over_ours(host_times(bench.gpu, work)),
        "waited": over_ours(waited_times(bench.gpu, work)),
    }


def _queued_as(gpu: Any, form: str, call: Callable[[], object]) -> float:
    with models_forms.kernels_of(form):
        call()  # Python is slow at functions that were just replaced
        return queued(gpu, call, HOST_CALLS)


def layer(bench: Bench, layers: Mapping[str, list[Linears]]) -> dict[str, Any]:
    """Host overhead of an eager call of a linear layer with one row of x, by form, and each over
    ours; "gradients": of one that records them. "failed": why a form has none."""
    modules = {form: each[0][LAYER] for form, each in layers.items()}
    ours = modules["libnf4"]
    x = torch.randn(1, 1, ours.in_features, dtype=DTYPE, device=bench.gpu.place)
    recorded = x.clone().requires_grad_()
    calls, failed = {}, {}
    for form, module in modules.items():
        try:
            with models_forms.kernels_of(form):
                module(recorded)
        except Exception as error:  # the others go on
            failed[form] = f"{type(error).__name__}: {error}"
            continue
        calls[form, False] = torch.no_grad()(partial(module, x))
        calls[form, True] = partial(module, recorded)
    work = {key: partial(_queued_as, bench.gpu, key[0], call) for key, call in calls.items()}
    times = in_turns(work, HOST_TURNS)
    plain, grad = (
        _over_ours_if_any({form: each for (form, of), each in times.items() if of == recording})
        for recording in (False, True)
    )
    forms = {form: each | {"gradients": grad[form]} for form, each in plain.items()}
    return {"shape": [ours.out_features, ours.in_features], "forms": forms, "failed": failed}


def _over_ours_if_any(times: Mapping[str, Timing]) -> dict[str, dict]:
    figures = over_ours(times) if "libnf4" in times else {n: t.figures() for n, t in times.items()}
    figures.get("libnf4", {}).pop("ratio", None)
    return figures
