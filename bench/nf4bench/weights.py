"""Rotating sets of random weights, quantized by us, with room for outputs."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import nf4
import torch
from nf4 import _abi

from nf4bench.cases import ACT_ORDER, INT4, REORDERED, Case

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CODES = {"fp32": _abi.DTYPE_FP32, "fp16": _abi.DTYPE_FP16, "bf16": _abi.DTYPE_BF16}
FORMATS = {"nf4": _abi.FORMAT_NF4, "fp4": _abi.FORMAT_FP4, "own": _abi.FORMAT_NF4}
INT4_PARTS = ("packed", "scales", "zeros", "g_idx", "permutation")
PARTS = ("packed", "absmax", "nested_absmax", "nested_code", "nested_offset", "codebook")


@functools.cache
def _table(kind: str, place: str) -> torch.Tensor:
    """The tables that all weights share: "scales", or a format's codebook."""
    if kind == "scales":
        return torch.from_numpy(nf4.scale_code().copy()).to(place)
    if kind == "own":
        return torch.linspace(-1, 1, 16, device=place) ** 3
    return torch.from_numpy(nf4.codebook(kind).copy()).to(place)


class Weight:
    """One random weight of normal values: `dense`, `quantized` by us, and `out`, which for
    dequantize is the memory of `dense` where its placement allows. prefix: of its C functions."""

    prefix, parts = "", PARTS

    def __init__(self, case: Case, place: str) -> None:
        self.case, self.place = case, place
        dtype = DTYPES[case.dtype]
        self.dense = torch.randn(case.shape, device=place, dtype=dtype)
        self.quantized = self._quantized()
        self.out_room = self.dense.view(-1)
        if case.work == "quantize":
            self.out_room = torch.empty_like(self.out_room)
        elif case.placement == "out + 1 element":
            self.out_room = torch.empty(case.elements + 16, device=place, dtype=dtype)
        start = int(case.placement == "out + 1 element")
        self.out = self.out_room[start : start + case.elements].view(case.shape)
        self.descriptor = self._empty_descriptor()
        for name in self.parts:
            part = getattr(self.quantized, name)
            setattr(self.descriptor, name, None if part is None else part.data_ptr())

    @functools.cached_property
    def others(self) -> dict[str, Any]:
        """What peers multiply with in its place, by their name."""
        return {}

    def _empty(self, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(count, device=self.place, dtype=dtype)

    def _quantized(self) -> nf4.QuantizedTensor:
        case = self.case
        self.sizes = sizes = nf4.sizes(
            case.shape, blocksize=case.blocksize, nested_blocksize=case.nested_blocksize
        )
        self.packed_room = self._empty(sizes.packed_bytes + 16, torch.uint8)
        self.workspace = self._empty(max(sizes.workspace_bytes, 16), torch.uint8)
        start = int(case.placement == "packed + 1 byte")
        self.quantized = nf4.QuantizedTensor(
            packed=self.packed_room[start : start + sizes.packed_bytes],
            absmax=self._empty(sizes.blocks, torch.uint8 if case.nested else torch.float32),
            nested_absmax=self._empty(sizes.nested_blocks) if case.nested else None,
            nested_code=_table("scales", self.place) if case.nested else None,
            nested_offset=self._empty(1) if case.nested else None,
            codebook=_table("own", self.place) if case.format == "own" else None,
            format="nf4" if case.format == "own" else case.format,
            blocksize=case.blocksize,
            nested_blocksize=case.nested_blocksize,
            shape=case.shape,
            dtype=case.dtype,
        )
        self.quantize(None if self.place == "cpu" else 0)
        return self.quantized

    def _empty_descriptor(self) -> _abi.Tensor:
        case = self.case
        made = _abi.Tensor(
            format=FORMATS[case.format], blocksize=case.blocksize,
            nested_blocksize=case.nested_blocksize, rows=case.shape[0], cols=case.shape[1],
        )  # fmt: skip
        made.struct_size = ctypes.sizeof(made)
        return made

    @property
    def codebook(self) -> torch.Tensor:
        """The codebook in use, float32 [16]."""
        return _table(self.case.format, self.place)

    def quantize(self, stream: int | None) -> None:
        nf4.quantize(self.dense, out=self.quantized, workspace=self.workspace, stream=stream)

    def dequantize(self, stream: int | None) -> torch.Tensor:
        return nf4.dequantize(self.quantized, self.case.dtype, out=self.out, stream=stream)

    @property
    def scales(self) -> torch.Tensor:
        return self.quantized.absmax

    @property
    def packed_bytes(self) -> int:
        return self.sizes.packed_bytes

    @property
    def scale_bytes(self) -> int:
        return self.sizes.absmax_bytes + 4 * self.sizes.nested_blocks

    @property
    def dense_bytes(self) -> int:
        return self.dense.numel() * self.dense.element_size()

    @property
    def input_bytes(self) -> int:
        """What the case's work reads."""
        if self.case.work == "quantize":
            return self.dense_bytes
        return self.packed_bytes + self.scale_bytes

    @property
    def moved_bytes(self) -> int:
        """What dequantize and quantize have to move."""
        return self.packed_bytes + self.scale_bytes + self.dense_bytes


class Int4Weight(Weight):
    """One of 4-bit integers, in the layout that is the case's format, in groups of blocksize
    columns. As most checkpoints are: AWQ with zero points, the others symmetric."""

    prefix, parts = "int4_", INT4_PARTS

    def _quantized(self) -> nf4.Int4Tensor:
        case = self.case
        made = nf4.quantize_int4(
            self.dense, layout=case.format, group_size=case.blocksize,
            symmetric=case.format != "awq",
        )  # fmt: skip
        self.packed_room = made.packed.view(-1)
        if case.placement not in (ACT_ORDER, REORDERED):
            return made
        groups = torch.arange(case.shape[1], dtype=torch.int32) // case.blocksize
        g_idx = groups[torch.randperm(case.shape[1])].to(self.place)
        made = dataclasses.replace(made, g_idx=g_idx)
        return nf4.reorder(made) if case.placement == REORDERED else made

    def _empty_descriptor(self) -> _abi.Int4Tensor:
        return self.quantized.descriptor()

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight as the library has it on the CPU, which rounds nothing in float32."""
        held = {name: getattr(self.quantized, name) for name in self.parts}
        on_cpu = {name: each.cpu() for name, each in held.items() if each is not None}
        found = nf4.dequantize(dataclasses.replace(self.quantized, **on_cpu), "fp32")
        return found.to(self.place, dtype)

    @property
    def scales(self) -> torch.Tensor:
        return self.quantized.scales

    @property
    def packed_bytes(self) -> int:
        return self.case.elements // 2

    @property
    def scale_bytes(self) -> int:
        """Of scales and zeros."""
        return self.quantized.nbytes - self.packed_bytes


def weight_of(case: Case, place: str) -> Weight:
    return (Int4Weight if case.format in INT4 else Weight)(case, place)


def rotation(case: Case, place: str, input_bytes: float) -> list[Weight]:
    """At least two weights, and so many that the inputs of all are `input_bytes` or more."""
    first = weight_of(case, place)
    count = max(2, -(-int(input_bytes) // first.input_bytes))
    return [first] + [weight_of(case, place) for _ in range(count - 1)]
