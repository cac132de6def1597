"""nf4 convert: converts weights from one layout to another, and MXFP4 and NVFP4 to NF4."""

from __future__ import annotations

import argparse
from typing import Any

from nf4.checkpoint.repack import TARGETS, convert_checkpoint
from nf4.cli.console import add_command, add_conversion
from nf4.cli.conversion import run_conversion

_DESCRIPTION = """\
Convert the 4-bit integer weights of a checkpoint, including AutoRound's, between the layouts
of GPTQ, AWQ and compressed-tensors without loss: codes, zero points and scales are repacked,
and a dequantized weight has the same bits before and after. SRC and DST are both files or both
directories; DST has the same shards as SRC. Dense tensors are copied unchanged.
quantization_config of config.json is written as the layout's own programs write it. The files
beside the weights are copied as by `nf4 quantize`.

Weights that a layout cannot hold are refused: in awq, act order and rows that are not a
multiple of 8; in gptq and gptq_v2, columns that are not a multiple of 8; in all but
compressed-tensors, several group sizes. Scales keep their dtype, fp16 or bf16. Programs that
load AWQ or GPTQ cast them to the dtype in which they compute.

Weights in MXFP4 are converted to compressed-tensors, and weights in NVFP4 to compressed-tensors or
modelopt. The codes and the scales of blocks stay. The global scale is inverted if one layout
multiplies by it and the other divides; a weight that would change in the model's dtype is refused.
With `--to nf4` these weights are quantized to NF4, and the report has the error.
"""


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands, "convert", run, "convert between layouts of 4-bit weights", _DESCRIPTION
    )
    add_conversion(parser)
    parser.add_argument("--to", choices=tuple(TARGETS), required=True, help="the layout of DST")


def run(args: argparse.Namespace) -> int:
    def convert(progress: Any) -> Any:
        return convert_checkpoint(
            args.source,
            args.destination,
            args.to,
            threads=args.threads,
            replace=args.force,
            progress=progress,
        )

    return run_conversion(args, convert, {"layout": args.to}, "converted")
