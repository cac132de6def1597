"""What one Python call of matmul costs the host, and one that is waited for, beside the peers'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import nf4

from nf4bench import call as calls
from nf4bench.matmul_cases import weight_case
from nf4bench.matmul_product import Product
from nf4bench.measure import Timing, in_turns
from nf4bench.peers import present
from nf4bench.suite import Bench
from nf4bench.weights import Weight

CASE, M = weight_case((4096, 4096)), 1
OURS, GIVEN = "libnf4", "libnf4, out given"


def _work(bench: Bench, peers: Mapping[str, Any]) -> dict[str, Callable]:
    """Every call, by name, on torch's current stream as users make it."""
    product = Product(Weight(CASE, bench.gpu.place), M)
    x, y, weight = product.x, product.y, product.weight
    work: dict[str, Callable] = {
        OURS: lambda: nf4.matmul(x, weight.quantized),
        GIVEN: lambda: nf4.matmul(x, weight.quantized, out=y),
    }
    for name, peer in present(peers).items():
        if peer.supports(CASE, M, 0):
            multiply = peer.prepare(weight, 0)
            work[name] = lambda multiply=multiply: multiply(x)
    return work | {calls.LAUNCH: calls.smallest_launch(bench, weight)}


def _figures(times: Mapping[str, Timing]) -> dict[str, dict]:
    """With each over ours."""
    ours = times[OURS].us
    return {
        name: each.figures() | {"ratio": round(each.us / ours, 3)} for name, each in times.items()
    }


def run(bench: Bench, peers: Mapping[str, Any]) -> dict:
    """host: microseconds of the host, calls that are not waited for; waited: those of a call and
    a device synchronise."""
    gpu, work = bench.gpu, _work(bench, peers)
    host = {name: lambda c=each: calls.queued(gpu, c) for name, each in work.items()}
    waited = {name: lambda c=each: calls.waited(gpu, c) for name, each in work.items()}
    return {
        "shape": list(CASE.shape),
        "m": M,
        "host": _figures(in_turns(host, calls.HOST_TURNS)),
        "waited": _figures(in_turns(waited, calls.WAITED_TURNS)),
    }
