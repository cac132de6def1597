"""Unsloth's puzzle: nine dequantizes an iteration, each through the Python call and waited for, us
beside Unsloth's sequence, bitsandbytes and Triton; eager and compiled; and its 14 points."""

from __future__ import annotations

import functools
import re
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nf4bench import rooflines, rows, tables
from nf4bench.cases import Case
from nf4bench.check import WrongResult, require_dequantized
from nf4bench.measure import Timing, fastest, in_turns
from nf4bench.options import ITERATIONS, ROOT
from nf4bench.peers import present, public_call
from nf4bench.rows import Bench, Report
from nf4bench.weights import DTYPES, Weight

TURNS = 10
PEERS = ("unsloth", "bitsandbytes", "triton")  # torch's own operators are no contender here
NOTHING = "nothing: a view"  # the cost of waiting, and in its compiled form of torch.compile
CALL_BUDGET_US = 6  # the most that a call may add to the roofline
# Hidden, inner, and dtype of each MLP. gate and up are [inner, hidden], down is [hidden, inner].
MLPS = ((2048, 8192, "fp16"), (1024, 4096, "bf16"), (4096, 14336, "bf16"))

Calls = list[Callable[[], torch.Tensor]]


def mlp_cases(hidden: int, inner: int, dtype: str) -> list[Case]:
    up = Case((inner, hidden), dtype)
    return [up, up, Case((hidden, inner), dtype)]


def cases() -> list[Case]:
    """The nine weights of an iteration."""
    return [case for mlp in MLPS for case in mlp_cases(*mlp)]


# ---- As an operator of torch ------------------------------------------------------------


class Operator:
    """Dequantize as an operator of torch, so that torch.compile sees one opaque call; made once a
    process, by operator(). The low-level registration: torch.library.custom_op would add the
    autograd and mutation wrappers that a frozen weight has no use for. A weight passes as its
    packed tensor, which the graph depends on, and its number, by which the rest is found."""

    NAME = "nf4_bench::dequantize"

    def __init__(self) -> None:
        self._weights: list[tuple[Weight, Callable[[], torch.Tensor]]] = []
        namespace, name = self.NAME.split("::")
        self._library = torch.library.Library(namespace, "DEF")
        self._library.define(f"{name}(Tensor packed, int weight) -> Tensor")
        for key in ("CPU", "CUDA"):
            self._library.impl(name, self._run, key)
        torch.library.register_fake(self.NAME, self._fake, lib=self._library)

    def _run(self, packed: torch.Tensor, weight: int) -> torch.Tensor:
        return self._weights[weight][1]()

    def _fake(self, packed: torch.Tensor, weight: int) -> torch.Tensor:
        case = self._weights[weight][0].case
        return packed.new_empty(case.shape, dtype=DTYPES[case.dtype])

    def prepare(self, weight: Weight, call: Callable[[], torch.Tensor]) -> Callable:
        """The operator's call in place of `call`."""
        self._weights.append((weight, call))
        operation = torch.ops.nf4_bench.dequantize.default
        packed, number = weight.quantized.packed, len(self._weights) - 1
        return lambda: operation(packed, number)


@functools.cache
def operator() -> Operator:
    return Operator()


def as_operator(weights: Sequence[Weight], calls: Calls) -> Calls:
    return list(map(operator().prepare, weights, calls))


def _own_code(call: Callable) -> Callable:
    """The same closure with code of its own: the compiler keeps what it made by the code, and
    would look through the entries of all weights in every call."""
    own = call.__code__.replace()
    return types.FunctionType(own, call.__globals__, "own", call.__defaults__, call.__closure__)


def compiled(calls: Calls) -> Calls:
    """The calls under torch.compile(fullgraph=True), run once. Raises what the compiler raises."""
    made = [torch.compile(_own_code(call), fullgraph=True, dynamic=False) for call in calls]
    for call in made:
        call()
    return made


# ---- Times ------------------------------------------------------------------------------


def iterate(gpu: Any, calls: Sequence[Callable], iterations: int) -> float:
    """Microseconds of an iteration: every call, and a device synchronize after each."""
    began = time.perf_counter()
    for _ in range(iterations):
        for call in calls:
            call()
            gpu.synchronize()
    return (time.perf_counter() - began) * 1e6 / iterations


def timed(gpu: Any, implementations: Mapping[str, Calls], iterations: int) -> dict[str, Timing]:
    """Microseconds of an iteration of each, in turns that make `iterations` in all."""
    turns = min(TURNS, max(2, iterations))
    once = functools.partial(iterate, gpu, iterations=-(-iterations // turns))
    return in_turns({n: functools.partial(once, c) for n, c in implementations.items()}, turns)


def require(
    bench: Bench, what: str, weights: Sequence[Weight], calls: Calls, expected: Sequence
) -> None:
    """Every result of an implementation. Raises WrongResult."""

    def waited_for(call: Callable[[], torch.Tensor]) -> torch.Tensor:
        result = call()
        bench.gpu.synchronize()
        return result

    for weight, call, values in zip(weights, calls, expected, strict=True):
        require_dequantized(what, weight, values, functools.partial(waited_for, call))


def compiled_and_equal(
    bench: Bench, weights: Sequence[Weight], implementations: Mapping[str, Calls],
    expected: Sequence,
) -> tuple[dict[str, Calls], dict[str, str]]:  # fmt: skip
    """What compiles, and why the rest does not; a peer that does not, or to other bits, is tried as
    an operator of torch. Raises WrongResult for ours."""
    made, refused = {}, {}
    waiting = list(implementations.items())
    for name, calls in waiting:
        try:
            attempt = compiled(calls)
            if name != NOTHING:
                require(bench, f"{name}, compiled", weights, attempt, expected)
            made[name] = attempt
        except Exception as error:  # whatever the compiler says of a peer is the peer's result
            wrong = isinstance(error, WrongResult)
            if wrong and name == "libnf4":
                raise
            said = str(error).strip().splitlines()[0]
            refused[name] = said if wrong else f"{type(error).__name__}: {said}"
            if name not in ("libnf4", NOTHING) and not name.endswith(tables.AS_OPERATOR):
                waiting.append((f"{name}{tables.AS_OPERATOR}", as_operator(weights, calls)))
    return made, refused


def _roofline_us(bench: Bench) -> float:
    """Time of the roofline kernels for the nine weights, the best launch variant of each."""
    total = 0.0
    for mlp in MLPS:
        same_size = mlp_cases(*mlp)
        weights = bench.rotation(same_size[0])
        times = bench.times(weights, rooflines.dequantize(bench.library, weights, "plain"))
        total += len(same_size) * fastest(times, "roofline").timing.us
    return total


def _eager(
    bench: Bench, weights: Sequence[Weight], ours: Calls, expected: Sequence[torch.Tensor]
) -> dict[str, Calls]:
    """Every implementation's calls as users make them. Raises WrongResult."""
    made = {"libnf4": ours}
    for name, peer in present(bench.peers).items():
        if name in PEERS and all(peer.supports(weight) for weight in weights):
            made[name] = [
                peer.prepare(weight, rows.fastest_variant(bench, name, peer, weight, values))
                for weight, values in zip(weights, expected, strict=True)
            ]
    for name, calls in made.items():
        require(bench, f"{name}, eager", weights, calls, expected)
    return made


# ---- Score and points -------------------------------------------------------------------


def summary(totals: Mapping[str, float], roofline_us: float) -> dict:
    """Score and budget from microseconds of an iteration of each implementation."""
    ours, calls = totals["libnf4"], len(cases())
    budget = roofline_us + calls * CALL_BUDGET_US
    ratios = {
        name: round(us / ours, 3)
        for name, us in totals.items()
        if not name.startswith("libnf4") and name != NOTHING
    }
    return {
        "libnf4_us": round(ours, 2), "roofline_us": round(roofline_us, 2), "calls": calls,
        "budget_us": round(budget, 2), "of_budget": round(ours / budget, 4),
        "score": ratios.get("unsloth"), "ratios": ratios,
    }  # fmt: skip


def source_lines(pattern: str, root: Path = ROOT) -> list[str]:
    """FILE:LINE of what matches in what dequantize's kernels are made of."""
    folders = [root / "lib" / "cuda" / name for name in ("", "ptx", "dequant")]
    return [
        f"{path.relative_to(root).as_posix()}:{number}"
        for path in sorted(path for folder in folders for path in folder.glob("*.cuh"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]


def speedup_points(speedup: float) -> int:
    """-3 where it is none; 1 from 1.05 on, 2 more from 1.10, 2 more from 1.15."""
    return (speedup >= 1.05) + 2 * (speedup >= 1.1) + 2 * (speedup >= 1.15) if speedup > 1 else -3


def points(speedup: float | None, kernels: int, refusal: str) -> list[dict]:
    """The rows of the puzzle's marking: what is asked, points had and possible, evidence.

    speedup  None where Unsloth's sequence is missing
    kernels  GPU operations of one dequantize
    refusal  why it does not compile, or nothing
    """
    faster = (0, "Unsloth's sequence is missing here")
    if speedup is not None:
        faster = (speedup_points(speedup), f"{speedup:.2f}x here")
    registered = "fullgraph=True, bits compared, as an operator that the harness registers"
    asm, eviction = source_lines(r"\basm( volatile)?\("), source_lines("evict_first")
    rows = [
        ("one kernel for both dequantizations", 3 * (kernels == 1), 3,
         f"{kernels} in the graph of one dequantize"),
        ("at least 1.15x as fast as Unsloth", faster[0], 5, faster[1]),
        ("works under torch.compile", -1 if refusal else 1, 1, refusal or registered),
        ("custom asm", 3 * bool(asm), 3, ", ".join(asm) or "none"),
        ("cache eviction", int(bool(eviction)), 1, ", ".join(eviction) or "none"),
        ("tested in fp16 and bf16", 1, 1, "bits compared in bf16 and fp16"),
    ]  # fmt: skip
    return [dict(zip(("asked", "points", "of", "evidence"), row, strict=True)) for row in rows]


def run(bench: Bench, iterations: int | None, report: Report) -> dict:
    """All figures. Raises WrongResult before what is wrong is timed."""
    iterations, gpu = iterations or ITERATIONS, bench.gpu
    named = {name: bench.peers[name] for name in PEERS if name in bench.peers}
    figures = rows.begin(bench, named, report) | {"iterations": iterations}
    weights = [Weight(case, gpu.place) for case in cases()]
    expected = [bench.expected(weight) for weight in weights]
    ours = [public_call(weight) for weight in weights]
    operated = as_operator(weights, ours)
    eager = _eager(bench, weights, ours, expected)
    idle = [lambda packed=weight.quantized.packed: packed.view(-1) for weight in weights]
    # torch.compile takes no ctypes call, so ours is compiled as an operator of torch.
    to_compile = eager | {"libnf4": operated, NOTHING: idle}
    graphs, refused = compiled_and_equal(bench, weights, to_compile, expected)
    del expected
    roofline_us = _roofline_us(bench)
    called = eager | {f"libnf4{tables.AS_OPERATOR}": operated, NOTHING: idle}
    times = timed(gpu, called, iterations)
    score = summary({name: timing.us for name, timing in times.items()}, roofline_us)
    compiled_times = timed(gpu, graphs, iterations)
    kernels = gpu.kernels(weights[0].dequantize)
    figures |= {
        "eager": {name: timing.figures() for name, timing in times.items()},
        "compiled": {name: timing.figures() for name, timing in compiled_times.items()}
        | {name: {"refused": why} for name, why in refused.items()},
        "summary": score,
        "points": points(score["score"], kernels, refused.get("libnf4", "")),
    }
    eager_and_compiled, marks = tables.challenge(figures)
    budget = f"{score['of_budget']:.2f} of a budget of {score['budget_us']:.1f} µs"
    for line in (*eager_and_compiled.lines(), budget, *marks.lines()):
        report(line)
    return figures
