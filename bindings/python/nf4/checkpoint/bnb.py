"""bitsandbytes' 4-bit layout in a checkpoint: finds, checks and reads weights, and plans the
tensors of new ones.

A 4-bit weight P consists of several tensors: `P` (packed bytes, perhaps viewed as a float type),
`P.absmax`, `P.quant_map`, with double quantization also `P.nested_absmax` and `P.nested_quant_map`,
and `P.quant_state.bitsandbytes__nf4` (or `__fp4`), which is JSON as bytes.

libnf4 writes the weights of a state_dict in MXFP4 and NVFP4 in the same way: `P.absmax` has bytes,
`P.nested_absmax` the global scales of NVFP4, and there is no table.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np

from nf4._formats import ROWS, SCALE_RULES, has_global_scales
from nf4._quantize import quantize
from nf4.checkpoint.dtypes import BITS, NF4_TO_TORCH, NUMPY, STORAGE, STORAGE_NAMES, TORCH_TO_NF4
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.header import MAX_RANK, TensorInfo, TensorSpec
from nf4.checkpoint.jsonio import is_count, parse_object
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.weights import Survey, Weight, fields_of
from nf4.info import codebook
from nf4.tensor import QuantizedTensor
from nf4.typing import ScaleRuleName

FORMATS = tuple(ROWS)
NESTED_BLOCKSIZE = 256
STATE_MARK = ".quant_state.bitsandbytes__"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
# bitsandbytes makes quant_map in torch's default dtype, and never reads it.
_TABLE_DTYPES = ("F32", "F16", "BF16", "F64")
# bitsandbytes' own quant_states have about 180 bytes.
_MAX_STATE_BYTES = 65536
_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class State:
    """A weight's quant_state. dtype and shape are those of the dense weight, shape is (outputs,
    inputs). nested_blocksize 0: absmax is float32, nested_offset unused. In MXFP4 and NVFP4
    absmax is always bytes; nested_blocksize and scale_rule are those of nf4.QuantizedTensor."""

    format: str
    blocksize: int
    dtype: str
    shape: tuple[int, ...]
    nested_blocksize: int = 0
    nested_offset: float = 0.0
    scale_rule: ScaleRuleName | None = None

    @property
    def nested(self) -> bool:
        return self.nested_blocksize != 0 and not self.scale_bytes

    @property
    def scale_bytes(self) -> bool:
        """Whether the scales are floats of 8 bits."""
        return self.format in SCALE_RULES

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def blocks(self) -> int:
        return -(-self.elements // self.blocksize)

    @property
    def packed_bytes(self) -> int:
        return (self.elements + 1) // 2

    def tables(self) -> dict[str, tuple[str, int]]:
        """Returns the parts other than packed bytes and quant_state: name -> (dtype, elements)."""
        if self.scale_bytes:
            rows = math.prod(self.shape[:-1])
            globals = -(-rows // self.nested_blocksize) if self.nested_blocksize else 1
            outer = {"nested_absmax": ("F32", globals)} if has_global_scales(self.format) else {}
            return {"absmax": ("U8", self.blocks), **outer}
        if not self.nested:
            return {"absmax": ("F32", self.blocks), "quant_map": ("F32", 16)}
        return {
            "absmax": ("U8", self.blocks),
            "quant_map": ("F32", 16),
            "nested_absmax": ("F32", -(-self.blocks // self.nested_blocksize)),
            "nested_quant_map": ("F32", 256),
        }

    def to_json(self) -> bytes:
        """Returns the JSON as bitsandbytes writes it, padded with spaces to a length that does not
        depend on nested_offset, so that a file's layout is known before its data."""
        fields: dict[str, Any] = {
            "quant_type": self.format,
            "blocksize": self.blocksize,
            "dtype": NF4_TO_TORCH[self.dtype],
            "shape": list(self.shape),
        }
        if self.scale_bytes:
            fields |= {"rows_of_a_global_scale": self.nested_blocksize}
            fields |= {"scale_rule": self.scale_rule} if self.scale_rule else {}
        if not self.nested:
            return json.dumps(fields).encode()
        fields |= {"nested_blocksize": self.nested_blocksize, "nested_dtype": "float32"}
        longest = len(json.dumps(fields | {"nested_offset": -1.7976931348623157e308}))
        return json.dumps(fields | {"nested_offset": self.nested_offset}).ljust(longest).encode()


@dataclasses.dataclass(frozen=True)
class BnbWeight(Weight):
    """A weight in bitsandbytes' layout. `parts` maps "", "absmax", ... to tensors of the file."""

    state: State

    @property
    def packed(self) -> TensorInfo:
        return self.parts[""]

    @property
    def storage(self) -> str:
        """The dtype as which the packed bytes are viewed, by torch's name."""
        return STORAGE_NAMES[self.packed.dtype]

    def describe(self) -> dict[str, Any]:
        return {
            "blocksize": self.state.blocksize,
            "nested_blocksize": self.state.nested_blocksize,
            "quant_storage": self.storage,
        }

    def stored(self, part: str) -> TensorInfo | None:
        return self.parts.get({"packed": "", "nested_code": "nested_quant_map"}.get(part, part))

    def whole_parts(self, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
        offset = np.array([self.state.nested_offset], np.float32)
        return {"nested_offset": offset} if self.state.nested else {}

    def own_codebook(self, checkpoint: Checkpoint) -> np.ndarray | None:
        """Returns quant_map as float32; None if it is the format's codebook in quant_map's
        dtype, or if there is none."""
        info = self.parts.get("quant_map")
        if info is None:
            return None
        table = checkpoint.read(info.name).view(NUMPY[info.dtype])
        standard = codebook(self.state.format).astype(table.dtype)
        return None if np.array_equal(table, standard) else table.astype(np.float32)

    def load(self, checkpoint: Checkpoint) -> QuantizedTensor:
        """Reads the weight. A quant_map other than the format's codebook becomes the tensor's
        codebook: the file's values decide."""

        def floats(part: str) -> np.ndarray:
            return checkpoint.read(self.parts[part].name).view(np.float32)

        state, nested = self.state, self.state.nested
        as_bytes = nested or state.scale_bytes
        return QuantizedTensor(
            packed=checkpoint.read(self.name),
            absmax=checkpoint.read(self.parts["absmax"].name) if as_bytes else floats("absmax"),
            nested_absmax=floats("nested_absmax") if "nested_absmax" in self.parts else None,
            nested_code=floats("nested_quant_map") if nested else None,
            nested_offset=np.array([state.nested_offset], np.float32) if nested else None,
            codebook=self.own_codebook(checkpoint),
            **fields_of(state),
        )


def _power_of_two(value: object, low: int, high: int) -> bool:
    return is_count(value) and low <= value <= high and value & (value - 1) == 0


def parse_state(fields: dict[str, Any], format: str) -> State:
    """Returns a State from quant_state's JSON. Raises ValueError naming a wrong field."""
    if fields.get("quant_type") != format:
        raise ValueError(f"quant_type {fields.get('quant_type')!r} under a key for {format!r}")
    size = fields.get("blocksize")
    if format in SCALE_RULES:
        if type(size) is not int or size not in ROWS[format].blocksizes:
            raise ValueError(f"blocksize {size!r} is not one of {format}")
    elif not _power_of_two(size, 32, 4096):
        raise ValueError(f"blocksize {size!r} is not a power of two, 32..4096")
    dtype = TORCH_TO_NF4.get(str(fields.get("dtype")))
    if dtype is None:
        raise ValueError(f"dtype {fields.get('dtype')!r} is not float32, float16 or bfloat16")
    shape = fields.get("shape")
    if not isinstance(shape, list) or not shape or not all(is_count(size) for size in shape):
        raise ValueError(f"shape {shape!r} is not a list of sizes")
    if len(shape) > MAX_RANK:
        raise ValueError(f"shape of {len(shape)} dimensions; at most {MAX_RANK} are read")
    if math.prod(size or 1 for size in shape) > 2**60:
        raise ValueError(f"shape {shape} overflows")
    state = State(format, fields["blocksize"], dtype, tuple(shape))
    if state.scale_bytes:
        return _with_global_scales(state, fields)
    if not any(key.startswith("nested_") for key in fields):
        return state
    if not _power_of_two(fields.get("nested_blocksize"), 1, 2**30):
        raise ValueError(
            f"nested_blocksize {fields.get('nested_blocksize')!r} is not a power of two"
        )
    if fields.get("nested_dtype") != "float32":
        raise ValueError(f"nested_dtype {fields.get('nested_dtype')!r} is not float32")
    offset = fields.get("nested_offset")
    if type(offset) not in (int, float) or not abs(offset) <= _LARGEST:
        raise ValueError(f"nested_offset {offset!r} is not a float32")
    return dataclasses.replace(
        state, nested_blocksize=fields["nested_blocksize"], nested_offset=float(offset)
    )


def _with_global_scales(state: State, fields: dict[str, Any]) -> State:
    """Returns the state of a weight in MXFP4 or NVFP4. Raises ValueError naming a wrong field."""
    if state.shape[-1] % state.blocksize:
        raise ValueError(f"shape {list(state.shape)} has rows that are not whole blocks")
    rows, rule = fields.get("rows_of_a_global_scale", 0), fields.get("scale_rule")
    has_globals = has_global_scales(state.format)
    if not is_count(rows) or rows >= 2**31 or (rows and not has_globals):
        raise ValueError(f"rows_of_a_global_scale {rows!r} is not a number of rows")
    if rule is not None and not (has_globals and rule in [*SCALE_RULES[state.format]]):
        raise ValueError(f"scale_rule {rule!r} is not one of {state.format}")
    return dataclasses.replace(state, nested_blocksize=rows, scale_rule=rule)


def _part_problems(state: State, parts: dict[str, TensorInfo]) -> list[str]:
    """Lists how the tensors of a weight contradict its quant_state."""
    expected = state.tables()
    problems = []
    for part, (dtype, elements) in expected.items():
        info = parts.get(part)
        if info is None:
            problems.append(f"its {part} is missing")
        elif (info.dtype, info.elements) != (dtype, elements) and not (
            part == "quant_map" and info.dtype in _TABLE_DTYPES and info.elements == elements
        ):
            problems.append(
                f"its {part} is {info.dtype} of {info.elements}, "
                f"but its quant_state requires {dtype} of {elements}"
            )
    for part in parts.keys() & set(_PARTS) - expected.keys():
        problems.append(f"it has {part}, but its quant_state is not nested")
    packed = parts[""]
    if packed.dtype not in STORAGE_NAMES:
        problems.append(f"packed bytes cannot be stored as {packed.dtype}")
    elif packed.nbytes != state.packed_bytes:
        problems.append(
            f"{packed.nbytes} packed bytes, but shape {list(state.shape)} takes "
            f"{state.packed_bytes}"
        )
    elif len(packed.shape) != 2 or packed.shape[1] != 1:
        problems.append(f"packed bytes of shape {list(packed.shape)}; expected a single column")
    return problems


def _weight(
    checkpoint: Checkpoint, name: str, keys: list[str]
) -> tuple[BnbWeight | None, list[str]]:
    """Returns the 4-bit weight `name`, whose quant_state tensors are `keys`, or what is wrong."""
    if len(keys) > 1:
        return None, [f"it has {len(keys)} quant_states"]
    if name not in checkpoint:
        return None, ["it has a quant_state, but its packed bytes are missing"]
    format = keys[0].removeprefix(name + STATE_MARK)
    info = checkpoint.info(keys[0])
    if format not in FORMATS:
        return None, [f"its quant_state is for {format!r}; expected {', '.join(FORMATS)}"]
    if info.dtype != "U8" or info.nbytes > _MAX_STATE_BYTES:
        return None, [f"its quant_state is {info.dtype} of {info.nbytes} bytes, not JSON as U8"]
    file = checkpoint.owner[keys[0]]
    try:
        fields = parse_object(bytes(file.read(info)), file.path, "its quant_state", name)
        state = parse_state(fields, format)
    except FormatError as error:
        return None, [error.reason]
    except ValueError as error:
        return None, [f"its quant_state: {error}"]
    parts = {"": checkpoint.info(name), "quant_state": info}
    for part in _PARTS:
        if f"{name}.{part}" in checkpoint:
            parts[part] = checkpoint.info(f"{name}.{part}")
    problems = _part_problems(state, parts)
    return (
        None if problems else BnbWeight(name, parts, checkpoint.owner[name].path, state)
    ), problems


def survey(checkpoint: Checkpoint) -> Survey:
    """Finds the 4-bit weights of a checkpoint. Reads only the quant_states."""
    states: dict[str, list[str]] = {}
    for name in checkpoint.owner:
        base, mark, _ = name.rpartition(STATE_MARK)
        if mark:
            states.setdefault(base, []).append(name)
    result = Survey()
    taken: set[str] = set()
    for name, keys in states.items():
        weight, problems = _weight(checkpoint, name, keys)
        taken.update(keys, {name}, {f"{name}.{part}" for part in _PARTS})
        if weight is not None:
            result.weights[name] = weight
        path = checkpoint.owner[keys[0]].path
        result.faults += [FormatError(path, problem, name) for problem in problems]
    for file, info in checkpoint.tensors():
        if info.name in taken:
            continue
        base, _, part = info.name.rpartition(".")
        if part in _PARTS and (base in checkpoint or base.endswith(".weight")):
            result.faults.append(FormatError(file.path, f"it has {part}, but no quant_state", base))
            continue
        result.dense[info.name] = info
    return result


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tensors of a 4-bit weight to be written. storage: torch's name of the dtype as which
    packed bytes are viewed."""

    name: str
    state: State
    storage: str = "uint8"

    def storage_problem(self) -> str | None:
        """Says why the packed bytes cannot be viewed as `storage`; None if they can."""
        itemsize, packed = BITS[STORAGE[self.storage]] // 8, self.state.packed_bytes
        if packed % itemsize:
            return f"{packed} packed bytes cannot be stored as {self.storage} of {itemsize} bytes"
        return None

    def specs(self) -> list[TensorSpec]:
        state, name, dtype = self.state, self.name, STORAGE[self.storage]
        packed = state.packed_bytes * 8 // BITS[dtype]
        return [
            TensorSpec(name, dtype, (packed, 1)),
            TensorSpec(f"{name}{STATE_MARK}{state.format}", "U8", (len(state.to_json()),)),
            *(
                TensorSpec(f"{name}.{part}", dtype, (elements,))
                for part, (dtype, elements) in state.tables().items()
            ),
        ]

    def quantize(self, array: np.ndarray, threads: int) -> QuantizedTensor:
        state = self.state
        return quantize(
            array,
            format=state.format,
            blocksize=state.blocksize,
            nested_blocksize=state.nested_blocksize,
            threads=threads,
        )

    def parts(self, weight: QuantizedTensor) -> dict[str, np.ndarray | bytes]:
        """The data of `specs`: tensor name -> bytes."""
        name, state = self.name, self.state
        data: dict[str, np.ndarray | bytes] = {
            name: weight.packed,
            f"{name}.absmax": weight.absmax,
        }
        if not state.scale_bytes:
            # bitsandbytes writes FP4's code 8 as +0, though its CUDA kernels decode it as -0, as we
            # do.
            data[f"{name}.quant_map"] = codebook(state.format) + np.float32(0)
        if weight.nested_absmax is not None:
            data[f"{name}.nested_absmax"] = weight.nested_absmax
        if weight.nested:
            offset = float(np.asarray(weight.nested_offset).reshape(-1)[0])
            state = dataclasses.replace(state, nested_offset=offset)
            data[f"{name}.nested_quant_map"] = weight.nested_code
        data[f"{name}{STATE_MARK}{state.format}"] = state.to_json()
        return data
