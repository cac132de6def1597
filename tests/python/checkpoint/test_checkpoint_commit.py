"""The moment at which output is put in place, and what is lost or kept by it."""

from __future__ import annotations

import errno
import os
import signal
import stat
import tempfile
from pathlib import Path

import checkpoint_helpers as helpers
import pytest
from checkpoint_helpers import listing
from nf4.checkpoint import OutputRefused, QuantizeOptions, quantize_checkpoint, transaction
from nf4.cli import main


def _model(tmp_path: Path, kind: str) -> Path:
    folder = helpers.write_model(tmp_path / "in")
    return folder if kind == "directory" else folder / "model.safetensors"


def _old_output(tmp_path: Path, kind: str) -> Path:
    destination = tmp_path / "out"
    if kind == "file":
        destination.write_bytes(b"old")
        return destination
    return helpers.write_model(destination)


def _content(path: Path) -> object:
    return helpers.tree(path) if path.is_dir() else path.read_bytes()


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("what", ["weights", "configuration", "side file", "index", "folder"])
def test_links_into_the_destination_are_refused(what, tmp_path, capsys):
    """A directory of links, as a download cache is, over the directory that holds the files."""
    destination = helpers.write_shards(tmp_path / "out")
    (destination / "1_Pooling").mkdir()
    (destination / "1_Pooling" / "config.json").write_text("{}")
    source = helpers.write_shards(tmp_path / "in")
    (source / "vocab.txt").write_text("a")
    (destination / "vocab.txt").write_text("a")
    name = {
        "weights": "model-00002-of-00006.safetensors",
        "configuration": "config.json",
        "side file": "vocab.txt",
        "index": "model.safetensors.index.json",
        "folder": "1_Pooling",
    }[what]
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(destination / name)
    before = helpers.tree(destination)
    assert main(["quantize", str(source), str(destination), "--force"]) == 3
    stderr = capsys.readouterr().err
    assert f"{source / name}: a link to {destination / name}, which is outside" in stderr
    assert helpers.tree(destination) == before
    assert listing(tmp_path) == ["in", "out"]


def test_a_shard_that_is_the_destination_file_is_refused(tmp_path):
    with pytest.raises(OutputRefused, match="is a link to"):
        (tmp_path / "a").write_bytes(b"weights")
        (tmp_path / "b").symlink_to("a")
        transaction.refuse_reading_from(tmp_path / "a", [str(tmp_path / "b")])


DIRECTORY_FAILURES = {
    "making the directory": "mkdir",
    "renaming it": "rename",
    "creating a file": "pwrite",
    "syncing a file": "fsync",
}


@pytest.mark.parametrize("case", DIRECTORY_FAILURES)
def test_system_errors_leave_no_directory(case, tmp_path, monkeypatch, capsys):
    source, name = _model(tmp_path, "directory"), DIRECTORY_FAILURES[case]

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, name, fail)
    assert main(["quantize", str(source), str(tmp_path / "out")]) == 4
    monkeypatch.undo()
    assert os.strerror(errno.EIO) in capsys.readouterr().err
    assert listing(tmp_path) == ["in"]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_failed_exchange_leaves_the_old_directory(code, tmp_path, monkeypatch, capsys):
    source, destination = _model(tmp_path, "directory"), _old_output(tmp_path, "directory")
    before = helpers.tree(destination)
    monkeypatch.setattr(transaction, "_rename", lambda *arguments: code)
    assert main(["quantize", str(source), str(destination), "--force"]) == 4
    assert f"{destination}: {os.strerror(code)}" in capsys.readouterr().err
    assert helpers.tree(destination) == before
    assert listing(tmp_path) == ["in", "out"]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_parent_that_cannot_be_synced_is_a_warning(kind, existing, tmp_path, monkeypatch, capsys):
    """The output is in place by then, so to fail would be to report what is not so."""
    source, destination = _model(tmp_path, kind), tmp_path / "out"
    if existing:
        _old_output(tmp_path, kind)
    fsync = os.fsync

    def fail_for_parent(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), tmp_path.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail_for_parent)
    assert main(["quantize", str(source), str(destination), "--force"]) == 0
    stderr = capsys.readouterr().err
    assert f"warning: {destination}: written, but its directory could not be synced" in stderr
    assert main(["verify", str(destination)]) == 0
    assert listing(tmp_path) == ["in", "out"]


def test_old_directory_that_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch, capsys):
    source, destination = _model(tmp_path, "directory"), _old_output(tmp_path, "directory")
    before = helpers.tree(destination)

    def fail(path: str) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(os, "unlink", fail)
    assert main(["quantize", str(source), str(destination), "--force"]) == 0
    old = next(tmp_path.glob(".out.nf4-tmp-*"))
    assert f"{old}: the old output, could not be deleted whole: " in capsys.readouterr().err
    assert helpers.tree(old) == before
    assert main(["verify", str(destination)]) == 0


def test_old_directory_with_read_only_parts_is_deleted():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        source, destination = _model(folder, "directory"), _old_output(folder, "directory")
        closed = destination / "closed" / "deeper"
        closed.mkdir(parents=True)
        (closed / "file").write_text("old")
        closed.chmod(0o555)
        closed.parent.chmod(0o555)
        root = os.geteuid() == 0
        if root:
            # Root may delete anything, so be somebody else meanwhile, who owns it all.
            for path in [destination, *destination.rglob("*")]:
                os.chown(path, 65534, 65534)
            os.seteuid(65534)
        try:
            assert main(["quantize", str(source), str(destination), "--force"]) == 0
        finally:
            if root:
                os.seteuid(0)
        assert listing(folder) == ["in", "out"]
        assert "closed" not in listing(destination)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_signal_at_the_rename_waits_for_it(kind, existing, tmp_path, monkeypatch):
    """Neither an error with the temporary left, nor half of the steps that belong together."""
    source, destination = _model(tmp_path, kind), tmp_path / "out"
    if existing:
        _old_output(tmp_path, kind)
    sync_parent = transaction._sync_parent
    synced = []

    def interrupted(path: str, warnings: list[str]) -> None:
        signal.raise_signal(signal.SIGINT)
        sync_parent(path, warnings)
        synced.append(path)

    monkeypatch.setattr(transaction, "_sync_parent", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(str(source), str(destination), QuantizeOptions(), replace=existing)
    assert synced == [str(destination)]
    assert main(["verify", str(destination)]) == 0
    assert listing(tmp_path) == ["in", "out"]


@pytest.mark.parametrize("old_system", [False, True])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_appears_meanwhile_is_not_replaced(kind, old_system, tmp_path, monkeypatch):
    source, destination = _model(tmp_path, kind), tmp_path / "out"
    if old_system:
        monkeypatch.setattr(transaction, "_rename", lambda *arguments: errno.EINVAL)

    def progress(name: str, count: int) -> None:
        if not destination.exists():
            _old_output(tmp_path, kind)

    with pytest.raises((OutputRefused, OSError)) as caught:
        quantize_checkpoint(str(source), str(destination), QuantizeOptions(), progress=progress)
    assert str(destination) in str(caught.value)
    expected = tmp_path / "expected"
    expected.mkdir()
    assert _content(destination) == _content(_old_output(expected, kind))
    assert listing(tmp_path) == ["expected", "in", "out"]


def test_file_systems_without_rename_flags_are_fine(tmp_path, monkeypatch):
    source = _model(tmp_path, "file")
    monkeypatch.setattr(transaction, "_rename", lambda *arguments: errno.EINVAL)
    assert main(["quantize", str(source), str(tmp_path / "out")]) == 0
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert listing(tmp_path) == ["in", "out"]


def test_output_is_no_more_open_than_its_source(tmp_path):
    source = helpers.write_model(tmp_path / "in")
    (source / "1_Pooling").mkdir(mode=0o700)
    (source / "1_Pooling" / "config.json").write_text("{}")
    for path in [source, *source.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    destination = tmp_path / "out"
    assert main(["quantize", str(source), str(destination)]) == 0
    modes = {path: _mode(path) for path in [destination, *destination.rglob("*")]}
    assert len(modes) == 6
    assert all(mode == (0o700 if p.is_dir() else 0o600) for p, mode in modes.items())
    single = tmp_path / "single"
    assert main(["quantize", str(source / "model.safetensors"), str(single)]) == 0
    assert _mode(single) == 0o600


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_replaced_output_keeps_its_mode(kind, tmp_path):
    source, destination = _model(tmp_path, kind), _old_output(tmp_path, kind)
    mode = 0o640 if kind == "file" else 0o750
    destination.chmod(mode)
    assert main(["quantize", str(source), str(destination), "--force"]) == 0
    assert _mode(destination) == mode


def test_umask_is_heeded(tmp_path):
    source = _model(tmp_path, "directory")
    before = os.umask(0o077)
    try:
        assert main(["quantize", str(source), str(tmp_path / "out")]) == 0
    finally:
        os.umask(before)
    assert _mode(tmp_path / "out") == 0o700
    assert _mode(tmp_path / "out" / "model.safetensors") == 0o600


@pytest.mark.parametrize("keep", [{"config.json": "{}"}, {".git": None, "a.safetensors": "x"}])
def test_directory_that_may_be_more_than_a_checkpoint_is_kept(keep, tmp_path, capsys):
    source, destination = _model(tmp_path, "directory"), tmp_path / "out"
    destination.mkdir()
    for name, text in keep.items():
        (destination / name).mkdir() if text is None else (destination / name).write_text(text)
    assert main(["quantize", str(source), str(destination), "--force"]) == 4
    assert "so it is not replaced" in capsys.readouterr().err
    assert listing(destination) == sorted(keep)


@pytest.mark.parametrize("name", ["模" * 84, "é" * 127, "a" * 255])
def test_names_as_long_as_they_may_be(name, tmp_path):
    source = _model(tmp_path, "file")
    assert main(["quantize", str(source), str(tmp_path / name)]) == 0
    assert listing(tmp_path) == sorted(["in", name])


def test_read_error_of_a_side_file_names_it(tmp_path, monkeypatch, capsys):
    source = _model(tmp_path, "directory")

    def fail(fd: int, count: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "read", fail)
    assert main(["quantize", str(source), str(tmp_path / "out")]) == 4
    monkeypatch.undo()
    assert f"{source}/tokenizer.json: Input/output error" in capsys.readouterr().err
    assert listing(tmp_path) == ["in"]
