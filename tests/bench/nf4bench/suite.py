"""The rows of the bench: each case checked, then timed beside its limits and its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nf4bench import limits, peers, tables
from nf4bench.cases import Case
from nf4bench.check import require_dequantized, require_quantized
from nf4bench.device import Launch
from nf4bench.library import PLAIN, Library
from nf4bench.limits import Candidates
from nf4bench.measure import Candidate, Timing, fastest, measure
from nf4bench.options import REPLAYS
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
        self.configurations = self.library.configurations()
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

    def chosen(self, weight: Weight) -> str | None:
        """The name of the configuration that the library takes; None: one of none."""
        address = weight.out.data_ptr()
        index = self.library.chosen(weight.descriptor, address, CODES[weight.case.dtype])
        return self.configurations[index] if index >= 0 else None


def configured(bench: Bench, weight: Weight, configuration: int) -> Launch:
    """Dequantize with a configuration of the C library; the launch returns weight.out."""
    out, dtype = weight.out.data_ptr(), CODES[weight.case.dtype]

    def launch(stream: int) -> torch.Tensor:
        bench.library.dequantize(configuration, weight.descriptor, out, dtype, stream)
        return weight.out

    return launch


def both_launches(bench: Bench, shipped: Sequence[Launch], plain: Sequence[Launch]) -> Candidates:
    """The public call; where that launches with PDL, also the same kernels launched plainly."""
    if not bench.library.has_pdl():
        return {Candidate("libnf4"): shipped}
    return {Candidate("libnf4"): plain, Candidate("libnf4", "pdl"): shipped}


def _our_dequantize(bench: Bench, weights: Sequence[Weight]) -> Candidates:
    plain = [configured(bench, weight, PLAIN) for weight in weights]
    return both_launches(bench, [weight.dequantize for weight in weights], plain)


def peer_candidates(name: str, peer: peers.Peer, weights: Sequence[Weight]) -> Candidates:
    """A peer's calls into weight.out, in every launch shape that it has."""

    def launch(weight: Weight, variant: int) -> Launch:
        call = peer.prepare(weight, variant)
        return lambda stream: call(weight.out)

    return {
        Candidate(name, variant=variant): [launch(weight, variant) for weight in weights]
        for variant in peer.variants
    }


def _row(weight: Weight, launch: str, times: Mapping[Candidate, Timing]) -> dict[str, Any]:
    """The row of a table: our time, and every other over it."""
    case = weight.case
    as_calls = times.get(OURS_AS_CALLS)
    ours, limit = fastest(times, "libnf4", launch), fastest(times, "stream", launch)
    row: dict[str, Any] = {
        "work": case.work, "shape": list(case.shape), "dtype": case.dtype, "nested": case.nested,
        "blocksize": case.blocksize, "format": case.format, "placement": case.placement,
        "launch": launch, "bytes": weight.moved_bytes, **ours.timing.figures(),
        "gb_per_s": round(weight.moved_bytes / ours.timing.us / 1e3, 1),
        "limit": {"variant": limit.variant, **limit.timing.figures()},
        "of_limit": round(limit.timing.us / ours.timing.us, 4),
    }  # fmt: skip
    sizes = {"read": limits.read_bytes(weight), "write": limits.write_bytes(weight)}
    for bound, nbytes in sizes.items():
        found = fastest(times, bound)
        if found:
            row[bound] = {"variant": found.variant, "bytes": nbytes, **found.timing.figures()}
    if as_calls:
        row["as_calls"] = as_calls.figures()
    beside_peers = as_calls or ours.timing
    row["peers"] = {}
    for name in case.peers:
        found = fastest(times, name)
        if found:
            ratio = round(found.timing.us / beside_peers.us, 3)
            row["peers"][name] = {
                "variant": found.variant, **found.timing.figures(), "ratio": ratio
            }  # fmt: skip
    return row


def fastest_variant(
    bench: Bench, name: str, peer: peers.Peer, weight: Weight, expected: Any
) -> int:
    """A peer's launch shape that is fastest for this weight. Raises WrongResult."""
    if len(peer.variants) == 1:
        return peer.variants[0]
    candidates = peer_candidates(name, peer, [weight])
    for candidate, launches in candidates.items():
        bench.require(f"{name}, launch shape {candidate.variant}", weight, expected, launches[0])
    return fastest(bench.times([weight], candidates), name).variant


def dequantize_rows(bench: Bench, case: Case) -> list[dict]:
    """One row for each way to launch. Raises WrongResult before anything is timed."""
    weights = bench.rotation(case)
    first = weights[0]
    ours = _our_dequantize(bench, weights)
    theirs: Candidates = {}
    for name, peer in bench.peers_of(first).items():
        theirs |= peer_candidates(name, peer, weights)
    expected = bench.expected(first)
    for candidate, launches in (ours | theirs).items():
        bench.require(_described(candidate), first, expected, launches[0])
    del expected
    candidates = ours | theirs
    for ours_too in ours:
        candidates |= limits.dequantize_stream(bench.library, weights, ours_too.launch)
    if case.bounds:
        sink = torch.empty(16, dtype=torch.uint8, device=bench.gpu.place)
        candidates |= limits.read(bench.library, weights, sink)
        candidates |= limits.write(bench.library, weights)
    times = bench.times(weights, candidates)
    chosen = bench.chosen(first)
    configuration = {"configuration": chosen and chosen.removesuffix(" pdl")}
    return [_row(first, each.launch, times) | configuration for each in ours]


def _described(candidate: Candidate) -> str:
    text = candidate.name if candidate.launch == "plain" else f"{candidate.name} with PDL"
    return text if candidate.variant == 0 else f"{text}, launch shape {candidate.variant}"


def _our_quantize(bench: Bench, weights: Sequence[Weight]) -> Candidates:
    def plain(weight: Weight) -> Launch:
        source, workspace = weight.dense.data_ptr(), weight.workspace
        return lambda stream: bench.library.quantize(
            source, CODES[weight.case.dtype], weight.descriptor, workspace.data_ptr(),
            workspace.numel(), False, stream,
        )  # fmt: skip

    shipped = [weight.quantize for weight in weights]
    return both_launches(bench, shipped, [plain(weight) for weight in weights])


def quantize_rows(bench: Bench, case: Case) -> list[dict]:
    """bitsandbytes copies its codebook from the host in every call, which ends a capture: it
    is timed as its calls, and so are ours once more, for the ratio; but ours have their memory
    from before, as all else here, and its make their own. Raises WrongResult before anything
    is timed."""
    weights = bench.rotation(case)
    first = weights[0]
    ours = _our_quantize(bench, weights)
    sink = torch.empty(16, dtype=torch.uint8, device=bench.gpu.place)
    candidates = ours | limits.read(bench.library, weights, sink)
    for candidate, launches in ours.items():
        first.packed_room.fill_(0xA5)
        bench.gpu.run(launches[0])
        require_quantized(first)
        candidates |= limits.quantize_stream(bench.library, weights, candidate.launch)
    theirs = bench.peers_of(first).get("bitsandbytes")
    peer = Candidate("bitsandbytes")
    if theirs:
        calls = [theirs.quantize(weight) for weight in weights]
        candidates[peer] = [lambda _, call=call: call() for call in calls]
        candidates[OURS_AS_CALLS] = [weight.quantize for weight in weights]
    times = bench.times(weights, candidates, eager=(peer, OURS_AS_CALLS))
    return [_row(first, each.launch, times) for each in ours]


def consumer_row(bench: Bench, case: Case) -> dict:
    """Dequantize and then read all of the output: with the library's choice of stores, with
    normal ones and with those that evict first, all launched plainly; and those two alone,
    without a reader. Raises WrongResult before anything is timed."""
    weights = bench.rotation(case)
    expected = bench.expected(weights[0])
    policies = {
        "libnf4": [configured(bench, weight, PLAIN) for weight in weights],
        "normal": [_stores(bench, weight, True) for weight in weights],
        "evict_first": [_stores(bench, weight, False) for weight in weights],
    }
    candidates: Candidates = {}
    sink = torch.empty(16, dtype=torch.uint8, device=bench.gpu.place)
    for name, producers in policies.items():
        bench.require(f"stores: {name}", weights[0], expected, producers[0])
        candidates[Candidate(f"{name} alone")] = producers
        for variant in bench.library.variants("read"):
            candidates[Candidate(name, variant=variant)] = [
                _then_read(bench, weight, producer, variant, sink)
                for weight, producer in zip(weights, producers, strict=True)
            ]
    times = bench.times(weights, candidates)
    read = {name: fastest(times, name).timing for name in policies}
    return {
        "shape": list(case.shape), "dtype": case.dtype, "bytes": weights[0].dense_bytes,
        "then_read": {name: timing.figures() for name, timing in read.items()},
        "alone": {name: times[Candidate(f"{name} alone")].figures() for name in policies},
        "ratio": round(read["normal"].us / read["libnf4"].us, 3),
    }  # fmt: skip


def _stores(bench: Bench, weight: Weight, keep: bool) -> Launch:
    out, dtype = weight.out.data_ptr(), CODES[weight.case.dtype]

    def launch(stream: int) -> torch.Tensor:
        bench.library.dequantize_stores(keep, weight.descriptor, out, dtype, stream)
        return weight.out

    return launch


def _then_read(
    bench: Bench, weight: Weight, producer: Launch, variant: int, sink: torch.Tensor
) -> Launch:
    source, nbytes = weight.out.data_ptr(), limits.write_bytes(weight)

    def launch(stream: int) -> None:
        producer(stream)
        bench.library.read(variant, source, nbytes, sink.data_ptr(), False, stream)

    return launch


def run(bench: Bench, cases: Iterable[Case], report: Report) -> dict:
    """All figures, as the record holds them."""
    figures: dict[str, Any] = {
        "device": bench.gpu.name,
        "torch": torch.__version__,
        "peers": peers.described(bench.peers),
        "rows": [],
        "consumer": [],
    }
    torch.manual_seed(0)
    for name, each in figures["peers"].items():
        report(f"{name}: {each.get('version') or 'missing: ' + each['missing']}")
    for case in cases:
        if case.work == "consumer":
            figures["consumer"].append(consumer_row(bench, case))
            report(tables.consumer_line(figures["consumer"][-1]))
        else:
            rows = {"dequantize": dequantize_rows, "quantize": quantize_rows}[case.work]
            made = rows(bench, case)
            figures["rows"] += made
            for row in made:
                report(tables.line(row))
        bench.gpu.release()
    return figures
