"""nf4 quantize: a dense checkpoint to bitsandbytes' 4-bit layout."""

from __future__ import annotations

import argparse
from typing import Any

from nf4.checkpoint.bnb import FORMATS
from nf4.checkpoint.convert import QuantizeOptions, quantize_checkpoint
from nf4.checkpoint.dtypes import STORAGE, TORCH_TO_NF4
from nf4.cli.console import add_command, add_conversion
from nf4.cli.conversion import run_conversion

_DESCRIPTION = """\
Quantize the linear layers of a dense model to 4 bits, in the layout that bitsandbytes and
transformers load. SRC and DST are both files or both directories; the shards of DST are
those of SRC.

An installed transformers, 5.0 or later, decides by the model's modules which layers can be
4-bit; without it, and for a model that it does not know or that needs timm, the names and
shapes of the tensors decide. Copied unchanged: embeddings, norms, biases, output heads,
routers and experts of mixtures, tensors that are not matrices, what --skip matches, and
weights that are 4-bit already. config.json gets a quantization_config that lists the layers
left dense.

The tokenizer and other files beside the weights are copied; weights in other formats and
hidden files are not. Symbolic links that leave the model folder are refused, except those of
the Hugging Face cache.

A PATTERN is one or more whole parts of a module's name (lm_head, layers.0), or, with *, ? or
[], a glob over the whole name ('*.mlp.*_proj').
"""


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "quantize", run, "a dense model to 4 bits", _DESCRIPTION)
    add_conversion(parser)
    parser.add_argument("--format", choices=FORMATS, default="nf4", help="(default: nf4)")
    parser.add_argument(
        "--blocksize",
        type=int,
        choices=[2**power for power in range(5, 13)],
        default=64,
        metavar="N",
        help="weights per scale: a power of two, 32..4096 (default: 64)",
    )
    parser.add_argument(
        "--flat",
        action="store_true",
        help="float32 scales (default: double quantization, 8-bit scales)",
    )
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave these modules dense too (may be repeated)",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="quantize only these modules, whatever the default rules say (may be repeated)",
    )
    parser.add_argument(
        "--compute-dtype",
        choices=tuple(TORCH_TO_NF4),
        help="bnb_4bit_compute_dtype of config.json (default: the model's dtype)",
    )
    parser.add_argument(
        "--quant-storage",
        choices=tuple(STORAGE),
        default="uint8",
        help="the dtype that the packed bytes are stored as, for FSDP (default: uint8)",
    )
    parser.add_argument(
        "--allow-nonfinite",
        action="store_true",
        help="accept weights with NaN (stored as 0) or Inf (stored as the block's largest value)",
    )


def run(args: argparse.Namespace) -> int:
    options = QuantizeOptions(
        format=args.format,
        blocksize=args.blocksize,
        nested=not args.flat,
        storage=args.quant_storage,
        skip=tuple(args.skip),
        only=tuple(args.only),
        compute=args.compute_dtype,
        allow_nonfinite=args.allow_nonfinite,
        threads=args.threads,
    )

    def convert(progress: Any) -> Any:
        return quantize_checkpoint(
            args.source, args.destination, options, replace=args.force, progress=progress
        )

    settings = {
        "format": options.format,
        "blocksize": options.blocksize,
        "double_quantization": options.nested,
        "quant_storage": options.storage,
    }
    return run_conversion(args, convert, settings, "quantized")
