"""The rows of matmul: each product checked against float64, then timed beside the floor, which is
reading the packed weight and its scales once, and beside the peers. Nothing is in the caches when
its turn comes: weights, each x and each y rotate as the weights of dequantize do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nf4bench import matmul_tables
from nf4bench.device import Launch
from nf4bench.library import Library
from nf4bench.limits import Candidates
from nf4bench.matmul_cases import PDL_M, Group
from nf4bench.matmul_peers import Multiply, Peer
from nf4bench.matmul_product import (
    MOST_PEER_ERROR,
    Batch,
    Product,
    exact,
    most_error,
    require,
)
from nf4bench.measure import Candidate, Timing, fastest
from nf4bench.peers import dequantized, present
from nf4bench.suite import Bench, Report, both_launches
from nf4bench.weights import Weight

Turn = Sequence[Product]  # the weights that share an x
APART = "apart"  # ours, in a call for each weight


class Floor:
    """Memory of as many bytes as a turn's weights have, to be read once."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.bytes = sum(weight.input_bytes for weight in weights) // 16 * 16
        # The kernel writes where it finds nothing but zeros.
        self._source = torch.randint(
            1, 256, (self.bytes,), device=weights[0].place, dtype=torch.uint8
        )
        self._sink = torch.empty(16, device=weights[0].place, dtype=torch.uint8)

    def read(self, library: Library, variant: int, pdl: bool) -> Launch:
        source, sink, nbytes = self._source.data_ptr(), self._sink.data_ptr(), self.bytes
        return lambda stream: library.read(variant, source, nbytes, sink, pdl, stream)


@dataclass
class Setting:
    """What all products of a group share. turns: the rotation's weights, as many at a time as
    share an x; calls: each peer's, by name and way to call it, as turns are; numbers: what the
    first turn's weights are in float64, by peer, and "" for us."""

    group: Group
    turns: list[list[Weight]]
    floors: list[Floor]
    peers: Mapping[str, Peer]
    calls: dict[tuple[str, int], list[list[Multiply]]]
    numbers: dict[str, list[torch.Tensor]]


def _turns(bench: Bench, group: Group) -> list[list[Weight]]:
    """Two turns at least, and so many that no weight is in the caches in its own."""
    weights, size = bench.rotation(group.case), group.together
    while len(weights) % size or len(weights) < 2 * size:
        weights.append(Weight(group.case, bench.gpu.place))
    return [weights[first : first + size] for first in range(0, len(weights), size)]


def setting(bench: Bench, group: Group, peers: Mapping[str, Any]) -> Setting:
    turns, usable = _turns(bench, group), present(peers)
    numbers, calls = {"": [dequantized(each, torch.float64) for each in turns[0]]}, {}
    for name, peer in usable.items():
        ways = [way for way in peer.variants if _supported(peer, group, way)]
        for way in ways:
            calls[name, way] = [[peer.prepare(each, way) for each in turn] for turn in turns]
        own = [peer.numbers(each) if ways else None for each in turns[0]]
        numbers[name] = numbers[""] if own[0] is None else own
    return Setting(group, turns, [Floor(turn) for turn in turns], usable, calls, numbers)


def _supported(peer: Peer, group: Group, way: int) -> bool:
    return any(peer.supports(group.case, m, way) for m in group.ms)


def _together(launches: Sequence[Launch]) -> Launch:
    """One after the other; gives what each gives, which is its y."""

    def launch(stream: int) -> object:
        return [each(stream) for each in launches]

    return launch


def _products(of: Setting, m: int) -> list[list[Product]]:
    found = []
    for first, *others in of.turns:
        leading = Product(first, m)
        found.append([leading, *(Product(other, m, leading.x) for other in others)])
    return found


def _launched(
    bench: Bench, m: int, shipped: Sequence[Launch], plain: Sequence[Launch]
) -> Candidates:
    found = both_launches(bench, shipped, plain)
    return found if m <= PDL_M else {Candidate("libnf4"): found[Candidate("libnf4")]}


def _one_by_one(bench: Bench, turns: Sequence[Turn], m: int) -> Candidates:
    """A call for each weight."""
    plain = [_together([each.plain(bench.library) for each in turn]) for turn in turns]
    shipped = [_together([each.shipped for each in turn]) for turn in turns]
    return _launched(bench, m, shipped, plain)


def _ours(bench: Bench, turns: Sequence[Turn], m: int) -> Candidates:
    """A turn is one call, of several weights if it has as many."""
    if len(turns[0]) == 1:
        return _one_by_one(bench, turns, m)
    calls = [Batch(turn) for turn in turns]
    plain = [each.plain(bench.library) for each in calls]
    return _launched(bench, m, [each.shipped for each in calls], plain)


def _apart(bench: Bench, turns: Sequence[Turn], m: int) -> Candidates:
    """A call for each of several weights, to compare one call with."""
    if len(turns[0]) == 1:
        return {}
    found = _one_by_one(bench, turns, m)
    return {each._replace(name=APART): launches for each, launches in found.items()}


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


def _floors(
    bench: Bench, of: Setting, launches: Iterable[str], known: Mapping[str, int]
) -> Candidates:
    """Every launch shape of the floor's kernel, or the one that is known to be the fastest."""
    found: Candidates = {}
    for launch in launches:
        every = bench.library.variants("read")
        for variant in [known[launch]] if launch in known else every:
            found[Candidate("floor", launch, variant)] = [
                floor.read(bench.library, variant, launch == "pdl") for floor in of.floors
            ]
    return found


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
    ours, floor = fastest(times, "libnf4", launch), fastest(times, "floor", launch)
    products = weights * m * case.elements
    row: dict[str, Any] = {
        "shape": list(case.shape), "weights": weights, "m": m, "dtype": case.dtype,
        "nested": case.nested, "launch": launch, **ours.timing.figures(),
        "tflop_per_s": round(2 * products / ours.timing.us / 1e6, 1),
        "floor": {
            "variant": floor.variant, "bytes": of.floors[0].bytes, **floor.timing.figures()
        },
        "of_floor": round(floor.timing.us / ours.timing.us, 4),
        "peers": {},
    }  # fmt: skip
    apart = fastest(times, APART, launch)
    if apart:
        ratio = round(apart.timing.us / ours.timing.us, 3)
        row["apart"] = {**apart.timing.figures(), "ratio": ratio}
    for name in of.peers:
        found = fastest(times, name)
        if found:
            ratio = round(found.timing.us / ours.timing.us, 3)
            row["peers"][name] = {
                "variant": found.variant, **found.timing.figures(), "ratio": ratio
            }  # fmt: skip
    return row


def rows_of(bench: Bench, of: Setting, m: int, known: dict[str, int]) -> list[dict]:
    """One row for each way to launch ours. known: the floor's fastest launch shapes, by way to
    launch, which the first of the group's products finds. Raises WrongResult before anything is
    timed."""
    products = _products(of, m)
    first = products[0][0]
    ours = _ours(bench, products, m)
    candidates = ours | _apart(bench, products, m) | _theirs(of, products, m)
    errors = _checked(bench, of, products[0], candidates, m)
    launches = [candidate.launch for candidate in ours]
    candidates |= _floors(bench, of, launches, known)
    times = bench.times([first.weight], candidates)
    for launch in launches:
        known[launch] = fastest(times, "floor", launch).variant
    kernels = bench.library.matmul_shapes()
    chosen = kernels[first.chosen(bench.library, bench.gpu.stream)]
    return [
        _row(of, m, each.launch, times) | {"kernel": chosen, "error": float(f"{errors[each]:.3e}")}
        for each in ours
    ]


def run(
    bench: Bench, peers: Mapping[str, Any], groups: Iterable[Group], report: Report
) -> list[dict]:
    """The rows of all groups, as the record holds them."""
    found = []
    for group in groups:
        of, known = setting(bench, group, peers), {}
        for m in group.ms:
            rows = rows_of(bench, of, m, known)
            for row in rows:
                report(matmul_tables.line(row))
            found += rows
            bench.gpu.release()
        del of
        bench.gpu.release()
    return found
