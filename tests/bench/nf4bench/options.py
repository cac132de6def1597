"""What the command line may ask for; what makes no sense is refused with the usage.

    python tests/bench/nf4bench/options.py ARGUMENTS

only checks them. This module needs nothing but Python, so that `./dev bench` can refuse
before it builds and installs.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PEERS = ("bitsandbytes", "unsloth", "torch", "triton")
MODES = ("sweep", "challenge", "call", "matmul", "matmul-sweep", "models")
SWEEPS = ("sweep", "matmul-sweep")  # whose tables go between markers of that name
MAX_ELEMENTS = 2**31 - 1  # bitsandbytes counts elements in 32 bits
REPLAYS, MIN_REPLAYS = 15, 3
ITERATIONS = 1000  # of the challenge, as its authors have it

Shape = tuple[int, int]


@dataclass(frozen=True)
class Options:
    """mode is "" for the rows of the bench, or one of MODES. Numbers that were not given are
    None, so that each program has defaults of its own."""

    mode: str = ""
    device: str = "auto"
    shapes: tuple[Shape, ...] | None = None
    quick: bool = False
    peers: tuple[str, ...] | None = None
    replays: int | None = None
    iterations: int | None = None
    threads: int | None = None
    json: Path | None = None
    plots: Path | None = None
    notes: Path | None = None
    build: Path = field(default=ROOT / "build")
    before: Path | None = None


def shape(text: str) -> Shape:
    """ROWSxCOLS. Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d{1,10})x(\d{1,10})", text)
    rows, cols = map(int, match.groups()) if match else (0, 0)
    if not 0 < rows * cols <= MAX_ELEMENTS:
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected ROWSxCOLS, such as 4096x14336, of 1 to {MAX_ELEMENTS} elements"
        )
    return rows, cols


def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(shape(each) for each in text.split(","))


def _peers(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no peer {unknown[0]!r}; expected some of {','.join(PEERS)}, or none"
        )
    return names


def _at_least(least: int):
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}; expected a number of {least} or more")
        return int(text)

    return parse


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="./dev bench",
        description="libnf4 beside its peers and beside the limit of memory, on the GPU if there "
        "is one, else the CPU",
    )
    modes = made.add_mutually_exclusive_group()
    modes.add_argument("--sweep", action="store_true", help="every launch configuration (GPU)")
    modes.add_argument("--challenge", action="store_true", help="Unsloth's puzzle (GPU)")
    modes.add_argument("--call", action="store_true", help="what a Python call costs (GPU)")
    modes.add_argument("--matmul", action="store_true", help="matmul beside its peers (GPU)")
    modes.add_argument("--matmul-sweep", action="store_true", help="every kernel of matmul (GPU)")
    modes.add_argument("--models", action="store_true", help="LLaMA-7B beside its peers (GPU)")
    modes.add_argument(
        "--before", type=Path, metavar="DIR",
        help="this checkout beside another one, both with build/: dequantize, quantize, matmul, "
        "models and host overhead in turns. Exits with 1 where a product is over 3 %% slower (GPU)",
    )  # fmt: skip
    which = made.add_mutually_exclusive_group()
    which.add_argument("--shapes", type=_shapes, help="ROWSxCOLS,... instead of LLaMA's")
    which.add_argument("--quick", action="store_true", help="only the shapes that matter most")
    made.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    made.add_argument("--peers", type=_peers, help=f"some of {','.join(PEERS)}, or none (GPU)")
    made.add_argument(
        "--replays", type=_at_least(MIN_REPLAYS), help=f"of each graph; {REPLAYS} by default (GPU)"
    )
    made.add_argument(
        "--iterations", type=_at_least(1), help=f"of the challenge; {ITERATIONS} by default"
    )
    made.add_argument(
        "--threads", type=_at_least(1), help="one for each processor by default (CPU)"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    made.add_argument("--plots", type=Path, metavar="DIR", help="write the plots to this folder")
    made.add_argument(
        "--notes", type=Path, metavar="FILE", help="write a sweep's tables into this file"
    )
    made.add_argument("--build", type=Path, default=Options.build, help="the build directory")
    return made


def has_section(path: Path, name: str) -> bool:
    """Does the file have the markers of that name, the end after the beginning?"""
    _, _, rest = path.read_text().partition(f"<!-- {name}:begin -->")
    return f"<!-- {name}:end -->" in rest


def _contradiction(options: Options) -> str | None:
    """Why these options make no sense together on any machine, or None."""
    if options.mode in ("challenge", "call") and (options.shapes or options.quick):
        return f"--{options.mode} has shapes of its own; expected neither --shapes nor --quick"
    if options.mode in ("models", "before") and options.shapes:
        return f"--{options.mode} has shapes of its own; expected no --shapes"
    if options.mode not in ("", "challenge") and options.peers is not None:
        return f"--peers means nothing to --{options.mode}"
    if options.mode in ("challenge", "call", "before") and options.replays is not None:
        return f"--replays means nothing to --{options.mode}"
    if options.mode != "challenge" and options.iterations is not None:
        return "--iterations belongs to --challenge"
    if options.mode not in SWEEPS and options.notes is not None:
        return f"--notes belongs to --{' and --'.join(SWEEPS)}"
    if options.mode not in ("", "matmul") and options.plots is not None:
        return f"--plots means nothing to --{options.mode}"
    for name, folder in (("json", options.json and options.json.parent), ("plots", options.plots)):
        if folder is not None and not folder.is_dir():
            return f"--{name}: there is no folder {folder}"
    section, notes = options.mode, options.notes
    if notes and not (notes.is_file() and has_section(notes, section)):
        return f"--notes: {notes} is no file with <!-- {section}:begin --> and its end"
    return _contradiction_on(options, options.device)


def _contradiction_on(options: Options, device: str) -> str | None:
    """Why these options make no sense on "gpu" or "cpu", or None."""
    gpu_only = [options.mode] if options.mode else []
    gpu_only += [
        name for name in ("peers", "replays", "plots") if getattr(options, name) is not None
    ]
    if device == "cpu" and gpu_only:
        return f"--{gpu_only[0]} needs a GPU"
    if device == "gpu" and options.threads is not None:
        return "--threads is for the CPU"
    processors = len(os.sched_getaffinity(0))
    if options.threads is not None and options.threads > processors:
        return f"--threads is {options.threads}, and this process may run on {processors}"
    return None


def parse(arguments: Sequence[str]) -> Options:
    """Exits with status 2 and the usage where the arguments make no sense."""
    made = parser()
    values = vars(made.parse_args(arguments))
    mode = "".join(name for name in MODES if values.pop(name.replace("-", "_")))
    mode = "before" if values["before"] else mode
    options = Options(mode=mode, **values)
    problem = _contradiction(options)
    if problem:
        made.error(problem)
    return options


def settle(options: Options, no_gpu: str | None) -> str:
    """The device to bench, "gpu" or "cpu". `no_gpu` says why there is no GPU, or is None.

    Exits with status 2 and the usage where the options make no sense on this machine."""
    device = options.device
    if device == "auto":
        device = "cpu" if no_gpu else "gpu"
    elif device == "gpu" and no_gpu:
        parser().error(f"--device gpu: {no_gpu}")
    problem = _contradiction_on(options, device)
    if problem:
        parser().error(f"{problem}: {no_gpu}" if no_gpu and device == "cpu" else problem)
    return device


if __name__ == "__main__":
    parse(sys.argv[1:])
