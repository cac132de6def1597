"""nf4 convert: converts integer weights from one layout to another."""

from __future__ import annotations

import argparse
from typing import Any

from nf4.checkpoint.int4_layouts import LAYOUTS
from nf4.checkpoint.repack import convert_checkpoint
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
"""


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands, "convert", run, "between the layouts of integer weights", _DESCRIPTION
    )
    add_conversion(parser, threads=False)
    parser.add_argument("--to", choices=tuple(LAYOUTS), required=True, help="the layout of DST")


def run(args: argparse.Namespace) -> int:
    def convert(progress: Any) -> Any:
        return convert_checkpoint(
            args.source, args.destination, args.to, replace=args.force, progress=progress
        )

    return run_conversion(args, convert, {"layout": args.to}, "converted")
