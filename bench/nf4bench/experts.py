"""The products of mixture-of-experts layers: libnf4's beside torch's grouped_mm on dense bf16, with
bitsandbytes' dequantize before it, and grouped-nf4-gemm (PyPI). Each launch of a graph has another
random routing. A form is checked against float64 before it is timed."""

from __future__ import annotations

import importlib
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import Any

import nf4.torch
import torch
from nf4.torch._weight import WeightParts
from torch import Tensor

from nf4bench import experts_cases, experts_decode, experts_pages, peers
from nf4bench.experts_cases import BLOCKSIZE, DENSE, DEQUANTIZED, GROUPED_NF4, Group, Model
from nf4bench.experts_weights import DTYPE, Operands, Routing, Stack
from nf4bench.host import host_times
from nf4bench.matmul_cases import MOST_ERROR
from nf4bench.measure import measure
from nf4bench.peers import PeerMissing, present
from nf4bench.product import MOST_PEER_ERROR, require
from nf4bench.rows import Bench, Report, begin

CHECKED_ROWS = 64
Call = Callable[[int], Tensor]
grouped_mm = torch.nn.functional.grouped_mm


def libnf4(each: Operands, routing: Routing) -> Call:
    if each.gradient:
        return lambda stream: nf4.matmul_grouped_grad(
            each.x, each.stack.quantized, routing.ends, out=each.y, stream=stream
        )
    index = routing.index if each.by_index else None
    return lambda stream: nf4.matmul_grouped(
        each.x, each.stack.quantized, routing.ends, x_index=index, out=each.y, stream=stream
    )


class Dense:
    version = torch.__version__

    def __init__(self, place: str) -> None:
        """As the other peers."""

    def prepare(self, each: Operands, routing: Routing) -> Call:
        weight = each.right(each.stack.dense)
        return lambda stream: grouped_mm(each.sorted_x, weight, offs=routing.ends)


class Dequantized:
    """bitsandbytes' dequantize of each active expert, whose scales are flat, then grouped_mm."""

    def __init__(self, place: str) -> None:
        self.version = peers.Bitsandbytes(place).version
        self._functional = importlib.import_module("bitsandbytes.functional")
        self._into = place == "cuda"  # elsewhere it only makes new tensors
        self._code = torch.from_numpy(nf4.codebook("nf4").copy()).to(place)

    def _state(self, stack: Stack, expert: int) -> Any:
        return self._functional.QuantState(
            absmax=stack.scales[expert].view(-1), shape=stack.dense.shape[1:], dtype=DTYPE,
            blocksize=BLOCKSIZE, code=self._code, quant_type="nf4",
        )  # fmt: skip

    def prepare(self, each: Operands, routing: Routing) -> Call:
        stack, dequantize = each.stack, self._functional.dequantize_4bit
        room = stack.room[: len(routing.active)]
        parts = [
            (stack.packed[expert].view(-1, 1), self._state(stack, expert), out)
            for expert, out in zip(routing.active, room, strict=True)
        ]

        def call(stream: int) -> Tensor:
            for packed, state, out in parts:
                if self._into:
                    dequantize(packed, state, out=out)
                else:
                    out.copy_(dequantize(packed, state))
            return grouped_mm(each.sorted_x, each.right(room), offs=routing.active_ends)

        return call


class GroupedNf4:
    """Its one launch for all active experts, with flat scales. A graph holds the routing that it
    was captured with: the host names the experts and the rows of each."""

    def __init__(self, place: str) -> None:
        if place != "cuda":
            raise PeerMissing("its kernels are Triton's, for GPUs")
        os.environ.setdefault("GNF4_PIN_ARENA_INTS", str(1 << 20))  # for all captures
        self._multiply = importlib.import_module("nf4_grouped").gemm_4bit_grouped
        self.version = metadata.version(GROUPED_NF4)

    def prepare(self, each: Operands, routing: Routing) -> Call:
        packed, scales = each.stack.packed, each.stack.scales
        return lambda stream: self._multiply(
            each.sorted_x, packed, scales, routing.counts, routing.active_index
        )


FACTORIES: dict[str, Callable[[str], Any]] = {
    DENSE: Dense, DEQUANTIZED: Dequantized, GROUPED_NF4: GroupedNf4,
}  # fmt: skip
TRIED = Model("tried", 4, 128, 64, 2)  # every peer can do it


def load(place: str) -> dict[str, Any]:
    """Each peer that can multiply here, or why it is missing."""
    routing = Routing(TRIED, 3, place)
    tried = Operands("gate_up", Stack(TRIED.shape("gate_up"), place), 3, routing)

    def make(name: str) -> Any:
        peer = FACTORIES[name](place)
        _checked(name, tried, routing, peer.prepare(tried, routing), MOST_PEER_ERROR)
        return peer

    return peers.load_each(FACTORIES, make)


def _checked(
    what: str, each: Operands, routing: Routing, call: Call, most: float, gpu: Any = None
) -> float:
    """The relative error of some rows. Raises WrongResult."""
    m = len(routing.index)
    rows = torch.linspace(0, m - 1, min(m, CHECKED_ROWS), device=each.x.device).long()
    y = call(0) if gpu is None else gpu.run(call)
    return require(what, most, each.expected(routing, rows), y[rows])


def _in_order(calls: Sequence[Call], stream: int) -> list[Tensor]:
    return [call(stream) for call in calls]


def row(
    bench: Bench, group: Group, stacks: Mapping[str, Stack], tokens: int, found: Mapping[str, Any]
) -> dict[str, Any]:
    """Raises WrongResult before anything is timed."""
    model, place = group.model, bench.gpu.place
    routings = [Routing(model, tokens, place) for _ in range(experts_cases.ROUTINGS)]
    operands = [Operands(name, stacks[name], tokens, routings[0]) for name in group.works]
    prepare = {"libnf4": libnf4} | {n: found[n].prepare for n in group.peers if n in found}
    launches, errors = {}, {}
    for name, form in prepare.items():
        calls = [[form(each, routing) for each in operands] for routing in routings]
        what = f"{name}: {model.name} {group.work}, {tokens} tokens"
        most = MOST_ERROR["bf16"] if name == "libnf4" else MOST_PEER_ERROR
        errors[name] = max(
            _checked(what, each, routings[0], call, most, bench.gpu)
            for each, call in zip(operands, calls[0], strict=True)
        )
        launches[name] = [partial(_in_order, each) for each in calls]
    times = measure(bench.gpu, launches, bench.replays or experts_cases.REPLAYS)
    ours, active = times["libnf4"], statistics.mean(len(each.active) for each in routings)
    nbytes = sum(each.stack.nbytes(active) for each in operands)
    return {
        "model": model.name, "experts": model.experts, "hidden": model.hidden,
        "intermediate": model.intermediate, "top_k": model.top_k, "work": group.work,
        "tokens": tokens, "active": round(active, 1), "bytes": round(nbytes),
        "gb_per_s": round(nbytes / ours.us / 1e3, 1), **ours.figures(),
        "error": float(f"{errors['libnf4']:.3e}"),
        "peers": {
            name: each.figures() | {"ratio": round(each.us / ours.us, 3)}
            for name, each in times.items()
            if name != "libnf4"
        },
    }  # fmt: skip


def rows(
    bench: Bench,
    found: Mapping[str, Any],
    groups: Iterable[Group],
    report: Report,
    format: str = "nf4",
) -> list[dict[str, Any]]:
    made = []
    for model, of_model in experts_cases.by_model(groups).items():
        works = sorted({work for group in of_model for work in group.works})
        shapes = {*map(model.shape, works)}
        of_shape = {shape: Stack(shape, bench.gpu.place, format) for shape in shapes}
        stacks = {work: of_shape[model.shape(work)] for work in works}
        for group in of_model:
            for tokens in group.tokens:
                made.append(row(bench, group, stacks, tokens, found))
                report(experts_pages.ROWS.line(made[-1]))
        del stacks, of_shape
        bench.gpu.release()
    return made


def run_format(
    bench: Bench, found: Mapping[str, Any], groups: Iterable[Group], format: str, report: Report
) -> dict[str, Any]:
    """The products of experts in another format than NF4."""
    figures = begin(bench, found, report) | {"format": format}
    report(f"experts in {format}")
    return figures | {"rows": rows(bench, present(found), groups, report, format)}


# So small that the GPU is done before the host has come to the next.
CALLED, CALLED_TOKENS = Model("small", 8, 256, 128, 2), 4
GROUPED_MM = "torch.nn.functional.grouped_mm"


def calls(bench: Bench) -> list[dict[str, Any]]:
    """What an eager call costs the host, nothing waited for, by the name of what is called."""
    place = bench.gpu.place
    routing, stack = Routing(CALLED, CALLED_TOKENS, place), Stack(CALLED.shape("gate_up"), place)
    each = Operands("gate_up", stack, CALLED_TOKENS, routing)
    layer = nf4.torch.NF4Experts.from_quantized(stack.quantized)
    given = (each.x, routing.ends, routing.index)
    arguments = WeightParts.of(stack.quantized).arguments()
    operator = torch.ops.nf4.linear_grouped.default
    work = {
        "nf4.torch.NF4Experts": partial(layer, *given),
        "torch.ops.nf4.linear_grouped": partial(operator, *given, None, *arguments),
        "nf4.matmul_grouped": partial(
            nf4.matmul_grouped, each.x, stack.quantized, routing.ends, x_index=routing.index
        ),
        GROUPED_MM: partial(
            grouped_mm, each.sorted_x, stack.dense.transpose(1, 2), offs=routing.ends
        ),
    }
    with torch.no_grad():
        times = host_times(bench.gpu, work)
    return [
        {"name": name, **time.figures(), "ratio": round(time.us / times[GROUPED_MM].us, 3)}
        for name, time in times.items()
    ]


def run(
    bench: Bench, found: Mapping[str, Any], groups: Iterable[Group], decoded: Any, report: Report
) -> dict[str, Any]:
    """All figures, as figures.json holds them. decoded: the model whose decoding is measured.
    Raises WrongResult before what is wrong is timed."""
    figures = begin(bench, found, report)
    figures["rows"] = rows(bench, present(found), groups, report)
    figures["call"] = experts_pages.CALLS.told(calls(bench), report)
    figures["decode"] = experts_decode.run(bench, decoded)
    experts_pages.DECODE.told(figures["decode"]["forms"], report)
    return figures
