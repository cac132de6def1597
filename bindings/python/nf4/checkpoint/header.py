"""Parses and builds the header of a safetensors file, and checks it against the whole format."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from nf4.checkpoint.dtypes import BITS
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.jsonio import check_marks, is_count, parse_object

# The limit of the safetensors library.
MAX_HEADER_BYTES = 100_000_000
# The largest published checkpoints have tens of thousands of tensors over all their shards.
MAX_TENSORS = 500_000
# The most dimensions that every numpy has.
MAX_RANK = 32
_PREFIX_BYTES = 8
# A clone without Git LFS has this in place of a large file.
_LFS_POINTER = b"version https://git-lfs"


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file: `begin` and `end` are byte offsets into the file's data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written; its size follows from dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


def _no_header(prefix: bytes, length: int) -> str:
    if _LFS_POINTER.startswith(prefix):
        return "this is a pointer of Git LFS; expected the file itself, as git lfs pull fetches it"
    return f"not a safetensors file: its header length {length} is over {MAX_HEADER_BYTES}"


def header_length(prefix: bytes, file_size: int, path: str) -> int:
    """Returns the header's length from the first 8 bytes of a file of `file_size` bytes."""
    if len(prefix) < _PREFIX_BYTES:
        raise FormatError(
            path, f"too short for safetensors: {len(prefix)} bytes, at least 8 needed"
        )
    length = int.from_bytes(prefix, "little")
    if length == 0:
        raise FormatError(path, "header length 0")
    if length > MAX_HEADER_BYTES:
        raise FormatError(path, _no_header(prefix, length))
    if length > file_size - _PREFIX_BYTES:
        raise FormatError(path, f"header length {length} is past the end of {file_size} bytes")
    return length


def _tensor_bytes(info: Mapping[str, Any], path: str, name: str) -> int:
    """Returns a tensor's bytes from its dtype and shape. Raises FormatError if these are
    invalid."""
    dtype, shape = info.get("dtype"), info.get("shape")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise FormatError(path, f"unknown dtype {dtype!r}", name)
    if not isinstance(shape, list) or not all(is_count(size) for size in shape):
        raise FormatError(path, "shape is not a list of sizes", name)
    if len(shape) > MAX_RANK:
        raise FormatError(path, f"{len(shape)} dimensions; at most {MAX_RANK} are read", name)
    # Zeros are left out so that a shape such as [2**62, 2**62, 0] does not hide an overflow.
    bits = BITS[dtype]
    for size in shape:
        bits *= size or 1
        if bits >= 2**63:
            raise FormatError(path, f"shape {shape} overflows", name)
    if 0 in shape:
        return 0
    if bits % 8:
        raise FormatError(path, f"shape {shape} of {dtype} is not a whole number of bytes", name)
    return bits // 8


def _tensor_info(name: str, info: object, path: str) -> TensorInfo:
    if not isinstance(info, dict):
        raise FormatError(path, "its header entry is not an object", name)
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise FormatError(path, "its name is not valid Unicode", name) from None
    size = _tensor_bytes(info, path, name)
    offsets = info.get("data_offsets")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(is_count, offsets))):
        raise FormatError(path, "data_offsets is not a pair of offsets", name)
    begin, end = offsets
    if end < begin:
        raise FormatError(path, f"data_offsets end {end} before they begin {begin}", name)
    if end - begin != size:
        raise FormatError(
            path,
            f"{info['dtype']} {info['shape']} takes {size} bytes, its span has {end - begin}",
            name,
        )
    return TensorInfo(name, info["dtype"], tuple(info["shape"]), begin, end)


def _check_coverage(tensors: Iterable[TensorInfo], data_bytes: int, path: str) -> None:
    """Requires the tensors to cover the data section without overlap, gap or trailing bytes."""
    reached = 0
    for info in tensors:
        if info.begin != reached:
            problem = "overlaps other data" if info.begin < reached else "leaves a gap before it"
            raise FormatError(
                path, f"{problem}: begins at {info.begin}, expected {reached}", info.name
            )
        reached = info.end
    if reached != data_bytes:
        problem = "truncated" if reached > data_bytes else "trailing bytes"
        raise FormatError(
            path, f"{problem}: the tensors take {reached} bytes, the file has {data_bytes}"
        )


def _check_metadata(metadata: object, path: str) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(path, "__metadata__ is not an object of strings")
    return metadata


def check_tensor_count(header: bytes, path: str) -> None:
    """Raises FormatError for a header of too many tensors or values, before it is parsed. Each
    tensor has a brace of its own."""
    check_marks(header, path, "the header")
    if header.count(b"{") > MAX_TENSORS:
        raise FormatError(path, f"the header lists more than {MAX_TENSORS} tensors")


def parse_header(
    header: bytes, data_bytes: int, path: str
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Returns the tensors of a header, in the order of their data, and its metadata.

    Raises FormatError for anything that the format forbids. `data_bytes` is the size of the data
    section.
    """
    check_tensor_count(header, path)
    if header[:1] != b"{":
        raise FormatError(path, "the header does not start with '{'")
    entries = parse_object(header, path, "the header")
    metadata = _check_metadata(entries.pop("__metadata__", None), path)
    tensors = [_tensor_info(name, info, path) for name, info in entries.items()]
    tensors.sort(key=lambda info: (info.begin, info.end))
    _check_coverage(tensors, data_bytes, path)
    return {info.name: info for info in tensors}, metadata


def build_header(
    specs: Iterable[TensorSpec], metadata: Mapping[str, str], path: str
) -> tuple[bytes, dict[str, TensorInfo]]:
    """Returns the header of a file that will hold `specs`, with the length prefix, and the place of
    each tensor.

    Wide dtypes come first, so that every tensor is aligned for its type when the file is
    mapped; the header is padded with spaces for the same reason, as safetensors does.
    """
    ordered = sorted(specs, key=lambda spec: (-BITS[spec.dtype], spec.name))
    tensors: dict[str, TensorInfo] = {}
    offset = 0
    for spec in ordered:
        if spec.name in tensors:
            raise FormatError(path, "written twice", spec.name)
        end = offset + spec.nbytes
        tensors[spec.name] = TensorInfo(spec.name, spec.dtype, spec.shape, offset, end)
        offset = end
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for info in tensors.values():
        entries[info.name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [info.begin, info.end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(path, f"its header would take {len(text)} bytes, over {MAX_HEADER_BYTES}")
    return len(text).to_bytes(_PREFIX_BYTES, "little") + text, tensors
