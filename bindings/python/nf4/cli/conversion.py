"""Shared by quantize, dequantize and convert: progress, and the report at the end."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from nf4.checkpoint.difference import total
from nf4.checkpoint.errors import add_note, printable
from nf4.checkpoint.output import Progress
from nf4.checkpoint.source import weight_bytes
from nf4.checkpoint.steps import Result
from nf4.cli.console import (
    StdoutError,
    note,
    print_json,
    progress,
    rate_text,
    show,
    size_text,
)
from nf4.cli.exits import Exit


def run_conversion(
    args: argparse.Namespace,
    convert: Callable[[Progress], Result],
    settings: dict[str, Any],
    verb: str,
) -> int:
    """Converts with a progress bar, then reports to stdout."""
    with progress(weight_bytes(args.source), args.command, args.quiet) as advance:
        result = convert(advance)
    try:
        if args.json:
            print_json(_document(args, result, settings))
        else:
            show("\n".join(_lines(args, result, verb)))
    except StdoutError as error:
        add_note(error, f"{_destination(args)} is complete")
        raise
    finally:
        for warning in result.warnings:
            note(f"warning: {warning}")
        if result.left_out and not args.quiet:
            note(f"not copied: {', '.join(result.left_out)}")
    return Exit.OK


def _document(args: argparse.Namespace, result: Result, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "command": args.command,
        "source": args.source,
        "destination": args.destination,
        **settings,
        "weights": result.weights,
        "dense_tensors": result.dense,
        "fp8_weights": result.fp8,
        "already_4bit": result.already,
        "elements": result.elements,
        "bytes_in": result.bytes_in,
        "bytes_out": result.bytes_out,
        "weight_bytes_in": result.weight_bytes_in,
        "weight_bytes_out": result.weight_bytes_out,
        "kernel_bytes": result.kernel_bytes,
        "kernel_seconds": result.kernel_seconds,
        "seconds": result.seconds,
        "not_copied": result.left_out,
        "warnings": result.warnings,
        "chosen_by": result.chosen_by,
        "left_dense": result.left_dense,
        "calibrated": result.calibrated,
        **_loss(result),
    }


def _loss(result: Result) -> dict[str, float]:
    """Returns the error of weights that were quantized again, if there are any."""
    if not result.losses:
        return {}
    loss = total(result.losses)
    return {"rms_relative_error": loss.rms_relative, "max_abs_error": loss.max_abs}


def _destination(args: argparse.Namespace) -> str:
    """Returns the destination, with a slash at the end if it is a directory."""
    path = args.destination
    return printable(os.path.join(path, "") if os.path.isdir(path) else path)


def _lines(args: argparse.Namespace, result: Result, verb: str) -> list[str]:
    if result.weights == 0:
        lines = [f"nothing to {args.command}: all {result.dense} dense tensors are copied"]
    else:
        lines = [
            f"{verb} {result.weights} weights ({result.elements / 1e6:.1f} million elements): "
            f"{size_text(result.weight_bytes_in)} -> {size_text(result.weight_bytes_out)}",
            f"copied {result.dense} dense tensors",
        ]
    if result.fp8:
        lines.append(f"{verb} {result.fp8} weights in FP8")
    if result.calibrated:
        lines.append(f"calibrated {result.calibrated} of them")
    if result.already:
        lines.append(f"copied {result.already} weights that are 4-bit already")
    for loss in [total(result.losses)] if result.losses else ():
        lines.append(
            f"error  rms {100 * loss.rms_relative:.2f} % of the weights' RMS, "
            f"max {loss.max_abs:.4f}"
        )
    for reason, count in result.left_dense.items():
        lines.append(f"left dense: {count} {'matrix' if count == 1 else 'matrices'} ({reason})")
    if result.chosen_by:
        lines.append(f"layers chosen by {result.chosen_by}")
    if result.weights:
        parts = []
        if result.kernel_bytes:  # none where all weights are calibrated
            kernel = rate_text(result.kernel_bytes, result.kernel_seconds)
            parts.append(f"{result.kernel_seconds:.2f} s {args.command} ({kernel})")
        if result.chosen_by:
            parts.append(f"{result.choice_seconds:.2f} s choice of layers")
        lines.append(
            f"checkpoint: {size_text(result.bytes_in)} -> {size_text(result.bytes_out)} "
            f"in {result.seconds:.2f} s{', of which ' * bool(parts)}{', '.join(parts)}"
        )
    return [*map(printable, lines), f"wrote {_destination(args)}"]
