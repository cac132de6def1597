"""The harness of Unsloth's puzzle: nine dequantizes an iteration, each through the Python call
and waited for, us beside Unsloth's sequence, bitsandbytes and Triton; eager and compiled."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nf4bench import limits, score, suite, tables
from nf4bench.check import WrongResult, require_dequantized
from nf4bench.measure import Timing, fastest, in_turns
from nf4bench.options import ITERATIONS
from nf4bench.peers import described, present
from nf4bench.suite import Bench, Report
from nf4bench.torch_operator import operator, public_call
from nf4bench.weights import Weight

TURNS = 10
PEERS = ("unsloth", "bitsandbytes", "triton")  # torch's own operators are no contender here

NOTHING = "nothing: a view"  # what waiting costs, and in its compiled form torch.compile

Calls = list[Callable[[], torch.Tensor]]


def _nothing(weight: Weight) -> Callable[[], torch.Tensor]:
    packed = weight.quantized.packed
    return lambda: packed.view(-1)


def as_operator(weights: Sequence[Weight], calls: Calls) -> Calls:
    return [operator().prepare(weight, call) for weight, call in zip(weights, calls, strict=True)]


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


def compiled(calls: Calls) -> Calls | str:
    """The calls under torch.compile(fullgraph=True), run once; or why they cannot be."""
    made = [torch.compile(_own_code(call), fullgraph=True, dynamic=False) for call in calls]
    try:
        for call in made:
            call()
    except Exception as error:  # whatever the compiler says of a peer is the peer's result
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return made


def require(
    bench: Bench, what: str, weights: Sequence[Weight], calls: Calls, expected: Sequence
) -> None:
    """Every result of an implementation. Raises WrongResult."""
    for weight, call, values in zip(weights, calls, expected, strict=True):
        require_dequantized(what, weight, values, lambda call=call: _waited_for(bench.gpu, call))


def _waited_for(gpu: Any, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    result = call()
    gpu.synchronize()
    return result


def compiled_and_equal(
    bench: Bench,
    weights: Sequence[Weight],
    implementations: Mapping[str, Calls],
    expected: Sequence,
) -> tuple[dict[str, Calls], dict[str, str]]:
    """What compiles, and why the rest does not. Raises WrongResult for ours; a peer whose bits
    the compiler changes is one that does not."""
    made, refused = {}, {}
    for name, calls in implementations.items():
        attempt = compiled(calls)
        try:
            if isinstance(attempt, str):
                refused[name] = attempt
            else:
                require(bench, f"{name}, compiled", weights, attempt, expected)
                made[name] = attempt
        except WrongResult as error:
            if name == "libnf4":
                raise
            refused[name] = str(error)
    return made, refused


def _stream_us(bench: Bench) -> float:
    """The stream kernels' time for the nine weights, the best launch shape of each."""
    total = 0.0
    for mlp in score.MLPS:
        cases = mlp.cases()  # all of one size
        weights = bench.rotation(cases[0])
        times = bench.times(weights, limits.dequantize_stream(bench.library, weights, "plain"))
        total += len(cases) * fastest(times, "stream").timing.us
    return total


def _eager(
    bench: Bench, weights: Sequence[Weight], ours: Calls, expected: Sequence[torch.Tensor]
) -> dict[str, Calls]:
    """Every implementation's calls as users make them. Raises WrongResult."""
    made = {"libnf4": ours}
    for name, peer in present(bench.peers).items():
        if name in PEERS and all(peer.supports(weight) for weight in weights):
            made[name] = [
                peer.prepare(weight, suite.fastest_variant(bench, name, peer, weight, values))
                for weight, values in zip(weights, expected, strict=True)
            ]
    for name, calls in made.items():
        require(bench, f"{name}, eager", weights, calls, expected)
    return made


def _figures(times: Mapping[str, Timing], refused: Mapping[str, str]) -> dict[str, dict]:
    figures = {name: timing.figures() for name, timing in times.items()}
    return figures | {name: {"refused": reason} for name, reason in refused.items()}


def _evidence(bench: Bench, weight: Weight, speedup: float | None, refusal: str) -> score.Evidence:
    return score.Evidence(
        speedup=speedup,
        kernels=bench.gpu.kernels(weight.dequantize),
        compiled_refusal=refusal,
        dtypes=tuple(mlp.dtype for mlp in score.MLPS),
        asm=score.source_lines(r"\basm( volatile)?\("),
        eviction=score.source_lines("evict_first"),
    )


def run(bench: Bench, iterations: int | None, report: Report) -> dict:
    """All figures. Raises WrongResult before what is wrong is timed."""
    iterations = iterations or ITERATIONS
    torch.manual_seed(0)
    weights = [Weight(case, bench.gpu.place) for case in score.cases()]
    expected = [bench.expected(weight) for weight in weights]
    ours = [public_call(weight) for weight in weights]
    # torch.compile takes no ctypes call, so ours is compiled as an operator of torch, and so
    # is a peer that it refuses.
    operated = as_operator(weights, ours)
    eager = _eager(bench, weights, ours, expected)
    graphs, refused = compiled_and_equal(bench, weights, eager | {"libnf4": operated}, expected)
    alike = {
        f"{name}{tables.AS_OPERATOR}": as_operator(weights, eager[name])
        for name in refused
        if name != "libnf4"
    }
    for found, more in zip(
        (graphs, refused), compiled_and_equal(bench, weights, alike, expected), strict=True
    ):
        found.update(more)
    del expected

    idle = [_nothing(weight) for weight in weights]
    attempt = compiled(idle)
    if isinstance(attempt, str):
        refused[NOTHING] = attempt
    else:
        graphs[NOTHING] = attempt

    stream_us = _stream_us(bench)
    times = timed(
        bench.gpu, eager | {f"libnf4{tables.AS_OPERATOR}": operated, NOTHING: idle}, iterations
    )
    summary = score.summary({name: times[name].us for name in times if name != NOTHING}, stream_us)
    evidence = _evidence(bench, weights[0], summary["score"], refused.get("libnf4", ""))
    figures = {
        "device": bench.gpu.name,
        "peers": described({name: bench.peers[name] for name in PEERS if name in bench.peers}),
        "iterations": iterations,
        "eager": _figures(times, {}),
        "compiled": _figures(timed(bench.gpu, graphs, iterations), refused),
        "summary": summary,
        "points": score.points(evidence),
    }
    report(tables.challenge_text(figures))
    return figures
