"""Finds and copies the files beside the weights, such as a tokenizer's.

A model folder may come from anywhere, so nothing is copied through a link that leaves it, except
from the blobs of the Hugging Face cache that it is a snapshot in.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.files import copy_synced, creation_mode, file_kind
from nf4.checkpoint.jsonio import MAX_CONFIG_BYTES, parse_value, read_bytes
from nf4.checkpoint.source import CONFIG_NAME, QUANTIZATION_NAMES, Checkpoint

# The limit on the size of all copied files together.
MAX_SIDE_BYTES = 1_000_000_000
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".ggml",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".npz",
    ".ot",
    ".tflite",
)


def _blobs(folder: Path) -> Path | None:
    """Returns where the Hugging Face cache keeps the files of a snapshot: `folder` is, or is in,
    REPOSITORY/snapshots/REVISION, whose files link to REPOSITORY/blobs/HASH."""
    for snapshot in (folder, *folder.parents):
        if snapshot.parent.name == "snapshots":
            return snapshot.parent.parent / "blobs"
    return None


def _refuse_outside(path: str, directory: str) -> None:
    """Raises FormatError if `path` leads out of the model folder `directory`."""
    target, folder = Path(os.path.realpath(path)), Path(os.path.realpath(directory))
    if target.is_relative_to(folder) or target.parent == _blobs(folder):
        return
    raise FormatError(path, f"a link to {target}, which is outside the model folder")


def _submodules(directory: str) -> set[str]:
    """Returns the folders in which a sentence-transformers model keeps layers. Their weights are
    part of the model and are copied. Raises FormatError if modules.json does not name them."""
    path = os.path.join(directory, "modules.json")
    _refuse_outside(path, directory)
    try:
        modules = parse_value(read_bytes(path, "modules.json", MAX_CONFIG_BYTES), path, "it")
    except FileNotFoundError:
        return set()
    try:
        return {os.path.normpath(module["path"]) for module in modules if module["path"]}
    except (TypeError, KeyError):
        raise FormatError(path, "it is not a list of modules, each with its path") from None


def _fail(error: OSError) -> None:
    raise error


def _walk(directory: str, left: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each folder of a model as a relative path, with the names of its files. Hidden ones
    are skipped. Links to folders of the model are followed; a folder that was visited before goes
    to `left`."""
    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(directory, onerror=_fail, followlinks=True):
        _refuse_outside(folder, directory)
        status = os.stat(folder)
        relative = os.path.relpath(folder, directory)
        if (status.st_dev, status.st_ino) in seen:
            left.append(relative)
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if not name.startswith(".")]
        # Folders come before links to them, so that the link is left out.
        folders.sort(key=lambda name: (os.path.islink(os.path.join(folder, name)), name))
        yield relative, sorted(name for name in names if not name.startswith("."))


def _size(path: str, directory: str) -> int | None:
    """Returns the size of a file in the model folder; None for a broken link. Raises FormatError
    for a file outside, and for one that is not a regular file."""
    _refuse_outside(path, directory)
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return None
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(path, f"{file_kind(status.st_mode)}, not a regular file")
    return status.st_size


def side_files(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """Returns the files of a model folder to copy, and those left out (weights in any format,
    quantization settings, and broken links), as relative paths. Neither includes hidden files and
    folders, config.json, or the weights and the index of the checkpoint itself.

    Raises FormatError for a link that leaves the folder, also among files that are only read; for a
    device, FIFO or socket; and for more than MAX_SIDE_BYTES to copy.
    """
    directory = checkpoint.directory
    assert directory is not None
    submodules = _submodules(directory)
    own = {*checkpoint.files, checkpoint.index_name or CONFIG_NAME, CONFIG_NAME}
    for name in sorted(own.union(checkpoint.beside)):
        _refuse_outside(os.path.join(directory, name), directory)
    sizes: dict[str, int] = {}
    left: list[str] = []
    for relative, names in _walk(directory, left):
        for name in names:
            path = os.path.normpath(os.path.join(relative, name))
            if path in own:
                continue
            if path in QUANTIZATION_NAMES or (
                name.endswith(_WEIGHT_SUFFIXES) and relative not in submodules
            ):
                left.append(path)
            elif (size := _size(os.path.join(directory, path), directory)) is None:
                left.append(path)
            else:
                sizes[path] = size
    if sum(sizes.values()) > MAX_SIDE_BYTES:
        largest = max(sizes, key=lambda path: sizes[path])
        raise FormatError(
            directory,
            f"{sum(sizes.values())} bytes of files beside the weights, and at most "
            f"{MAX_SIDE_BYTES} are copied; the largest is {largest}: move it out of the folder",
        )
    return list(sizes), left


def files_read(checkpoint: Checkpoint, copied: Iterable[str]) -> list[str]:
    """Returns every file that a conversion reads, including those in `copied`."""
    found = [file.path for file in checkpoint.files.values()]
    if checkpoint.directory is not None:
        names = [*copied, *checkpoint.beside, CONFIG_NAME]
        names += [n for n in [checkpoint.index_name] if n]
        found += [os.path.join(checkpoint.directory, name) for name in names]
    return found


def _make_folder(source: str, destination: str, folder: str) -> None:
    """Makes a folder and those above it, with no more permissions than those of the source."""
    target = os.path.join(destination, folder)
    if folder and not os.path.isdir(target):
        _make_folder(source, destination, os.path.dirname(folder))
        os.mkdir(target, creation_mode(0o777, os.path.join(source, folder)))


def copy_side_files(source: str, destination: str, copied: Iterable[str]) -> None:
    """Copies these files into a new directory."""
    for path in copied:
        _make_folder(source, destination, os.path.dirname(path))
        copy_synced(os.path.join(source, path), os.path.join(destination, path))
