"""Products of MXFP4 and NVFP4 beside those of NF4, of Humming in the same format, and dense ones. A
product is checked against float64 before it is timed. Weights and each x rotate, so that none is in
the caches when its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import nf4
import torch
from torch import Tensor

from nf4bench import peers
from nf4bench.matmul_cases import MOST_ERROR, QUICK_SHAPES
from nf4bench.measure import measure
from nf4bench.options import REPLAYS, Shape
from nf4bench.peers import present
from nf4bench.product import MOST_PEER_ERROR, exact, require
from nf4bench.rows import ROTATED_CACHES, Bench, Report, begin

DTYPE = torch.bfloat16
MS = (1, 8, 16, 32, 64, 128, 1024, 4096)
Multiply = Callable[[Tensor, Any], Tensor]  # x and a stream


class Weight:
    """Normal values as they were given, quantized by us, and dequantized."""

    def __init__(self, shape: Shape, place: str, format: str) -> None:
        self.given = torch.randn(shape, device=place, dtype=DTYPE)
        self.quantized = nf4.quantize(self.given, format=format)
        self.dense = nf4.dequantize(self.quantized, "bf16")


def _multiply(weight: nf4.QuantizedTensor) -> Multiply:
    return lambda x, stream: nf4.matmul(x, weight, stream=stream)


class Ours:
    """What libnf4 multiplies: the weight, or the same values in NF4."""

    version, most = nf4.__version__, MOST_ERROR["bf16"]

    def __init__(self, nf4_instead: bool) -> None:
        self._instead = nf4_instead

    def prepare(self, weight: Weight) -> tuple[Tensor, Multiply]:
        """The numbers that are multiplied, float64 [rows, cols], and the call."""
        quantized = nf4.quantize(weight.given) if self._instead else weight.quantized
        return nf4.dequantize(quantized, "bf16").double(), _multiply(quantized)


class Dense:
    version, most = torch.__version__, MOST_PEER_ERROR

    def __init__(self, place: str) -> None:
        """As the other peers."""

    def prepare(self, weight: Weight) -> tuple[Tensor, Multiply]:
        dense = weight.dense
        return dense.double(), lambda x, stream: torch.nn.functional.linear(x, dense)


class Humming:
    """humming-kernels' W4A16 on the same bytes: its forms are those of compressed-tensors."""

    most = MOST_PEER_ERROR
    CONFIGURATIONS: Mapping[str, dict[str, Any]] = {
        "mxfp4": {"dtype": "float4e2m1", "scale_dtype": "float8e8m0", "group_size": 32},
        "nvfp4": {
            "dtype": "float4e2m1", "scale_dtype": "float8e4m3", "group_size": 16,
            "scale_2_type": "tensor",
        },
    }  # fmt: skip

    def __init__(self, place: str) -> None:
        import humming  # type: ignore[import-not-found]
        from humming.layer import HummingLayer  # type: ignore[import-not-found]

        self.version, self._layer = humming.__version__, HummingLayer

    def prepare(self, weight: Weight) -> tuple[Tensor, Multiply]:
        (rows, cols), quantized = weight.given.shape, weight.quantized
        scales = {32: torch.float8_e8m0fnu, 16: torch.float8_e4m3fn}[quantized.blocksize]
        parts = {
            "weight": quantized.packed.view(torch.int32).view(rows, -1),
            "weight_scale": quantized.absmax.view(scales).view(rows, -1),
        }
        if quantized.nested_absmax is not None:
            parts["weight_scale_2"] = quantized.nested_absmax.view(1)
        layer = self._layer(
            shape_n=rows, shape_k=cols, torch_dtype=DTYPE,
            weight_config=dict(self.CONFIGURATIONS[quantized.format]),
        ).cuda()  # fmt: skip
        layer.load_from_tensors(parts)
        layer.transform()
        return nf4.dequantize(quantized, "fp32").double(), lambda x, stream: layer(x)


PEERS: dict[str, Callable[[str], Any]] = {
    "NF4": lambda place: Ours(nf4_instead=True), "dense": Dense, "humming": Humming,
}  # fmt: skip


def load(place: str) -> dict[str, Any]:
    """Each peer that is here, or why it is missing."""
    return peers.load_each(PEERS, lambda name: PEERS[name](place))


def _row(
    bench: Bench, shape: Shape, m: int, forms: Mapping[str, tuple[float, Tensor, list[Multiply]]]
) -> dict[str, Any]:
    """forms: the largest error, the numbers of the first weight, and a call for each weight. Raises
    WrongResult before anything is timed."""
    launches, error = {}, 0.0
    for name, (most, numbers, calls) in forms.items():
        xs = [torch.randn(m, shape[1], device=bench.gpu.place, dtype=DTYPE) for _ in calls]
        launches[name] = [partial(call, x) for call, x in zip(calls, xs, strict=True)]
        y = bench.gpu.run(launches[name][0])
        found = require(f"{name}: {shape}, M = {m}", most, exact(xs[0], numbers), y)
        error = found if name == "libnf4" else error
    times = measure(bench.gpu, launches, bench.replays or REPLAYS)
    ours = times.pop("libnf4")
    return {
        "shape": list(shape), "m": m, **ours.figures(), "error": float(f"{error:.3e}"),
        "peers": {
            name: each.figures() | {"ratio": round(each.us / ours.us, 3)}
            for name, each in times.items()
        },
    }  # fmt: skip


def _line(row: Mapping[str, Any]) -> str:
    beside = (f"{n} {each['us']:.1f} ({each['ratio']:.2f}x)" for n, each in row["peers"].items())
    rows, cols = row["shape"]
    return f"{rows}x{cols}, M = {row['m']}: libnf4 {row['us']:.1f} us, {', '.join(beside)}"


def run(
    bench: Bench, found: Mapping[str, Any], format: str, report: Report,
    shapes: Iterable[Shape] = QUICK_SHAPES, ms: Sequence[int] = MS,
) -> dict[str, Any]:  # fmt: skip
    """All figures. Raises WrongResult before a row is timed."""
    figures = begin(bench, found, report) | {"format": format, "rows": []}
    for shape in shapes:
        packed = shape[0] * shape[1] // 2
        count = max(2, -(-int(ROTATED_CACHES * bench.gpu.cache_bytes) // packed))
        weights = [Weight(shape, bench.gpu.place, format) for _ in range(count)]
        forms = {}
        for name, form in {"libnf4": Ours(nf4_instead=False), **present(found)}.items():
            numbers, first = form.prepare(weights[0])
            others = [form.prepare(each)[1] for each in weights[1:]]
            forms[name] = form.most, numbers, [first, *others]
        for m in ms:
            figures["rows"].append(_row(bench, shape, m, forms))
            report(_line(figures["rows"][-1]))
            bench.gpu.release()
        del weights, forms
        bench.gpu.release()
    return figures
