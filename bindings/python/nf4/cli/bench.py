"""nf4 bench: measures a report of a GPU to send."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nf4.checkpoint.errors import printable
from nf4.cli.console import add_command, positive_or_zero, print_json, show, step_progress
from nf4.cli.exits import Exit
from nf4.tuning import api, report, summary

_DESCRIPTION = """\
Measure a report of a GPU and write it to FILE as one JSON document: properties of the GPU,
versions, the costs that nf4 tune would store, times beside bitsandbytes (if it is installed) and a
dense weight, and checks of bits and errors. It takes about twice as long as nf4 tune. Nothing else
should use the GPU meanwhile. No costs are stored. Needs PyTorch.
"""


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "bench", run, "write a report of this GPU's times", _DESCRIPTION)
    parser.add_argument("file", metavar="FILE", help="where the report goes; replaced if it exists")
    parser.add_argument(
        "--device", type=positive_or_zero, default=0, metavar="N", help="the GPU (default: 0)"
    )


def run(args: argparse.Namespace) -> int:
    path = Path(args.file)
    with step_progress("bench", args.quiet, api.report_steps) as advance:
        document = api.write_report(path, args.device, advance=advance)
    doubts = report.doubts(document)
    if args.json:
        print_json({"path": str(path), "doubts": doubts})
    else:
        show("\n".join(map(printable, [*summary.lines(document), f"written to {path}"])))
    return Exit.FAULT if doubts else Exit.OK
