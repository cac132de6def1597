"""nf4 compare: compares two checkpoints of one model, by their weights and by their logits."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from nf4.checkpoint.difference import Difference, differences
from nf4.checkpoint.errors import FormatError, OptionError, printable
from nf4.checkpoint.source import Checkpoint, weight_bytes
from nf4.cli.compare_report import draw, report_lines
from nf4.cli.console import (
    add_command,
    add_dtype,
    add_threads,
    natural_key,
    note,
    print_json,
    progress,
    show,
    text_of,
)
from nf4.cli.exits import Exit

if TYPE_CHECKING:
    from nf4.torch.comparing import Encoded, Judged

_DESCRIPTION = """\
Compare a checkpoint with a reference of the same model, which is usually the dense one. Each
is dense or has 4-bit weights of any form that nf4 reads.

Without --text the weights alone are compared, one tensor in memory at a time: the relative
square error is the sum of the squared differences over that of the squared reference.

With --text both models are loaded, and each text is read in windows. The report has the
perplexity of both models, the KL divergence of the logits from the reference's (mean over the
tokens, in nats), and how often both models have the same most likely token. This needs torch
and transformers, a tokenizer.json, and memory for both models and two windows of logits.
"""
_PLOTS = (".png", ".svg", ".pdf")
T = TypeVar("T")


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands, "compare", run, "show the error of a quantized model", _DESCRIPTION
    )
    parser.add_argument("reference", metavar="REFERENCE", help="a checkpoint, usually dense")
    parser.add_argument("other", metavar="QUANTIZED", help="a checkpoint of the same model")
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="FILE",
        help="judge the logits on this text, UTF-8 (may be repeated)",
    )
    parser.add_argument("--plot", metavar="FILE", help=f"draw a plot: {', '.join(_PLOTS)}")
    parser.add_argument(
        "--window", type=int, default=512, metavar="N", help="tokens of a window (default: 512)"
    )
    parser.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="tokens from one window to the next (default: half a window)",
    )
    add_dtype(
        parser,
        "--dtype",
        ("fp32", "bf16", "fp16"),
        default="fp32",
        help="the dtype that both models compute in (default: fp32)",
    )
    parser.add_argument("--device", default="cpu", help="torch's name, such as cuda (default: cpu)")
    add_threads(parser)


def layer_of(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> model.layers.3; lm_head.weight -> lm_head."""
    numbered = re.match(r"(.*?\.\d+)\.", name)
    return numbered[1] if numbered else name.removesuffix(".weight")


def compare_checkpoints(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `nf4 compare --json` prints."""
    texts = _encoded(args) if args.text else []
    with Checkpoint(args.reference) as reference, Checkpoint(args.other) as other:
        with progress(weight_bytes(args.other), "weights", args.quiet) as advance:
            found, unmatched = differences(reference, other, args.threads, advance)
    if not found:
        raise FormatError(args.other, f"it has no tensor that {args.reference} has too")
    return {
        "reference": args.reference,
        "other": args.other,
        **_weights(found),
        "only_in_reference": unmatched.reference,
        "only_in_other": unmatched.other,
        "logits": _logits(args, texts) if texts else None,
    }


def _encoded(args: argparse.Namespace) -> list[Encoded]:
    texts = [(path, text_of(path)) for path in args.text]
    try:
        from nf4.torch.comparing import encoded
    except ImportError as error:
        raise OptionError(f"--text needs torch and transformers: {error}") from None
    return encoded((args.reference, args.other), texts, args.window, args.stride)


def _square(errors: Sequence[Difference]) -> float:
    """Returns the relative square error of several tensors together."""
    error = sum(each.error.squared_error for each in errors)
    reference = sum(each.error.squared_reference for each in errors)
    return error / reference if reference else (float("inf") if error else 0.0)


def _weights(found: list[Difference]) -> dict[str, Any]:
    """The tensors that are in 4 bits or differ, each and by layer."""
    shown = [
        each
        for each in sorted(found, key=lambda each: natural_key(each.name))
        if each.formats != ("dense", "dense") or each.error.squared_error != 0
    ]
    layers: dict[str, list[Difference]] = {}
    for each in shown:
        layers.setdefault(layer_of(each.name), []).append(each)
    rows = [
        {
            "name": each.name,
            "formats": list(each.formats),
            "shape": list(each.shape),
            "relative_square_error": _square([each]),
            "max_abs_error": each.error.max_abs,
        }
        for each in shown
    ]
    return {
        "tensors": rows,
        "layers": [
            {
                "name": name,
                "tensors": len(each),
                "relative_square_error": _square(each),
                "worst_tensor": _worst(each, lambda one: _square([one])).name,
            }
            for name, each in layers.items()
        ],
        "worst_layer": _worst(list(layers), lambda name: _square(layers[name])),
        "relative_square_error": _square(shown),
        "equal_dense_tensors": len(found) - len(shown),
    }


def _worst(items: Sequence[T], error: Callable[[T], float]) -> T | None:
    """Returns the first item with the largest error. NaN is larger than any."""
    return max(items, key=lambda each: (error(each) != error(each), error(each)), default=None)


def _logits(args: argparse.Namespace, texts: Sequence[Encoded]) -> dict[str, Any]:
    from nf4.torch.comparing import Judge, Judged

    options = {"dtype": args.dtype, "window": args.window, "stride": args.stride}
    judge = Judge(args.reference, args.other, device=args.device, **options)
    total, rows = Judged(), []
    tokens = sum(len(text.tokens) for text in texts)
    with progress(tokens, "logits", args.quiet, unit="tokens") as advance:
        for text in texts:
            judged = judge.judge(text, advance)
            rows.append({"text": text.name, **_judged(judged)})
            total += judged
    return {**options, "texts": rows, "all": _judged(total)}


def _judged(judged: Judged) -> dict[str, Any]:
    before, after = judged.perplexities
    change, deviation = judged.loss_change
    return {
        "tokens": judged.tokens,
        "windows": judged.windows,
        "reference_perplexity": before,
        "perplexity": after,
        "loss_change": change,
        "loss_change_standard_error": deviation,
        "kl_divergence": judged.divergence / judged.tokens,
        "same_top_token": judged.same_top / judged.tokens,
    }


def _require_plot(path: str) -> None:
    """Requires that a plot can be drawn, before hours may go by."""
    if not path.endswith(_PLOTS):
        raise OptionError(f"--plot {path}: expected a name that ends with {', '.join(_PLOTS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--plot needs matplotlib: pip install libnf4[plot]")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise OptionError(f"--plot {path}: {folder} is not a directory")


def run(args: argparse.Namespace) -> int:
    args.stride = args.window // 2 if args.stride is None else args.stride
    if args.plot is not None:
        _require_plot(args.plot)
    document = compare_checkpoints(args)
    for where, key in ((args.reference, "only_in_reference"), (args.other, "only_in_other")):
        if document[key]:
            names = ", ".join(document[key][:3]) + ", ..." * (len(document[key]) > 3)
            note(f"warning: not compared, only in {where}: {names}")
    if args.plot is not None:
        draw(args.plot, document)
    if args.json:
        print_json(document)
    else:
        show("\n".join(map(printable, report_lines(document))))
    return Exit.OK
