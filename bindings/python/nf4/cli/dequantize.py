"""nf4 dequantize: converts a 4-bit checkpoint to a dense one."""

from __future__ import annotations

import argparse
from typing import Any

from nf4.checkpoint.convert import dequantize_checkpoint
from nf4.cli.console import add_command, add_conversion, add_dtype
from nf4.cli.conversion import run_conversion

_DESCRIPTION = """\
Dequantize the 4-bit weights of a checkpoint, and those in FP8 beside them. SRC and DST are
both files or both directories; DST has the same shards as SRC. Dense tensors are copied
unchanged, quantization_config is removed from config.json, and the files beside the weights
are copied as by `nf4 quantize`.

The command warns if transformers does not load experts with a matrix for each expert.
"""


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "dequantize", run, "make a 4-bit model dense", _DESCRIPTION)
    add_conversion(parser)
    add_dtype(
        parser,
        "--dtype",
        ("bf16", "fp16", "fp32"),
        help="the dtype of the dequantized weights (default: each weight's dtype before "
        "quantization; for integers the model's dtype in config.json, or that of their scales)",
    )


def run(args: argparse.Namespace) -> int:
    def convert(progress: Any) -> Any:
        return dequantize_checkpoint(
            args.source,
            args.destination,
            dtype=args.dtype,
            threads=args.threads,
            replace=args.force,
            progress=progress,
        )

    return run_conversion(args, convert, {"dtype": args.dtype or "original"}, "dequantized")
