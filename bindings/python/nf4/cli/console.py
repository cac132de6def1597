"""Shared by the subcommands: arguments, messages, units, tables, JSON and progress."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO

from tqdm import tqdm

from nf4.checkpoint.dtypes import NF4_TO_TORCH, TORCH_TO_NF4
from nf4.checkpoint.errors import FormatError, printable
from nf4.cli.exits import EPILOG, Exit


def replace_closed_streams() -> None:
    """Replaces standard streams that were closed at the start, for which Python has None. Opened in
    this order, the replacements also take the descriptors, so that no other file gets them.
    stdout's replacement cannot be written to, so that lost output is an error."""
    for name, mode, flags in (
        ("stdin", "r", os.O_RDONLY),
        ("stdout", "w", os.O_RDONLY),
        ("stderr", "w", os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))


def use_any_name(*streams: TextIO) -> None:
    """Makes names that the terminal's encoding lacks print with escapes."""
    for stream in streams:
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


class StdoutError(Exception):
    """stdout cannot be written. The cause is the OSError."""


def show(text: str) -> None:
    """Prints on stdout and flushes. Raises StdoutError."""
    try:
        print(text)
        sys.stdout.flush()
    except OSError as error:
        raise StdoutError("stdout") from error


def discard_unwritten(stream: TextIO) -> None:
    """Discards output that could not be written. Python would try again at exit, and end with a
    code of its own."""
    try:
        stream.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def note(message: object) -> None:
    """Prints one line on stderr, if that can be written."""
    with suppress(OSError):
        print(f"nf4: {printable(message)}", file=sys.stderr)


def complain(message: object, code: int) -> int:
    """Prints one line on stderr. Returns the exit code to end with."""
    note(message)
    return int(code)


def positive_or_zero(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions, and options on one line with their help."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=26, width=88)


class Parser(argparse.ArgumentParser):
    """Raises StdoutError if --help cannot be printed, which argparse ignores. Wrong usage has its
    exit code even if stderr is full, where argparse of Python 3.11.2 and earlier raises."""

    def print_help(self, file: Any = None) -> None:
        if file is not None:
            super().print_help(file)
        else:
            show(self.format_help().rstrip("\n"))

    def error(self, message: str) -> NoReturn:
        try:
            super().error(message)
        except OSError:
            sys.exit(Exit.USAGE)


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    """Adds a subcommand with the common options: --json and --quiet."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument("--quiet", action="store_true", help="no progress and no notes on stderr")
    return parser


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads",
        type=positive_or_zero,
        default=0,
        metavar="N",
        help="CPU threads at most (default: one per processor)",
    )


def add_dtype(
    parser: argparse.ArgumentParser, option: str, names: Collection[str], **more: Any
) -> None:
    """Adds an option that takes one of these dtypes, by libnf4's name or by torch's: bf16 and
    bfloat16 are the same. The program gets the one that is in `names`."""

    def name_of(text: str) -> str:
        other = NF4_TO_TORCH.get(text) or TORCH_TO_NF4.get(text)
        return other if other in names else text

    parser.add_argument(option, type=name_of, choices=tuple(names), **more)


def add_conversion(parser: argparse.ArgumentParser, *, threads: bool = True) -> None:
    """Adds the arguments of commands that read a checkpoint and write another. threads: whether
    they take --threads."""
    parser.add_argument("source", metavar="SRC", help="a .safetensors file or a model directory")
    parser.add_argument("destination", metavar="DST", help="a file or a directory, as SRC is")
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace DST if it exists; a checkpoint directory with everything in it",
    )
    if threads:
        add_threads(parser)


def print_json(document: object) -> None:
    show(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity by null, because JSON lacks them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def size_text(count: float) -> str:
    """Returns bytes in decimal units: "43.1 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def rate_text(count: float, seconds: float) -> str:
    """Returns bytes in this many seconds as GB/s."""
    return f"{count / seconds / 1e9:.2f} GB/s" if seconds > 0 else "-"


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts layer.2 before layer.10."""
    parts = re.findall(r"([0-9]+)|([^0-9]+)", name)
    # Numbers without leading zeros compare by length first. int() has a limit on digits.
    numbers = ((digits.lstrip("0"), text) for digits, text in parts)
    return [(1, 0, text) if text else (0, len(digits), digits) for digits, text in numbers]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Returns lines of aligned columns: the first `left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return [line(header), "  ".join("-" * width for width in widths), *map(line, rows)]


@contextmanager
def progress(
    total: int, what: str, quiet: bool, unit: str = "B"
) -> Iterator[Callable[[str, int], None]]:
    """Shows a progress bar of bytes on stderr if that is a terminal. Yields a function to call with
    the name and the bytes of each tensor that is done."""
    off = quiet or not sys.stderr.isatty()
    with tqdm(total=total, desc=what, unit=unit, unit_scale=True, disable=off, leave=False) as bar:

        def advance(name: str, count: int) -> None:
            bar.update(count)

        yield advance


@contextmanager
def step_progress(
    what: str, quiet: bool, total: Callable[[], int]
) -> Iterator[Callable[[str], None]]:
    """Shows a progress bar of steps on stderr if that is a terminal. Yields a function to call with
    the name of each step. `total` is first called by the first step: it may import much, which
    would be in vain if no step is reached."""
    off = quiet or not sys.stderr.isatty()
    with tqdm(desc=what, disable=off, leave=False) as bar:

        def advance(name: str) -> None:
            bar.total = bar.total or total()
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        yield advance


def text_of(path: str) -> str:
    """Reads a text. Raises FormatError if it is not UTF-8."""
    with open(path, "rb") as file:
        content = file.read()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise FormatError(path, f"it is not UTF-8 text, from byte {error.start} on") from None
