"""The command line as a whole: subcommands, and how each failure ends."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import nf4
from nf4.checkpoint.errors import FormatError, OptionError, OutputRefused
from nf4.cli import dequantize, doctor, inspect, quantize, verify
from nf4.cli.console import HelpFormatter, complain, printable, replace_closed_streams, use_any_name
from nf4.cli.exits import EPILOG, Exit

_COMMANDS = (quantize, dequantize, inspect, verify, doctor)


class Terminated(BaseException):
    """SIGTERM or SIGHUP, raised where the program is so that its temporaries are removed."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(signal.Signals(number).name)


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)


@contextmanager
def _termination_raises() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into Terminated. An ignored one (nohup) stays ignored."""
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
    """The parser of `nf4`; each subcommand's sets `run`."""
    parser = argparse.ArgumentParser(
        prog="nf4",
        description="4-bit NormalFloat (NF4) and FP4 checkpoints in bitsandbytes' layout.",
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
    return f"{os.fsdecode(error.filename)}: {reason}" if error.filename else reason


def _drop_unwritten_output() -> None:
    """Where stdout cannot be written, Python would fail again at exit, with a code of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(args: argparse.Namespace) -> int:
    """Run a subcommand; expected errors become one line on stderr and an exit code."""
    try:
        with _termination_raises():
            code = args.run(args)
            sys.stdout.flush()
            return code
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        _drop_unwritten_output()
        return Exit.PIPE
    except OptionError as error:
        return complain(error, Exit.USAGE)
    except FormatError as error:
        return complain(error, Exit.FORMAT)
    except nf4.InvalidArgument as error:
        return complain(error, Exit.USAGE)
    except (OutputRefused, nf4.Error) as error:
        return complain(error, Exit.IO)
    except OSError as error:
        _drop_unwritten_output()
        return complain(_os_error_text(error), Exit.IO)
    except MemoryError:
        return complain("out of memory", Exit.IO)
    except KeyboardInterrupt:
        return complain("interrupted", Exit.INTERRUPTED)
    except Terminated as error:
        return complain(f"ended by {error}", 128 + error.number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `nf4` with these arguments (those of the process by default). Returns the exit code
    and never raises SystemExit."""
    replace_closed_streams()
    use_any_name(sys.stdout, sys.stderr)
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
        if args.version:
            print(f"nf4 {printable(nf4.version())}")
            return Exit.OK
        if args.command is None:
            parser.print_help(sys.stderr)
            return Exit.USAGE
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else Exit.USAGE
    except nf4.Error as error:
        return complain(error, Exit.IO)
    return _run(args)
