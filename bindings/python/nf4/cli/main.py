"""The command line: its subcommands, and the exit code of each failure."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import nf4
from nf4 import _interrupt
from nf4.checkpoint.errors import FormatError, OptionError, OutputRefused, printable
from nf4.cli import bench, compare, convert, dequantize, doctor, inspect, quantize, tune, verify
from nf4.cli.console import (
    HelpFormatter,
    Parser,
    StdoutError,
    complain,
    discard_unwritten,
    note,
    replace_closed_streams,
    show,
    use_any_name,
)
from nf4.cli.exits import EPILOG, Exit

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_COMMANDS = (quantize, dequantize, convert, inspect, compare, verify, doctor, tune, bench)


class Terminated(BaseException):
    """SIGTERM or SIGHUP, as an exception, so that temporaries are removed."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(signal.Signals(number).name)


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)


@contextmanager
def _termination_raises() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into Terminated. An ignored signal (nohup) stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, _raise_terminated)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of `nf4`. Each subcommand sets `run`."""
    parser = Parser(
        prog="nf4",
        description="4-bit checkpoints: NF4 and FP4 of bitsandbytes, MXFP4 and NVFP4, and integers "
        "of GPTQ, AWQ and compressed-tensors.",
        epilog=EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the library's version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for module in _COMMANDS:
        module.add_parser(commands)
    return parser


def _os_error_text(error: OSError) -> str:
    reason = error.strerror or str(error)
    if not error.filename:
        return reason
    path = os.fsdecode(error.filename)
    if isinstance(error, FileNotFoundError) and _is_hub_name(path):
        reason += f"; for a model of the Hugging Face Hub: hf download {path} --local-dir model"
    return f"{path}: {reason}"


def _is_hub_name(path: str) -> bool:
    """Tells if a path that does not exist looks like owner/model."""
    return _HUB_NAME.fullmatch(path) is not None and not os.path.isdir(os.path.dirname(path))


def _stdout_failed(error: StdoutError) -> int:
    discard_unwritten(sys.stdout)
    if isinstance(error.__cause__, BrokenPipeError):
        # Its reader has seen enough.
        return Exit.PIPE
    assert isinstance(error.__cause__, OSError)
    return complain(f"stdout: {_os_error_text(error.__cause__)}", Exit.STDOUT)


def _failed(error: BaseException) -> int:
    """Reports an expected error in one line on stderr, and raises any other. Returns the exit
    code."""
    match error:
        case StdoutError():
            return _stdout_failed(error)
        case OptionError() | nf4.InvalidArgument():
            return complain(error, Exit.USAGE)
        case FormatError():
            return complain(error, Exit.FORMAT)
        case OutputRefused() | nf4.Error():
            return complain(error, Exit.IO)
        case OSError():
            return complain(_os_error_text(error), Exit.IO)
        case MemoryError():
            return complain("out of memory", Exit.IO)
        case KeyboardInterrupt():
            return complain("interrupted", Exit.INTERRUPTED)
        case Terminated():
            return complain(f"ended by {error}", 128 + error.number)
    raise error


def _run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as exit_:  # --help, or wrong usage
        return exit_.code if isinstance(exit_.code, int) else Exit.USAGE
    if args.version:
        show(f"nf4 {printable(nf4.version())}")
        return Exit.OK
    if args.command is None:
        parser.print_help(sys.stderr)
        return Exit.USAGE
    return args.run(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `nf4` with these arguments (by default those of the process). Returns the exit code and
    never raises SystemExit."""
    replace_closed_streams()
    use_any_name(sys.stdout, sys.stderr)
    try:
        with _interrupt.raised(), _termination_raises():
            return _run(argv)
    except BaseException as error:
        code = _failed(error)
        for line in getattr(error, "__notes__", ()) if code != Exit.PIPE else ():
            note(line)
        return code
    finally:
        discard_unwritten(sys.stderr)
