"""The difference between the weights of two checkpoints of one model, one tensor in memory at a
time. Each checkpoint is dense or has 4-bit weights of any kind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from nf4._dequantize import dequantize
from nf4.checkpoint.dtypes import FILE_TO_NF4, NUMPY
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.fp8 import Fp8Weight
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.kinds import require_readable, survey
from nf4.checkpoint.leftovers import is_harmless
from nf4.checkpoint.rules import choose_rules, is_transposed, model_types
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.stacks import Stack, dense_of, is_stack, parameter_of
from nf4.checkpoint.weights import Survey, Weight

_PIECE_ELEMENTS = 1 << 20
# The dtypes that have values which float64 takes.
_NUMBERS = NUMPY.keys() - {"C64"}


@dataclasses.dataclass(frozen=True)
class ErrorStatistics:
    """The error of a 4-bit weight against the dense one: RMS of the difference over RMS of the
    dense weight, and the largest absolute difference. NaN where the dense weight has NaN."""

    rms_relative: float
    max_abs: float
    elements: int
    squared_error: float
    squared_reference: float


@dataclasses.dataclass(frozen=True)
class Difference:
    """A tensor of two checkpoints. formats: "dense", "fp8", or a 4-bit weight's, in the reference
    and in the other checkpoint. nbytes: what the other checkpoint stores for it."""

    name: str
    formats: tuple[str, str]
    shape: tuple[int, ...]
    nbytes: int
    error: ErrorStatistics


@dataclasses.dataclass(frozen=True)
class Unmatched:
    """Names of tensors that only the reference or only the other checkpoint has."""

    reference: list[str]
    other: list[str]


def differences(
    reference: Checkpoint,
    other: Checkpoint,
    threads: int = 0,
    advance: Callable[[str, int], None] = lambda name, count: None,
) -> tuple[list[Difference], Unmatched]:
    """Compares every tensor that both checkpoints have. threads: CPU threads; 0: all. advance:
    called with the name of each tensor, and its bytes in the other checkpoint.

    Raises FormatError for a checkpoint that is not read, for models of different types, for a
    tensor of two shapes, and for experts that are stored in two ways which no model relates.
    """
    types = reference.model_type, other.model_type
    if None not in types and types[0] != types[1]:
        reason = f"its model_type is {types[1]!r}, and that of {reference.path} is {types[0]!r}"
        raise FormatError(other.path, reason)
    pair = _Pair(_Side(reference, survey(reference), threads), _Side(other, survey(other), threads))
    found = []
    for each in pair.differences():
        found.append(each)
        advance(each.name, each.nbytes)
    reference.check_unchanged()
    other.check_unchanged()
    return found, pair.unmatched({each.name for each in found})


class _Side(NamedTuple):
    """A checkpoint and its tensors."""

    checkpoint: Checkpoint
    found: Survey
    threads: int

    def values(self, weight: Weight) -> np.ndarray:
        return dequantize(weight.load(self.checkpoint), "fp32", threads=self.threads)

    @property
    def others(self) -> Mapping[str, TensorInfo | Fp8Weight]:
        """The tensors that are not in 4 bits."""
        return {**self.found.dense, **self.found.fp8}

    def format(self, name: str) -> str:
        return "fp8" if name in self.found.fp8 else "dense"

    def is_number(self, name: str) -> bool:
        return name in self.found.fp8 or self.found.dense[name].dtype in _NUMBERS

    def array(self, name: str) -> np.ndarray:
        if name in self.found.fp8:
            return self.found.fp8[name].dense(self.checkpoint, "fp32")
        return self.checkpoint.owner[name].array(self.found.dense[name])

    def has_dense(self, weight: Weight) -> bool:
        return weight.name in self.others or is_stack(weight)

    def only_here(self, beside: _Side) -> list[Weight]:
        """Returns the 4-bit weights that have no 4-bit weight beside them."""
        there = beside.found.weights
        return [weight for name, weight in self.found.weights.items() if name not in there]

    def left(self, done: Container[str]) -> list[str]:
        dense = (name for name, info in self.found.dense.items() if not is_harmless(info))
        every = (*self.found.weights, *self.found.fp8, *dense)
        return [name for name in every if name not in done]


class _Pair:
    """Two checkpoints of one model. The second has the error."""

    def __init__(self, old: _Side, new: _Side):
        for side in (old, new):
            require_readable(side.checkpoint, side.found, fp8=True)
        self._old, self._new = old, new
        # A file has no configuration beside it; both checkpoints are of the same model.
        self._types = model_types(old.checkpoint.config) | model_types(new.checkpoint.config)
        self._stacks_of_old = _stacks(new, old)
        self._stacks_of_new = _stacks(old, new)

    def differences(self) -> Iterator[Difference]:
        old, new = self._old, self._new
        for name, weight in new.found.weights.items():
            before = old.found.weights.get(name)
            if before is not None:
                self._require_shapes(name, before.shape, weight.shape)
                error = statistics_of(new.values(weight), old.values(before))
                formats = before.format, weight.format
            elif old.has_dense(weight):
                dense = _dense_of(weight, old.checkpoint, self._types, self._stacks_of_old)
                error = statistics_of(new.values(weight), dense)
                formats = "dense", weight.format
            else:
                continue
            yield Difference(name, formats, weight.shape, weight.nbytes, error)
        for weight in filter(new.has_dense, old.only_here(new)):
            dense = _dense_of(weight, new.checkpoint, self._types, self._stacks_of_new)
            error = statistics_of(dense, old.values(weight))
            formats = weight.format, "dense"
            yield Difference(weight.name, formats, weight.shape, dense.nbytes, error)
        for name, info in new.others.items():
            before = old.others.get(name)
            if before is None or not (new.is_number(name) and old.is_number(name)):
                continue
            self._require_shapes(name, before.shape, info.shape)
            error = statistics_of(new.array(name), old.array(name))
            formats = old.format(name), new.format(name)
            yield Difference(name, formats, info.shape, info.nbytes, error)

    def unmatched(self, compared: set[str]) -> Unmatched:
        done = set(compared)
        for stacks in (self._stacks_of_old, self._stacks_of_new):
            done.update(stacks, *(stack.tensors for stack in stacks.values()))
        return Unmatched(self._old.left(done), self._new.left(done))

    def _require_shapes(self, name: str, before: Sequence[int], after: Sequence[int]) -> None:
        if tuple(before) != tuple(after):
            old, new = self._old.checkpoint, self._new.checkpoint
            reason = f"its shape is {list(after)}, but {list(before)} in {old.path}"
            raise FormatError(new.path, reason, name)


def _stacks(quantized: _Side, dense: _Side) -> dict[str, Stack]:
    return stacks_by_name(quantized.only_here(dense), quantized.checkpoint, dense.checkpoint)


def _dense_of(
    weight: Weight, dense: Checkpoint, types: frozenset[str], stacks: Mapping[str, Stack]
) -> np.ndarray:
    """Returns the dense weight of a 4-bit one, [outputs, inputs], in its own dtype."""
    name = weight.name
    if is_stack(weight):
        array = dense_of(weight, dense, stacks)
        if array.shape != weight.shape:
            reason = f"its shape {list(array.shape)} is not {list(weight.shape)}"
            raise FormatError(dense.path, reason, parameter_of(name))
        return array
    if name not in dense:
        raise FormatError(dense.path, "not there to compare with", name)
    info = dense.info(name)
    if info.dtype not in FILE_TO_NF4:
        raise FormatError(dense.path, f"cannot compare with {info.dtype}", name)
    array = dense.owner[name].array(info)
    if is_transposed(name, types):
        array = array.T
    if array.shape != weight.shape:
        raise FormatError(
            dense.path, f"its shape {list(array.shape)} is not {list(weight.shape)}", name
        )
    return array


def stacks_by_name(
    weights: Iterable[Weight], checkpoint: Checkpoint, dense: Checkpoint
) -> dict[str, Stack]:
    """Returns the stacks of experts of a dense checkpoint, if a 4-bit weight is compared with one.
    Raises FormatError if no model says which these are, and in which order."""
    compared = [each.name for each in weights if is_stack(each) and each.name not in dense]
    if not compared:
        return {}
    # A dense file has no configuration beside it; the 4-bit checkpoint is of the same model.
    rules, why = choose_rules(dense.config or checkpoint.config, survey(dense))
    if rules.model is None:
        reason = f"experts are compared by a model of transformers, not by {why}"
        raise FormatError(dense.path, reason, compared[0])
    return {stack.name: stack for stack in rules.model.stacks.values()}


def error_statistics(
    weight: Weight,
    checkpoint: Checkpoint,
    dense: Checkpoint,
    threads: int = 0,
    stacks: Mapping[str, Stack] | None = None,
) -> ErrorStatistics:
    """Returns the error of a 4-bit weight against the dense one, summed in float64. threads: CPU
    threads; 0: all. stacks: from stacks_by_name. Raises FormatError if the dense checkpoint has no
    such weight."""
    # A dense file has no configuration beside it; the 4-bit checkpoint is of the same model.
    types = model_types(dense.config) or model_types(checkpoint.config)
    reference = _dense_of(weight, dense, types, stacks or {})
    return statistics_of(dequantize(weight.load(checkpoint), "fp32", threads=threads), reference)


def statistics_of(values: np.ndarray, reference: np.ndarray) -> ErrorStatistics:
    """Compares values with a reference of the same number of elements. Sums in float64, piece by
    piece."""
    values, reference = (np.ascontiguousarray(each).reshape(-1) for each in (values, reference))
    squared_error = squared_reference = max_abs = 0.0
    for start in range(0, values.size, _PIECE_ELEMENTS):
        piece = slice(start, start + _PIECE_ELEMENTS)
        exact = reference[piece].astype(np.float64)
        with np.errstate(invalid="ignore"):
            difference = values[piece] - exact
            # A BLAS dot product would start threads of its own.
            squared_error += float(np.square(difference).sum())
            squared_reference += float(np.square(exact).sum())
            max_abs = float(np.maximum(max_abs, np.abs(difference).max()))
    return ErrorStatistics(
        rms_relative=relative(squared_error, squared_reference),
        max_abs=max_abs,
        elements=values.size,
        squared_error=squared_error,
        squared_reference=squared_reference,
    )


def total(errors: Collection[ErrorStatistics]) -> ErrorStatistics:
    """Returns the statistics of several weights together."""
    squared_error = sum(error.squared_error for error in errors)
    squared_reference = sum(error.squared_reference for error in errors)
    return ErrorStatistics(
        rms_relative=relative(squared_error, squared_reference),
        max_abs=float(np.max([error.max_abs for error in errors])),
        elements=sum(error.elements for error in errors),
        squared_error=squared_error,
        squared_reference=squared_reference,
    )


def relative(squared_error: float, squared_reference: float) -> float:
    """sqrt(squared_error / squared_reference); 0 for 0 / 0, inf for other divisions by 0."""
    if squared_error == 0:
        return 0.0
    return math.sqrt(squared_error / squared_reference) if squared_reference else math.inf
