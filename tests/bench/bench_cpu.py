"""Dequantize and quantize on the CPU beside bitsandbytes and beside memory, in one run.

The candidates take turns, so that all see the same machine, and the median counts. The
limit is memory alone: filling as many bytes as dequantize writes, copying as many as
quantize reads and writes, on as many threads. bitsandbytes makes a new output in every
call, so there are two comparisons: with new memory, where both make their outputs and page
faults are most of the time, and with kept memory, where we write to the caller's and malloc
is told to keep what bitsandbytes frees. Outputs are compared bit for bit, with the formulas
in numpy and with bitsandbytes, before anything is timed.

    python tests/bench/bench_cpu.py [--json FILE] [--threads N] [--shapes 4096x4096,...]

bitsandbytes (and torch) is a peer if it is installed; if not, it is named as missing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import nf4
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))
import oracle  # noqa: E402

SHAPES = ["4096x4096", "14336x4096"]
BLOCKSIZE, NESTED_BLOCKSIZE = 64, 256
TURNS, WARM_UP = 15, 2

Work = Callable[[], Any]


def keep_freed_memory() -> None:
    """glibc's malloc takes nothing by mmap and gives nothing back; others are left alone."""
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


class Peer:
    """bitsandbytes on the CPU, or why it is missing."""

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
        layout = {"dtype": self.tensor(np.empty(0, oracle.DTYPES[q.dtype])).dtype}
        if not q.nested:
            return self.functional.QuantState(
                absmax=self.tensor(q.absmax), shape=self.torch.Size(q.shape),
                code=self.tensor(nf4.codebook("nf4").copy()), blocksize=q.blocksize,
                quant_type="nf4", **layout,
            )  # fmt: skip
        nested = self.functional.QuantState(
            absmax=self.tensor(q.nested_absmax), blocksize=q.nested_blocksize,
            code=self.tensor(q.nested_code.copy()), dtype=self.torch.float32,
        )  # fmt: skip
        return self.functional.QuantState(
            absmax=self.tensor(q.absmax), shape=self.torch.Size(q.shape),
            code=self.tensor(nf4.codebook("nf4").copy()), blocksize=q.blocksize,
            quant_type="nf4", offset=self.tensor(q.nested_offset), state2=nested, **layout,
        )  # fmt: skip


@dataclass
class Case:
    """A weight, its quantized form, and room for the outputs, touched once."""

    shape: tuple[int, int]
    dtype: str
    nested: bool
    threads: int
    kept: bool  # the memory of the outputs

    @cached_property
    def dense(self) -> np.ndarray:
        values = np.random.default_rng(0).standard_normal(self.shape, np.float32)
        return (values * np.float32(0.02)).astype(oracle.DTYPES[self.dtype])

    @cached_property
    def quantized(self) -> nf4.QuantizedTensor:
        nested_blocksize = NESTED_BLOCKSIZE if self.nested else 0
        return nf4.quantize(self.dense, blocksize=BLOCKSIZE, nested_blocksize=nested_blocksize)

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
        out = self.out if self.kept else None
        return nf4.dequantize(self.quantized, out=out, threads=self.threads)

    def quantize(self) -> nf4.QuantizedTensor:
        if not self.kept:
            return nf4.quantize(
                self.dense, blocksize=BLOCKSIZE, threads=self.threads,
                nested_blocksize=self.quantized.nested_blocksize,
            )  # fmt: skip
        workspace = self.workspace if self.nested else None
        return nf4.quantize(
            self.dense, out=self.quantized, workspace=workspace, threads=self.threads
        )


def in_threads(pool: ThreadPoolExecutor, threads: int, nbytes: int, work: Callable) -> Work:
    """work(begin, bytes) on equal parts of nbytes at once; ctypes leaves the interpreter."""
    bounds = [nbytes * i // threads for i in range(threads + 1)]
    parts = [(begin, end - begin) for begin, end in zip(bounds, bounds[1:], strict=False)]
    return lambda: list(pool.map(lambda part: work(*part), parts))


def fill(pool: ThreadPoolExecutor, case: Case) -> Work:
    address = case.out.ctypes.data
    return in_threads(
        pool, case.threads, case.out.nbytes,
        lambda begin, nbytes: ctypes.memset(address + begin, 0x3C, nbytes),
    )  # fmt: skip


def copy(pool: ThreadPoolExecutor, case: Case) -> Work:
    source, target = case.dense.ctypes.data, case.out.ctypes.data
    return in_threads(
        pool, case.threads, case.bytes // 2,
        lambda begin, nbytes: ctypes.memmove(target + begin, source + begin, nbytes),
    )  # fmt: skip


def measure(candidates: dict[str, Work]) -> dict[str, dict]:
    """The median and the outer deciles of each candidate, in milliseconds, in turns."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(WARM_UP + TURNS):
        for name, work in candidates.items():
            begin = time.perf_counter()
            work()
            if turn >= WARM_UP:
                times[name].append((time.perf_counter() - begin) * 1e3)
    result = {}
    for name, values in times.items():
        deciles = statistics.quantiles(values, n=10)
        result[name] = {
            "ms": round(statistics.median(values), 4),
            "spread": [round(deciles[0], 4), round(deciles[-1], 4)],
        }
    return result


def require_equal(what: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    differing = oracle.differing(ours, theirs)
    if differing:
        sys.exit(f"bench_cpu: {what}: {differing} of {ours.size} elements differ; nothing timed")


def with_ratios(work: str, case: Case, times: dict[str, dict], limit: str) -> dict:
    """The row of a table: our time, and every other over it."""
    ours, memory = times.pop("libnf4"), times.pop(limit)
    return {
        "work": work,
        "shape": list(case.shape),
        "dtype": case.dtype,
        "nested": case.nested,
        "memory": "kept" if case.kept else "new",
        **ours,
        "gb_per_s": round(case.bytes / ours["ms"] / 1e6, 1),
        "limit": {"kernel": limit, **memory},
        "of_limit": round(memory["ms"] / ours["ms"], 4),
        "peers": {
            name: each | {"ratio": round(each["ms"] / ours["ms"], 3)}
            for name, each in times.items()
        },
    }


def bench_dequantize(pool: ThreadPoolExecutor, peer: Peer, case: Case) -> dict:
    q = case.quantized
    ours = case.dequantize().copy()
    expected = oracle.dequantize(q, nf4.codebook("nf4"), case.dtype)
    require_equal(f"dequantize {case.shape} {case.dtype}", ours, expected)
    candidates = {"libnf4": case.dequantize, "fill": fill(pool, case)}
    if peer.functional is not None:
        packed, state = peer.tensor(q.packed).view(-1, 1), peer.state(q)
        dequantize = peer.functional.dequantize_4bit
        theirs = peer.array(dequantize(packed, state), ours)
        require_equal(f"bitsandbytes' dequantize {case.shape} {case.dtype}", ours, theirs)
        candidates["bitsandbytes"] = lambda: dequantize(packed, state)
    return with_ratios("dequantize", case, measure(candidates), "fill")


def bench_quantize(pool: ThreadPoolExecutor, peer: Peer, case: Case) -> dict:
    q = case.quantize()
    expected = oracle.quantize(
        case.dense, blocksize=BLOCKSIZE, nested_blocksize=q.nested_blocksize,
        codebook=nf4.codebook("nf4"), scale_code=nf4.scale_code(),
    )  # fmt: skip
    for part in ("packed", "absmax"):
        require_equal(
            f"quantize {case.shape} {case.dtype} {part}", getattr(q, part), expected[part]
        )
    candidates = {"libnf4": case.quantize, "copy": copy(pool, case)}
    if peer.functional is not None:
        dense, quantize = peer.tensor(case.dense), peer.functional.quantize_4bit
        candidates["bitsandbytes"] = lambda: quantize(
            dense, blocksize=BLOCKSIZE, compress_statistics=case.nested, quant_type="nf4"
        )
    return with_ratios("quantize", case, measure(candidates), "copy")


def line(row: dict) -> str:
    shape = "x".join(map(str, row["shape"]))
    text = (
        f"{row['work']:10} {shape:>11} {row['dtype']} "
        f"{'nested' if row['nested'] else 'flat  '} {row['memory']:4} "
        f"{row['ms']:8.3f} ms {row['gb_per_s']:6.1f} GB/s  "
        f"{row['limit']['kernel']} {row['limit']['ms']:8.3f} ms"
    )
    for name, each in row["peers"].items():
        text += f"  {name} {each['ms']:9.3f} ms ({each['ratio']:.1f}x)"
    return text


def bench(peer: Peer, shapes: list, threads: int, kept: bool, report: Callable) -> list[dict]:
    rows = []
    with ThreadPoolExecutor(threads) as pool:
        for shape in shapes:
            for dtype, nested in (("bf16", True), ("fp16", True), ("fp32", True), ("bf16", False)):
                case = Case(shape, dtype, nested, threads, kept)
                rows.append(bench_dequantize(pool, peer, case))
                report(line(rows[-1]))
            for dtype, nested in (("bf16", True), ("fp32", True), ("fp32", False)):
                case = Case(shape, dtype, nested, threads, kept)
                rows.append(bench_quantize(pool, peer, case))
                report(line(rows[-1]))
    return rows


def run(shapes: list[tuple[int, int]], threads: int, report: Callable[[str], None] = print) -> dict:
    """All figures."""
    peer = Peer(threads)
    rows = bench(peer, shapes, threads, False, report)
    keep_freed_memory()
    rows += bench(peer, shapes, threads, True, report)
    return {
        "cpu_variant": nf4.cpu_variant(),
        "threads": threads,
        "peers": {"bitsandbytes": peer.version},
        "rows": rows,
    }


def parse_shape(text: str) -> tuple[int, int]:
    try:
        rows, cols = (int(part) for part in text.split("x"))
    except ValueError:
        rows = cols = 0
    if rows <= 0 or cols <= 0 or cols % BLOCKSIZE:
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected ROWSxCOLS, cols a multiple of {BLOCKSIZE}: "
            "bitsandbytes is wrong for others"
        )
    return rows, cols


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)),
        help="one for each processor by default",
    )  # fmt: skip
    parser.add_argument(
        "--shapes", type=lambda text: [parse_shape(each) for each in text.split(",")],
        default=[parse_shape(each) for each in SHAPES],
        help=f"ROWSxCOLS,...; {','.join(SHAPES)} by default",
    )  # fmt: skip
    arguments = parser.parse_args()
    if arguments.threads < 1:
        parser.error(f"--threads is {arguments.threads}; expected 1 or more")
    figures = run(arguments.shapes, arguments.threads)
    print(f"libnf4: {figures['cpu_variant']}, {figures['threads']} threads")
    for peer, version in figures["peers"].items():
        print(f"{peer}: {version}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
