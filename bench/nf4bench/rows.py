"""The rows of the bench: each case checked, then timed beside its rooflines and its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nf4bench import peers, rooflines, tables
from nf4bench.cases import Case
from nf4bench.check import require_dequantized, require_quantized
from nf4bench.device import Launch
from nf4bench.library import PLAIN, Library
from nf4bench.measure import Candidate, Timing, fastest, measure
from nf4bench.options import REPLAYS
from nf4bench.rooflines import Candidates
from nf4bench.table import grouped
from nf4bench.weights import CODES, Weight, rotation

Report = Callable[[str], None]
LARGE_BYTES, LARGE_REPLAYS = 300e6, 9  # long launches vary less
ROTATED_CACHES = 2  # inputs rotate over so many times the last-level cache
OURS_AS_CALLS = Candidate("libnf4 as calls")  # not captured, like the peer it is beside


@dataclass
class Bench:
    """What all programs share: the GPU, the C library, the peers, and how long to measure."""

    gpu: Any
    library: Library
    peers: dict[str, peers.Peer | peers.Missing]
    replays: int | None = None
    configurations: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.configurations = self.library.configurations("dequant")
        self.reference = peers.TorchOperators(self.gpu.place)

    def rotation(self, case: Case) -> list[Weight]:
        return rotation(case, self.gpu.place, ROTATED_CACHES * self.gpu.cache_bytes)

    def expected(self, weight: Weight) -> torch.Tensor:
        """The weight by the formulas, in torch's operators."""
        call = self.reference.prepare(weight, 0)
        return self.gpu.run(lambda stream: call())

    def require(self, what: str, weight: Weight, expected: torch.Tensor, launch: Launch) -> None:
        """Raises WrongResult."""
        require_dequantized(what, weight, expected, lambda: self.gpu.run(launch))

    def times(
        self, weights: Sequence[Weight], candidates: Candidates, eager: Sequence[Candidate] = ()
    ) -> dict[Candidate, Timing]:
        large = weights[0].moved_bytes > LARGE_BYTES
        replays = self.replays or (LARGE_REPLAYS if large else REPLAYS)
        return measure(self.gpu, candidates, replays, eager)

    def peers_of(self, weight: Weight) -> dict[str, peers.Peer]:
        """Those that the case asks for, that are here, and that can do it."""
        return {
            name: peer
            for name, peer in peers.present(self.peers).items()
            if name in weight.case.peers and peer.supports(weight)
        }

    def chosen(self, weight: Weight) -> int:
        """The index of the configuration that the library takes; negative: one of none."""
        if weight.prefix:
            return -1
        dtype = CODES[weight.case.dtype]
        return self.library.chosen("dequant", weight.descriptor, weight.out.data_ptr(), dtype)

    def sink(self) -> torch.Tensor:
        """Where kernels that only read would write."""
        return torch.empty(16, dtype=torch.uint8, device=self.gpu.place)


def begin(bench: Bench, found: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """What all figures begin with; random numbers are the same in each run."""
    torch.manual_seed(0)
    described = peers.described(found)
    for name, each in described.items():
        report(f"{name}: {each.get('version') or 'missing: ' + each['missing']}")
    return {"device": bench.gpu.name, "torch": torch.__version__, "peers": described}


def configured(
    bench: Bench, weight: Weight, configuration: int, keep: bool | None = None
) -> Launch:
    """Dequantize in a configuration of the C library; or plainly, with stores that stay in the
    cache or evict first. The launch returns weight.out."""
    given = weight.descriptor, weight.out.data_ptr(), CODES[weight.case.dtype]

    def launch(stream: int) -> torch.Tensor:
        if weight.prefix:
            bench.library.launch("int4_dequant", *given, False, stream)
        elif keep is None:
            bench.library.launch("dequant", configuration, *given, stream)
        else:
            bench.library.launch("dequant_stores", *given, keep, stream)
        return weight.out

    return launch


def both_launches(bench: Bench, shipped: Sequence[Launch], plain: Sequence[Launch]) -> Candidates:
    """The public call; where that launches with PDL, also the same kernels launched plainly."""
    if not bench.library.has_pdl():
        return {Candidate("libnf4"): shipped}
    return {Candidate("libnf4"): plain, Candidate("libnf4", "pdl"): shipped}


def _plain_dequantize(bench: Bench, weights: Sequence[Weight]) -> list[Launch]:
    return [configured(bench, weight, PLAIN) for weight in weights]


def peer_candidates(name: str, peer: peers.Peer, weights: Sequence[Weight]) -> Candidates:
    """A peer's calls into weight.out, in every launch variant that it has."""

    def launch(weight: Weight, variant: int) -> Launch:
        call = peer.prepare(weight, variant)
        return lambda stream: call(weight.out)

    return {
        Candidate(name, variant=variant): [launch(weight, variant) for weight in weights]
        for variant in peer.variants
    }


def beside(
    names: Iterable[str], times: Mapping[Candidate, Timing], ours: Timing
) -> dict[str, dict[str, Any]]:
    """Each that was timed: its fastest variant, and its time over ours."""
    found = {}
    for name in names:
        best = fastest(times, name)
        if best:
            ratio = round(best.timing.us / ours.us, 3)
            found[name] = {"variant": best.variant, **best.timing.figures(), "ratio": ratio}
    return found


def _row(weight: Weight, launch: str, times: Mapping[Candidate, Timing]) -> dict[str, Any]:
    """The row of a table: our time, and every other over it."""
    case, as_calls = weight.case, times.get(OURS_AS_CALLS)
    ours, best = fastest(times, "libnf4", launch), fastest(times, "roofline", launch)
    row: dict[str, Any] = {
        "work": case.work, "shape": list(case.shape), "dtype": case.dtype, "nested": case.nested,
        "blocksize": case.blocksize, "format": case.format, "placement": case.placement,
        "launch": launch, "bytes": weight.moved_bytes, **ours.timing.figures(),
        "gb_per_s": round(weight.moved_bytes / ours.timing.us / 1e3, 1),
        "roofline": {"variant": best.variant, **best.timing.figures()},
        "of_roofline": round(best.timing.us / ours.timing.us, 4),
    }  # fmt: skip
    sizes = {"read": rooflines.read_bytes(weight), "write": rooflines.write_bytes(weight)}
    for bound, nbytes in sizes.items():
        found = fastest(times, bound)
        if found:
            row[bound] = {"variant": found.variant, "bytes": nbytes, **found.timing.figures()}
    if as_calls:
        row["as_calls"] = as_calls.figures()
    return row | {"peers": beside(case.peers, times, as_calls or ours.timing)}


def fastest_variant(
    bench: Bench, name: str, peer: peers.Peer, weight: Weight, expected: Any
) -> int:
    """A peer's launch variant that is fastest for this weight. Raises WrongResult."""
    if len(peer.variants) == 1:
        return peer.variants[0]
    candidates = peer_candidates(name, peer, [weight])
    for candidate, launches in candidates.items():
        bench.require(f"{name}, launch variant {candidate.variant}", weight, expected, launches[0])
    return fastest(bench.times([weight], candidates), name).variant


def dequantize_rows(bench: Bench, case: Case) -> list[dict]:
    """One row for each way to launch. Raises WrongResult before anything is timed."""
    weights = bench.rotation(case)
    first = weights[0]
    shipped = [weight.dequantize for weight in weights]
    ours = both_launches(bench, shipped, _plain_dequantize(bench, weights))
    candidates = dict(ours)
    for name, peer in bench.peers_of(first).items():
        candidates |= peer_candidates(name, peer, weights)
    expected = bench.expected(first)
    for candidate, launches in candidates.items():
        bench.require(_described(candidate), first, expected, launches[0])
    del expected
    for each in ours:
        candidates |= rooflines.dequantize(bench.library, weights, each.launch)
    if case.bounds:
        candidates |= rooflines.read(bench.library, weights, bench.sink())
        candidates |= rooflines.write(bench.library, weights)
    times = bench.times(weights, candidates)
    chosen = bench.chosen(first)
    name = bench.configurations[chosen].removesuffix(" pdl") if chosen >= 0 else None
    return [_row(first, each.launch, times) | {"configuration": name} for each in ours]


def _described(candidate: Candidate) -> str:
    made = candidate.name if candidate.launch == "plain" else f"{candidate.name} with PDL"
    return made if candidate.variant == 0 else f"{made}, launch variant {candidate.variant}"


def quantize_rows(bench: Bench, case: Case) -> list[dict]:
    """bitsandbytes copies its codebook from the host in every call, which ends a capture: both
    are timed as eager calls for the ratio; bitsandbytes allocates its outputs, we write into
    preallocated ones. Raises WrongResult before anything is timed."""
    weights = bench.rotation(case)
    first = weights[0]

    def plain(weight: Weight) -> Launch:
        source, workspace = weight.dense.data_ptr(), weight.workspace
        return lambda stream: bench.library.launch(
            "quantize", source, CODES[case.dtype], weight.descriptor, workspace.data_ptr(),
            workspace.numel(), False, stream,
        )  # fmt: skip

    shipped = [weight.quantize for weight in weights]
    ours = both_launches(bench, shipped, [plain(weight) for weight in weights])
    candidates = ours | rooflines.read(bench.library, weights, bench.sink())
    for candidate, launches in ours.items():
        first.packed_room.fill_(0xA5)
        bench.gpu.run(launches[0])
        require_quantized(first)
        candidates |= rooflines.quantize(bench.library, weights, candidate.launch)
    theirs, peer = bench.peers_of(first).get("bitsandbytes"), Candidate("bitsandbytes")
    if theirs:
        calls = [theirs.quantize(weight) for weight in weights]
        candidates[peer] = [lambda _, call=call: call() for call in calls]
        candidates[OURS_AS_CALLS] = shipped
    times = bench.times(weights, candidates, eager=(peer, OURS_AS_CALLS))
    return [_row(first, each.launch, times) for each in ours]


def consumer_row(bench: Bench, case: Case) -> dict:
    """Dequantize and then read all of the output: with the library's choice of stores, with
    normal ones and with those that evict first, all launched plainly; and those two alone,
    without a reader. Raises WrongResult before anything is timed."""
    weights, library = bench.rotation(case), bench.library
    expected, sink = bench.expected(weights[0]), bench.sink()
    policies = {"libnf4": _plain_dequantize(bench, weights)} | {
        name: [configured(bench, weight, PLAIN, keep) for weight in weights]
        for name, keep in (("normal", True), ("evict_first", False))
    }

    def then_read(weight: Weight, producer: Launch, variant: int) -> Launch:
        source, nbytes = weight.out.data_ptr(), rooflines.write_bytes(weight)

        def launch(stream: int) -> None:
            producer(stream)
            library.launch("read", variant, source, nbytes, sink.data_ptr(), False, stream)

        return launch

    candidates: Candidates = {}
    for name, producers in policies.items():
        bench.require(f"stores: {name}", weights[0], expected, producers[0])
        candidates[Candidate(f"{name} alone")] = producers
        for variant in library.variants("read"):
            candidates[Candidate(name, variant=variant)] = [
                then_read(*each, variant) for each in zip(weights, producers, strict=True)
            ]
    times = bench.times(weights, candidates)
    read = {name: fastest(times, name).timing for name in policies}
    return {
        "shape": list(case.shape), "dtype": case.dtype, "bytes": weights[0].dense_bytes,
        "then_read": {name: timing.figures() for name, timing in read.items()},
        "alone": {name: times[Candidate(f"{name} alone")].figures() for name in policies},
        "ratio": round(read["normal"].us / read["libnf4"].us, 3),
    }  # fmt: skip


def measured(
    bench: Bench, cases: Iterable[Case], described: Mapping[str, Any], report: Report
) -> list[dict]:
    """The rows of what is dequantized and quantized."""
    table, found = tables.rows(described, tuple(described)), []
    for case in cases:
        made = {"dequantize": dequantize_rows, "quantize": quantize_rows}[case.work]
        rows = made(bench, case)
        found += rows
        report(table.line({row["launch"]: row for row in rows}))
        bench.gpu.release()
    return found


def run(bench: Bench, cases: Iterable[Case], report: Report) -> dict:
    """All figures, as figures.json holds them."""
    by_work = grouped(cases, lambda case: case.work == "consumer")
    figures = begin(bench, bench.peers, report)
    figures["rows"] = measured(bench, by_work.get(False, ()), figures["peers"], report)
    figures["consumer"] = []
    for case in by_work.get(True, ()):
        figures["consumer"].append(consumer_row(bench, case))
        report(tables.CONSUMER.line(figures["consumer"][-1]))
        bench.gpu.release()
    return figures
