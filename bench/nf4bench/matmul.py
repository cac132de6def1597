"""Matmul: each product checked against float64, then timed beside the roofline, which is one read
of the packed weight and its scales, and beside the peers. Nothing is in the caches when its turn
comes: weights, each x and each y rotate as the weights of dequantize do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nf4bench import host, rooflines, tables
from nf4bench.cases import Case
from nf4bench.device import Launch
from nf4bench.matmul_cases import ERROR_MS, MANY, PDL_M, Group, error_cases
from nf4bench.matmul_peers import Multiply, Peer
from nf4bench.measure import Candidate, Timing, fastest
from nf4bench.options import Shape
from nf4bench.peers import dequantized, described, present
from nf4bench.product import (
    MOST_PEER_ERROR,
    Batch,
    Product,
    exact,
    most_error,
    relative_error,
    require,
)  # fmt: skip
from nf4bench.rooflines import Candidates
from nf4bench.rows import Bench, Report, begin, beside, both_launches
from nf4bench.weights import Weight, weight_of

Turn = Sequence[Product]  # the weights that share an x
APART = "apart"  # ours, in a call for each weight


@dataclass
class Setting:
    """What all products of a group share. turns: the rotation's weights, as many at a time as
    share an x; memory: as many bytes as a turn's weights have, to be read once; calls: each peer's,
    by name and way to call it, as turns are; numbers: what the first turn's weights are in float64,
    by peer, and "" for us."""

    group: Group
    turns: list[list[Weight]]
    memory: list[torch.Tensor]
    peers: Mapping[str, Peer]
    calls: dict[tuple[str, int], list[list[Multiply]]]
    numbers: dict[str, list[torch.Tensor]]


def _memory(weights: Sequence[Weight]) -> torch.Tensor:
    """The roofline's kernel writes where it finds nothing but zeros, of which there are none."""
    nbytes = sum(weight.input_bytes for weight in weights) // 16 * 16
    return torch.randint(1, 256, (nbytes,), device=weights[0].place, dtype=torch.uint8)


def setting(bench: Bench, group: Group, peers: Mapping[str, Any]) -> Setting:
    """Two turns at least, and so many that no weight is in the caches in its own."""
    weights, size = bench.rotation(group.case), group.together
    while len(weights) % size or len(weights) < 2 * size:
        weights.append(weight_of(group.case, bench.gpu.place))
    turns = [weights[first : first + size] for first in range(0, len(weights), size)]
    usable = present(peers)
    numbers, calls = {"": [dequantized(each, torch.float64) for each in turns[0]]}, {}
    for name, peer in usable.items():
        ways = [
            way for way in peer.variants
            if any(peer.supports(group.case, m, way) for m in group.ms)
        ]  # fmt: skip
        for way in ways:
            calls[name, way] = [[peer.prepare(each, way) for each in turn] for turn in turns]
        own = [peer.numbers(each) if ways else None for each in turns[0]]
        numbers[name] = numbers[""] if own[0] is None else own
    return Setting(group, turns, [_memory(turn) for turn in turns], usable, calls, numbers)


def _together(launches: Sequence[Launch]) -> Launch:
    """One after the other; gives what each gives, which is its y."""
    return lambda stream: [each(stream) for each in launches]


def _products(of: Setting, m: int) -> list[list[Product]]:
    found = []
    for first, *others in of.turns:
        leading = Product(first, m)
        found.append([leading, *(Product(other, m, leading.x) for other in others)])
    return found


def _ours(bench: Bench, turns: Sequence[Turn], m: int) -> Candidates:
    """A turn is one call, of several weights if it has as many; then also a call for each weight,
    to compare one call with."""

    def launched(shipped: Sequence[Launch], plain: Sequence[Launch]) -> Candidates:
        found = both_launches(bench, shipped, plain)
        return found if m <= PDL_M else {Candidate("libnf4"): found[Candidate("libnf4")]}

    one_by_one = launched(
        [_together([each.shipped for each in turn]) for turn in turns],
        [_together([each.plain(bench.library) for each in turn]) for turn in turns],
    )
    if len(turns[0]) == 1:
        return one_by_one
    calls = [Batch(turn) for turn in turns]
    ours = launched([each.shipped for each in calls], [each.plain(bench.library) for each in calls])
    return ours | {each._replace(name=APART): made for each, made in one_by_one.items()}


def _theirs(of: Setting, turns: Sequence[Turn], m: int) -> Candidates:
    def launch(call: Multiply, x: torch.Tensor) -> Launch:
        return lambda stream: call(x)

    return {
        Candidate(name, variant=way): [
            _together([launch(call, turn[0].x) for call in calls])
            for calls, turn in zip(prepared, turns, strict=True)
        ]
        for (name, way), prepared in of.calls.items()
        if of.peers[name].supports(of.group.case, m, way)
    }


def _checked(
    bench: Bench, of: Setting, turn: Turn, candidates: Candidates, m: int
) -> dict[Candidate, float]:
    """The largest relative error of each candidate's first launch, which is of this turn. Raises
    WrongResult."""
    errors, expected = {}, {}
    for candidate, launches in candidates.items():
        ours = candidate.name in ("libnf4", APART)
        numbers = of.numbers["" if ours else candidate.name]
        if id(numbers) not in expected:
            expected[id(numbers)] = [exact(turn[0].x, each) for each in numbers]
        # NaN, so that what is not written is wrong.
        for product in turn:
            product.y.fill_(torch.nan)
        ys = bench.gpu.run(launches[0])
        what = f"{of.group.case}, M = {m}: {candidate.name} {candidate.launch} {candidate.variant}"
        most = most_error(turn[0].weight) if ours else MOST_PEER_ERROR
        errors[candidate] = max(
            require(f"{what}, product {i}" if len(turn) > 1 else what, most, wanted, y)
            for i, (wanted, y) in enumerate(zip(expected[id(numbers)], ys, strict=True))
        )
    return errors


def _row(of: Setting, m: int, launch: str, times: Mapping[Candidate, Timing]) -> dict[str, Any]:
    case, weights = of.group.case, of.group.together
    ours, roofline = fastest(times, "libnf4", launch).timing, fastest(times, "roofline", launch)
    row: dict[str, Any] = {
        "shape": list(case.shape), "weights": weights, "m": m, "dtype": case.dtype,
        "nested": case.nested, "format": case.format, "placement": case.placement,
        "launch": launch, **ours.figures(),
        "tflop_per_s": round(2 * weights * m * case.elements / ours.us / 1e6, 1),
        "roofline": {
            "variant": roofline.variant, "bytes": of.memory[0].numel(), **roofline.timing.figures()
        },
        "of_roofline": round(roofline.timing.us / ours.us, 4),
        "peers": beside(of.peers, times, ours),
    }  # fmt: skip
    apart = fastest(times, APART, launch)
    if apart:
        ratio = round(apart.timing.us / ours.us, 3)
        row["apart"] = {**apart.timing.figures(), "ratio": ratio}
    return row


def rows_of(bench: Bench, of: Setting, m: int, known: dict[str, int]) -> list[dict]:
    """One row for each way to launch ours. known: the roofline's fastest launch variants, by way to
    launch, which the first of the group's products finds. Raises WrongResult before anything is
    timed."""
    products, sink = _products(of, m), bench.sink()
    first = products[0][0]
    candidates = _ours(bench, products, m)
    ours = [each for each in candidates if each.name == "libnf4"]
    candidates |= _theirs(of, products, m)
    errors = _checked(bench, of, products[0], candidates, m)
    given = [(each.data_ptr(), each.numel(), sink.data_ptr()) for each in of.memory]
    for each in ours:
        variants = [known[each.launch]] if each.launch in known else ()
        roofline = each._replace(name="roofline")
        candidates |= rooflines.of(bench.library, "read", given, roofline, variants)
    times = bench.times([first.weight], candidates)
    for each in ours:
        known[each.launch] = fastest(times, "roofline", each.launch).variant
    kernel = first.kernel(bench.library, bench.gpu.stream)
    return [
        _row(of, m, each.launch, times) | {"kernel": kernel, "error": float(f"{errors[each]:.3e}")}
        for each in ours
    ]


def rows(
    bench: Bench, peers: Mapping[str, Any], groups: Iterable[Group], report: Report
) -> list[dict]:
    """The rows of all groups, as figures.json holds them."""
    found = []
    for group in groups:
        of, known = setting(bench, group, peers), {}
        for m in group.ms:
            made = rows_of(bench, of, m, known)
            several = group.together > 1
            table = tables.matmul(described(peers), many=m >= MANY and not several, several=several)
            report(table.line({row["launch"]: row for row in made}))
            found += made
            bench.gpu.release()
        del of
        bench.gpu.release()
    return found


# ---- Errors -----------------------------------------------------------------------------

ERROR_PEERS = ("bitsandbytes", "dense")
OUTLIERS, OUTLIER = 4, 1e3  # so many of a row are multiplied so


def _outliers(x: torch.Tensor) -> torch.Tensor:
    where = torch.randint(x.shape[1], (x.shape[0], OUTLIERS), device=x.device)
    return x.scatter(1, where, x.gather(1, where) * OUTLIER)


# How x is made from normal values, by name.
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "outliers of 1e3": _outliers,
    "mean 0.5": lambda x: x + 0.5,
}


def _errors(bench: Bench, peers: Mapping[str, Any], weight: Weight) -> Iterable[dict]:
    """Ours, bitsandbytes' and a dense product with the dequantized weight, each beside the product
    in float64 of the unrounded weight."""
    case, numbers = weight.case, dequantized(weight, torch.float64)
    usable = present(peers).items()
    calls = {name: peer.prepare(weight, 0) for name, peer in usable if name in ERROR_PEERS}
    for m, (kind, changed) in itertools.product(ERROR_MS, KINDS.items()):
        product = Product(weight, m)
        x = product.x.copy_(changed(product.x))
        expected, ys = exact(x, numbers), {"libnf4": bench.gpu.run(product.shipped)}
        for name, call in calls.items():
            ys[name] = bench.gpu.run(lambda stream, call=call, x=x: call(x))
        yield {
            "shape": list(case.shape), "dtype": case.dtype, "nested": case.nested,
            "format": case.format, "placement": case.placement, "x": kind, "m": m,
            "errors": {n: float(f"{relative_error(y, expected):.3e}") for n, y in ys.items()},
        }  # fmt: skip


def errors(
    bench: Bench, peers: Mapping[str, Any], cases: Iterable[Case], report: Report
) -> list[dict]:
    """The rows of the error table."""
    found = []
    for case in cases:
        of = _errors(bench, peers, weight_of(case, bench.gpu.place))
        found += tables.ERROR.told(of, report)
        bench.gpu.release()
    return found


def run(
    bench: Bench, peers: Mapping[str, Any], groups: Iterable[Group], shapes: Sequence[Shape],
    report: Report,
) -> dict:  # fmt: skip
    """All figures, as figures.json holds them; `shapes` are those of the errors. Raises
    WrongResult before a product is timed."""
    figures = begin(bench, peers, report)
    figures["rows"] = rows(bench, peers, groups, report)
    figures["errors"] = errors(bench, peers, error_cases(shapes), report)
    figures["call"] = host.matmul(bench, peers)
    for line in tables.matmul_calls(figures["call"]).lines():
        report(line)
    return figures
