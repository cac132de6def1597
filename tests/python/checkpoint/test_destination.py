"""Destinations that cannot be replaced, what --force may delete, and which error is told."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import checkpoint_helpers as helpers
import nf4
import numpy as np
import pytest
from checkpoint_helpers import listing
from nf4.checkpoint import (
    OutputRefused,
    QuantizeOptions,
    dequantize_checkpoint,
    quantize_checkpoint,
    rules,
    transaction,
)
from nf4.checkpoint.architecture import UnknownModel
from nf4.cli import main


def _source(model: Path, kind: str) -> Path:
    return model if kind == "directory" else model / "model.safetensors"


def _old_output(path: Path, kind: str) -> Path:
    if kind == "directory":
        return helpers.write_model(path)
    path.write_bytes(b"old")
    return path


def _mount(how: str, target: Path, tmp_path: Path) -> list[str]:
    """A command that mounts something at `target` and then runs its arguments, where no one
    else sees the mount."""
    other = tmp_path / "other"
    if target.is_dir():
        other.mkdir()
    else:
        other.write_bytes(b"other")
    mount = "mount -t tmpfs none" if how == "tmpfs" else f"mount --bind {other}"
    return ["unshare", "-rm", "sh", "-c", f'{mount} {target} && exec "$@"', "sh"]


@pytest.mark.parametrize(
    ("kind", "how"), [("directory", "tmpfs"), ("directory", "bind"), ("file", "bind")]
)
def test_mount_points_are_refused_at_the_start(kind, how, model, tmp_path):
    destination = tmp_path / "out"
    destination.mkdir() if kind == "directory" else destination.write_bytes(b"old")
    inside = _mount(how, destination, tmp_path)
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"]).returncode != 0:
        pytest.skip("mounting is not permitted")
    result = subprocess.run(
        [*inside, *helpers.command("quantize", _source(model, kind), destination, "--force")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 4
    assert f"{destination}: is a mount point, which cannot be replaced" in result.stderr
    assert listing(tmp_path) == ["model", "other", "out"]


def test_mount_point_is_refused_before_any_work(model, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(transaction, "_is_mount_point", lambda path: path == str(tmp_path / "out"))
    seen: list[str] = []
    with pytest.raises(OutputRefused, match="is a mount point"):
        quantize_checkpoint(
            str(model),
            str(tmp_path / "out"),
            QuantizeOptions(),
            progress=lambda n, _: seen.append(n),
        )
    assert seen == [] and listing(tmp_path) == ["model", "out"]


def test_destination_is_checked_before_the_model_is_asked(model, tmp_path, monkeypatch):
    """That takes seconds; what comes to the destination meanwhile is not deleted either."""
    out = helpers.write_model(tmp_path / "out")
    asked: list[bool] = []

    def ask(*_: object) -> None:
        asked.append(True)
        _appears(out)
        raise UnknownModel("not in this test")

    monkeypatch.setattr(rules, "ask", ask)
    arguments = (str(model), str(out), QuantizeOptions())
    with pytest.raises(OutputRefused, match="exists already"):
        quantize_checkpoint(*arguments)
    assert not asked
    with pytest.raises(OutputRefused, match="changed since the start"):
        quantize_checkpoint(*arguments, replace=True)
    assert asked and (out / "mine.txt").read_text() == "mine"


def test_without_proc_mount_points_are_found_all_the_same(monkeypatch):
    def missing(path: str) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

    monkeypatch.setattr(transaction, "_mount_id", missing)
    assert transaction._is_mount_point("/proc")
    assert not transaction._is_mount_point(os.path.dirname(__file__))


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize(("where", "name"), [("", "."), ("deeper", "..")])
def test_current_directory_is_not_replaced(
    where, name, force, model, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    if force:
        helpers.write_model(out)
    (out / where).mkdir(parents=True, exist_ok=True)
    before = helpers.tree(out)
    monkeypatch.chdir(out / where)
    assert main(["quantize", os.path.relpath(model), name, *force]) == 4
    expected = "exists already" if where and not force else "is or holds the current directory"
    assert f"{out}: {expected}" in capsys.readouterr().err
    assert helpers.tree(out) == before and listing(tmp_path) == ["model", "out"]


@pytest.fixture
def deep(tmp_path):
    """A current directory whose path is longer than the system takes, with a model in it."""
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(tmp_path)
        for _ in range(17):
            os.mkdir("d" * 250)
            os.chdir("d" * 250)
        helpers.write_model(Path("m"))
        yield
    finally:
        os.fchdir(before)
        os.close(before)
        shutil.rmtree(tmp_path / ("d" * 250))


def test_a_path_that_is_too_long_is_called_that(deep, capsys):
    nf4.load("m/model.safetensors")
    with pytest.raises(OSError, match="File name too long"):
        nf4.save("out.safetensors", {"a": np.ones(1, np.float32)})
    for source, destination in (("m", "out"), ("m/model.safetensors", "out.safetensors")):
        assert main(["quantize", source, destination]) == 4
        assert "File name too long" in capsys.readouterr().err
    assert os.listdir(".") == ["m"]


def test_deleted_current_directory_is_no_obstacle(model, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    (tmp_path / "q").mkdir()
    assert main(["quantize", str(model), str(tmp_path / "q")]) == 0


def _appears(out: Path) -> None:
    (out / "mine.txt").write_text("mine")


def _appears_deeper(out: Path) -> None:
    (out / "runs").mkdir()
    (out / "runs" / "log").write_text("mine")


def _changes(out: Path) -> None:
    (out / "tokenizer.json").write_text("written anew")


def _is_replaced(out: Path) -> None:
    (out / "new").write_bytes((out / "tokenizer.json").read_bytes())
    (out / "new").replace(out / "tokenizer.json")


MEANWHILE = [_appears, _appears_deeper, _changes, _is_replaced]


def _once(action, out: Path):
    done: list[bool] = []

    def progress(name: str, count: int) -> None:
        if not done:
            action(out)
        done.append(True)

    return progress


@pytest.mark.parametrize("action", MEANWHILE)
def test_force_deletes_nothing_that_came_meanwhile(action, model, tmp_path):
    out = helpers.write_model(tmp_path / "out")
    expected = helpers.write_model(tmp_path / "expected")
    action(expected)
    with pytest.raises(OutputRefused, match="changed since the start, so it is not replaced"):
        quantize_checkpoint(
            str(model),
            str(out),
            QuantizeOptions(),
            replace=True,
            progress=_once(action, out),
        )
    assert helpers.tree(out) == helpers.tree(expected)
    assert listing(tmp_path) == ["expected", "model", "out"]


@pytest.mark.parametrize("action", MEANWHILE)
def test_force_deletes_nothing_that_came_at_the_last_moment(action, model, tmp_path, monkeypatch):
    """Between the last look and the exchange: it stays, where a warning says."""
    out = helpers.write_model(tmp_path / "out")
    exchange = transaction._exchange

    def late(first: str, second: str) -> None:
        action(out)
        exchange(first, second)

    monkeypatch.setattr(transaction, "_exchange", late)
    result = quantize_checkpoint(str(model), str(out), QuantizeOptions(), replace=True)
    (old,) = tmp_path.glob(".out.nf4-tmp-*")
    assert f"{old}: the old output, could not be deleted whole" in result.warnings[0]
    kept = helpers.tree(old)
    expected = helpers.write_model(tmp_path / "expected")
    before = helpers.tree(expected)
    action(expected)
    after = helpers.tree(expected)
    came = {n: data for n, data in after.items() if before.get(n) != data} or {"tokenizer.json"}
    assert kept.keys() >= set(came)
    assert all(kept[name] == after[name] for name in came)
    assert main(["verify", str(out)]) == 0


def test_deleting_the_old_output_leaves_newer_directories_as_they_are(tmp_path):
    """What came after the listing keeps its mode; what somebody removed is no obstacle."""
    old = helpers.write_model(tmp_path / "old")
    for name in ("listed", "emptied", "turned"):
        (old / name).mkdir()
        (old / name / "file").write_text("old")
    listing_before = transaction._listing(str(old))
    (old / "listed").chmod(0o555)
    (old / "new").mkdir(mode=0o750)
    (old / "new").chmod(0o750)
    shutil.rmtree(old / "emptied")
    shutil.rmtree(old / "turned")
    (old / "turned").write_text("new")
    (old / "tokenizer.json").unlink()
    with pytest.raises(OSError) as caught:
        transaction._delete(str(old), listing_before)
    assert caught.value.errno == errno.ENOTEMPTY
    assert listing(old) == ["new", "turned"]
    assert (old / "new").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("existing", [False, True])
def test_force_replaces_no_file_that_came_meanwhile(existing, model, tmp_path):
    out = tmp_path / "out"
    if existing:
        out.write_bytes(b"old")
    with pytest.raises(OutputRefused, match="exists already|changed since the start"):
        quantize_checkpoint(
            str(model / "model.safetensors"),
            str(out),
            QuantizeOptions(),
            replace=True,
            progress=_once(lambda path: path.write_bytes(b"new"), out),
        )
    assert out.read_bytes() == b"new"
    assert listing(tmp_path) == ["model", "out"]


def test_a_name_that_is_taken_is_no_temporary(model, tmp_path, monkeypatch):
    tokens = iter(["taken", "taken", "free"])
    monkeypatch.setattr(transaction.secrets, "token_hex", lambda count: next(tokens))
    (tmp_path / ".out.nf4-tmp-taken").write_text("mine")
    out = str(tmp_path / "out")
    assert main(["quantize", str(model), out]) == 0
    assert (tmp_path / ".out.nf4-tmp-taken").read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_first_error_is_told_and_then_what_was_left(kind, model, tmp_path, monkeypatch, capsys):
    """No space, and then the temporary cannot be removed."""

    def fail(code: int):
        def call(*arguments: object, **options: object) -> None:
            raise OSError(code, os.strerror(code))

        return call

    monkeypatch.setattr(os, "pwrite", fail(errno.ENOSPC))
    monkeypatch.setattr(os, "unlink", fail(errno.EROFS))
    monkeypatch.setattr(transaction.shutil, "rmtree", fail(errno.EROFS))
    assert main(["quantize", str(_source(model, kind)), str(tmp_path / "out")]) == 4
    monkeypatch.undo()
    first, second = capsys.readouterr().err.splitlines()
    (temporary,) = tmp_path.glob(".out.nf4-tmp-*")
    assert first.startswith(f"nf4: {tmp_path}/out") and "No space left on device" in first
    assert second == f"nf4: {temporary}: left behind: Read-only file system"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_error_at_close_does_not_hide_the_first(name, model, tmp_path, monkeypatch, capsys):
    pwrite, close = os.pwrite, os.close
    failed: set[int] = set()
    closed: list[int] = []

    def fail_write(fd: int, data: bytes, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(f"/{name}"):
            failed.add(fd)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    def fail_close(fd: int) -> None:
        close(fd)
        if fd in failed:
            failed.remove(fd)
            closed.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", fail_write)
    monkeypatch.setattr(os, "close", fail_close)
    assert main(["quantize", str(model), str(tmp_path / "out")]) == 4
    monkeypatch.undo()
    assert closed
    assert capsys.readouterr().err == f"nf4: {tmp_path}/out/{name}: No space left on device\n"
    assert listing(tmp_path) == ["model"]


def test_dequantize_takes_the_same_care(quantized, tmp_path):
    (quantized / "notes.txt").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match="notes.txt: a link to /etc/hostname, which is outside"):
        dequantize_checkpoint(str(quantized), str(tmp_path / "back"))
