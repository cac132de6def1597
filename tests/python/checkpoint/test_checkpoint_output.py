"""Output appears whole or not at all, whatever the system refuses."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import checkpoint_helpers as helpers
import numpy as np
import pytest
from checkpoint_helpers import listing
from nf4.checkpoint import (
    FormatError,
    OutputRefused,
    QuantizeOptions,
    quantize_checkpoint,
    transaction,
)
from nf4.checkpoint.header import TensorSpec
from nf4.checkpoint.writer import SafetensorsWriter
from nf4.cli import main


def _file(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    path.write_bytes(helpers.file_bytes(helpers.dense_tensors()))
    return path


def _failing(code: int, after: int = 0):
    """A system call that works `after` times, and then fails with errno `code`."""

    def make(real):
        calls = 0

        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls > after:
                raise OSError(code, os.strerror(code))
            return real(*arguments, **options)

        return call

    return make


FAILURES = {
    "no space at the header": ("pwrite", errno.ENOSPC, 0),
    "no space later": ("pwrite", errno.ENOSPC, 5),
    "quota": ("pwrite", errno.EDQUOT, 3),
    "I/O error": ("pwrite", errno.EIO, 3),
    "error at fsync": ("fsync", errno.EIO, 0),
    "error at close": ("close", errno.EIO, 0),
    "read error": ("preadv", errno.EIO, 4),
    "error at rename": ("replace", errno.EACCES, 0),
}


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("case", FAILURES)
def test_system_errors_leave_the_destination_as_it_was(
    case, existing, tmp_path, monkeypatch, capsys
):
    source, destination = _file(tmp_path), tmp_path / "out.safetensors"
    if existing:
        destination.write_bytes(b"old")
    before = listing(tmp_path)
    name, code, after = FAILURES[case]
    if name == "close":
        _fail_close_after_fsync(monkeypatch, code)
    elif name == "replace" and not existing:
        monkeypatch.setattr(transaction, "_rename", lambda *arguments: code)
    else:
        monkeypatch.setattr(os, name, _failing(code, after)(getattr(os, name)))
    assert main(["quantize", str(source), str(destination), "--force"]) == 4
    monkeypatch.undo()
    stderr = capsys.readouterr().err
    assert os.strerror(code) in stderr and str(tmp_path) in stderr and stderr.count("\n") == 1
    assert listing(tmp_path) == before
    assert not existing or destination.read_bytes() == b"old"


def _fail_close_after_fsync(monkeypatch, code: int) -> None:
    """Delayed write errors show at the close of what was synced: that close alone fails."""
    synced: set[int] = set()
    fsync, close = os.fsync, os.close

    def record(fd: int) -> None:
        fsync(fd)
        synced.add(fd)

    def fail(fd: int) -> None:
        close(fd)
        if fd in synced:
            synced.discard(fd)
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "close", fail)


def test_short_writes_go_on(tmp_path, monkeypatch):
    source = _file(tmp_path)
    quantize_checkpoint(str(source), str(tmp_path / "whole"), QuantizeOptions())
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:11], at))
    quantize_checkpoint(str(source), str(tmp_path / "pieces"), QuantizeOptions())
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "pieces").read_bytes()


def test_interrupting_timers_do_no_harm(tmp_path):
    """Signals whose handlers return make system calls end with EINTR: all are retried."""
    source = _file(tmp_path)
    quantize_checkpoint(str(source), str(tmp_path / "calm"), QuantizeOptions())
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        for _ in range(20):
            quantize_checkpoint(
                str(source), str(tmp_path / "alarmed"), QuantizeOptions(), replace=True
            )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (tmp_path / "calm").read_bytes() == (tmp_path / "alarmed").read_bytes()


def test_file_size_limit_is_an_error(tmp_path):
    """A real refusal by the system (EFBIG), in place of a full disk."""
    source = _file(tmp_path)
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "from nf4.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = [sys.executable, "-c", script, "quantize", source, tmp_path / "out"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.returncode == 4
    assert "File too large" in result.stderr and "Traceback" not in result.stderr
    assert listing(tmp_path) == ["in.safetensors"]


def test_changed_input_is_refused_before_output_appears(tmp_path, monkeypatch):
    source = _file(tmp_path)

    def touch(name: str, count: int) -> None:
        os.utime(source, ns=(1, 1))

    with pytest.raises(FormatError, match="changed while it was read"):
        quantize_checkpoint(str(source), str(tmp_path / "out"), QuantizeOptions(), progress=touch)
    assert listing(tmp_path) == ["in.safetensors"]


@pytest.mark.parametrize("how", ["same", "dotted", "symlink", "hard link"])
def test_output_that_is_the_input_is_refused(how, tmp_path, capsys):
    source = _file(tmp_path)
    other = tmp_path / "other.safetensors"
    if how == "same":
        other = source
    elif how == "dotted":
        other = tmp_path / "." / ".." / tmp_path.name / source.name
    elif how == "symlink":
        other.symlink_to(source)
    else:
        other.hardlink_to(source)
    content = source.read_bytes()
    assert main(["quantize", str(source), str(other), "--force"]) == 4
    assert "the output is the input" in capsys.readouterr().err
    assert source.read_bytes() == content


def test_directories_in_each_other_are_refused(tmp_path, capsys):
    source = helpers.write_model(tmp_path / "a" / "model")
    before = helpers.tree(tmp_path)
    for destination in (source, source / "out", tmp_path / "a"):
        assert main(["quantize", str(source), str(destination), "--force"]) == 4
        assert "output" in capsys.readouterr().err
    assert helpers.tree(tmp_path) == before


def test_an_index_stands_for_its_directory(tmp_path, capsys):
    folder = helpers.write_shards(tmp_path / "model")
    index = folder / "model.safetensors.index.json"
    for destination in (folder, folder / "out", tmp_path):
        assert main(["quantize", str(index), str(destination), "--force"]) == 4
        assert "output" in capsys.readouterr().err
    assert "out" not in listing(folder)


def _no_parent(tmp_path: Path) -> Path:
    return tmp_path / "nowhere" / "out"


def _parent_is_file(tmp_path: Path) -> Path:
    return tmp_path / "in.safetensors" / "out"


def _fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def _directory(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


REFUSED = {
    "no parent": (_no_parent, "No such file or directory"),
    "parent is a file": (_parent_is_file, "ot"),
    "a FIFO": (_fifo, "is a FIFO, not a regular file"),
    "a directory": (_directory, "is a directory, not a regular file"),
    "a device": (lambda _: Path("/dev/null"), "is a character device"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_destinations_are_named(case, tmp_path, capsys):
    source = _file(tmp_path)
    make, phrase = REFUSED[case]
    destination = make(tmp_path)
    before = listing(tmp_path)
    assert main(["quantize", str(source), str(destination), "--force"]) == 4
    stderr = capsys.readouterr().err
    assert phrase in stderr and stderr.count("\n") == 1
    assert listing(tmp_path) == before


def test_impossible_sources_are_named(tmp_path, capsys):
    fifo = _fifo(tmp_path)
    for source, code, phrase in [
        (tmp_path / "nothing", 4, f"{tmp_path}/nothing: No such file or directory"),
        (fifo, 3, f"{fifo}: a FIFO, not a file or directory"),
        (Path("/dev/null"), 3, "/dev/null: a character device"),
    ]:
        assert main(["quantize", str(source), str(tmp_path / "out")]) == code
        assert phrase in capsys.readouterr().err
        assert main(["verify", str(source)]) == (1 if code == 3 else 4)
    assert listing(tmp_path) == ["fifo"]


@pytest.mark.parametrize(
    ("source", "said"), [("owner/model-1.5B", True), ("here/model", False), ("model", False)]
)
def test_the_name_of_a_model_on_the_hub(source, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert main(["quantize", source, "out"]) == 4
    assert (f"hf download {source} --local-dir model" in capsys.readouterr().err) is said


def test_read_only_directory_is_named(capsys):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        source, closed = _file(folder), folder / "read-only"
        closed.mkdir(mode=0o555)
        root = os.geteuid() == 0
        if root:
            # Root may write anywhere, so be somebody else meanwhile.
            os.seteuid(65534)
        try:
            code = main(["quantize", str(source), str(closed / "out")])
        finally:
            if root:
                os.seteuid(0)
        stderr = capsys.readouterr().err
        assert code == 4
        assert f"{closed}/out: Permission denied" in stderr
        assert listing(closed) == []


def test_existing_output_needs_force(tmp_path, capsys):
    source, destination = _file(tmp_path), tmp_path / "out"
    destination.write_bytes(b"old")
    assert main(["quantize", str(source), str(destination)]) == 4
    assert "exists already" in capsys.readouterr().err
    assert destination.read_bytes() == b"old"
    assert main(["quantize", str(source), str(destination), "--force"]) == 0
    assert main(["verify", str(destination)]) == 0


def test_a_link_as_destination_stays_a_link(tmp_path):
    source, target, link = _file(tmp_path), tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    assert main(["quantize", str(source), str(link)]) == 0
    assert link.is_symlink() and not target.is_symlink()
    assert main(["verify", str(target)]) == 0


def test_directory_is_replaced_whole(tmp_path, capsys):
    source, destination = helpers.write_model(tmp_path / "in"), tmp_path / "out"
    destination.mkdir()
    assert main(["quantize", str(source), str(destination)]) == 0
    (destination / "stray.txt").write_text("from an earlier run")
    assert main(["quantize", str(source), str(destination)]) == 4
    assert (destination / "stray.txt").exists()
    assert main(["quantize", str(source), str(destination), "--force"]) == 0
    assert not (destination / "stray.txt").exists()
    assert listing(tmp_path) == ["in", "out"]


def test_directory_that_is_no_checkpoint_is_never_replaced(tmp_path, capsys):
    source, destination = helpers.write_model(tmp_path / "in"), tmp_path / "home"
    destination.mkdir()
    (destination / "thesis.tex").write_text("years of work")
    assert main(["quantize", str(source), str(destination), "--force"]) == 4
    assert "holds no checkpoint" in capsys.readouterr().err
    assert listing(destination) == ["thesis.tex"]


def test_directory_is_left_alone_where_no_exchange_is_possible(tmp_path, monkeypatch):
    destination = helpers.write_model(tmp_path / "out")
    before = helpers.tree(destination)

    class OldKernel:
        def __init__(self, *arguments: object, **options: object):
            pass

    monkeypatch.setattr(transaction.ctypes, "CDLL", OldKernel)
    with pytest.raises(OutputRefused, match="in one step"):
        target = transaction.DirectoryTarget.check(destination, replace=True)
        with target.staged([], like=str(tmp_path)) as path:
            Path(path, "config.json").write_text("{}")
    assert helpers.tree(destination) == before
    assert listing(tmp_path) == ["out"]


def test_directory_output_over_a_file_is_refused(tmp_path, capsys):
    source = helpers.write_model(tmp_path / "in")
    (tmp_path / "out").write_text("a file")
    assert main(["quantize", str(source), str(tmp_path / "out"), "--force"]) == 4
    assert "is not a directory, and the output is one" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "a file"


def test_file_systems_without_directory_fsync_are_fine(tmp_path, monkeypatch):
    fsync = os.fsync

    def no_directories(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(fd)

    source = helpers.write_model(tmp_path / "in")
    monkeypatch.setattr(os, "fsync", no_directories)
    assert main(["quantize", str(source), str(tmp_path / "out")]) == 0


def test_signal_while_cleaning_up_waits(tmp_path):
    """A second SIGINT during the removal of the temporary comes after it."""
    with pytest.raises(KeyboardInterrupt), transaction.signals_deferred():
        signal.raise_signal(signal.SIGINT)
        (tmp_path / "done").touch()
    assert (tmp_path / "done").exists()


def test_conversion_off_the_main_thread(tmp_path):
    """Signal handlers can only be set on the main thread; elsewhere nothing is deferred."""
    source = _file(tmp_path)
    with ThreadPoolExecutor() as pool:
        arguments = ["quantize", str(source), str(tmp_path / "out")]
        assert pool.submit(main, arguments).result() == 0
    assert listing(tmp_path) == ["in.safetensors", "out"]


def test_writer_keeps_its_own_promises(tmp_path):
    """Too much data, too little, and a name given twice are errors of the caller."""
    spec = TensorSpec("a", "F32", (4,))
    with pytest.raises(FormatError, match="written twice"):
        SafetensorsWriter(str(tmp_path / "a"), [spec, spec])
    with pytest.raises(ValueError, match="20 bytes for 16"):
        with SafetensorsWriter(str(tmp_path / "b"), [spec]) as writer:
            writer.write("a", bytes(20))
    with pytest.raises(ValueError, match="never written in full: a"):
        with SafetensorsWriter(str(tmp_path / "c"), [spec]) as writer:
            writer.write("a", bytes(12))
    with pytest.raises(FileExistsError):
        SafetensorsWriter(str(tmp_path / "c"), [spec])


def test_nonfinite_weight_is_refused_by_name(tmp_path, capsys):
    tensors = helpers.dense_tensors()
    tensors["model.layers.1.proj.weight"][3, 5] = np.nan
    source = tmp_path / "in.safetensors"
    source.write_bytes(helpers.file_bytes(tensors))
    out = str(tmp_path / "out")
    assert main(["quantize", str(source), out]) == 3
    stderr = capsys.readouterr().err
    assert "tensor 'model.layers.1.proj.weight': NaN at element 38" in stderr
    assert listing(tmp_path) == ["in.safetensors"]
    assert main(["quantize", str(source), out, "--allow-nonfinite"]) == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_every_nonfinite_value_is_found(dtype, value, tmp_path):
    tensors = {"a.weight": helpers.random_weight((4, 16), dtype)}
    tensors["a.weight"][3, 15] = value
    source = tmp_path / "in.safetensors"
    source.write_bytes(helpers.file_bytes(tensors))
    with pytest.raises(FormatError, match="(NaN|Inf) at element 63"):
        quantize_checkpoint(str(source), str(tmp_path / "out"), QuantizeOptions())
