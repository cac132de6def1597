"""Matmul on the CPU, y = x W^T in bf16, beside bitsandbytes, torch and reading the weight.

Peers: bitsandbytes' matmul_4bit on the same bytes, which makes a dense weight in new memory for
each call (with a malloc that keeps what is freed it takes a third of the time); the kernel to which
its Linear4bit turns for inference on AVX512-BF16, on bytes that it has rearranged beforehand and
scales in bf16; and torch's linear with a dense bf16 weight, four times the bytes.

The roofline is reading the bytes of the weight once, by as many threads: memcmp of memory with
itself, or a sum by torch, whichever is faster. Weights take turns, so many that none is in the
caches when its turn comes again: in a model there are others between.

Before anything is timed, the error of rows of y against a product in binary64 of the unrounded
weight is found to be within what nf4.h's users may expect: no more than 1.1 times that of a dense
weight rounded to bf16.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import nf4
import numpy as np

from nf4bench.cpu import BLOCKSIZE, Peer, Work, measure, oracle
from nf4bench.options import Shape
from nf4bench.table import Row, Table, number, shape, text

BATCHES = [1, 4, 16, 64]
# Of weights, in sum: several times what caches hold.
ROTATED_BYTES = 200 << 20
CHECKED_ROWS = 64
BF16 = oracle.DTYPES["bf16"]


@dataclass
class Weights:
    """As many weights of a shape as rotate."""

    shape: Shape

    def _rotate(self, bytes_of_one: int) -> int:
        return max(2, -(-ROTATED_BYTES // bytes_of_one))

    @cached_property
    def first(self) -> np.ndarray:
        values = np.random.default_rng(0).standard_normal(self.shape, np.float32)
        return (values * np.float32(0.02)).astype(BF16)

    @cached_property
    def quantized(self) -> list[nf4.QuantizedTensor]:
        def made() -> nf4.QuantizedTensor:
            return nf4.quantize(self.first, blocksize=BLOCKSIZE, nested_blocksize=256)

        first = made()
        return [first, *(made() for _ in range(self._rotate(first.nbytes) - 1))]

    def dense(self, peer: Peer) -> list[Any]:
        """Dequantized, as torch tensors."""
        first = peer.tensor(nf4.dequantize(self.quantized[0]))
        return [first.clone() for _ in range(self._rotate(first.numel() * 2))]


def relative_error(y: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(y - expected) / np.linalg.norm(expected))


def require_accurate(q: nf4.QuantizedTensor, x: np.ndarray, y: np.ndarray) -> float:
    """The relative error of rows of y; the program ends where it is too large."""
    rows = np.linspace(0, q.shape[0] - 1, CHECKED_ROWS).astype(int)
    unrounded = oracle.dequantize(q, nf4.codebook("nf4"), "fp32")[rows].astype(np.float64)
    rounded = unrounded.astype(np.float32).astype(BF16).astype(np.float64)
    wide = x.astype(np.float64)
    expected = wide @ unrounded.T
    error = relative_error(y[:, rows].astype(np.float64), expected)
    dense = relative_error((wide @ rounded.T).astype(BF16).astype(np.float64), expected)
    if not error <= 1.1 * dense:
        sys.exit(
            f"bench: matmul {q.shape}, M = {len(x)}: error {error:.2e}, of a dense weight "
            f"{dense:.2e}; nothing timed"
        )
    return error


def rotating(works: list[Work]) -> Work:
    turn = itertools.cycle(works)
    return lambda: next(turn)()


def reads(pool: ThreadPoolExecutor, peer: Peer, weights: Weights, threads: int) -> dict:
    """Works that read the packed bytes and the scales' codes of a weight."""
    memcmp = ctypes.CDLL(None).memcmp
    memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def read(q: nf4.QuantizedTensor) -> Work:
        parts = [
            (part.ctypes.data, part.ctypes.data, part.size)
            for whole in (q.packed.reshape(-1), q.absmax)
            for part in np.array_split(whole, threads)
        ]
        return lambda: list(pool.map(lambda part: memcmp(*part), parts))

    def total(q: nf4.QuantizedTensor) -> Work:
        words = [peer.torch.from_numpy(q.packed.reshape(-1).view(np.int64))]
        return lambda: [each.sum() for each in words]

    found = {"memcmp": rotating([read(q) for q in weights.quantized])}
    if peer.functional is not None:
        found["sum by torch"] = rotating([total(q) for q in weights.quantized])
    return found


def peers(peer: Peer, weights: Weights, x: np.ndarray, dense: list[Any]) -> dict[str, Work]:
    if peer.functional is None:
        return {}
    functional, tensor = peer.functional, peer.tensor(x)

    def on_bytes(q: nf4.QuantizedTensor) -> Work:
        packed, state = peer.tensor(q.packed).view(-1, 1), peer.state(q)
        return lambda: peer.matmul_4bit(tensor, packed.t(), quant_state=state)

    def rearranged(q: nf4.QuantizedTensor) -> Work:
        packed, state = functional._convert_weight_packed_for_cpu(
            peer.tensor(q.packed).view(-1, 1).clone(), peer.state(q)
        )
        return lambda: peer.matmul_4bit(tensor, packed, quant_state=state)

    found = {"bitsandbytes": rotating([on_bytes(q) for q in weights.quantized])}
    if getattr(functional, "has_avx512bf16", lambda: False)():
        found["rearranged"] = rotating([rearranged(q) for q in weights.quantized])
    linear = peer.torch.nn.functional.linear
    found["dense"] = rotating([lambda w=w: linear(tensor, w) for w in dense])
    return found


def _peers(row: Row) -> str:
    return ", ".join(
        f"{name} ms {each['ms']:.3f} ({each['ratio']:.2f}x)" for name, each in row["peers"].items()
    )


TABLE = Table(
    text("work", "matmul bf16 nested"), text("shape", shape), number("M", "{m}"),
    number("ms", "{ours[ms]:.3f}"), number("ms reading", "{roofline[ms]:.3f}"),
    number("of the roofline", "{of_roofline:.2f}"), text("peers", _peers),
    number("error", "{error:.1e}"),
)  # fmt: skip


def row(
    weights: Weights, m: int, error: float, times: dict[str, dict], rooflines: list[str]
) -> dict:
    ours = times.pop("ours")
    best = min(rooflines, key=lambda name: times[name]["ms"])
    found = {name: times[name] for name in times if name not in rooflines}
    q = weights.quantized[0]
    return {
        "work": "matmul", "shape": list(weights.shape), "dtype": "bf16", "nested": True,
        "m": m, "error": error,
        "ours": ours | {"gb_per_s": round(q.nbytes / ours["ms"] / 1e6, 1)},
        "roofline": {"kernel": best, **times[best]},
        "of_roofline": round(times[best]["ms"] / ours["ms"], 3),
        "peers": {
            name: each | {"ratio": round(each["ms"] / ours["ms"], 2)}
            for name, each in found.items()
        },
    }  # fmt: skip


def run(
    pool: ThreadPoolExecutor, peer: Peer, shapes: Sequence[Shape], threads: int,
    report: Callable[[str], None],
) -> list[dict]:  # fmt: skip
    rows = []
    for each in shapes:
        weights = Weights(each)
        dense = weights.dense(peer) if peer.functional is not None else []
        rooflines = reads(pool, peer, weights, threads)
        for m in BATCHES:
            x = np.random.default_rng(m).standard_normal((m, each[1]), np.float32).astype(BF16)
            y = np.empty((m, each[0]), BF16)
            works = [partial(nf4.matmul, x, q, out=y, threads=threads) for q in weights.quantized]
            works[0]()
            error = require_accurate(weights.quantized[0], x, y)
            times = measure({"ours": rotating(works)} | rooflines | peers(peer, weights, x, dense))
            rows.append(row(weights, m, error, times, list(rooflines)))
            report(TABLE.line(rows[-1]))
    return rows
