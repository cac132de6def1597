"""Dequantize, quantize and matmul on the CPU beside bitsandbytes and memory, in one run.

Where the output is decides more than who writes it: memory that the kernel has yet to provide
is zeroed page by page at the first touch. So each is timed with new memory, as a call without
`out` makes it, and with memory that is kept from call to call: ours in the caller's array,
bitsandbytes', which always makes its output, with a malloc that keeps what is freed (and has no
way back, so all that is new comes first). Three ratios follow: both new, both kept, and
bitsandbytes as it is called against us in the caller's memory.

The limit is memory alone, kept: filling as many bytes as dequantize writes, copying as many as
quantize reads and writes, on as many threads; the fastest of our own threads and of torch's
counts.

The candidates take turns (cpu_turns.py). Outputs are compared bit for bit, with the
formulas in numpy and with bitsandbytes, before anything is timed.

Matmul is another matter: cpu_matmul.py.

    python tests/bench/bench_cpu.py [--json FILE] [--threads N] [--shapes 4096x4096,...]

bitsandbytes (and torch) is a peer if it is installed; if not, it is named as missing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import nf4
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "python"), str(ROOT / "tests" / "bench")]
import cpu_matmul  # noqa: E402
import oracle  # noqa: E402
from cpu_peer import Peer  # noqa: E402
from cpu_turns import Work, measure  # noqa: E402

SHAPES = ["4096x4096", "14336x4096"]
BLOCKSIZE, NESTED_BLOCKSIZE = 64, 256


def keep_freed_memory() -> None:
    """From here on glibc's malloc takes nothing by mmap and gives nothing back, and there is no
    way back; others are left alone."""
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


@dataclass
class Case:
    """A weight, its quantized form, and room for the outputs, touched once."""

    shape: tuple[int, int]
    dtype: str
    nested: bool
    threads: int

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
        return nf4.dequantize(self.quantized, threads=self.threads)

    def dequantize_kept(self) -> np.ndarray:
        return nf4.dequantize(self.quantized, out=self.out, threads=self.threads)

    def quantize(self) -> nf4.QuantizedTensor:
        return nf4.quantize(
            self.dense, blocksize=BLOCKSIZE, threads=self.threads,
            nested_blocksize=self.quantized.nested_blocksize,
        )  # fmt: skip

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
    limits: dict[str, Work] = {
        "fill": lambda: list(pool.map(lambda part: ctypes.memset(*part), parts))
    }
    if peer.functional is not None:
        target = peer.tensor(case.out)
        limits["fill by torch"] = lambda: target.fill_(1)
    return limits


def copies(pool: ThreadPoolExecutor, peer: Peer, case: Case) -> dict[str, Work]:
    source, target = (as_bytes(each)[: case.bytes // 2] for each in (case.dense, case.out))
    split = (np.array_split(each, case.threads) for each in (target, source))
    parts = [(to.ctypes.data, start.ctypes.data, to.size) for to, start in zip(*split, strict=True)]
    limits: dict[str, Work] = {
        "copy": lambda: list(pool.map(lambda part: ctypes.memmove(*part), parts))
    }
    if peer.functional is not None:
        torch_source, torch_target = peer.tensor(source), peer.tensor(target)
        limits["copy by torch"] = lambda: torch_target.copy_(torch_source)
    return limits


def require_equal(what: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    differing = oracle.differing(ours, theirs)
    if differing:
        sys.exit(f"bench_cpu: {what}: {differing} of {ours.size} elements differ; nothing timed")


@dataclass
class Contest:
    """What is timed of a case: ours with new and with kept memory, the limits, the peers."""

    work: str
    case: Case
    new: Work
    kept: Work
    limits: dict[str, Work]
    peers: dict[str, Work]

    def measure_new(self) -> dict[str, dict]:
        return measure({"new": self.new, "kept": self.kept} | self.peers)

    def measure_kept(self) -> dict[str, dict]:
        return measure({"kept": self.kept} | self.limits | self.peers)

    def row(self, with_new: dict[str, dict], with_kept: dict[str, dict]) -> dict:
        """Our times, the limit, and the ratios of the peer's time to ours."""
        new, kept = with_new["new"], with_kept["kept"]
        limit = min(self.limits, key=lambda name: with_kept[name]["ms"])

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
            "work": self.work,
            "shape": list(self.case.shape),
            "dtype": self.case.dtype,
            "nested": self.case.nested,
            "new": new,
            "kept": kept | {"gb_per_s": round(self.case.bytes / kept["ms"] / 1e6, 1)},
            "limit": {"kernel": limit, **with_kept[limit]},
            "of_limit": round(with_kept[limit]["ms"] / kept["ms"], 3),
            "peers": {peer: beside(peer) for peer in self.peers},
        }


def dequantize_contest(pool: ThreadPoolExecutor, peer: Peer, case: Case) -> Contest:
    """After the results were found equal."""
    q = case.quantized
    ours = case.dequantize()
    expected = oracle.dequantize(q, nf4.codebook("nf4"), case.dtype)
    require_equal(f"dequantize {case.shape} {case.dtype}", ours, expected)
    require_equal(f"dequantize to out {case.shape} {case.dtype}", case.dequantize_kept(), expected)
    peers = {}
    if peer.functional is not None:
        packed, state = peer.tensor(q.packed).view(-1, 1), peer.state(q)
        peers["bitsandbytes"] = partial(peer.functional.dequantize_4bit, packed, state)
        theirs = peer.array(peers["bitsandbytes"](), ours)
        require_equal(f"bitsandbytes' dequantize {case.shape} {case.dtype}", ours, theirs)
    limits = fills(pool, peer, case)
    return Contest("dequantize", case, case.dequantize, case.dequantize_kept, limits, peers)


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
    limits = copies(pool, peer, case)
    return Contest("quantize", case, case.quantize, case.quantize_kept, limits, peers)


CASES = [
    (dequantize_contest, "bf16", True),
    (dequantize_contest, "fp16", True),
    (dequantize_contest, "fp32", True),
    (dequantize_contest, "bf16", False),
    (quantize_contest, "bf16", True),
    (quantize_contest, "fp32", True),
    (quantize_contest, "fp32", False),
]


HEADING = (
    f"{'ms':35} {'new':>7} {'kept':>7} {'limit':>7}  of limit"
    f"  {'bitsandbytes: new':>19} {'kept':>8}  {'new/new':>7} {'kept/kept':>9} {'new/our kept':>12}"
)


def line(figures: dict) -> str:
    shape = "x".join(map(str, figures["shape"]))
    scales = "nested" if figures["nested"] else "flat"
    text = (
        f"{figures['work']:10} {shape:>10} {figures['dtype']} {scales:6}"
        f" {figures['new']['ms']:7.3f} {figures['kept']['ms']:7.3f} {figures['limit']['ms']:7.3f}"
        f"  {figures['of_limit']:8.2f}"
    )
    for each in figures["peers"].values():
        ratio = each["ratio"]
        text += (
            f"  {each['new']['ms']:19.3f} {each['kept']['ms']:8.3f}  {ratio['both_new']:6.1f}x"
            f" {ratio['both_kept']:8.2f}x {ratio['theirs_new_ours_kept']:11.1f}x"
        )
    return text


def run(shapes: list[tuple[int, int]], threads: int, report: Callable[[str], None] = print) -> dict:
    """All figures."""
    peer = Peer(threads)
    rows = []
    with ThreadPoolExecutor(threads) as pool:

        def contests() -> Iterator[Contest]:
            for shape in shapes:
                for make, dtype, nested in CASES:
                    yield make(pool, peer, Case(shape, dtype, nested, threads))

        with_new = [contest.measure_new() for contest in contests()]
        matmul = cpu_matmul.run(pool, peer, shapes, threads, report)
        keep_freed_memory()
        report(HEADING)
        for contest, times in zip(contests(), with_new, strict=True):
            rows.append(contest.row(times, contest.measure_kept()))
            report(line(rows[-1]))
    return {
        "cpu_variant": nf4.cpu_variant(),
        "threads": threads,
        "peers": {"bitsandbytes": peer.version},
        "rows": rows,
        "matmul": matmul,
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
