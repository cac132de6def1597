"""The command line and nf4.save where the n-th call that changes a file fails, or is the last.

    fault_files.py [--kills N] [--allocations N]

Starts itself with file_faults.c before the C library. For each way to write (a file or a
directory, new or in place of an old one; quantize, dequantize, convert, save) and each n until the
writing succeeds: the n-th call fails; every one from the n-th on that takes space says that the
disk is full; the process is killed at the n-th call. The destination is then what it was, or the
new one, whole; after an error no temporary and no descriptor is left; after a kill the next run
succeeds. --kills also kills N processes at random moments, --allocations fails one of Python's
allocations N times.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import errno
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import checkpoint_helpers as helpers
import int4_checkpoints
import nf4
import numpy as np
import tqdm
from nf4.cli import main as nf4_main

try:
    import _testcapi
except ImportError:  # some distributions leave it out
    _testcapi = None

SHIM = Path(__file__).with_name("file_faults.c")
FAIL, FULL, KILL = 1, 2, 3
# Calls that take space of a disk.
_TAKES_SPACE = b"write pwrite64 sendfile64 copy_file_range mkdir open64"
# More calls than any of the writers makes.
_MOST_CALLS = 2000


@dataclasses.dataclass
class Writer:
    """A way to write `destination`. old: what is there before; None: nothing. write: returns
    whether it is there afterwards."""

    name: str
    write: Callable[[Path], bool]
    old: Path | None
    is_file: bool


def _command(*words: object) -> Callable[[Path], bool]:
    def write(destination: Path) -> bool:
        said = io.StringIO()
        given = [str(destination) if word == "OUT" else str(word) for word in words]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            code = nf4_main([*given, "--quiet"])
        # As of nf4.save, an exception: it may come after the rename.
        if code == 4 and said.getvalue().startswith("nf4: out of memory"):
            raise MemoryError
        if code not in (0, 4) or (code == 4 and said.getvalue().count("\n") < 1):
            raise AssertionError(f"exit status {code}: {said.getvalue()}")
        return code == 0

    return write


def _save(destination: Path) -> bool:
    weights = {
        "a.weight": nf4.quantize(helpers.random_weight((8, 64))),
        "norm": np.ones(3, np.float32),
    }
    try:
        nf4.save(destination, weights, replace=True)
    except OSError:
        return False
    return True


def _writers(folder: Path) -> list[Writer]:
    """Each on new ground and over an old destination."""
    dense = helpers.write_model(folder / "dense")
    shards = helpers.write_shards(folder / "shards")
    integers = int4_checkpoints.CASES[0].folder(folder / "integers")
    old = helpers.write_model(folder / "old", {"old.weight": helpers.random_weight((4, 32))})
    assert _command("quantize", dense, "OUT")(folder / "quantized")
    convert = _command("convert", integers, "OUT", "--to", "awq", "--force")
    file = dense / "model.safetensors"
    writers = [
        ("quantize a file", _command("quantize", file, "OUT", "--force"), True),
        ("quantize a directory", _command("quantize", shards, "OUT", "--force"), False),
        ("dequantize", _command("dequantize", folder / "quantized", "OUT", "--force"), False),
        ("convert", convert, False),
        ("save a file", _save, True),
        ("save a directory", _save, False),
    ]
    return [
        Writer(name, write, before, is_file)
        for name, write, is_file in writers
        for before in (None, old / "model.safetensors" if is_file else old)
    ]


class Faults:
    """file_faults.c, and what the n-th call did."""

    def __init__(self) -> None:
        self.shim = ctypes.CDLL(None)
        self.shim.faults_arm.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_char_p]
        self.shim.faults_failed.restype = ctypes.c_char_p

    def arm(self, mode: int, n: int) -> None:
        names, code = (_TAKES_SPACE, errno.ENOSPC) if mode == FULL else (b"", errno.EIO)
        self.shim.faults_arm(mode, n, code, names)

    def disarm(self) -> bool:
        """Whether a call was hit."""
        hit = self.shim.faults_failed() != b""
        self.shim.faults_arm(0, 0, 0, b"")
        return hit


def _content(path: Path) -> object:
    if not path.exists():
        return None
    return path.read_bytes() if path.is_file() else helpers.tree(path)


class Check:
    """One writer, in a folder of its own, with every fault."""

    def __init__(self, writer: Writer, folder: Path, faults: Faults):
        self.writer = writer
        self.faults = faults
        self.folder = folder
        self.destination = folder / ("out.safetensors" if writer.is_file else "out")
        self.count = 0
        self._begin()
        self.before = _content(self.destination)
        assert writer.write(self.destination)
        self.new = _content(self.destination)
        self.descriptors = len(os.listdir("/proc/self/fd"))

    def _begin(self) -> None:
        """The folder with nothing but the old destination."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        if self.writer.old is not None:
            copy = shutil.copyfile if self.writer.is_file else shutil.copytree
            copy(self.writer.old, self.destination)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            left = sorted(os.listdir(self.folder))
            raise AssertionError(f"{self.writer.name}: call {self.count}: {what}; there are {left}")

    def errors(self, mode: int) -> None:
        for n in range(1, _MOST_CALLS):
            self._begin()
            self.faults.arm(mode, n)
            try:
                written = self.writer.write(self.destination)
                failed = self.faults.shim.faults_failed().decode()
            finally:
                hit = self.faults.disarm()
            if not hit:
                self._require(written and _content(self.destination) == self.new, "no success")
                return
            self.count += 1
            expected = self.new if written else self.before
            self._require(_content(self.destination) == expected, f"{failed}: the destination")
            # A file that could not be deleted is named, and left.
            deleting = failed.startswith(("unlink", "rmdir")) or (written and failed == "chmod")
            names = [name for name in os.listdir(self.folder) if name != self.destination.name]
            self._require(deleting or not names, f"{failed}: a temporary is left")
            open_now = len(os.listdir("/proc/self/fd"))
            self._require(open_now == self.descriptors, f"{failed}: a descriptor is left")
        raise AssertionError(f"{self.writer.name} never succeeds")

    def kill(self) -> None:
        """A child each; the parent has all modules loaded and makes no threads."""
        for n in range(1, _MOST_CALLS):
            self._begin()
            child = os.fork()
            if child == 0:
                self.faults.arm(KILL, n)
                with contextlib.suppress(BaseException):
                    self.writer.write(self.destination)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if not os.WIFSIGNALED(status):
                self._require(_content(self.destination) == self.new, "no success")
                return
            self.count += 1
            self.whole_after_kill()
        raise AssertionError(f"{self.writer.name} never succeeds")

    def allocation(self, n: int) -> bool:
        """The n-th of Python fails, in a child; whether there were as many."""
        self._begin()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            # Any exception may come of it.
            with contextlib.suppress(BaseException):
                _testcapi.set_nomemory(n, n + 1)
                written = self.writer.write(self.destination)
                os._exit(0 if written else 2)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        self.count += 1
        content = _content(self.destination)
        self._require(content in (self.before, self.new), f"allocation {n}: not whole")
        claimed = {0: self.new, 2: self.before}.get(os.waitstatus_to_exitcode(status), content)
        self._require(content == claimed, f"allocation {n}: not what the writer says")
        stray = [name for name in os.listdir(self.folder) if name != self.destination.name]
        # The old directory may be left beside the new one, as after a kill. numpy's
        # __array_interface__ ends the process.
        killed = os.WIFSIGNALED(status)
        self._require(
            killed or not stray or content == self.new, f"allocation {n}: a temporary is left"
        )
        return killed or os.WEXITSTATUS(status) != 0

    def whole_after_kill(self) -> None:
        self._require(_content(self.destination) in (self.before, self.new), "not whole")
        stray = [name for name in os.listdir(self.folder) if name != self.destination.name]
        self._require(all(".nf4-tmp-" in name for name in stray), "strange files")
        self._require(self.writer.write(self.destination), "the next run fails")
        self._require(_content(self.destination) == self.new, "the next run writes another")


def _inject(folder: Path, counts: dict[str, int]) -> None:
    faults = Faults()
    counts |= {"failed": 0, "killed": 0, "writers": 0}
    (folder / "sources").mkdir()
    for writer in _writers(folder / "sources"):
        check = Check(writer, folder / "work", faults)
        check.errors(FAIL)
        check.errors(FULL)
        counts["failed"] += check.count
        check.count = 0
        check.kill()
        counts["killed"] += check.count
        counts["writers"] += 1


def _fail_allocations(folder: Path, count: int) -> int:
    """Of all writers in turn, early ones as often as late ones; how many were there to fail."""
    (folder / "allocations").mkdir()
    checks = [
        Check(writer, folder / "work", Faults()) for writer in _writers(folder / "allocations")
    ]
    rng = random.Random(4)
    numbers = [int(10 ** rng.uniform(0, 4.5)) for _ in range(count)]
    return sum(checks[i % len(checks)].allocation(n) for i, n in enumerate(numbers))


def _kill_at_random(folder: Path, kills: int) -> int:
    """Processes of the command line, on new ground and over an old destination, ended at random
    moments."""
    tensors = {
        f"model.layers.{n}.proj.weight": helpers.random_weight((256, 1024), seed=n)
        for n in range(12)
    }
    large = helpers.write_model(folder / "large", tensors)
    small = helpers.write_model(folder / "small")
    file = "model.safetensors"
    rng = random.Random(4)
    killed = 0
    sources = [(large, None), (large, small), (large / file, None), (large / file, small / file)]
    for number, (source, old) in enumerate(sources, 1):
        write = _command("quantize", source, "OUT", "--force")
        writer = Writer("quantize", write, old, source.is_file())
        check = Check(writer, folder / "work", Faults())
        start = time.monotonic()
        writer.write(check.destination)
        duration = time.monotonic() - start
        while killed < kills * number // len(sources):
            check._begin()
            child = os.fork()
            if child == 0:
                writer.write(check.destination)
                os._exit(0)
            time.sleep(rng.uniform(0, duration))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            killed += os.WIFSIGNALED(status)
            check.whole_after_kill()
    return killed


_PROOFS = {
    "failed": "nth-file-call",
    "killed": "kill-at-file-call",
    "killed_at_random": "kill-at-random",
    "allocations": "nth-python-allocation",
}


@contextlib.contextmanager
def _proving(counts: dict[str, int], *keys: str) -> Iterator[None]:
    """Leaves those counts for docs/reliability.md, as failed where the block fails."""
    failed = 1
    try:
        yield
        failed = 0
    finally:
        path = os.environ.get("NF4_PROOFS")
        for key in keys if path is not None else ():
            if failed or counts.get(key):
                with open(path, "a") as file:
                    file.write(f"{_PROOFS[key]} {counts.get(key, 0)} {failed}\n")


def _preload() -> int:
    """Runs this program with file_faults.c. Not from /dev/shm, from which some systems load no
    libraries."""
    with tempfile.TemporaryDirectory() as name:
        shim = Path(name) / "file_faults.so"
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-shared", "-fPIC", SHIM, "-o", shim, "-ldl"], check=True)
        environment = {**os.environ, "LD_PRELOAD": str(shim)}
        command = [sys.executable, __file__, "--preloaded", *sys.argv[1:]]
        return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--allocations", type=int, default=0)
    parser.add_argument("--preloaded", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.preloaded:
        return _preload()
    warnings.simplefilter("ignore")
    # Its own is shared by processes: one that is killed with it would hold up all others.
    tqdm.tqdm.set_lock(threading.RLock())
    counts: dict[str, int] = {}
    # In memory, as each run syncs.
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared) as name:
        folder = Path(name)
        with _proving(counts, "failed", "killed"):
            _inject(folder, counts)
        with _proving(counts, "killed_at_random"):
            if args.kills:
                counts["killed_at_random"] = _kill_at_random(folder, args.kills)
        if _testcapi is None:
            print("skipped: no allocations failed, as this Python has no _testcapi")
        else:
            with _proving(counts, "allocations"):
                counts["allocations"] = _fail_allocations(folder, args.allocations)
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
