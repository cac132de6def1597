"""Reads a rank's part of a tensor from a safetensors file into existing memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from nf4.checkpoint import FormatError
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.reader import SafetensorsFile
from nf4.torch.distributed._cuts import Ranges, Read

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def runs_of_box(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yields the elements of a box in a row-major tensor as ascending ranges (first, past the last)
    of the tensor's elements."""
    whole = len(shape)  # the box is whole in dimensions from here on
    while whole and (offsets[whole - 1], sizes[whole - 1]) == (0, shape[whole - 1]):
        whole -= 1
    if 0 in sizes:
        return
    inner = math.prod(shape[whole:])
    if whole == 0:
        yield 0, inner
        return
    first, count = offsets[whole - 1] * inner, sizes[whole - 1] * inner
    strides = [math.prod(shape[dim + 1 :]) for dim in range(whole - 1)]
    outer = (range(at, at + size) for at, size in zip(offsets, sizes[: whole - 1], strict=False))
    for place in itertools.product(*outer):
        begin = first + sum(at * stride for at, stride in zip(place, strides, strict=True))
        yield begin, begin + count


def read_runs(
    file: SafetensorsFile, info: TensorInfo, runs: Iterable[tuple[int, int]], into: Tensor
) -> None:
    """Reads ranges of elements, one after another, into host memory of the file's dtype."""
    size = into.element_size()
    view = memoryview(into.view(-1).view(torch.uint8).numpy()) if into.numel() else memoryview(b"")
    done = 0
    for begin, end in runs:
        piece = view[done : done + (end - begin) * size]
        file.read_into(info, begin * size, piece)
        done += len(piece)


def dtype_of(file: SafetensorsFile, info: TensorInfo) -> torch.dtype:
    if info.dtype not in _DTYPES:
        raise FormatError(file.path, f"torch has no {info.dtype}", info.name)
    return _DTYPES[info.dtype]


def read_part(
    file: SafetensorsFile, info: TensorInfo, read: Read | None, *, as_bytes: bool = False
) -> Tensor:
    """Reads what a cut (_cuts.py) needs of a weight's part into host memory; None: all of it."""
    stored = torch.uint8 if as_bytes else dtype_of(file, info)
    shape, runs = info.shape, [(0, info.elements)]
    if read is not None:
        count = sum(end - begin for begin, end in read.ranges)
        shape = (*read.view[: read.dim], count, *read.view[read.dim + 1 :])
        runs = read.runs()
    made = torch.empty(shape, dtype=stored)
    read_runs(file, info, runs, made)
    return made


def fill(
    own: Tensor,
    file: SafetensorsFile,
    info: TensorInfo,
    *,
    as_bytes: bool = False,
    rows: Ranges | None = None,
) -> None:
    """Reads a tensor, or this rank's part of a DTensor. as_bytes: these are codes, whatever their
    dtype in the file; else floats are cast to the dtype of `own`. rows: the rows of the file's
    tensor that `own` has. Raises FormatError for another shape."""
    stored = torch.uint8 if as_bytes else dtype_of(file, info)
    shape = (info.nbytes, 1) if as_bytes else info.shape
    if rows is not None:
        shape = (sum(end - begin for begin, end in rows), *shape[1:])
    if tuple(own.shape) != shape:
        reason = f"its shape is {list(shape)}, but {list(own.shape)} in the model"
        raise FormatError(file.path, reason, info.name)
    _require_dtype(own, stored, file, info)
    with torch.no_grad():
        for local, offsets in parts_of(own):
            if rows is None:
                runs = list(runs_of_box(shape, offsets, local.shape))
            else:
                runs = Read(info.shape, 0, tuple(rows)).runs()
            in_place = local.device.type == "cpu" and local.dtype == stored
            if in_place and local.is_contiguous():
                read_runs(file, info, runs, local)
                continue
            host = torch.empty(local.shape, dtype=stored)
            read_runs(file, info, runs, host)
            local.copy_(host)


def fill_box(own: Tensor, begin: Sequence[int], file: SafetensorsFile, info: TensorInfo) -> None:
    """Reads a tensor into the box of `own` that begins at `begin`; `own` may have more leading
    dimensions. For a DTensor, reads what this rank has of that box."""
    stored = dtype_of(file, info)
    _require_dtype(own, stored, file, info)
    sizes = (*[1] * (own.dim() - len(info.shape)), *info.shape)
    with torch.no_grad():
        for local, offsets in parts_of(own):
            common = _common(begin, sizes, offsets, local.shape)
            if common is None:
                continue
            wanted = [end - first for first, end in common]
            inside = [first - at for (first, _), at in zip(common, begin, strict=True)]
            host = torch.empty(wanted, dtype=stored)
            read_runs(file, info, runs_of_box(sizes, inside, wanted), host)
            _part(local, common, offsets).copy_(host)


def put(own: Tensor, begin: Sequence[int] | None, whole: Tensor, path: str, name: str) -> None:
    """Copies a tensor, or what this rank has of it, into `own`, or into the box of `own` that
    begins at `begin`. Raises FormatError, with the file and the name, for another shape."""
    if begin is None and own.shape != whole.shape:
        reason = f"its shape is {list(whole.shape)}, but {list(own.shape)} in the model"
        raise FormatError(path, reason, name)
    whole = whole.reshape(*[1] * (own.dim() - whole.dim()), *whole.shape)
    begin = (0,) * own.dim() if begin is None else begin
    with torch.no_grad():
        for local, offsets in parts_of(own):
            common = _common(begin, whole.shape, offsets, local.shape)
            if common is not None:
                _part(local, common, offsets).copy_(_part(whole, common, begin))


def _common(
    begin: Sequence[int], sizes: Sequence[int], offsets: Sequence[int], have: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Returns the ranges (first, past the last) that two boxes share; None if there are none."""
    boxes = zip(begin, sizes, offsets, have, strict=True)
    found = [(max(at, other), min(at + size, other + extent)) for at, size, other, extent in boxes]
    return None if any(first >= end for first, end in found) else found


def _part(tensor: Tensor, ranges: Sequence[tuple[int, int]], begin: Sequence[int]) -> Tensor:
    """Returns the part of a tensor that begins at `begin` of a whole, by the whole's indices."""
    return tensor[tuple(slice(a - at, b - at) for (a, b), at in zip(ranges, begin, strict=True))]


def _require_dtype(
    own: Tensor, stored: torch.dtype, file: SafetensorsFile, info: TensorInfo
) -> None:
    if stored != own.dtype and not (stored.is_floating_point and own.is_floating_point()):
        raise FormatError(file.path, f"it is {info.dtype}, but {own.dtype} in the model", info.name)


def parts_of(own: Tensor) -> list[tuple[Tensor, Sequence[int]]]:
    """Returns the local tensors that this rank has of a tensor, and where each begins in it."""
    own = own.detach()
    if not hasattr(own, "to_local"):  # not a DTensor, whose module takes seconds to import
        return [(own, (0,) * own.dim())]
    local = own.to_local()
    # torch.distributed.checkpoint calls this too. A rank outside of the mesh has no chunk.
    chunks = own.__create_chunk_list__() if local.numel() else []
    return [(local, chunk.offsets) for chunk in chunks]
