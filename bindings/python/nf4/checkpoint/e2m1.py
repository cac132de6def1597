"""MXFP4 and NVFP4 weights in a checkpoint: finds, checks and reads them. e2m1_layouts.py says how
their tensors are named, e2m1_config.py what config.json says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nf4.checkpoint.dtypes import model_dtype
from nf4.checkpoint.e2m1_config import Settings
from nf4.checkpoint.e2m1_layouts import BLOCKSIZES, FIELDS, GPT_OSS, LAYOUTS, MXFP4, Layout
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.fp8 import FP8, FP8_SCALES, fp8_weight
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.weights import Survey, Weight, fields_of
from nf4.tensor import QuantizedTensor
from nf4.typing import ScaleRuleName

# Tensors beside a weight that change nothing where activations and the KV cache have 16 bits.
_OF_ACTIVATIONS = (
    "input_scale", "input_global_scale", "k_scale", "v_scale", "k_bias", "v_bias"
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class E2m1State:
    """The facts about a weight that are known before its data is read. shape: (outputs, inputs), or
    (experts, outputs, inputs). format and nested_blocksize: as in nf4.QuantizedTensor; 0: one
    global scale. dtype: libnf4's name, of the dense weight."""

    layout: Layout
    shape: tuple[int, ...]
    blocksize: int
    dtype: str
    nested_blocksize: int = 0

    @property
    def format(self) -> str:
        return self.layout.format

    @property
    def scale_rule(self) -> ScaleRuleName | None:
        return self.layout.scale_rule


@dataclasses.dataclass(frozen=True)
class E2m1Weight(Weight):
    """A weight in MXFP4 or NVFP4. `parts` has "packed", "scales" and, for NVFP4, "global"."""

    state: E2m1State
    joins = True

    def describe(self) -> dict[str, Any]:
        return {
            "layout": self.state.layout.name,
            "blocksize": self.state.blocksize,
            "nested_blocksize": self.state.nested_blocksize,
            "scales_dtype": "e8m0" if self.format == MXFP4 else "e4m3 + fp32",
        }

    def global_scale(self, checkpoint: Checkpoint) -> np.ndarray | None:
        """Reads the fp32 scale of NVFP4, [1]."""
        if "global" not in self.parts:
            return None
        return checkpoint.read(self.parts["global"].name).view(np.float32)

    @property
    def stored_layout(self) -> str | None:
        return self.state.layout.name

    def stored(self, part: str) -> TensorInfo | None:
        """Scales of 8 bits are bytes, whatever their dtype."""
        names = {field: name for name, field in FIELDS.items()}
        info = self.parts.get(names.get(part, ""))
        if info is None or part == "packed":
            return info
        dtype, size = ("U8", info.nbytes) if part == "absmax" else (info.dtype, info.elements)
        return dataclasses.replace(info, dtype=dtype, shape=(size,))

    def whole_parts(self, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
        scale = self.global_scale(checkpoint)
        return {} if scale is None else {"nested_absmax": scale}

    def join(
        self, name: str, shape: tuple[int, ...], parts: tuple[tuple[E2m1Weight, ...], ...]
    ) -> E2m1Weight:
        for weight in (each for group in parts for each in group):
            for what in ("layout", "blocksize"):
                if getattr(weight.state, what) != getattr(self.state, what):
                    reason = f"its {what} is not that of {self.name}"
                    raise FormatError(weight.path, reason, weight.name)
        rows = math.gcd(*(group[0].shape[0] for group in parts)) if "global" in self.parts else 0
        state = dataclasses.replace(self.state, shape=shape, nested_blocksize=rows)
        infos = [info for group in parts for each in group for info in each.parts.values()]
        return _JoinedWeight(name, {info.name: info for info in infos}, self.path, state, parts)

    def read(self, checkpoint: Checkpoint, part: str) -> np.ndarray:
        """Reads the bytes of a part."""
        return checkpoint.read(self.parts[part].name)

    def load(self, checkpoint: Checkpoint) -> QuantizedTensor:
        packed = self.read(checkpoint, "packed")
        return dataclasses.replace(self.without_codes(checkpoint), packed=packed)

    def without_codes(self, checkpoint: Checkpoint) -> QuantizedTensor:
        """Reads the scales alone; `packed` is empty."""
        return QuantizedTensor(
            packed=np.empty(0, np.uint8),
            absmax=self.read(checkpoint, "scales"),
            nested_absmax=self.global_scale(checkpoint),
            **fields_of(self.state),
        )


@dataclasses.dataclass(frozen=True)
class _JoinedWeight(E2m1Weight):
    """A stack of experts of which the checkpoint stores a matrix each. matrices: the weights, as in
    stacks.Stack.parts: for each of the matrices of an expert, which follow each other along the
    outputs, those of all experts."""

    matrices: tuple[tuple[E2m1Weight, ...], ...]

    @property
    def stored_layout(self) -> None:
        return None  # no layout has a place for it

    def _in_order(self) -> list[E2m1Weight]:
        return [each for of_expert in zip(*self.matrices, strict=True) for each in of_expert]

    def global_scale(self, checkpoint: Checkpoint) -> np.ndarray | None:
        """Reads the fp32 scales of NVFP4, one for nested_blocksize rows."""
        rows = self.state.nested_blocksize
        if not rows:
            return None
        return np.concatenate(
            [
                np.repeat(weight.global_scale(checkpoint), weight.shape[0] // rows)
                for weight in self._in_order()
            ]
        )

    def read(self, checkpoint: Checkpoint, part: str) -> np.ndarray:
        every = [weight.read(checkpoint, part) for weight in self._in_order()]
        return np.concatenate(every).reshape(*self.shape[:2], -1)


def _blocksize(layout: Layout, shape: tuple[int, ...], scales: tuple[int, ...]) -> int:
    """Returns the blocksize of a weight with scales of this shape. Raises ValueError if it is not
    one of the format's."""
    cols, blocks = shape[-1], scales[-1] if scales else 0
    known = BLOCKSIZES[layout.format]
    for size in known:
        if size * blocks == cols:
            return size
    expected = " or ".join(f"{cols / size:g}" for size in known)
    raise ValueError(
        f"its {layout.names['scales'][1:]} has {blocks} scales for {cols} columns; expected "
        f"{expected}, in blocks of {' or '.join(map(str, known))} in the order of the columns"
    )


def _state(
    layout: Layout, parts: dict[str, TensorInfo], dtype: str, settings: Settings | None
) -> E2m1State:
    """Returns the state of a weight. Raises ValueError if its parts contradict each other or the
    settings."""
    if settings is not None and layout not in settings.layouts:
        said = ", ".join(f"{each.format} of {each.name}" for each in settings.layouts)
        raise ValueError(f"it is {layout.format} of {layout.name}, but {settings.file} says {said}")
    packed = parts["packed"]
    rank = 4 if layout.blocks else 2
    if len(packed.shape) != rank or 0 in packed.shape:
        raise ValueError(f"its codes are of shape {list(packed.shape)}; expected {rank} dimensions")
    shape = layout.shape(packed.shape)
    size = _blocksize(layout, shape, parts["scales"].shape)
    shapes = layout.shapes(shape, size)
    for part, name in layout.names.items():
        info = parts.get(part)
        if info is None:
            raise ValueError(f"its {name[1:]} is missing")
        if info.dtype != layout.dtypes[part]:
            raise ValueError(f"its {name[1:]} is {info.dtype}; expected {layout.dtypes[part]}")
        if not layout.fits(part, info, shapes):
            raise ValueError(
                f"its {name[1:]} is of shape {list(info.shape)}; expected {list(shapes[part])}"
            )
    if settings is not None and settings.blocksizes and size not in settings.blocksizes:
        said = ", ".join(map(str, settings.blocksizes))
        raise ValueError(f"its blocks have {size} columns, but {settings.file} says {said}")
    return E2m1State(layout, shape, size, dtype)


def _candidates(info: TensorInfo) -> list[Layout]:
    """The layouts in which a tensor of this name and dtype holds codes."""
    return [
        layout
        for layout in LAYOUTS
        if info.name.endswith(layout.names["packed"]) and info.dtype == layout.dtypes["packed"]
    ]


def _layout(
    checkpoint: Checkpoint, info: TensorInfo, settings: Settings | None
) -> tuple[Layout | None, str]:
    """Returns the layout of the weight whose codes may be in this tensor, by the dtype of its
    scales, and the module's name. None: no layout has such tensors."""
    layouts = _candidates(info)
    if not layouts:
        return None, ""
    module = info.name.removesuffix(layouts[0].names["packed"])
    scales = layouts[0].tensor(module, "scales")
    if scales in checkpoint:
        stored = checkpoint.info(scales).dtype
        fits = (layout for layout in layouts if layout.dtypes["scales"] == stored)
        found = next(fits, None)
        if found is not None:
            return found, module
    said = () if settings is None else settings.layouts
    return next((layout for layout in layouts if layout in said), None), module


def _weight(
    checkpoint: Checkpoint, layout: Layout, module: str, settings: Settings | None
) -> E2m1Weight:
    """Returns the weight of a module. Raises ValueError if it is not one."""
    name = f"{module}.weight"
    if name in checkpoint and layout.names["packed"] != ".weight":
        raise ValueError("it is there as a dense weight too")
    parts = {
        part: checkpoint.info(tensor)
        for part in layout.names
        if (tensor := layout.tensor(module, part)) in checkpoint
    }
    if "scales" not in parts:
        raise ValueError(f"its {layout.names['scales'][1:]} is missing")
    state = _state(layout, parts, model_dtype(checkpoint.config) or "bf16", settings)
    return E2m1Weight(name, parts, checkpoint.owner[parts["packed"].name].path, state)


def add_e2m1(found: Survey, checkpoint: Checkpoint, settings: Settings | None) -> None:
    """Moves the MXFP4 and NVFP4 weights of a checkpoint from the dense tensors of a survey to its
    weights. settings: None: the tensors' names and dtypes decide. Reads no data."""
    taken: set[str] = set()
    for tensor, info in list(found.dense.items()):
        layout, module = _layout(checkpoint, info, settings)
        if layout is None or not module:
            continue
        taken.update(layout.tensor(module, part) for part in layout.names)
        if layout is not GPT_OSS:
            taken.update(f"{module}.{name}" for name in _OF_ACTIVATIONS)
        try:
            weight = _weight(checkpoint, layout, module, settings)
        except ValueError as error:
            path = checkpoint.owner[tensor].path
            found.faults.append(FormatError(path, str(error), f"{module}.weight"))
        else:
            found.weights[weight.name] = weight
    for name in taken & found.dense.keys():
        del found.dense[name]
    found.faults += _orphans(found, checkpoint, settings)
    if settings is not None and settings.mixed:
        _add_fp8(found, checkpoint)


def _orphans(
    found: Survey, checkpoint: Checkpoint, settings: Settings | None
) -> Iterator[FormatError]:
    """Yields a fault for each part of a gpt-oss weight whose codes are missing. The names of the
    other layouts' parts are those that leftovers.py looks for."""
    if settings is None or GPT_OSS not in settings.layouts:
        return
    suffix = GPT_OSS.names["scales"]
    for name in [name for name in found.dense if name.endswith(suffix)]:
        module = name.removesuffix(suffix)
        reason = f"it has {suffix[1:]}, but no {GPT_OSS.names['packed'][1:]}"
        yield FormatError(checkpoint.owner[name].path, reason, f"{module}.weight")
        del found.dense[name]


def _add_fp8(found: Survey, checkpoint: Checkpoint) -> None:
    """Moves the FP8 weights of a mixed checkpoint from the dense tensors of a survey to `fp8`.
    Reads no data."""
    for name, info in list(found.dense.items()):
        if info.dtype != FP8 or not name.endswith(".weight"):
            continue
        try:
            found.fp8[name] = fp8_weight(checkpoint, info)
        except FormatError as error:
            found.faults.append(error)
        module = name.removesuffix(".weight")
        for part in ("weight", *FP8_SCALES, *_OF_ACTIVATIONS):
            found.dense.pop(f"{module}.{part}", None)
