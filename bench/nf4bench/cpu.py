"""Dequantize, quantize and matmul on the CPU beside bitsandbytes and memory, in one run.

Where the output is decides more than who writes it: memory that the kernel has yet to provide is
zeroed page by page at the first touch. So each is timed with new memory, as a call without `out`
makes it, and with memory that is kept from call to call: ours in the caller's tensor, bitsandbytes'
with a malloc that keeps what is freed (and has no way back, so all that is new comes first).

The roofline is memory alone: filling what dequantize writes, copying as much as quantize reads and
writes, reading the weight of a product, on as many threads; the fastest of our own threads and of
torch's counts. Results are compared before anything is timed. The weights of a product rotate.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import nf4
import torch

from nf4bench import (
    check,
    cpu_experts,
    cpu_layers,
    ggml,
    int4_cases,
    matmul_peers,
    peers,
    tables,
)
from nf4bench.cases import CLASSES, Case
from nf4bench.matmul_cases import MOST_OF_DENSE, Group, weight_case
from nf4bench.measure import summary, taken
from nf4bench.options import Shape
from nf4bench.product import Product, exact, relative_error, require
from nf4bench.table import Row, Table, number, shape, text
from nf4bench.weights import Weight, rotation

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "python"))
import oracle  # noqa: E402

SHAPES: list[Shape] = [(4096, 4096), (14336, 4096)]
CASES = [
    *(("dequantize", *kind) for kind in CLASSES),
    ("quantize", "bf16", True), ("quantize", "fp32", True), ("quantize", "fp32", False),
]  # fmt: skip
BATCHES, INT4_BATCHES = (1, 4, 16, 64), (1, 64)
ROTATED_BYTES = 200 << 20  # bytes of a product's weights: several times the caches
TURNS, LEAD_IN, CALLS = 5, 3, 5
PAUSE, LONG_MS = 0.02, 300.0  # seconds between turns; milliseconds after which a turn ends

Work = Callable[[], Any]


# ---- Turns ------------------------------------------------------------------------------


def turn(work: Work) -> list[float]:
    """Milliseconds of the calls that count: after a pause, in which the threads of the last
    candidate stop spinning (OpenMP's go on for milliseconds), and three calls untimed (one, where
    calls are long), in which its own wake up and its memory enters the caches."""
    time.sleep(PAUSE)
    times: list[float] = []
    while len(times) < 2 or (len(times) < LEAD_IN + CALLS and sum(times) < LONG_MS):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return times[LEAD_IN:] or times[1:]


def measure(candidates: dict[str, Work]) -> dict[str, dict]:
    """The median and the outer deciles of each, in milliseconds."""
    turns = {name: partial(turn, work) for name, work in candidates.items()}
    found = {}
    for name, values in taken(turns, TURNS, warm_up=0, rotate=True).items():
        timing = summary(list(itertools.chain(*values)))
        spread = [round(each, 4) for each in timing.spread]
        found[name] = {"ms": round(timing.us, 4), "spread": spread}
    return found


def keep_freed_memory() -> None:
    """From here on glibc's malloc takes nothing by mmap and gives nothing back, and there is no
    way back; others are left alone."""
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


# ---- Rooflines --------------------------------------------------------------------------


@dataclass
class Memory:
    """What moves bytes and does nothing else, on as many threads."""

    threads: int
    pool: ThreadPoolExecutor

    def __post_init__(self) -> None:
        self._memcmp = ctypes.CDLL(None).memcmp
        self._memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def _parts(self, tensor: torch.Tensor) -> list[tuple[int, int]]:
        """The address and the bytes of each thread's part."""
        split = tensor.view(-1).view(torch.uint8).tensor_split(self.threads)
        return [(part.data_ptr(), part.numel()) for part in split]

    def _each(self, move: Callable, *parts: Sequence) -> Work:
        return lambda: list(self.pool.map(move, *parts))

    def fill(self, out: torch.Tensor) -> dict[str, Work]:
        fill = self._each(lambda part: ctypes.memset(part[0], 0x3C, part[1]), self._parts(out))
        return {"fill": fill, "fill by torch": lambda: out.fill_(1)}

    def copy(self, weight: Weight) -> dict[str, Work]:
        source, target = (
            each.view(-1).view(torch.uint8)[: weight.moved_bytes // 2]
            for each in (weight.dense, weight.out_room)
        )
        parts = self._parts(target), self._parts(source)
        copy = self._each(lambda to, start: ctypes.memmove(to[0], *start), *parts)
        return {"copy": copy, "copy by torch": lambda: target.copy_(source)}

    def read(self, weights: Sequence[Weight]) -> dict[str, Work]:
        """Packed bytes and scales."""

        def compare(weight: Weight) -> Work:
            parts = [*self._parts(weight.quantized.packed), *self._parts(weight.scales)]
            return self._each(lambda part: self._memcmp(part[0], *part), parts)

        words = [weight.quantized.packed.view(-1).view(torch.int64) for weight in weights]
        return {
            "memcmp": rotating(map(compare, weights)),
            "sum by torch": rotating(each.sum for each in words),
        }


def rotating(works: Iterable[Work]) -> Work:
    turns = itertools.cycle(list(works))
    return lambda: next(turns)()


def fastest(rooflines: Iterable[str], times: dict[str, dict]) -> dict:
    best = min(rooflines, key=lambda name: times[name]["ms"])
    return {"kernel": best, **times[best]}


# ---- Dequantize and quantize ------------------------------------------------------------


@dataclass
class Contest:
    """What is timed of a case: ours with new and with kept memory, the rooflines, the peers."""

    weight: Weight
    new: Work
    kept: Work
    rooflines: dict[str, Work]
    peers: dict[str, Work]

    def measure_new(self) -> dict[str, dict]:
        return measure({"new": self.new, "kept": self.kept} | self.peers)

    def measure_kept(self) -> dict[str, dict]:
        return measure({"kept": self.kept} | self.rooflines | self.peers)

    def row(self, with_new: dict[str, dict], with_kept: dict[str, dict]) -> dict:
        """Our times, the roofline, and the ratios of the peer's time to ours."""
        case, new, kept = self.weight.case, with_new["new"], with_kept["kept"]
        roofline = fastest(self.rooflines, with_kept)

        def beside(peer: str) -> dict:
            theirs_new, theirs_kept = with_new[peer], with_kept[peer]
            ratios = {
                "both_new": theirs_new["ms"] / new["ms"],
                "both_kept": theirs_kept["ms"] / kept["ms"],
                "theirs_new_ours_kept": theirs_new["ms"] / with_new["kept"]["ms"],
            }
            rounded = {name: round(ratio, 2) for name, ratio in ratios.items()}
            return {"new": theirs_new, "kept": theirs_kept, "ratio": rounded}

        return {
            "work": case.work, "shape": list(case.shape), "dtype": case.dtype,
            "nested": case.nested, "new": new,
            "kept": kept | {"gb_per_s": round(self.weight.moved_bytes / kept["ms"] / 1e6, 1)},
            "roofline": roofline, "of_roofline": round(roofline["ms"] / kept["ms"], 3),
            "peers": {peer: beside(peer) for peer in self.peers},
        }  # fmt: skip


def contest(memory: Memory, theirs: dict[str, Any], case: Case) -> Contest:
    """After results were found equal to the formulas; of quantize ours alone, as bitsandbytes'
    bytes are its backend's own. Raises WrongResult."""
    weight = Weight(case, "cpu")
    q, threads = weight.quantized, memory.threads
    if case.work == "dequantize":
        new = partial(nf4.dequantize, q, threads=threads)
        kept = partial(nf4.dequantize, q, out=weight.out, threads=threads)
        calls = {name: peer.prepare(weight, 0) for name, peer in theirs.items()}
        expected = peers.TorchOperators("cpu").prepare(weight, 0)()
        for name, call in {"libnf4": new, "libnf4, out given": kept, **calls}.items():
            check.require_dequantized(name, weight, expected, call)
        return Contest(weight, new, kept, memory.fill(weight.out), calls)
    layout = {"blocksize": case.blocksize, "nested_blocksize": case.nested_blocksize}
    new = partial(nf4.quantize, weight.dense, threads=threads, **layout)
    kept = partial(
        nf4.quantize, weight.dense, out=q, workspace=weight.workspace, threads=threads
    )  # fmt: skip
    expected = oracle.quantize(
        weight.dense.float().numpy(), codebook=nf4.codebook("nf4"), scale_code=nf4.scale_code(),
        **layout,
    )  # fmt: skip
    for made, part in itertools.product((new(), kept()), ("packed", "absmax")):
        wanted, found = torch.from_numpy(expected[part]), getattr(made, part)
        check.require_equal(f"{case}: {part}", wanted.view(-1), found.view(-1))
    calls = {name: peer.quantize(weight) for name, peer in theirs.items()}
    return Contest(weight, new, kept, memory.copy(weight), calls)


# ---- Matmul -----------------------------------------------------------------------------


class Rearranged(matmul_peers.Bitsandbytes):
    """The kernel to which bitsandbytes' Linear4bit turns for inference on AVX512-BF16, on bytes
    that it has rearranged beforehand and scales in bf16."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self._functional = importlib.import_module("bitsandbytes.functional")
        if not getattr(self._functional, "has_avx512bf16", lambda: False)():
            raise peers.PeerMissing("it needs AVX512-BF16")

    def prepare(self, weight: Weight, variant: int) -> matmul_peers.Multiply:
        packed, state = self._functional._convert_weight_packed_for_cpu(
            weight.quantized.packed.view(-1, 1).clone(), self._dequantize.state(weight)
        )
        return lambda x: self._multiply(x, packed, quant_state=state)


def accurate(product: Product, numbers: torch.Tensor) -> float:
    """The relative error of y. Raises WrongResult where it is over 1.1 times that of a weight
    rounded to bf16."""
    expected = exact(product.x, numbers)
    rounded = exact(product.x, numbers.to(product.y.dtype).double()).to(product.y.dtype)
    most = MOST_OF_DENSE * relative_error(rounded, expected)
    return require(f"{product.weight.case}, M = {product.m}", most, expected, product.y)


def works_of_ggml(
    name: str, peer: ggml.Ggml, tensors: Sequence[int], product: Product, numbers: torch.Tensor
) -> Work:
    """Raises WrongResult where the first weight's y is not the product."""
    made = [peer.product(tensor, product.x) for tensor in tensors]
    first, y = made[0]
    first()
    found = peer.read(y, tuple(product.y.shape))
    require(f"{name}, M = {product.m}", ggml.MOST_ERROR, exact(product.x, numbers), found)
    return rotating(compute for compute, _ in made)


def products(shape: Shape) -> list[Group]:
    return [
        Group(weight_case(shape), BATCHES),
        *(Group(int4_cases.case(shape, layout), INT4_BATCHES) for layout in int4_cases.LAYOUTS),
    ]


def matmul_rows(memory: Memory, group: Group) -> Iterator[dict]:
    """Raises WrongResult before a product is timed."""
    case = group.case
    weights = rotation(case, "cpu", ROTATED_BYTES)
    numbers = peers.dequantized(weights[0], torch.float64)
    loaded = {"dense": matmul_peers.Dense("cpu")}
    if case.format == "nf4":
        loaded = matmul_peers.load("cpu")
        loaded |= peers.load_each(["rearranged"], lambda _: Rearranged("cpu"))
    calls = {
        name: [peer.prepare(weight, 0) for weight in weights]
        for name, peer in peers.present(loaded).items()
    }
    of_ggml: dict[str, ggml.Ggml] = {}
    if case.format == "nf4":
        made = peers.load_each(ggml.TYPES, lambda kind: ggml.Ggml(kind, memory.threads))
        of_ggml = peers.present(made)
    tensors = {name: list(map(peer.prepare, weights)) for name, peer in of_ggml.items()}
    reads, nbytes = memory.read(weights), weights[0].input_bytes
    for m in group.ms:
        first = Product(weights[0], m)
        x, y, threads = first.x, first.y, memory.threads
        works = [partial(nf4.matmul, x, w.quantized, out=y, threads=threads) for w in weights]
        works[0]()
        error = accurate(first, numbers)
        theirs = {name: rotating(partial(c, x) for c in each) for name, each in calls.items()}
        for name, peer in of_ggml.items():
            theirs[name] = works_of_ggml(name, peer, tensors[name], first, numbers)
        times = measure({"ours": rotating(works)} | reads | theirs)
        ours, roofline = times["ours"], fastest(reads, times)
        yield {
            "work": "matmul", "shape": list(case.shape), "dtype": case.dtype, "m": m,
            "nested": case.nested, "format": case.format, "error": error,
            "ours": ours | {"gb_per_s": round(nbytes / ours["ms"] / 1e6, 1)},
            "roofline": roofline, "of_roofline": round(roofline["ms"] / ours["ms"], 3),
            "peers": {
                name: times[name] | {"ratio": round(times[name]["ms"] / ours["ms"], 2)}
                for name in theirs
            },
        }  # fmt: skip
    for peer in of_ggml.values():
        peer.free()


# ---- All --------------------------------------------------------------------------------


def _peers(row: Row) -> str:
    return ", ".join(
        f"{name} ms new {each['new']['ms']:.3f} ({each['ratio']['both_new']:.1f}x, over ours kept "
        f"{each['ratio']['theirs_new_ours_kept']:.1f}x), kept {each['kept']['ms']:.3f} "
        f"({each['ratio']['both_kept']:.2f}x)"
        if "new" in each
        else f"{name} ms {each['ms']:.3f} ({each['ratio']:.2f}x)"
        for name, each in row["peers"].items()
    )


_SHARED = [
    number("ms roofline", "{roofline[ms]:.3f}"), number("of the roofline", "{of_roofline:.2f}"),
    text("peers", _peers),
]  # fmt: skip
TABLE = Table(
    text("work", "{work}"), text("shape", shape), text("dtype", "{dtype}"),
    text("layout", lambda row: "nested" if row["nested"] else "flat"),
    number("ms new", "{new[ms]:.3f}"), number("ms kept", "{kept[ms]:.3f}"), *_SHARED,
)  # fmt: skip
MATMUL = Table(
    text("work", lambda row: f"matmul {tables.weight(row)}"), text("shape", shape),
    number("M", "{m}"), number("ms", "{ours[ms]:.3f}"), *_SHARED, number("error", "{error:.1e}"),
)  # fmt: skip


def int4(shapes: Sequence[Shape], threads: int) -> dict:
    """Products of integer weights beside NF4's. Raises WrongResult."""
    rows = cpu_layers.run_int4(shapes, threads)
    return {"cpu_variant": nf4.cpu_variant(), "threads": threads, "matmul": rows}


def layers(shapes: Sequence[Shape], threads: int) -> dict:
    """Linear4bit of bf16 beside bitsandbytes'. Raises WrongResult."""
    rows = cpu_layers.run(shapes, threads, dtypes=(torch.bfloat16,))
    return {"cpu_variant": nf4.cpu_variant(), "threads": threads, "layers": rows}


def run(shapes: Sequence[Shape], threads: int, report: Callable[[str], None] = print) -> dict:
    """All figures. Raises WrongResult before what is wrong is timed."""
    torch.set_num_threads(threads)
    loaded = peers.load(("bitsandbytes",), "cpu")
    theirs, described = peers.present(loaded), peers.described(loaded)["bitsandbytes"]
    version = described.get("version") or f"missing: {described['missing']}"
    report(f"libnf4: {nf4.cpu_variant()}, {threads} threads; bitsandbytes: {version}")
    cases = [Case(each, dtype, nested, work) for each in shapes for work, dtype, nested in CASES]
    with ThreadPoolExecutor(threads) as pool:
        memory = Memory(threads, pool)
        with_new = [contest(memory, theirs, case).measure_new() for case in cases]
        rows, matmul = [], []
        for group in itertools.chain(*map(products, shapes)):
            for row in matmul_rows(memory, group):
                matmul.append(row)
                report(MATMUL.line(row))
        layers = cpu_layers.run(shapes, threads, report) if theirs else []
        experts = cpu_experts.run(threads, report)
        keep_freed_memory()
        for case, times in zip(cases, with_new, strict=True):
            made = contest(memory, theirs, case)
            rows.append(made.row(times, made.measure_kept()))
            report(TABLE.line(rows[-1]))
    return {
        "cpu_variant": nf4.cpu_variant(), "threads": threads, "peers": {"bitsandbytes": version},
        "rows": rows, "matmul": matmul, "layers": layers,
        "experts": experts,
    }  # fmt: skip
