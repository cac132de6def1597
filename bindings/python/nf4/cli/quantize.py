"""nf4 quantize: quantizes a dense checkpoint to 4 bits, in bitsandbytes' layout, or one of
integers, MXFP4 or NVFP4."""

from __future__ import annotations

import argparse
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

from nf4.checkpoint.bnb import FORMATS
from nf4.checkpoint.convert import quantize_checkpoint
from nf4.checkpoint.dtypes import STORAGE, TORCH_TO_NF4
from nf4.checkpoint.errors import OptionError
from nf4.checkpoint.kinds import LAYOUTS, WRITERS
from nf4.checkpoint.quantize_plan import QuantizeOptions, formats_with
from nf4.checkpoint.steps import AnyQuantized
from nf4.cli.console import add_command, add_conversion, add_dtype, note, progress, text_of
from nf4.cli.conversion import run_conversion

_DESCRIPTION = """\
Quantize the linear layers of a dense model to 4 bits. nf4 and fp4 have the layout that
bitsandbytes and transformers load. int4 (integers with a scale for each group) has the layout of
compressed-tensors, GPTQ or AWQ. mxfp4 has the layout of compressed-tensors or gpt-oss, and nvfp4
that of compressed-tensors or ModelOpt. Values are rounded to nearest. SRC and DST are both files
or both directories; DST has the same shards as SRC.

An installed transformers, 5.0 or later, decides from the model's modules which layers can be
4-bit. Without it, and for a model that it does not know or that needs timm, the names and
shapes of the tensors decide. These are copied unchanged: embeddings, norms, biases, output
heads, routers, experts of mixtures without --experts, tensors that are not matrices, modules
that --skip matches, and weights that are already 4-bit. config.json gets a
quantization_config that lists the layers left dense.

The tokenizer and other files beside the weights are copied; weights in other formats and
hidden files are not. Symbolic links that leave the model folder are refused, except those of
the Hugging Face cache.

A PATTERN is one or more whole parts of a module's name (lm_head, layers.0), or, with *, ? or
[], a glob over the whole name ('*.mlp.*_proj').
"""
# The options that only some formats have, by their names in QuantizeOptions.
_OPTIONS = {
    "blocksize": "--blocksize",
    "nested": "--flat",
    "storage": "--quant-storage",
    "compute": "--compute-dtype",
    "experts": "--experts",
    "group_size": "--group-size",
    "symmetric": "--symmetric or --asymmetric",
    "layout": "--layout",
}
# Their names in --json, where these differ.
_JSON = {"nested": "double_quantization", "storage": "quant_storage"}


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands, "quantize", run, "quantize a dense model to 4 bits", _DESCRIPTION
    )
    add_conversion(parser)
    parser.add_argument(
        "--format",
        choices=(*FORMATS, *(each for each in WRITERS if each not in FORMATS)),
        default="nf4",
        help="(default: nf4)",
    )
    parser.add_argument(
        "--blocksize",
        type=int,
        choices=[2**power for power in range(5, 13)],
        metavar="N",
        help="for nf4 and fp4: weights per scale, a power of two, 32..4096 (default: 64)",
    )
    parser.add_argument(
        "--flat",
        dest="nested",
        action="store_false",
        default=None,
        help="for nf4 and fp4: float32 scales (default: double quantization, 8-bit scales)",
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
        help="quantize only these modules, regardless of the default rules (may be repeated)",
    )
    add_dtype(
        parser,
        "--compute-dtype",
        tuple(TORCH_TO_NF4),
        dest="compute",
        help="bnb_4bit_compute_dtype of config.json (default: the model's dtype)",
    )
    add_dtype(
        parser,
        "--quant-storage",
        tuple(STORAGE),
        dest="storage",
        help="the dtype that the packed bytes are stored as, for FSDP (default: uint8)",
    )
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        help="for int4, mxfp4 and nvfp4 (default: compressed-tensors); modelopt for nvfp4; "
        "gpt-oss for mxfp4: the experts of gpt-oss alone",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="for int4: columns per scale: a multiple of 8, or -1 for the row (default: 128)",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--symmetric",
        dest="symmetric",
        action="store_true",
        default=None,
        help="for int4: all zero points are 8 (default)",
    )
    kind.add_argument(
        "--asymmetric",
        dest="symmetric",
        action="store_false",
        default=None,
        help="for int4: a zero point for each group",
    )
    parser.add_argument(
        "--experts",
        action="store_true",
        default=None,
        help="also stacks of experts, which from_pretrained loads if nf4.torch is imported",
    )
    parser.add_argument(
        "--calibrate",
        action="append",
        default=[],
        metavar="FILE",
        help="choose scales and codes by what the layers see in this text, UTF-8 (may be repeated)",
    )
    parser.add_argument(
        "--device",
        help="for --calibrate: torch's name of where the model runs, such as cuda (default: cpu)",
    )
    parser.add_argument(
        "--allow-nonfinite",
        action="store_true",
        help="accept weights with NaN (stored as 0) or Inf (stored as the block's largest value)",
    )


def _chosen(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the given options of one format. Raises OptionError for an option of another
    format."""
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    for name in given:
        *others, last = formats = formats_with(name)
        if args.format not in formats:
            named = f"{', '.join(others)} and {last}" if others else last
            raise OptionError(
                f"{_OPTIONS[name]} is not an option of --format {args.format}; it is one of {named}"
            )
    return given


def _settings(options: QuantizeOptions) -> dict[str, Any]:
    """The options as --json shows them."""
    names = [name for name in options.options if name != "compute"]
    found = {_JSON.get(name, name): getattr(options, name) for name in names}
    return {"format": options.format, **found}


def _calibrator(args: argparse.Namespace, options: QuantizeOptions) -> Any:
    """Returns what calibrates the weights, for --calibrate."""
    if not args.calibrate:
        if args.device is not None:
            raise OptionError("--device is an option of --calibrate, which is not given")
        return None
    if args.allow_nonfinite:
        raise OptionError("--calibrate needs finite weights; expected no --allow-nonfinite")
    texts = [(path, text_of(path)) for path in args.calibrate]
    try:
        from nf4.torch.calibration.checkpoints import Calibrator, windows_of
    except ImportError as error:
        raise OptionError(f"--calibrate needs torch and transformers: {error}") from None
    ids = windows_of(args.source, texts)
    say = (lambda _: None) if args.quiet else note
    return Calibrator(args.source, options, ids, args.device or "cpu", args.destination, say)


def run(args: argparse.Namespace) -> int:
    options = QuantizeOptions(
        format=args.format,
        skip=tuple(args.skip),
        only=tuple(args.only),
        allow_nonfinite=args.allow_nonfinite,
        threads=args.threads,
        **_chosen(args),
    )

    calibrator = _calibrator(args, options)

    def calibrate(names: list[str]) -> dict[str, AnyQuantized]:
        with ExitStack() as stack:
            bar = partial(progress, what="calibration", quiet=args.quiet, unit="layers")
            return calibrator.calibrate(names, lambda total: stack.enter_context(bar(total)))

    def convert(advance: Any) -> Any:
        with calibrator or nullcontext():
            return quantize_checkpoint(
                args.source,
                args.destination,
                options,
                replace=args.force,
                progress=advance,
                calibrate=calibrate if calibrator else None,
            )

    return run_conversion(args, convert, _settings(options), "quantized")
