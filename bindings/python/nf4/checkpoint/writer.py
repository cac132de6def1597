"""Writes safetensors files. The tensors are known at the start; their data comes in any order and
in pieces."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping

import numpy as np

from nf4.checkpoint.errors import naming
from nf4.checkpoint.files import Descriptor, write_fully
from nf4.checkpoint.header import TensorSpec, build_header


class SafetensorsWriter(Descriptor):
    """Creates the file `path`, which must not exist, for the tensors `specs`.

    `write` writes their data; `finish` checks that all of it was written, and syncs. As a context
    manager it finishes if the block raises nothing; otherwise the caller removes the file (see
    transaction.py). mode: the file's, as in open(2).

    Raises FormatError for a name given twice or a header that is too long, OSError naming the
    file.
    """

    def __init__(
        self,
        path: str,
        specs: Iterable[TensorSpec],
        metadata: Mapping[str, str] | None = None,
        mode: int = 0o666,
    ):
        self.path = path
        header, self._tensors = build_header(specs, metadata or {}, path)
        self._missing = {name: info.nbytes for name, info in self._tensors.items()}
        self._data_start = len(header)
        self.nbytes = len(header) + sum(self._missing.values())
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with naming(path):
                write_fully(self._fd, memoryview(header), 0)
        except BaseException:
            with contextlib.suppress(OSError):
                self.close()
            raise

    def write(self, name: str, data: np.ndarray | bytes | memoryview, offset: int = 0) -> None:
        """Writes the bytes of a tensor from byte `offset` on. An array must be contiguous."""
        if isinstance(data, np.ndarray):
            data = memoryview(data.reshape(-1).view(np.uint8))
        view = memoryview(data)
        info = self._tensors[name]
        if offset + len(view) > info.nbytes:
            raise ValueError(f"{name}: {offset + len(view)} bytes for {info.nbytes}")
        with naming(self.path):
            write_fully(self._fd, view, self._data_start + info.begin + offset)
        self._missing[name] -= len(view)

    def finish(self) -> None:
        unwritten = [name for name, missing in self._missing.items() if missing]
        try:
            if unwritten:
                raise ValueError(f"{self.path}: never written in full: {', '.join(unwritten)}")
            with naming(self.path):
                os.fsync(self._fd)
                self.close()
        finally:
            # It is open here only after an error, which is then reported.
            with contextlib.suppress(OSError):
                self.close()
