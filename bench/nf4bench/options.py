"""What the command line may ask for; what makes no sense is refused with the usage.

    python bench/nf4bench/options.py ARGUMENTS

only checks them. This module needs nothing but Python, so that `./dev bench` can refuse
before it builds and installs.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("bitsandbytes", "unsloth", "torch", "triton")
MAX_ELEMENTS = 2**31 - 1  # bitsandbytes counts elements in 32 bits
REPLAYS, MIN_REPLAYS = 15, 3
ITERATIONS = 1000  # iterations of the challenge, as its authors have it

Shape = tuple[int, int]


# The programs that are given a path.
PATHS = {"report": "FILE", "before": "DIR"}
# The programs of the bench, all on a GPU and some on the CPU: help, and the options that mean
# something to them, beside --json, --build and --device. "" has the rows.
MODES: dict[str, tuple[str, tuple[str, ...]]] = {
    "": ("", ("shapes", "quick", "peers", "replays", "plots", "threads")),
    "sweep": ("every launch configuration of dequantize", ("shapes", "quick", "replays")),
    "challenge": ("Unsloth's puzzle", ("peers", "iterations")),
    "call": ("what a Python call costs", ()),
    "matmul": (
        "matmul beside its peers",
        ("shapes", "quick", "replays", "plots", "format"),
    ),
    "matmul-sweep": ("every kernel of matmul", ("shapes", "quick", "replays")),
    "models": (
        "LLaMA-7B beside its peers; on the CPU a Linear4bit beside bitsandbytes'",
        ("quick", "replays", "threads"),
    ),
    "int4": (
        "GPTQ, AWQ and compressed-tensors beside NF4 and peers",
        ("shapes", "quick", "replays", "threads"),
    ),
    "training": ("a QLoRA step through transformers and PEFT", ("quick", "replays", "format")),
    "experts": (
        "mixture of experts beside dense bf16 and peers",
        ("quick", "replays", "plots", "format"),
    ),
    "families": ("the kernels of an A100, RTX cards and a T4 on this GPU, beside bitsandbytes", ()),
    "distributed": ("two GPUs: a QLoRA step under FSDP2, a token under tensor parallelism", ()),
    "report": ("writes a report of this GPU to FILE, as `nf4 bench FILE` does", ()),
    "before": (
        "this checkout beside the one in DIR, both already built: dequantize, quantize, matmul, "
        "models and host overhead in turns. Exits with 1 where a product is over 3 %% slower",
        ("quick",),
    ),
}
OPTIONS = ("shapes", "quick", "peers", "replays", "iterations", "plots", "threads", "format")
GPU_ONLY = ("peers", "replays", "plots", "format")
FORMATS = ("mxfp4", "nvfp4")
CPU_MODES = ("", "int4", "models")


@dataclass(frozen=True)
class Options:
    """mode is one of MODES. What was not given is None, so that each program has defaults of its
    own."""

    mode: str = ""
    device: str = "auto"
    shapes: tuple[Shape, ...] | None = None
    quick: bool = False
    peers: tuple[str, ...] | None = None
    replays: int | None = None
    iterations: int | None = None
    threads: int | None = None
    format: str | None = None
    json: Path | None = None
    plots: Path | None = None
    build: Path = field(default=ROOT / "build")
    before: Path | None = None
    report: Path | None = None


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
    return tuple(map(shape, text.split(",")))


def _peers(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(
                f"no peer {name!r}; expected some of {','.join(PEERS)}, or none"
            )
    return names


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}; expected a number of {least} or more")
        return int(text)

    return parse


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="./dev bench",
        description="libnf4 beside its peers and beside the bandwidth roofline, on the GPU if "
        "there is one, else the CPU",
    )
    modes = made.add_mutually_exclusive_group()
    for name, (text, _) in list(MODES.items())[1:]:
        path = {"type": Path, "metavar": PATHS.get(name)}
        how = path if name in PATHS else {"action": "store_true"}
        modes.add_argument(f"--{name}", help=text if name in CPU_MODES else f"{text} (GPU)", **how)
    which, add = made.add_mutually_exclusive_group(), made.add_argument
    which.add_argument("--shapes", type=_shapes, help="ROWSxCOLS,... instead of LLaMA's")
    which.add_argument("--quick", action="store_true", help="only the shapes that matter most")
    add("--device", choices=("auto", "gpu", "cpu"), default="auto")
    add("--peers", type=_peers, help=f"some of {','.join(PEERS)}, or none (GPU)")
    replays = f"of each graph; {REPLAYS} by default (GPU)"
    add("--replays", type=_at_least(MIN_REPLAYS), help=replays)
    add("--iterations", type=_at_least(1), help=f"of the challenge; {ITERATIONS} by default")
    add("--format", choices=FORMATS, help="this format instead of NF4; experts are gpt-oss's (GPU)")
    add("--threads", type=_at_least(1), help="all processors by default (CPU)")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file")
    add("--plots", type=Path, metavar="DIR", help="write the plots to this folder")
    add("--build", type=Path, default=Options.build, help="the build directory")
    return made


def _contradiction(options: Options) -> str | None:
    """Why these options make no sense together on any machine, or None."""
    for name in OPTIONS:
        if getattr(options, name) not in (None, False) and name not in MODES[options.mode][1]:
            return f"--{name} means nothing {f'to --{options.mode}' if options.mode else 'here'}"
    for name in ("shapes", "quick", "plots") if options.format else ():
        if getattr(options, name):
            return f"--{name} means nothing to --format"
    files = {name: getattr(options, name) for name in ("json", "report")}
    folders = {name: file.parent for name, file in files.items() if file is not None}
    for name, folder in (*folders.items(), ("plots", options.plots)):
        if folder is not None and not folder.is_dir():
            return f"--{name}: there is no folder {folder}"
    return None


def _contradiction_on(options: Options, device: str) -> str | None:
    """Why these options make no sense on "gpu" or "cpu", or None."""
    if device == "gpu":
        return None if options.threads is None else "--threads is for the CPU"
    if options.mode not in CPU_MODES:
        return f"--{options.mode} needs a GPU"
    for name in GPU_ONLY:
        if getattr(options, name) is not None:
            return f"--{name} needs a GPU"
    processors = len(os.sched_getaffinity(0))
    if (options.threads or 0) > processors:
        return f"--threads is {options.threads}, and this process may run on {processors}"
    for rows, cols in options.shapes or ():
        if cols % 64:
            return f"--shapes: {rows}x{cols}: bitsandbytes is wrong where 64 does not divide cols"
    return None


def parse(arguments: Sequence[str]) -> Options:
    """Exits with status 2 and the usage where the arguments make no sense."""
    made = parser()
    values = vars(made.parse_args(arguments))
    modes = {name: values.pop(name.replace("-", "_")) for name in list(MODES)[1:]}
    mode = "".join(name for name, given in modes.items() if given)
    options = Options(mode=mode, **{name: modes[name] for name in PATHS}, **values)
    device = options.device
    problem = _contradiction(options) or (device != "auto" and _contradiction_on(options, device))
    if problem:
        made.error(problem)
    return options


def settle(options: Options, no_gpu: str | None) -> str:
    """The device to bench, "gpu" or "cpu". `no_gpu` says why there is no GPU, or is None.

    Exits with status 2 and the usage where the options make no sense on this machine."""
    device = options.device if options.device != "auto" else "cpu" if no_gpu else "gpu"
    if device == "gpu" and no_gpu:
        parser().error(f"--device gpu: {no_gpu}")
    problem = _contradiction_on(options, device)
    if problem:
        parser().error(f"{problem}: {no_gpu}" if no_gpu and device == "cpu" else problem)
    return device


if __name__ == "__main__":
    parse(sys.argv[1:])
