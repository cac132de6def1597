"""nf4 inspect: lists the tensors of a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from nf4.checkpoint.difference import (
    ErrorStatistics,
    error_statistics,
    stacks_by_name,
    total,
)
from nf4.checkpoint.errors import FormatError, printable
from nf4.checkpoint.fp8 import Fp8Weight
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.kinds import method_problem, survey
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.weights import Survey, Weight
from nf4.cli.console import (
    add_command,
    add_threads,
    natural_key,
    note,
    print_json,
    progress,
    show,
    size_text,
    table,
)
from nf4.cli.exits import Exit

_DESCRIPTION = """\
List the tensors of a checkpoint: shape, format (the layout for integers), blocksize or group
size, bytes in the file (all parts of a weight included) and bits per element.

With --dense, also the error of each 4-bit weight against the dense one that it was made from:
`rms` is the RMS of the difference over the RMS of the dense weight, `max` the largest absolute
difference.
"""


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "inspect", run, "list the tensors of a checkpoint", _DESCRIPTION)
    parser.add_argument("path", metavar="PATH", help="a .safetensors file or a model directory")
    parser.add_argument("--dense", metavar="PATH", help="a dense checkpoint to compare with")
    add_threads(parser)


def weight_row(weight: Weight, error: ErrorStatistics | None) -> dict[str, Any]:
    """Returns one 4-bit weight as --json shows it."""
    row = {
        "name": weight.name,
        "format": weight.format,
        "shape": list(weight.shape),
        "dtype": weight.dtype,
        **weight.describe(),
        "bytes": weight.nbytes,
        "bits_per_weight": _bits(weight.nbytes, weight.elements),
    }
    if error is not None:
        row["rms_relative_error"] = error.rms_relative
        row["max_abs_error"] = error.max_abs
    return row


def _dense_row(info: TensorInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "format": "dense",
        "shape": list(info.shape),
        "dtype": info.dtype,
        "bytes": info.nbytes,
        "bits_per_weight": _bits(info.nbytes, info.elements),
    }


def _fp8_row(weight: Fp8Weight) -> dict[str, Any]:
    return {
        "name": weight.name,
        "format": "fp8",
        "shape": list(weight.shape),
        "dtype": weight.codes.dtype,
        "block": list(weight.block),
        "scales_dtype": weight.scales.dtype,
        "bytes": weight.nbytes,
        "bits_per_weight": _bits(weight.nbytes, weight.elements),
    }


def _bits(nbytes: int, elements: int) -> float:
    return 8 * nbytes / elements if elements else 0.0


def _totals(found: Survey, errors: dict[str, ErrorStatistics]) -> dict[str, Any]:
    weights, dense, fp8 = found.weights.values(), found.dense.values(), found.fp8.values()
    elements = sum(weight.elements for weight in weights)
    nbytes = sum(weight.nbytes for weight in weights)
    dense_elements = sum(info.elements for info in dense)
    dense_bytes = sum(info.nbytes for info in dense)
    all_bytes = nbytes + dense_bytes + sum(weight.nbytes for weight in fp8)
    all_elements = elements + dense_elements + sum(weight.elements for weight in fp8)
    totals: dict[str, Any] = {
        "weights": len(weights),
        "weight_elements": elements,
        "weight_bytes": nbytes,
        "weight_bits_per_weight": _bits(nbytes, elements),
        "dense_tensors": len(dense),
        "dense_elements": dense_elements,
        "dense_bytes": dense_bytes,
        "fp8_weights": len(fp8),
        "fp8_elements": sum(weight.elements for weight in fp8),
        "fp8_bytes": sum(weight.nbytes for weight in fp8),
        "bytes": all_bytes,
        "bits_per_weight": _bits(all_bytes, all_elements),
    }
    if errors:
        of_all = total(errors.values())
        totals["rms_relative_error"] = of_all.rms_relative
        totals["max_abs_error"] = of_all.max_abs
    return totals


def inspect_checkpoint(
    path: str, dense_path: str | None = None, *, threads: int = 0, quiet: bool = True
) -> dict[str, Any]:
    """Returns what `nf4 inspect --json` prints: {"path", "tensors": [...], "totals": {...},
    "warnings": [...]}. A warning says if nothing reads the checkpoint's quantization settings.

    Raises FormatError for a broken checkpoint, or a dense one that does not fit it."""
    with ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint(path))
        found = survey(checkpoint)
        found.require_sound()
        errors: dict[str, ErrorStatistics] = {}
        if dense_path is not None:
            dense = stack.enter_context(Checkpoint(dense_path))
            if not found.weights:
                why = "it has no 4-bit weight to compare; --dense is for the dense checkpoint"
                raise FormatError(path, why)
            total = sum(weight.nbytes for weight in found.weights.values())
            stacks = stacks_by_name(found.weights.values(), checkpoint, dense)
            with progress(total, "comparing", quiet) as advance:
                for name, weight in found.weights.items():
                    errors[name] = error_statistics(weight, checkpoint, dense, threads, stacks)
                    advance(name, weight.nbytes)
        rows = [weight_row(weight, errors.get(name)) for name, weight in found.weights.items()]
        rows += [_dense_row(info) for info in found.dense.values()]
        rows += [_fp8_row(weight) for weight in found.fp8.values()]
        rows.sort(key=lambda row: natural_key(row["name"]))
        problem = method_problem(checkpoint)
        warnings = [] if problem is None else [problem.reason]
        totals = _totals(found, errors)
        return {"path": path, "tensors": rows, "totals": totals, "warnings": warnings}


def _scale_cells(row: dict[str, Any]) -> tuple[str, str]:
    """Returns the columns "block" and "scales"."""
    if row["format"] == "dense":
        return "", ""
    if row["format"] == "fp8":
        return "x".join(map(str, row["block"])), row["scales_dtype"]
    if row["format"] == "int4":
        size = "row" if row["group_size"] == -1 else str(row["group_size"])
        return size, row["scales_dtype"] + " + zeros" * row["zero_points"]
    if "scales_dtype" in row:  # mxfp4, nvfp4
        return str(row["blocksize"]), row["scales_dtype"]
    return str(row["blocksize"]), "8-bit" if row["nested_blocksize"] else "float32"


def _kind(row: dict[str, Any]) -> str:
    """Returns the column "format" of a 4-bit weight."""
    return row["layout"] if row["format"] == "int4" else row["format"]


def _cells(row: dict[str, Any], compared: bool) -> list[str]:
    four_bit = row["format"] not in ("dense", "fp8")
    cells = [
        printable(row["name"]),
        "x".join(map(str, row["shape"])) or "scalar",
        f"{_kind(row)} ({row['dtype']})" if four_bit else row["dtype"],
        *_scale_cells(row),
        size_text(row["bytes"]),
        f"{row['bits_per_weight']:.2f}",
    ]
    if compared:
        has = "rms_relative_error" in row
        cells.append(f"{100 * row['rms_relative_error']:.2f} %" if has else "")
        cells.append(f"{row['max_abs_error']:.4f}" if has else "")
    return cells


def report_lines(document: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of the report that `nf4 inspect` prints."""
    totals = document["totals"]
    compared = "rms_relative_error" in totals
    header = ["tensor", "shape", "format", "block", "scales", "size", "bits"]
    header += ["rms", "max"] if compared else []
    rows = [_cells(row, compared) for row in document["tensors"]]
    yield from table(header, rows, left=3)
    yield ""
    yield (
        f"4-bit  {totals['weights']} weights, {totals['weight_elements']:,} elements, "
        f"{size_text(totals['weight_bytes'])}, "
        f"{totals['weight_bits_per_weight']:.2f} bits per element"
    )
    yield (
        f"dense  {totals['dense_tensors']} tensors, {totals['dense_elements']:,} elements, "
        f"{size_text(totals['dense_bytes'])}"
    )
    if totals["fp8_weights"]:
        yield (
            f"FP8    {totals['fp8_weights']} weights, {totals['fp8_elements']:,} elements, "
            f"{size_text(totals['fp8_bytes'])}"
        )
    yield f"total  {size_text(totals['bytes'])}, {totals['bits_per_weight']:.2f} bits per element"
    if compared:
        yield (
            f"error  rms {100 * totals['rms_relative_error']:.2f} % of the weights' RMS, "
            f"max {totals['max_abs_error']:.4f}"
        )


def run(args: argparse.Namespace) -> int:
    document = inspect_checkpoint(args.path, args.dense, threads=args.threads, quiet=args.quiet)
    for warning in document["warnings"]:
        note(f"warning: {warning}")
    if args.json:
        print_json(document)
    else:
        show("\n".join(report_lines(document)))
    return Exit.OK
