"""A checkpoint: one safetensors file, or a directory of shards with an index."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.files import Closing, file_kind
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.jsonio import MAX_CONFIG_BYTES, read_object
from nf4.checkpoint.reader import SafetensorsFile

INDEX_SUFFIX = ".safetensors.index.json"
INDEX_NAME = "model" + INDEX_SUFFIX
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
_NO_OTHER = "no other safetensors file (weights in .bin, .pt or .gguf are not read)"
# The tools of GPTQ, AWQ, AutoRound and ModelOpt write these files beside config.json. They say how
# the checkpoint was quantized.
QUANTIZATION_NAMES = (
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
    "hf_quant_config.json",
)


def _shards_of_index(path: str) -> dict[str, str]:
    """Reads weight_map of an index: tensor name -> file name, which must be a plain name."""
    weight_map = read_object(path, "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(path, "it has no weight_map")
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and shard == os.path.basename(shard) and "\0" not in shard
        if not plain or shard in ("", ".", ".."):
            raise FormatError(path, f"its shard {shard!r} is not a file name", name)
    return weight_map


def _weights_of_directory(path: str) -> str:
    """Returns the file in a directory that leads to its weights: a safetensors file or an index.
    model.safetensors is preferred to an index, as in transformers."""
    names = sorted(os.listdir(path))
    for name in (SINGLE_NAME, INDEX_NAME):
        if name in names:
            return os.path.join(path, name)
    found = [n for n in names if n.endswith(INDEX_SUFFIX)]
    found = found or [n for n in names if n.endswith(".safetensors")]
    if len(found) == 1:
        return os.path.join(path, found[0])
    problem = f"several to choose from: {', '.join(found)}" if found else _NO_OTHER
    raise FormatError(path, f"no {SINGLE_NAME} or {INDEX_NAME}, and {problem}")


class Checkpoint(Closing):
    """An open checkpoint. A context manager.

    path          the path given: a .safetensors file, a directory, or an index (which stands for
                  its directory)
    directory     the checkpoint's directory; None for a single file
    index_name    the name of its index file, else None
    files         file name -> SafetensorsFile, in the order of their names
    owner         tensor name -> the SafetensorsFile that holds it
    config        config.json beside the weights of a directory, else {}
    beside        the contents of the files of QUANTIZATION_NAMES in a directory, by name
    opened        time.perf_counter() when its opening began

    Raises FormatError for a broken file, OSError for one that cannot be read. If `faults` is a
    list, faults of single shards are appended to it instead, and the rest is opened. If `shards` is
    given, exactly these files are opened, without an index or config.json.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        faults: list[FormatError] | None = None,
        *,
        shards: Sequence[str] | None = None,
    ):
        self.opened = time.perf_counter()
        self.path = os.fspath(path)
        self._faults = faults
        self.directory: str | None = None
        self.index_name: str | None = None
        self.config: dict[str, Any] = {}
        self.beside: dict[str, dict[str, Any]] = {}
        self.files: dict[str, SafetensorsFile] = {}
        self.owner: dict[str, SafetensorsFile] = {}
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            if shards is None:
                self._open()
            for shard in shards or ():
                self._add(shard)
            stack.pop_all()

    def _open(self) -> None:
        mode = os.stat(self.path).st_mode
        weights = self.path
        if stat.S_ISDIR(mode):
            weights, self.directory = _weights_of_directory(self.path), self.path
        elif not stat.S_ISREG(mode):
            raise FormatError(self.path, f"{file_kind(mode)}, not a file or directory")
        if weights.endswith(INDEX_SUFFIX):
            self.directory = os.path.dirname(weights) or "."
            self.index_name = os.path.basename(weights)
            self._open_shards(weights)
        else:
            self._add(weights)
        self.config = self._read_config(CONFIG_NAME) or {}
        found = ((name, self._read_config(name)) for name in QUANTIZATION_NAMES)
        self.beside = {name: config for name, config in found if config is not None}

    def _read_config(self, name: str) -> dict[str, Any] | None:
        """Returns a configuration in a directory; None where there is none."""
        path = os.path.join(self.directory or "", name)
        if self.directory is None or not os.path.exists(path):
            return None
        return read_object(path, "the configuration", limit=MAX_CONFIG_BYTES, constants=True)

    def _open_shards(self, index: str) -> None:
        weight_map = _shards_of_index(index)
        folder = os.path.dirname(index)
        for shard in sorted(set(weight_map.values())):
            path = os.path.join(folder, shard)
            with self._collecting():
                if not os.path.exists(path):
                    raise FormatError(index, f"its shard {shard} is missing")
                self._add(path)
        for name, shard in weight_map.items():
            if shard in self.files and name not in self.files[shard].tensors:
                with self._collecting():
                    raise FormatError(index, f"it is not in its shard {shard}", name)

    @contextlib.contextmanager
    def _collecting(self) -> Iterator[None]:
        try:
            yield
        except FormatError as error:
            if self._faults is None:
                raise
            self._faults.append(error)

    def _add(self, path: str) -> None:
        file = SafetensorsFile(path)
        self.files[os.path.basename(path)] = file
        twice = self.owner.keys() & file.tensors.keys()
        # Tensors that only this file has belong to it, even if the error is collected.
        for name in file.tensors:
            self.owner.setdefault(name, file)
        if twice:
            name = min(twice)
            raise FormatError(path, f"it is in {self.owner[name].path} too", name)

    @property
    def model_type(self) -> str | None:
        """The model_type of config.json, if it has one."""
        value = self.config.get("model_type")
        return value if isinstance(value, str) else None

    def __contains__(self, name: str) -> bool:
        return name in self.owner

    def info(self, name: str) -> TensorInfo:
        return self.owner[name].tensors[name]

    def tensors(self) -> Iterator[tuple[SafetensorsFile, TensorInfo]]:
        """Yields every tensor with its file, file by file in the order of the data."""
        for file in self.files.values():
            for name, info in file.tensors.items():
                if self.owner[name] is file:
                    yield file, info

    def read(self, name: str) -> np.ndarray:
        """Reads the bytes of a tensor, uint8 [nbytes]."""
        return self.owner[name].read(self.info(name))

    def check_unchanged(self) -> None:
        """Raises FormatError if a file was written to since it was opened."""
        for file in self.files.values():
            file.check_unchanged()

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def weight_bytes(path: str) -> int:
    """Returns the bytes of a checkpoint's weight files, for a progress bar; 0 if that is unknown.
    Opening the checkpoint will then say why."""
    try:
        names = os.listdir(path) if os.path.isdir(path) else []
        files = [os.path.join(path, n) for n in names if n.endswith(".safetensors")] or [path]
        return sum(os.path.getsize(file) for file in files)
    except OSError:
        return 0
