"""The files beside the weights: nothing from outside the model folder, no devices, and not
without a limit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import checkpoint_helpers as helpers
import pytest
from nf4.checkpoint import FormatError, QuantizeOptions, quantize_checkpoint, side_files
from nf4.cli import main

SINGLE = ("model.safetensors", "config.json", "tokenizer.json")
SHARDS = ("model-00002-of-00006.safetensors", "model.safetensors.index.json", "config.json")


def _refused(source: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `nf4 quantize` says when it refuses a model."""
    destination = source.parent / "refused"
    assert main(["quantize", str(source), str(destination)]) == 3
    assert not destination.exists() and not list(source.parent.glob(".refused*"))
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    return stderr


def _move_and_link(path: Path, target: Path, relative: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)
    path.symlink_to(os.path.relpath(target, path.parent) if relative else target)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize(("make", "names"), [("model", SINGLE), ("shards", SHARDS)])
def test_links_that_leave_the_model_are_refused(make, names, relative, tmp_path, capsys):
    for name in names:
        source = tmp_path / name / "in"
        (helpers.write_model if make == "model" else helpers.write_shards)(source)
        _move_and_link(source / name, tmp_path / name / "secret", relative)
        expected = f"{source / name}: a link to {tmp_path / name}/secret, which is outside"
        assert expected in _refused(source, capsys)


def test_links_out_of_the_model_by_detours_are_refused(model, tmp_path, capsys):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.txt").write_text("secret")
    cases = {
        "through a folder": ("folder", tmp_path / "secret"),
        "through another link": ("second", "first"),
        "dotted": ("dotted", "../model/../secret/key.txt"),
        "to a name that starts like the model's": ("sibling", "../model2"),
        "to nothing": ("nowhere", "../gone"),
        "to a device": ("zero", "/dev/zero"),
        "to a file without a size": ("environ", "/proc/self/environ"),
    }
    (tmp_path / "model2").write_text("secret")
    for name, target in cases.values():
        link, first = model / name, model / "first"
        if name == "second":
            first.symlink_to(tmp_path / "secret" / "key.txt")
        link.symlink_to(target)
        assert "which is outside the model folder" in _refused(model, capsys)
        link.unlink()
        first.unlink(missing_ok=True)
    assert main(["quantize", str(model), str(tmp_path / "q")]) == 0


def test_a_shard_with_a_hidden_name_is_checked_too(tmp_path, capsys):
    source = helpers.write_shards(tmp_path / "in")
    index = source / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002-of-00006", ".hidden"))
    (source / "model-00002-of-00006.safetensors").rename(tmp_path / "secret.safetensors")
    (source / ".hidden.safetensors").symlink_to(tmp_path / "secret.safetensors")
    assert f"{source}/.hidden.safetensors: a link to " in _refused(source, capsys)


def test_files_that_are_not_copied_may_be_links(model, tmp_path):
    (tmp_path / "outside").write_bytes(b"weights")
    (model / "pytorch_model.bin").symlink_to(tmp_path / "outside")
    (model / ".cache").symlink_to(tmp_path / "outside")
    result = quantize_checkpoint(str(model), str(tmp_path / "q"), QuantizeOptions())
    assert result.left_out == ["pytorch_model.bin"]


def _cache(tmp_path: Path, part: str) -> Path:
    """A model as in the Hugging Face cache: the files of a snapshot are links to blobs."""
    repository = tmp_path / "hub" / "models--a--b"
    source = helpers.write_model(repository / "snapshots" / "0123abcd" / part)
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    for number, path in enumerate(files):
        _move_and_link(path, repository / "blobs" / f"{number:040x}", relative=True)
    return source


@pytest.mark.parametrize("part", ["", "transformer"])
@pytest.mark.parametrize("by", ["path", "link"])
def test_blobs_of_a_hub_cache_are_read(by, part, tmp_path):
    source = _cache(tmp_path, part)
    if by == "link":
        (tmp_path / "latest").symlink_to(source)
    given = source if by == "path" else tmp_path / "latest"
    assert main(["quantize", str(given), str(tmp_path / "q")]) == 0
    copied, original = helpers.tree(tmp_path / "q"), helpers.tree(source)
    assert copied.keys() == original.keys()
    assert copied["tokenizer.json"] == original["tokenizer.json"]
    assert not any(path.is_symlink() for path in (tmp_path / "q").rglob("*"))


@pytest.mark.parametrize("target", ["hub/other", "hub/models--c--d/blobs/0", "hub/models--a--b/x"])
def test_a_hub_cache_has_no_other_links(target, tmp_path, capsys):
    source = _cache(tmp_path, "")
    (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / target).write_text("secret")
    (source / "vocab.txt").symlink_to(tmp_path / target)
    assert f"vocab.txt: a link to {tmp_path / target}, " in _refused(source, capsys)


def test_blobs_that_are_a_link_are_not_followed(tmp_path, capsys):
    source = _cache(tmp_path, "")
    blobs = tmp_path / "hub" / "models--a--b" / "blobs"
    _move_and_link(blobs, tmp_path / "elsewhere", relative=False)
    assert f"a link to {tmp_path}/elsewhere/" in _refused(source, capsys)


def test_fifos_devices_and_sockets_are_refused(model, tmp_path, capsys):
    os.mkfifo(model / "vocab.txt")
    expected = f"{model}/vocab.txt: a FIFO, not a regular file"
    assert expected in _refused(model, capsys)
    (model / "vocab.txt").unlink()
    if os.geteuid() == 0:
        os.mknod(model / "null.txt", 0o20600, os.makedev(1, 3))
        assert f"{model}/null.txt: a character device" in _refused(model, capsys)


def test_side_files_have_a_limit(model, tmp_path, monkeypatch, capsys):
    for name, size in {"a.txt": 400, "b.txt": 600}.items():
        (model / name).write_bytes(bytes(size))
    size = sum(map(len, helpers.tree(model).values()))
    size -= len((model / "model.safetensors").read_bytes())
    size -= len((model / "config.json").read_bytes())
    monkeypatch.setattr(side_files, "MAX_SIDE_BYTES", size - 1)
    stderr = _refused(model, capsys)
    assert f"{model}: {size} bytes of files beside the weights, " in stderr
    assert (
        f"at most {size - 1} are copied; the largest is b.txt: move it out of the folder" in stderr
    )
    monkeypatch.setattr(side_files, "MAX_SIDE_BYTES", size)
    assert main(["quantize", str(model), str(tmp_path / "q")]) == 0


def test_a_huge_side_file_is_refused_before_anything_is_written(model, capsys):
    with open(model / "dump.txt", "wb") as file:
        file.truncate(side_files.MAX_SIDE_BYTES + 1)
    assert "the largest is dump.txt" in _refused(model, capsys)


@pytest.mark.parametrize("change", ["grows", "shrinks"])
def test_side_file_that_changes_while_it_is_copied_is_refused(change, model, tmp_path, monkeypatch):
    vocabulary = model / "vocab.txt"
    vocabulary.write_bytes(bytes(100))
    read = os.read

    def change_first(fd: int, count: int) -> bytes:
        if os.path.samestat(os.fstat(fd), vocabulary.stat()) and vocabulary.stat().st_size == 100:
            os.truncate(vocabulary, 200 if change == "grows" else 50)
        return read(fd, count)

    monkeypatch.setattr(os, "read", change_first)
    with pytest.raises(FormatError, match="vocab.txt: changed while it was read"):
        quantize_checkpoint(str(model), str(tmp_path / "q"), QuantizeOptions())
    assert helpers.listing(tmp_path) == ["model"]


def test_large_side_files_are_copied_in_pieces(model, tmp_path):
    content = os.urandom(3_000_001)
    (model / "vocab.txt").write_bytes(content)
    assert main(["quantize", str(model), str(tmp_path / "q")]) == 0
    assert (tmp_path / "q" / "vocab.txt").read_bytes() == content
    shutil.rmtree(tmp_path / "q")
