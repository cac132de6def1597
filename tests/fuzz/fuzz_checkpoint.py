"""Fuzzes the reader of checkpoints and the command line.

    fuzz_checkpoint.py RUNS [--seed N] [--only RUN] [--report FILE]

Each run changes files of a small checkpoint (changes.py) and reads, verifies or converts it. What
may come of it is a result, or an error that nf4.checkpoint documents; the command line ends with
one of its exit codes, and leaves a whole destination or none. Anything else is a finding: another
exception, more than a GiB of memory, more than 60 s of processor time, the end of the process, a
temporary that is left. A run depends on the seed and its number alone, so that --only repeats it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import checkpoint_helpers as helpers
import int4_checkpoints
from changes import Changes
from limits import HANG
from nf4.checkpoint import (
    FormatError,
    QuantizeOptions,
    architecture,
    audit,
    quantize_checkpoint,
)
from nf4.checkpoint.tensors import load
from nf4.cli import main as nf4_main
from nf4.cli.exits import Exit

_MEMORY = 1 << 30
_SECONDS = 60  # of processor time; a run takes less than one
_MOST_FINDINGS = 20
# The command line is a tenth of the runs, as it takes longer.
_COMMANDS = (
    ("inspect", "IN", "--json"),
    ("verify", "IN"),
    ("dequantize", "IN", "OUT", "--quiet"),
    ("quantize", "IN", "OUT", "--quiet"),
    ("quantize", "IN", "OUT", "--format", "int4", "--group-size", "8", "--json"),
    ("convert", "IN", "OUT", "--to", "gptq"),
    ("convert", "IN", "OUT", "--to", "awq"),
)


class Finding(Exception):
    """What a run must not do."""


def _no_model(request: str, name: str) -> None:
    raise architecture.UnknownModel("not asked: to build a model takes seconds")


def _write_seeds(folder: Path) -> list[Path]:
    """Small checkpoints of each kind."""
    dense = helpers.write_model(folder / "dense")
    shards = helpers.write_shards(folder / "shards")
    for name, options in {
        "nested": QuantizeOptions(),
        "flat": QuantizeOptions(format="fp4", nested=False, blocksize=32),
        "stored": QuantizeOptions(storage="bfloat16", skip=("layers.1",)),
    }.items():
        quantize_checkpoint(str(dense), str(folder / name), options)
    quantize_checkpoint(str(shards), str(folder / "nested-shards"), QuantizeOptions())
    for number, case in enumerate(int4_checkpoints.CASES):
        case.folder(folder / f"int4-{number}", shards=1 + number % 2)
    return sorted(folder.iterdir())


class Run:
    """One run, on a folder of its own."""

    def __init__(self, seed: int, number: int, seeds: list[Path], folder: Path):
        self.rng = random.Random(f"{seed} {number}")
        self.source = folder / "in"
        self.destination = folder / "out"
        shutil.rmtree(self.source, ignore_errors=True)
        shutil.copytree(self.rng.choice(seeds), self.source)
        self._change()

    def _change(self) -> None:
        changes = Changes(self.rng)
        names = sorted(name for name in os.listdir(self.source) if name != "tokenizer.json")
        for name in self.rng.sample(names, self.rng.choice((1, 1, 2)) if len(names) > 1 else 1):
            path = self.source / name
            path.write_bytes(changes.file(name, path.read_bytes()))

    def do(self) -> str:
        """What came of it, in a word."""
        kind = self.rng.randrange(20)
        if kind < 2:
            return self._command(self.rng.choice(_COMMANDS))
        try:
            if kind < 12:
                load(self.source)
            else:
                audit(str(self.source))
        except FormatError as error:
            if not str(error).startswith(str(self.source)):
                raise Finding(f"an error that does not name the file: {error}") from error
            return "format error"
        except OSError as error:
            return f"OSError {error.errno}"
        return "read"

    def _command(self, words: tuple[str, ...]) -> str:
        paths = {"IN": str(self.source), "OUT": str(self.destination)}
        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = nf4_main([paths.get(word, word) for word in words])
        said = stderr.getvalue()
        if code not in (Exit.OK, Exit.FAULT, Exit.USAGE, Exit.FORMAT, Exit.IO):
            raise Finding(f"exit status {code}: {said}")
        if "out of memory" in said:
            raise Finding(said)
        left = sorted(os.listdir(self.source.parent))
        if left != (["in", "out"] if code == 0 and "OUT" in words else ["in"]):
            raise Finding(f"exit status {code}, and left are {left}")
        if self.destination.exists():
            self._check_destination()
        return f"exit {code}"

    def _check_destination(self) -> None:
        """What was written is a checkpoint."""
        try:
            load(self.destination)
        except FormatError as error:
            # A dtype that numpy lacks, or a weight that was copied, is in the source, too.
            with contextlib.suppress(FormatError):
                load(self.source)
                raise Finding(f"what was written of a good source: {error}") from error
        shutil.rmtree(self.destination)


def _expire(number: int, frame: object) -> None:
    limit = HANG if number == signal.SIGALRM else _SECONDS
    raise Finding(f"it took more than {limit} s")


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, resource.RLIM_INFINITY))


def fuzz(seed: int, numbers: range, folder: Path, now: mmap.mmap) -> dict[str, object]:
    """Runs them, until there are too many findings, and reports. `now`: the number of the run."""
    architecture._run = _no_model
    seeds = _write_seeds(folder / "seeds")
    work = folder / "work"
    work.mkdir()
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, _expire)
    done = 0
    outcomes: collections.Counter[str] = collections.Counter()
    known: set[str] = set()
    _limit_memory()
    for number in numbers:
        done += 1
        now[:8] = struct.pack("<q", number)
        signal.alarm(HANG)
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)
        try:
            outcomes[Run(seed, number, seeds, work).do()] += 1
        except BaseException as error:
            where = traceback.format_tb(error.__traceback__)[-1]
            if f"{type(error)}{where}" not in known:
                known.add(f"{type(error)}{where}")
                print(f"run {number}:", file=sys.stderr)
                traceback.print_exc()
            shutil.rmtree(work)
            work.mkdir()
        if len(known) == _MOST_FINDINGS:
            break
    return {"runs": done, "findings": len(known), "outcomes": dict(outcomes)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    numbers = range(args.runs) if args.only is None else range(args.only, args.only + 1)
    now = mmap.mmap(-1, mmap.PAGESIZE)
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as name:
        report = Path(name) / "report"
        child = os.fork()
        if child == 0:
            status = 1
            try:
                document = fuzz(args.seed, numbers, Path(name), now)
                report.write_text(json.dumps(document))
                status = 0 if document["findings"] == 0 else 1
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        _, ended = os.waitpid(child, 0)
        if not report.exists():
            number = struct.unpack("<q", now[:8])[0]
            print(f"run {number} ended the process: {ended}", file=sys.stderr)
            report.write_text(json.dumps({"runs": number, "findings": 1}))
        print(report.read_text())
        if args.report is not None:
            args.report.write_text(report.read_text() + "\n")
    return 0 if ended == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
