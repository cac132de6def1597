"""Dequantize, quantize and matmul on the CPU beside bitsandbytes and memory, in one run.

Where the output is decides more than who writes it: memory that the kernel has yet to provide
is zeroed page by page at the first touch. So each is timed with new memory, as a call without
`out` makes it, and with memory that is kept from call to call: ours in the caller's array,
bitsandbytes', which always makes its output, with a malloc that keeps what is freed (and has no
way back, so all that is new comes first). Three ratios follow: both new, both kept, and
bitsandbytes as it is called against us in the caller's memory.

The roofline is memory alone, kept: filling as many bytes as dequantize writes, copying as many as
quantize reads and writes, on as many threads; the fastest of our own threads and of torch's
counts. Outputs are compared bit for bit, with the formulas in numpy and with bitsandbytes, before
anything is timed. Matmul is another matter: cpu_matmul.py.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import nf4
import numpy as np

from nf4bench.options import Shape
from nf4bench.table import Row, Table, number, shape, text

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
import oracle  # noqa: E402

SHAPES: list[Shape] = [(4096, 4096), (14336, 4096)]
BLOCKSIZE, NESTED_BLOCKSIZE = 64, 256
TURNS, LEAD_IN, CALLS = 5, 3, 5
PAUSE = 0.02  # seconds
LONG = 0.3  # seconds: a turn ends after as much

Work = Callable[[], Any]


# ---- Turns ------------------------------------------------------------------------------


def turn(work: Work) -> list[float]:
    """Milliseconds of the calls that count: after a pause, in which the threads of the last
    candidate stop spinning (OpenMP's go on for milliseconds), and three calls untimed (one, where
    calls are long), in which its own wake up and its memory enters the caches."""
    time.sleep(PAUSE)
    times: list[float] = []
    while len(times) < 2 or (len(times) < LEAD_IN + CALLS and sum(times) < LONG * 1e3):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return times[LEAD_IN:] or times[1:]


def measure(candidates: dict[str, Work]) -> dict[str, dict]:
    """The median and the outer deciles of each, in milliseconds. They take turns, so that all see
    the same machine."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    for _ in range(TURNS):
        for name in order:
            times[name] += turn(candidates[name])
        order.append(order.pop(0))
    found = {}
    for name, values in times.items():
        deciles = statistics.quantiles(values, n=10)
        spread = [round(deciles[0], 4), round(deciles[-1], 4)]
        found[name] = {"ms": round(statistics.median(values), 4), "spread": spread}
    return found


# ---- The peer ---------------------------------------------------------------------------


class Peer:
    """bitsandbytes on the CPU, on the same memory as ours; or why it is missing."""

    def __init__(self, threads: int) -> None:
        self.functional = None
        try:
            import bitsandbytes
            import bitsandbytes.functional as functional
            import torch
        except Exception as error:  # an import that fails for any reason is a missing peer
            self.version = f"missing: {error}"
            return
        torch.set_num_threads(threads)
        self.torch, self.functional, self.version = torch, functional, bitsandbytes.__version__
        self.matmul_4bit = bitsandbytes.matmul_4bit

    def tensor(self, array: np.ndarray) -> Any:
        """The same memory as a torch tensor; torch takes no bfloat16 from numpy."""
        if array.dtype == oracle.DTYPES["bf16"]:
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)

    def array(self, tensor: Any, like: np.ndarray) -> np.ndarray:
        """The way back, to the dtype of `like`."""
        return tensor.view(self.torch.uint8).numpy().view(like.dtype)

    def state(self, q: nf4.QuantizedTensor) -> Any:
        """The weight as bitsandbytes describes it, borrowing its parts."""
        nested: dict[str, Any] = {}
        if q.nested:
            nested["offset"] = self.tensor(q.nested_offset)
            nested["state2"] = self.functional.QuantState(
                absmax=self.tensor(q.nested_absmax), blocksize=q.nested_blocksize,
                code=self.tensor(q.nested_code.copy()), dtype=self.torch.float32,
            )  # fmt: skip
        return self.functional.QuantState(
            absmax=self.tensor(q.absmax), shape=self.torch.Size(q.shape),
            code=self.tensor(nf4.codebook("nf4").copy()), blocksize=q.blocksize, quant_type="nf4",
            dtype=self.tensor(np.empty(0, oracle.DTYPES[q.dtype])).dtype, **nested,
        )  # fmt: skip


def keep_freed_memory() -> None:
    """From here on glibc's malloc takes nothing by mmap and gives nothing back, and there is no
    way back; others are left alone."""
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


# ---- Cases ------------------------------------------------------------------------------


@dataclass
class Case:
    """A weight, its quantized form, and room for the outputs, touched once."""

    shape: Shape
    dtype: str
    nested: bool
    threads: int

    def __post_init__(self) -> None:
        self._layout = {
            "blocksize": BLOCKSIZE, "nested_blocksize": NESTED_BLOCKSIZE if self.nested else 0,
        }  # fmt: skip

    @cached_property
    def dense(self) -> np.ndarray:
        values = np.random.default_rng(0).standard_normal(self.shape, np.float32)
        return (values * np.float32(0.02)).astype(oracle.DTYPES[self.dtype])

    @cached_property
    def quantized(self) -> nf4.QuantizedTensor:
        return nf4.quantize(self.dense, **self._layout)

    @cached_property
    def out(self) -> np.ndarray:
        return np.ones_like(self.dense)

    @cached_property
    def workspace(self) -> np.ndarray:
        raw = np.zeros(self.quantized.sizes.workspace_bytes + 15, np.uint8)
        return raw[-raw.ctypes.data % 16 :]

    @property
    def bytes(self) -> int:
        return self.dense.nbytes + self.quantized.nbytes

    def dequantize(self) -> np.ndarray:
        return nf4.dequantize(self.quantized, threads=self.threads)

    def dequantize_kept(self) -> np.ndarray:
        return nf4.dequantize(self.quantized, out=self.out, threads=self.threads)

    def quantize(self) -> nf4.QuantizedTensor:
        return nf4.quantize(self.dense, threads=self.threads, **self._layout)

    def quantize_kept(self) -> nf4.QuantizedTensor:
        workspace = self.workspace if self.nested else None
        return nf4.quantize(
            self.dense, out=self.quantized, workspace=workspace, threads=self.threads
        )


def as_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def fills(pool: ThreadPoolExecutor, peer: Peer, case: Case) -> dict[str, Work]:
    split = np.array_split(as_bytes(case.out), case.threads)
    parts = [(part.ctypes.data, 0x3C, part.size) for part in split]
    rooflines: dict[str, Work] = {
        "fill": lambda: list(pool.map(lambda part: ctypes.memset(*part), parts))
    }
    if peer.functional is not None:
        target = peer.tensor(case.out)
        rooflines["fill by torch"] = lambda: target.fill_(1)
    return rooflines


def copies(pool: ThreadPoolExecutor, peer: Peer, case: Case) -> dict[str, Work]:
    source, target = (as_bytes(each)[: case.bytes // 2] for each in (case.dense, case.out))
    split = (np.array_split(each, case.threads) for each in (target, source))
    parts = [(to.ctypes.data, start.ctypes.data, to.size) for to, start in zip(*split, strict=True)]
    rooflines: dict[str, Work] = {
        "copy": lambda: list(pool.map(lambda part: ctypes.memmove(*part), parts))
    }
    if peer.functional is not None:
        torch_source, torch_target = peer.tensor(source), peer.tensor(target)
        rooflines["copy by torch"] = lambda: torch_target.copy_(torch_source)
    return rooflines


def require_equal(what: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    differing = oracle.differing(ours, theirs)
    if differing:
        sys.exit(f"bench: {what}: {differing} of {ours.size} elements differ; nothing timed")


@dataclass
class Contest:
    """What is timed of a case: ours with new and with kept memory, the rooflines, the peers."""

    work: str
    case: Case
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
        new, kept = with_new["new"], with_kept["kept"]
        best = min(self.rooflines, key=lambda name: with_kept[name]["ms"])

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
            "work": self.work, "shape": list(self.case.shape), "dtype": self.case.dtype,
            "nested": self.case.nested, "new": new,
            "kept": kept | {"gb_per_s": round(self.case.bytes / kept["ms"] / 1e6, 1)},
            "roofline": {"kernel": best, **with_kept[best]},
            "of_roofline": round(with_kept[best]["ms"] / kept["ms"], 3),
            "peers": {peer: beside(peer) for peer in self.peers},
        }  # fmt: skip


def dequantize_contest(pool: ThreadPoolExecutor, peer: Peer, case: Case) -> Contest:
    """After the results were found equal."""
    q, what = case.quantized, f"{case.shape} {case.dtype}"
    ours = case.dequantize()
    expected = oracle.dequantize(q, nf4.codebook("nf4"), case.dtype)
    require_equal(f"dequantize {what}", ours, expected)
    require_equal(f"dequantize to out {what}", case.dequantize_kept(), expected)
    peers = {}
    if peer.functional is not None:
        packed, state = peer.tensor(q.packed).view(-1, 1), peer.state(q)
        peers["bitsandbytes"] = partial(peer.functional.dequantize_4bit, packed, state)
        theirs = peer.array(peers["bitsandbytes"](), ours)
        require_equal(f"bitsandbytes' dequantize {what}", ours, theirs)
    rooflines = fills(pool, peer, case)
    return Contest("dequantize", case, case.dequantize, case.dequantize_kept, rooflines, peers)


def quantize_contest(pool: ThreadPoolExecutor, peer: Peer, case: Case) -> Contest:
    """After ours was found right; bitsandbytes' bytes are its backend's own."""
    expected = oracle.quantize(
        case.dense, blocksize=BLOCKSIZE, nested_blocksize=case.quantized.nested_blocksize,
        codebook=nf4.codebook("nf4"), scale_code=nf4.scale_code(),
    )  # fmt: skip
    for q in (case.quantize(), case.quantize_kept()):
        for part in ("packed", "absmax"):
            what = f"quantize {case.shape} {case.dtype} {part}"
            require_equal(what, getattr(q, part), expected[part])
    peers = {}
    if peer.functional is not None:
        peers["bitsandbytes"] = partial(
            peer.functional.quantize_4bit, peer.tensor(case.dense),
            blocksize=BLOCKSIZE, compress_statistics=case.nested, quant_type="nf4",
        )  # fmt: skip
    rooflines = copies(pool, peer, case)
    return Contest("quantize", case, case.quantize, case.quantize_kept, rooflines, peers)


CASES = [
    (dequantize_contest, "bf16", True), (dequantize_contest, "fp16", True),
    (dequantize_contest, "fp32", True), (dequantize_contest, "bf16", False),
    (quantize_contest, "bf16", True), (quantize_contest, "fp32", True),
    (quantize_contest, "fp32", False),
]  # fmt: skip


def _peers(row: Row) -> str:
    return ", ".join(
        f"{name} ms new {each['new']['ms']:.3f} ({each['ratio']['both_new']:.1f}x, over ours kept "
        f"{each['ratio']['theirs_new_ours_kept']:.1f}x), kept {each['kept']['ms']:.3f} "
        f"({each['ratio']['both_kept']:.2f}x)"
        for name, each in row["peers"].items()
    )


TABLE = Table(
    text("work", "{work}"), text("shape", shape), text("dtype", "{dtype}"),
    text("layout", lambda row: "nested" if row["nested"] else "flat"),
    number("ms new", "{new[ms]:.3f}"), number("ms kept", "{kept[ms]:.3f}"),
    number("ms roofline", "{roofline[ms]:.3f}"), number("of the roofline", "{of_roofline:.2f}"),
    text("peers", _peers),
)  # fmt: skip


def require_shapes(shapes: Iterable[Shape]) -> None:
    """Raises ArgumentTypeError."""
    for rows, cols in shapes:
        if cols % BLOCKSIZE:
            raise argparse.ArgumentTypeError(
                f"'{rows}x{cols}'; expected ROWSxCOLS, cols a multiple of {BLOCKSIZE}: "
                "bitsandbytes is wrong for others"
            )


def run(shapes: Sequence[Shape], threads: int, report: Callable[[str], None] = print) -> dict:
    """All figures."""
    from nf4bench import cpu_matmul

    peer = Peer(threads)
    report(f"libnf4: {nf4.cpu_variant()}, {threads} threads; bitsandbytes: {peer.version}")
    with ThreadPoolExecutor(threads) as pool:

        def contests() -> Iterator[Contest]:
            for each in shapes:
                for make, dtype, nested in CASES:
                    yield make(pool, peer, Case(each, dtype, nested, threads))

        with_new = [contest.measure_new() for contest in contests()]
        matmul = cpu_matmul.run(pool, peer, shapes, threads, report)
        keep_freed_memory()
        rows = []
        for contest, times in zip(contests(), with_new, strict=True):
            rows.append(contest.row(times, contest.measure_kept()))
            report(TABLE.line(rows[-1]))
    return {
        "cpu_variant": nf4.cpu_variant(), "threads": threads,
        "peers": {"bitsandbytes": peer.version}, "rows": rows, "matmul": matmul,
    }  # fmt: skip
