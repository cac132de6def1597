"""The steps of a conversion: copy, quantize or dequantize one tensor into an output file."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from nf4._dequantize import dequantize
from nf4.checkpoint.difference import ErrorStatistics
from nf4.checkpoint.dtypes import NF4_TO_FILE
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.fp8 import Fp8Weight
from nf4.checkpoint.header import TensorInfo, TensorSpec
from nf4.checkpoint.plans import WeightPlan
from nf4.checkpoint.reader import SafetensorsFile
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.stacks import Stack
from nf4.checkpoint.weights import Survey, Weight
from nf4.checkpoint.writer import SafetensorsWriter
from nf4.int4 import Int4Tensor
from nf4.tensor import QuantizedTensor

AnyQuantized = QuantizedTensor[Any] | Int4Tensor[Any]
_EXPONENTS = {
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
_CHECK_ELEMENTS = 1 << 20


@dataclasses.dataclass
class Result:
    """The result of a conversion.

    weights, dense       tensors converted, and copied as dense ones
    fp8                  weights in FP8 that were dequantized beside them (dequantize only)
    elements             elements of the converted weights
    bytes_in, bytes_out  sizes of the weight files; weight_bytes_*: of the converted weights alone
    kernel_bytes         bytes read and written by the kernels, in kernel_seconds
    seconds              of the whole conversion
    files                names of the weight files written
    left_out             files beside the weights that were not copied
    warnings             failures after the output was in place, and libraries that may not load it
    chosen_by            what decided which layers become 4-bit, in choice_seconds (quantize only)
    already              weights that were 4-bit, and are copied (quantize only)
    left_dense           why matrices were left dense: reason -> how many (quantize only)
    calibrated           weights that were calibrated (quantize only)
    losses               the errors of weights that were quantized again (convert to nf4 only)
    """

    weights: int = 0
    dense: int = 0
    fp8: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    elements: int = 0
    weight_bytes_in: int = 0
    weight_bytes_out: int = 0
    kernel_bytes: int = 0
    kernel_seconds: float = 0.0
    seconds: float = 0.0
    files: list[str] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    chosen_by: str = ""
    choice_seconds: float = 0.0
    already: int = 0
    left_dense: dict[str, int] = dataclasses.field(default_factory=dict)
    calibrated: int = 0
    losses: list[ErrorStatistics] = dataclasses.field(default_factory=list)

    def count(self, step: Step, elements: int, kernel_bytes: int, started: float) -> None:
        """Adds a weight whose kernel call began at perf_counter() `started` and has just ended."""
        self.kernel_seconds += time.perf_counter() - started
        self.kernel_bytes += kernel_bytes
        self.weights += 1
        self.elements += elements
        self.weight_bytes_in += step.bytes_in
        self.weight_bytes_out += sum(spec.nbytes for spec in step.specs())


class Step(Protocol):
    """Writes one tensor of the input to the output."""

    @property
    def name(self) -> str: ...

    @property
    def bytes_in(self) -> int: ...

    def specs(self) -> Sequence[TensorSpec]:
        """Returns the tensors that it writes."""

    def run(self, writer: SafetensorsWriter, result: Result) -> None:
        """Read, convert, write."""


@dataclasses.dataclass(frozen=True)
class _FromTensor:
    """A step that reads one tensor of a file."""

    file: SafetensorsFile
    info: TensorInfo

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def bytes_in(self) -> int:
        return self.info.nbytes


@dataclasses.dataclass(frozen=True)
class _OfWeight:
    """A step that reads a quantized weight."""

    checkpoint: Checkpoint
    weight: Weight | Fp8Weight

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def bytes_in(self) -> int:
        return self.weight.nbytes


class _Planned:
    """A step that writes the tensors of a plan."""

    plan: WeightPlan

    def specs(self) -> Sequence[TensorSpec]:
        return self.plan.specs()


@dataclasses.dataclass(frozen=True)
class FromWeight(_Planned, _OfWeight):
    """A step that reads a 4-bit weight and writes the tensors of a plan in its place."""

    weight: Weight
    plan: WeightPlan


@dataclasses.dataclass(frozen=True)
class Copy(_FromTensor):
    """Copies a tensor's bytes. dense: it is not part of a 4-bit weight."""

    dense: bool

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec(self.info.name, self.info.dtype, self.info.shape)]

    def run(self, writer: SafetensorsWriter, result: Result) -> None:
        for offset, piece in self.file.pieces(self.info):
            writer.write(self.info.name, piece, offset)
        result.dense += self.dense


@dataclasses.dataclass(frozen=True)
class Quantize(_Planned, _FromTensor):
    """Quantizes a dense matrix to 4 bits. made: weights that are quantized already, by name, from
    which it takes its own."""

    plan: WeightPlan
    transposed: bool
    allow_nonfinite: bool
    threads: int
    made: dict[str, AnyQuantized]

    def run(self, writer: SafetensorsWriter, result: Result) -> None:
        started = time.perf_counter()
        if (weight := self.made.pop(self.name, None)) is not None:
            result.count(self, self.info.elements, 0, started)
            result.calibrated += 1
        else:
            array = self._array()
            started = time.perf_counter()
            weight = self.plan.quantize(array, self.threads)
            result.count(self, self.info.elements, array.nbytes + weight.nbytes, started)
        for name, data in self.plan.parts(weight).items():
            writer.write(name, data)

    def _array(self) -> np.ndarray:
        """Returns the matrix, [outputs, inputs]."""
        array = self.file.array(self.info)
        if not self.allow_nonfinite:
            problem = nonfinite(array, self.info.dtype)
            if problem:
                raise FormatError(self.file.path, f"{problem} (see --allow-nonfinite)", self.name)
        return np.ascontiguousarray(array.T) if self.transposed else array


@dataclasses.dataclass(frozen=True)
class QuantizeStack(_Planned):
    """Quantizes experts, each of which may be a tensor, to one 4-bit weight."""

    checkpoint: Checkpoint
    stack: Stack
    plan: WeightPlan
    allow_nonfinite: bool
    threads: int

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def bytes_in(self) -> int:
        return sum(self.checkpoint.info(name).nbytes for name in self.stack.tensors)

    def run(self, writer: SafetensorsWriter, result: Result) -> None:
        array = self.stack.read(self.checkpoint)
        if not self.allow_nonfinite:
            dtype = self.checkpoint.info(self.stack.tensors[0]).dtype
            if nonfinite(array, dtype) is not None:
                self._raise_nonfinite()
        started = time.perf_counter()
        weight = self.plan.quantize(array, self.threads)
        result.count(self, array.size, array.nbytes + weight.nbytes, started)
        for name, data in self.plan.parts(weight).items():
            writer.write(name, data)

    def _raise_nonfinite(self) -> NoReturn:
        """Raises a FormatError that names the tensor with the value, which may be one expert's."""
        for name in self.stack.tensors:
            file, info = self.checkpoint.owner[name], self.checkpoint.info(name)
            problem = nonfinite(file.array(info), info.dtype)
            if problem:
                raise FormatError(file.path, f"{problem} (see --allow-nonfinite)", name)
        raise AssertionError("the stack has a value that none of its tensors has")


@dataclasses.dataclass(frozen=True)
class Dequantize:
    """Dequantizes a 4-bit weight to a dense matrix, or experts to a dense stack, of `dtype`
    (libnf4's name). name: the dense tensor's."""

    checkpoint: Checkpoint
    weight: Weight
    name: str
    dtype: str
    transposed: bool
    threads: int

    @property
    def bytes_in(self) -> int:
        return self.weight.nbytes

    def specs(self) -> Sequence[TensorSpec]:
        *experts, rows, cols = self.weight.shape
        shape = (*experts, *((cols, rows) if self.transposed else (rows, cols)))
        return [TensorSpec(self.name, NF4_TO_FILE[self.dtype], shape)]

    def run(self, writer: SafetensorsWriter, result: Result) -> None:
        weight = self.weight.load(self.checkpoint)
        started = time.perf_counter()
        array = dequantize(weight, self.dtype, threads=self.threads)
        result.count(self, array.size, array.nbytes + weight.nbytes, started)
        if self.transposed:
            array = np.ascontiguousarray(array.swapaxes(-1, -2))
        writer.write(self.name, array)


@dataclasses.dataclass(frozen=True)
class DequantizeFp8(_OfWeight):
    """Dequantizes a weight in FP8 to a dense matrix of `dtype` (libnf4's name)."""

    weight: Fp8Weight
    dtype: str

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec(self.name, NF4_TO_FILE[self.dtype], self.weight.shape)]

    def run(self, writer: SafetensorsWriter, result: Result) -> None:
        writer.write(self.name, self.weight.dense(self.checkpoint, self.dtype))
        result.fp8 += 1


def steps_of(
    checkpoint: Checkpoint, step: Callable[[SafetensorsFile, TensorInfo], Step | None]
) -> dict[str, list[Step]]:
    """Returns the steps for each file. step: the one for a tensor; None if another one has it."""
    return {
        name: [made for info in file.tensors.values() if (made := step(file, info))]
        for name, file in checkpoint.files.items()
    }


def steps_in_place(
    checkpoint: Checkpoint, found: Survey, made: Mapping[str, Step]
) -> dict[str, list[Step]]:
    """Returns the steps for each file, which copy dense tensors. made: the steps of the others, by
    the name of the tensor in whose place their results go."""

    def step(file: SafetensorsFile, info: TensorInfo) -> Step | None:
        copy = Copy(file, info, True) if info.name in found.dense else None
        return made.get(info.name, copy)

    return steps_of(checkpoint, step)


def nonfinite(array: np.ndarray, dtype: str, first: int = 0) -> str | None:
    """Returns a sentence on the first NaN or Inf of an array; None if there is none. first: the
    index of the array's first element in the tensor."""
    kind, exponent = _EXPONENTS[dtype]
    bits = array.reshape(-1).view(kind)
    for start in range(0, bits.size, _CHECK_ELEMENTS):
        bad = (bits[start : start + _CHECK_ELEMENTS] & exponent) == exponent
        if bad.any():
            index = start + int(bad.argmax())
            value = float(array.reshape(-1)[index])
            return f"{'NaN' if value != value else 'Inf'} at element {first + index}"
    return None
