"""4-bit integer weights of GPTQ, AWQ and compressed-tensors in a checkpoint: finds, checks and
reads them. int4_layouts.py says how a layout's bytes lie, int4_config.py what config.json says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from nf4.checkpoint.dtypes import FILE_TO_NF4, model_dtype
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.int4_config import Settings
from nf4.checkpoint.int4_layouts import (
    AWQ,
    COMPRESSED_TENSORS,
    GPTQ,
    GPTQ_V2,
    SYMMETRIC_ZERO,
    Layout,
)
from nf4.checkpoint.quantization import quantization
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.weights import Survey, Weight
from nf4.int4 import Int4Tensor

_SCALES = {"F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_INTEGERS = {"I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}
# The dtypes of the parts, by safetensors' names.
_DTYPES = {"packed": ("I32",), "scales": tuple(_SCALES), "zeros": ("I32",), "g_idx": ("I32",)}
# Symmetric weights are labelled as the one though their zero points are those of the other.
_CONFUSED = {GPTQ.name: GPTQ_V2, GPTQ_V2.name: GPTQ}
# The warning for integers without settings.
ASSUMED = "nothing tells gptq from gptq_v2 here; gptq is assumed"
# A warning for zero points of 0 in GPTQ v1.
BORROWS = (
    "which borrow from the next one in a word of gptq: GPTQModel and libnf4 read that, programs "
    "that add 1 to each stored one do not (gptq_v2 has no such case)"
)


@dataclasses.dataclass(frozen=True)
class Int4State:
    """The facts about a weight that are known before its data is read. shape: (outputs, inputs).
    group_size -1: the whole row. dtype: libnf4's name, of the dense weight. symmetric and
    act_order: what the file says that describes the quantization, or None."""

    layout: Layout
    shape: tuple[int, int]
    group_size: int
    dtype: str
    symmetric: bool | None = None
    act_order: bool | None = None
    file: str = "config.json"

    @property
    def groups(self) -> int:
        """The number of groups in a row."""
        return 1 if self.group_size == -1 else self.shape[1] // self.group_size


@dataclasses.dataclass(frozen=True)
class Int4Weight(Weight):
    """A weight of 4-bit integers. `parts` has "packed", "scales" and, where the file has them,
    "zeros", "g_idx" and "shape"."""

    state: Int4State

    @property
    def format(self) -> str:
        return "int4"

    @property
    def shape(self) -> tuple[int, int]:
        return self.state.shape

    def describe(self) -> dict[str, Any]:
        return {
            "layout": self.state.layout.name,
            "group_size": self.state.group_size,
            "scales_dtype": FILE_TO_NF4[self.parts["scales"].dtype],
            "zero_points": "zeros" in self.parts,
            "g_idx": "g_idx" in self.parts,
        }

    def words(self, checkpoint: Checkpoint, part: str = "packed") -> np.ndarray:
        """Reads an int32 part as it is stored."""
        info = self.parts[part]
        return checkpoint.read(info.name).view(np.int32).reshape(info.shape)

    def scales(self, checkpoint: Checkpoint) -> np.ndarray:
        """Reads the scales as they are stored."""
        info = self.parts["scales"]
        return checkpoint.read(info.name).view(_SCALES[info.dtype]).reshape(info.shape)

    def zeros(self, checkpoint: Checkpoint) -> np.ndarray | None:
        """Reads the zero points, uint8 [groups, rows]; None if the file has none and all are 8.
        Raises FormatError if they contradict config.json."""
        if "zeros" not in self.parts:
            return None
        return self.check_zeros(self.words(checkpoint, "zeros"))

    def check_zeros(self, words: np.ndarray) -> np.ndarray:
        """Returns the zero points, as `zeros` does, from words of all rows of some or all
        groups."""
        found = self.state.layout.zeros(words, self.shape[0])
        self._require(self._zeros_problem(found) if self.state.symmetric else None)
        return found

    def zero_points(self, checkpoint: Checkpoint) -> np.ndarray:
        """Like `zeros`, but returns zero points of 8 if the file has none."""
        found = self.zeros(checkpoint)
        if found is None:
            found = np.full((self.state.groups, self.shape[0]), SYMMETRIC_ZERO, np.uint8)
        return found

    def g_idx(self, checkpoint: Checkpoint) -> np.ndarray | None:
        """Reads the group of each column, int32 [cols]; None if that is column / group_size. Raises
        FormatError if it has other groups or groups of other sizes."""
        if "g_idx" not in self.parts:
            return None
        found, groups = self.words(checkpoint, "g_idx"), self.state.groups
        size = self.shape[1] // groups
        outside = (found < 0) | (found >= groups)
        if outside.any():
            first = int(outside.argmax())
            self._require(f"g_idx[{first}] is {found[first]}, but its groups are 0 to {groups - 1}")
        counts = np.bincount(found, minlength=groups)
        if (counts != size).any():
            group = int((counts != size).argmax())
            self._require(f"g_idx: group {group} has {counts[group]} columns, not {size}")
        return None if np.array_equal(found, np.arange(self.shape[1]) // size) else found

    def codes(self, checkpoint: Checkpoint) -> np.ndarray:
        """Returns the codes, uint8 [rows, cols]."""
        return self.state.layout.codes(self.words(checkpoint), self.shape)

    def load(self, checkpoint: Checkpoint) -> Int4Tensor:
        self.zeros(checkpoint)
        return Int4Tensor(
            layout=self.state.layout.name,
            shape=self.shape,
            group_size=self.state.group_size,
            packed=self.words(checkpoint),
            scales=self.scales(checkpoint),
            zeros=self.words(checkpoint, "zeros") if "zeros" in self.parts else None,
            g_idx=self.g_idx(checkpoint),
        )

    def _require(self, problem: str | None) -> None:
        if problem is not None:
            raise FormatError(self.path, problem, self.name)

    def _zeros_problem(self, zeros: np.ndarray) -> str | None:
        """Says how the zero points of a symmetric weight contradict its layout."""
        wrong = zeros != SYMMETRIC_ZERO
        if not wrong.any():
            return None
        layout = self.state.layout
        other = labelled_as_other(layout, zeros)
        if other is not None:
            return (
                f"{self.state.file} says {layout.name} and symmetric, but its zero points are "
                f"those of {other.name}: checkpoint_format should be {other.name}"
            )
        return (
            f"{self.state.file} says symmetric, but {np.count_nonzero(wrong)} of {zeros.size} zero "
            "points are not 8"
        )


def is_assumed(checkpoint: Checkpoint, found: Survey) -> bool:
    """Tells if nothing distinguishes gptq from gptq_v2."""
    return quantization(checkpoint) is None and any(
        isinstance(weight, Int4Weight) and weight.state.layout is GPTQ
        for weight in found.weights.values()
    )


def labelled_as_other(layout: Layout, zeros: np.ndarray) -> Layout | None:
    """Returns the other version of GPTQ if these zero points, read by `layout`, are those of
    symmetric weights of the other version."""
    other = _CONFUSED.get(layout.name)
    if other is None or not zeros.size:
        return None
    theirs = SYMMETRIC_ZERO + (1 if layout is GPTQ else -1)
    return other if (zeros == theirs).all() else None


def _layout_by_shapes(parts: dict[str, TensorInfo]) -> Layout:
    """Tells GPTQ from AWQ without config.json. Both have the same names."""
    packed, scales = parts["packed"].shape[-1:], parts.get("scales", parts["packed"]).shape[-1:]
    is_awq = "g_idx" not in parts and bool(packed) and scales == (8 * packed[0],)
    return AWQ if is_awq else GPTQ


def _stored_shape(checkpoint: Checkpoint, info: TensorInfo) -> tuple[int, int]:
    """Returns the shape in weight_shape. Raises ValueError if it is not a shape."""
    if info.dtype not in _INTEGERS or info.shape != (2,):
        raise ValueError(f"its weight_shape is {info.dtype} of shape {list(info.shape)}, not 2 I64")
    rows, cols = map(int, checkpoint.read(info.name).view(_INTEGERS[info.dtype]))
    if min(rows, cols) < 0 or rows * cols > 2**60:
        raise ValueError(f"its weight_shape is [{rows}, {cols}]")
    return rows, cols


def _group_size(cols: int, groups: int, said: Settings) -> int:
    """Returns the group size of a weight with this number of groups. Raises ValueError if there is
    none."""
    for size in said.group_sizes:
        if (size == -1 and groups == 1) or (size > 0 and size * groups == cols):
            return size
    if said.group_sizes:
        size = said.group_sizes[0]
        if size > 0 and cols % size:
            raise ValueError(
                f"the group size {size} of {said.file} does not divide its {cols} columns"
            )
        expected = 1 if size == -1 else cols // size
        raise ValueError(
            f"its scales have {groups} groups, but the group size {size} of {said.file} gives "
            f"{expected}"
        )
    if groups == 1:
        return -1
    if groups == 0 or cols % groups:
        raise ValueError(f"its scales have {groups} groups, which do not divide its {cols} columns")
    return cols // groups


def _state(checkpoint: Checkpoint, parts: dict[str, TensorInfo], said: Settings) -> Int4State:
    """Returns the state of a weight from the sizes of its parts. Raises ValueError if they are
    wrong."""
    layout = said.layout
    for part in ("packed", "scales", *(("shape",) if "shape" in layout.names else ())):
        if part not in parts:
            raise ValueError(f"its {layout.names[part]} is missing")
    for part, dtypes in _DTYPES.items():
        info = parts.get(part)
        if info is not None and info.dtype not in dtypes:
            raise ValueError(
                f"its {layout.names[part]} is {info.dtype}; expected {' or '.join(dtypes)}"
            )
        if info is not None and part != "g_idx" and len(info.shape) != 2:
            raise ValueError(f"its {layout.names[part]} has {len(info.shape)} dimensions, not 2")
    if "shape" in parts:
        shape = _stored_shape(checkpoint, parts["shape"])
    else:
        first, second = parts["packed"].shape
        shape = (8 * second, first) if layout.along_rows else (second, 8 * first)
    if 0 in shape:
        raise ValueError(f"its shape {list(shape)} is empty")
    groups = parts["scales"].shape[1 if layout.by_row else 0]
    size = _group_size(shape[1], groups, said)
    if size != -1 and size % 8:
        raise ValueError(f"its group size {size} is not a multiple of 8")
    dtype = model_dtype(checkpoint.config) or FILE_TO_NF4[parts["scales"].dtype]
    return Int4State(layout, shape, size, dtype, said.symmetric, said.act_order, said.file)


def _part_problems(state: Int4State, parts: dict[str, TensorInfo]) -> Iterator[str]:
    """Yields how the parts contradict the shape and the group size."""
    names = state.layout.names
    shapes = state.layout.shapes(state.shape, state.groups)
    for part, info in parts.items():
        if part in shapes and info.shape != shapes[part]:
            group = "of the whole row" if state.group_size == -1 else f"of {state.group_size}"
            yield (
                f"its {names[part]} has shape {list(info.shape)}, but {list(state.shape)} in "
                f"groups {group} takes {list(shapes[part])}"
            )
    if state.layout is COMPRESSED_TENSORS:
        if state.symmetric and "zeros" in parts:
            yield f"it has a weight_zero_point, but {state.file} says symmetric"
        if state.symmetric is False and "zeros" not in parts:
            yield f"its weight_zero_point is missing, and {state.file} says asymmetric"
    elif "zeros" not in parts and not (state.layout is AWQ and state.symmetric):
        yield "its qzeros is missing"


def _weight(
    checkpoint: Checkpoint, module: str, names: dict[str, str], settings: Settings | None
) -> tuple[Int4Weight | None, list[str]]:
    """Returns the weight of a module whose tensors have these names, or what is wrong."""
    parts = {
        part: checkpoint.info(f"{module}.{name}")
        for part, name in names.items()
        if f"{module}.{name}" in checkpoint
    }
    name = f"{module}.weight"
    if name in checkpoint:
        return None, ["it is there as a dense weight too"]
    by_names = COMPRESSED_TENSORS if "shape" in names else _layout_by_shapes(parts)
    said = settings or Settings(by_names)
    layout = said.layout
    if layout.names["packed"] != names["packed"]:
        return None, [f"it has {names['packed']}, but {said.file} says {layout.name}"]
    if "g_idx" in parts and "g_idx" not in layout.names:
        return None, [f"it has g_idx, which {layout.name} does not support"]
    try:
        state = _state(checkpoint, parts, said)
    except ValueError as error:
        return None, [str(error)]
    problems = list(_part_problems(state, parts))
    path = checkpoint.owner[parts["packed"].name].path
    return (None if problems else Int4Weight(name, parts, path, state)), problems


def add_integers(found: Survey, checkpoint: Checkpoint, settings: Settings | None) -> None:
    """Move the integer weights of a checkpoint from the dense tensors of a survey to its weights.
    settings: those of config.json; None: the tensors' names and shapes decide. Reads only
    weight_shape."""
    families = {kind.names["packed"]: kind.names for kind in (GPTQ, COMPRESSED_TENSORS)}
    taken: set[str] = set()
    for tensor in list(found.dense):
        module, _, last = tensor.rpartition(".")
        names = families.get(last)
        if names is None or not module:
            continue
        weight, problems = _weight(checkpoint, module, names, settings)
        taken.update(f"{module}.{name}" for name in names.values())
        if weight is not None:
            found.weights[weight.name] = weight
        path = checkpoint.owner[tensor].path
        found.faults += [FormatError(path, problem, f"{module}.weight") for problem in problems]
    for name in taken & found.dense.keys():
        del found.dense[name]
    _find_orphans(found, checkpoint, settings)


def _find_orphans(found: Survey, checkpoint: Checkpoint, settings: Settings | None) -> None:
    """Reports a fault for each part of an integer weight whose codes are missing."""
    for layout in (settings.layout,) if settings is not None else (GPTQ, COMPRESSED_TENSORS):
        marks = {n: p for p, n in layout.names.items() if n not in ("scales", "weight_scale")}
        for tensor in list(found.dense):
            module, _, last = tensor.rpartition(".")
            if last in marks and f"{module}.weight" not in checkpoint:
                reason = f"it has {last}, but no {layout.names['packed']}"
                path = checkpoint.owner[tensor].path
                found.faults.append(FormatError(path, reason, f"{module}.weight"))
                del found.dense[tensor]
