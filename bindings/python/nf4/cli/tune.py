"""nf4 tune: measures how long each way of a product takes on a GPU, and stores costs."""

from __future__ import annotations

import argparse
import dataclasses
from importlib import metadata
from typing import Any

import nf4
from nf4.checkpoint.errors import printable
from nf4.cli.console import (
    add_command,
    positive_or_zero,
    print_json,
    show,
    step_progress,
    table,
)
from nf4.cli.exits import Exit
from nf4.tuning import api
from nf4.tuning.result import Tuning

_DESCRIPTION = """\
Measure how long libnf4's kernels and dequantize + a dense product take on a GPU, and store costs
in the user's cache folder. It takes less than half a minute on an H200 and longer on slower GPUs,
and nothing else should use the GPU meanwhile. Python programs that start afterwards choose by the
costs. Other kernels may sum in another order, which can change the last bits. Needs PyTorch.
"""


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands, "tune", run, "measure this GPU, for the choice of kernels", _DESCRIPTION
    )
    parser.add_argument(
        "--device", type=positive_or_zero, default=0, metavar="N", help="the GPU (default: 0)"
    )
    parser.add_argument(
        "--reset", action="store_true", help="remove what was measured, of all GPUs"
    )


def _reset(args: argparse.Namespace) -> int:
    removed = [str(path) for path in api.reset()]
    if args.json:
        print_json({"removed": removed})
    else:
        show("\n".join(f"removed    {printable(path)}" for path in removed) or "nothing to remove")
    return Exit.OK


def _report(found: Tuning) -> dict[str, Any]:
    """Returns what `nf4 tune --json` prints."""
    before, after = found.over_best("before"), found.over_best("after")
    return {
        "gpu": dataclasses.asdict(found.gpu),
        "versions": {"libnf4": nf4.version(), "torch": metadata.version("torch")},
        "path": None if found.path is None else str(found.path),
        "reason": found.reason,
        "seconds": round(found.seconds, 1),
        "spread": round(found.spread, 3),
        "products": found.products,
        "over_best": {
            "before": {"mean": round(before[0], 4), "most": round(before[1], 4)},
            "after": {"mean": round(after[0], 4), "most": round(after[1], 4)},
        },
        "costs": found.costs,
        "checks": [dataclasses.asdict(check) for check in found.checks],
    }


def _lines(report: dict[str, Any]) -> list[str]:
    rows = [
        [when, *(f"{report['over_best'][key][of]:.3f}" for of in ("mean", "most"))]
        for key, when in (("before", "the library's rules"), ("after", "measured costs"))
    ]
    kept = "stored in " + report["path"] if report["path"] else f"not stored: {report['reason']}"
    return [
        f"{report['gpu']['name']}: {len(report['checks'])} products that were not fitted, "
        f"{report['seconds']:.0f} s",
        *table(["time over the fastest way", "mean", "most"], rows),
        f"costs      {', '.join(report['products']) or 'none'}",
        f"           {kept}",
    ]


def run(args: argparse.Namespace) -> int:
    if args.reset:
        return _reset(args)
    with step_progress("tune", args.quiet, api.steps) as advance:
        found = nf4.tune(args.device, advance=advance)
    report = _report(found)
    if args.json:
        print_json(report)
    else:
        show("\n".join(map(printable, _lines(report))))
    return Exit.OK if found.path else Exit.FAULT
