"""Reads safetensors files with pread, one tensor or one piece of it at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
from safetensors import SafetensorError, safe_open

from nf4.checkpoint.dtypes import NUMPY
from nf4.checkpoint.errors import FormatError, naming
from nf4.checkpoint.files import Descriptor, open_regular
from nf4.checkpoint.header import TensorInfo, check_tensor_count, header_length, parse_header

# The size of the pieces in which data is copied.
PIECE_BYTES = 8 << 20


class SafetensorsFile(Descriptor):
    """An open safetensors file whose whole structure has been checked.

    tensors: name -> TensorInfo, in the order of the data. A context manager. The file is not
    mapped, so that one that is truncated while it is read gives a FormatError and no SIGBUS.

    Raises FormatError for a file that breaks the format, OSError naming the file for one that
    cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._fd, self._opened = open_regular(self.path)
        try:
            self._parse()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """The file's bytes."""
        return self._opened.st_size

    def _parse(self) -> None:
        size = self.size
        length = header_length(bytes(self._pread(0, min(size, 8))), size, self.path)
        header = bytes(self._pread(8, length))
        check_tensor_count(header, self.path)
        self._check_with_safetensors()
        self._data_start = 8 + length
        self.tensors, self.metadata = parse_header(header, size - self._data_start, self.path)

    def _check_with_safetensors(self) -> None:
        """The safetensors library is fuzzed; parse_header checks what it accepts once more."""
        try:
            safe_open(self.path, framework="np", backend="pread")
        except SafetensorError as error:
            reason = str(error).removeprefix("Error while deserializing header: ")
            raise FormatError(self.path, f"not valid safetensors: {reason}") from None

    def _pread_into(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            with naming(self.path):
                count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                raise FormatError(
                    self.path, f"truncated while it was read: no data at byte {offset + done}"
                )
            done += count

    def _pread(self, offset: int, size: int) -> bytearray:
        data = bytearray(size)
        self._pread_into(memoryview(data), offset)
        return data

    def read(self, info: TensorInfo) -> np.ndarray:
        """Reads the bytes of a tensor: uint8 [nbytes], aligned for any dtype."""
        data = np.empty(info.nbytes, np.uint8)
        self.read_into(info, 0, memoryview(data))
        return data

    def read_into(self, info: TensorInfo, begin: int, view: memoryview) -> None:
        """Reads the bytes of a tensor from `begin` on, as many as fit into a view of bytes."""
        if not 0 <= begin <= info.nbytes - len(view):
            raise ValueError(f"bytes {begin} to {begin + len(view)} of {info.nbytes}")
        self._pread_into(view, self._data_start + info.begin + begin)

    def array(self, info: TensorInfo) -> np.ndarray:
        """Reads a tensor of a dtype in NUMPY as an array of its shape."""
        return self.read(info).view(NUMPY[info.dtype]).reshape(info.shape)

    def pieces(self, info: TensorInfo) -> Iterator[tuple[int, memoryview]]:
        """Yields the bytes of a tensor as (offset, piece). Each piece is valid until the next."""
        buffer = memoryview(bytearray(min(PIECE_BYTES, info.nbytes)))
        for offset in range(0, info.nbytes, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, info.nbytes - offset)]
            self._pread_into(piece, self._data_start + info.begin + offset)
            yield offset, piece

    def check_unchanged(self) -> None:
        """Raises FormatError if the file was written to since it was opened, because the data read
        may then mix old and new bytes."""
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            raise FormatError(self.path, "changed while it was read")
