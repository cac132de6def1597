"""The harness of Unsloth's puzzle: nine dequantizes an iteration, each through the Python call
and waited for, us beside Unsloth's sequence, bitsandbytes and Triton; eager and compiled."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nf4bench import limits, score, suite, tables
from nf4bench.check import require_dequantized
from nf4bench.measure import Timing, fastest, in_turns
from nf4bench.options import ITERATIONS
from nf4bench.peers import Peer, described, present
from nf4bench.suite import Bench, Report
from nf4bench.torch_operator import operator, public_call
from nf4bench.weights import Weight

TURNS = 10
PEERS = ("unsloth", "bitsandbytes", "triton")  # torch's own operators are no contender here

Calls = list[Callable[[], torch.Tensor]]


def iterate(gpu: Any, calls: Sequence[Callable], iterations: int) -> float:
    """Microseconds of an iteration: every call, and a device synchronise after each."""
    began = time.perf_counter()
    for _ in range(iterations):
        for call in calls:
            call()
            gpu.synchronize()
    return (time.perf_counter() - began) * 1e6 / iterations


def timed(gpu: Any, implementations: Mapping[str, Calls], iterations: int) -> dict[str, Timing]:
    """Microseconds of an iteration of each, in turns that make `iterations` in all."""
    turns = min(TURNS, max(2, iterations))
    each = -(-iterations // turns)
    work = {
        name: (lambda calls=calls: iterate(gpu, calls, each))
        for name, calls in implementations.items()
    }
    return in_turns(work, turns)


def _own_code(call: Callable) -> Callable:
    """The same closure with code of its own: the compiler keeps what it made by the code, and
    would look through the entries of all weights in every call."""
    code = call.__code__.replace()
    return types.FunctionType(
        code, call.__globals__, call.__name__, call.__defaults__, call.__closure__
    )


def compiled(weights: Sequence[Weight], calls: Calls) -> Calls | str:
    """The calls under torch.compile(fullgraph=True), run once; or why they cannot be."""
    made = [torch.compile(_own_code(call), fullgraph=True, dynamic=False) for call in calls]
    try:
        for call in made:
            call()
    except Exception as error:  # whatever the compiler says of a peer is the peer's result
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return made


def _require(bench: Bench, mode: str, weights: Sequence[Weight], calls: Mapping[str, Calls]):
    """Every result of every implementation. Raises WrongResult."""
    for index, weight in enumerate(weights):
        expected = bench.expected(weight)
        for name, each in calls.items():
            require_dequantized(
                f"{name}, {mode}", weight, expected,
                lambda call=each[index]: _waited_for(bench.gpu, call),
            )  # fmt: skip


def _waited_for(gpu: Any, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    result = call()
    gpu.synchronize()
    return result


def _stream_us(bench: Bench) -> float:
    """The stream kernels' time for the nine weights, the best launch shape of each."""
    total = 0.0
    for mlp in score.MLPS:
        cases = mlp.cases()  # all of one size
        weights = bench.rotation(cases[0])
        times = bench.times(weights, limits.dequantize_stream(bench.library, weights, "plain"))
        total += len(cases) * fastest(times, "stream").timing.us
    return total


def _best_variant(bench: Bench, name: str, peer: Peer, weight: Weight) -> int:
    """The launch shape that is fastest for this weight."""
    if len(peer.variants) == 1:
        return peer.variants[0]
    times = bench.times([weight], suite.peer_candidates(name, peer, [weight]))
    return fastest(times, name).variant


def _peer_calls(bench: Bench, name: str, peer: Peer, weights: Sequence[Weight]) -> Calls:
    return [peer.prepare(weight, _best_variant(bench, name, peer, weight)) for weight in weights]


def _figures(times: Mapping[str, Timing], refused: Mapping[str, str]) -> dict[str, dict]:
    figures = {name: timing.figures() for name, timing in times.items()}
    return figures | {name: {"refused": reason} for name, reason in refused.items()}


def run(bench: Bench, iterations: int | None, report: Report) -> dict:
    """All figures. Raises WrongResult before anything is timed."""
    iterations = iterations or ITERATIONS
    torch.manual_seed(0)
    gpu = bench.gpu
    weights = [Weight(case, gpu.place) for case in score.cases()]
    ours = [public_call(gpu, weight) for weight in weights]
    eager = {"libnf4": ours}
    for name, peer in present(bench.peers).items():
        if name in PEERS and all(peer.supports(weight) for weight in weights):
            eager[name] = _peer_calls(bench, name, peer, weights)
    _require(bench, "eager", weights, eager)

    # torch.compile takes no ctypes call, so ours is compiled as an operator of torch.
    operated = [
        operator().prepare(weight, call) for weight, call in zip(weights, ours, strict=True)
    ]
    attempts = {
        name: compiled(weights, calls) for name, calls in (eager | {"libnf4": operated}).items()
    }
    graphs = {name: each for name, each in attempts.items() if not isinstance(each, str)}
    refused = {name: each for name, each in attempts.items() if isinstance(each, str)}
    _require(bench, "compiled", weights, graphs)

    stream_us = _stream_us(bench)
    eager_times = timed(gpu, eager | {"libnf4 as an operator": operated}, iterations)
    compiled_times = timed(gpu, graphs, iterations)
    summary = score.summary({name: each.us for name, each in eager_times.items()}, stream_us)
    evidence = score.Evidence(
        speedup=summary["score"],
        kernels=gpu.kernels(lambda stream: weights[0].dequantize(stream)),
        compiled_refusal=refused.get("libnf4", ""),
        dtypes=tuple(mlp.dtype for mlp in score.MLPS),
        asm=score.source_lines(r"\basm( volatile)?\("),
        eviction=score.source_lines(r"evict_first"),
    )
    figures = {
        "device": gpu.name,
        "peers": described({name: bench.peers[name] for name in PEERS if name in bench.peers}),
        "iterations": iterations,
        "eager": _figures(eager_times, {}),
        "compiled": _figures(compiled_times, refused),
        "summary": summary,
        "points": score.points(evidence),
    }
    report(tables.challenge_text(figures))
    return figures
