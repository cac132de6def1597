"""Random changes to the files of a checkpoint: bytes, JSON values, and tensors."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

# The values that JSON values become.
_VALUES = (
    0, 1, -1, 2, 3, 7, 8, 63, 64, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**60, 2**62, 2**63 - 1,
    2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), None, True, False,
    "", "a", "\u0000", "\ud800", "nf4", "U8", "F32", "BF16", "F4", [], {}, [[]], [1, 2], {"a": 1},
    "x" * 300,
)  # fmt: skip
_DTYPES = ("U8", "I8", "F16", "BF16", "I32", "F32", "I64", "F64", "BOOL", "F8_E4M3", "F4", "C64")
Tensor = tuple[str, str, list[int], bytes]  # name, dtype, shape, data


def read_tensors(data: bytes) -> list[Tensor]:
    """Those of a valid file."""
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return [
        (name, info["dtype"], info["shape"], data[start + begin : start + end])
        for name, info in header.items()
        for begin, end in [info["data_offsets"]]
    ]


def write_tensors(tensors: list[Tensor]) -> bytes:
    header, data = {}, b""
    for name, dtype, shape, content in tensors:
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    return with_header(json.dumps(header).encode(), data)


def with_header(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


class Changes:
    """Changes by one generator of random numbers."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    def file(self, name: str, data: bytes) -> bytes:
        """Another content for a file of a checkpoint."""
        if self.rng.random() < 0.2:
            return self.bytes(data)
        if not name.endswith(".safetensors"):
            return self.text(data)
        if self.rng.random() < 0.4:
            start = 8 + struct.unpack("<Q", data[:8])[0]
            return with_header(self.text(data[8:start]), data[start:])
        return write_tensors(self.tensors(read_tensors(data)))

    def bytes(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self.rng.choice((1, 1, 2, 8))):
            at = self.rng.randrange(len(changed) + 1) if self.rng.random() < 0.5 else 0
            at = min(at + self.rng.randrange(16), len(changed))
            match self.rng.randrange(5):
                case 0:
                    changed[at : at + 1] = bytes([self.rng.randrange(256)])
                case 1:
                    del changed[at : at + self.rng.randrange(1, 20)]
                case 2:
                    changed[at:at] = self.rng.randbytes(self.rng.randrange(1, 20))
                case 3:
                    del changed[at:]
                case 4:
                    changed[at : at + 8] = struct.pack("<Q", self.rng.choice((0, 2**31, 2**64 - 1)))
        return bytes(changed)

    def text(self, data: bytes) -> bytes:
        """JSON of other values; now and then with a key twice, or deep."""
        document = json.loads(data)
        for _ in range(self.rng.choice((1, 1, 1, 2, 5))):
            document = self.value(document)
        text = json.dumps(document)
        match self.rng.randrange(40):
            case 0:
                text = text[:-1] + "," + text[1:]
            case 1:
                text = text.replace("{", '{"":' * 3000, 1) + "}" * 3000
            case 2:
                text = "\ufeff" + text
        return text.encode("utf-8", "surrogatepass")

    def value(self, value: Any) -> Any:
        """The same, but for one value somewhere in it."""
        inside = list(value) if isinstance(value, dict) else range(len(value or ())) \
            if isinstance(value, list) else ()  # fmt: skip
        if not inside or self.rng.random() < 0.1:
            return self.leaf(value)
        where = self.rng.choice(list(inside))
        kind = self.rng.randrange(12)
        if kind == 0:
            del value[where]
        elif kind == 1 and isinstance(value, dict):
            name = self.rng.choice(list(value)) + self.rng.choice(("", ".weight", "x"))
            value[name] = copy.deepcopy(value[where])
        elif kind == 2:
            value[where] = copy.deepcopy(value[self.rng.choice(list(inside))])
        else:
            value[where] = self.value(value[where])
        return value

    def leaf(self, value: Any) -> Any:
        if isinstance(value, int) and self.rng.random() < 0.5:
            return value + self.rng.choice((-8, -1, 1, 8, value))
        if isinstance(value, str) and value and self.rng.random() < 0.5:
            at = self.rng.randrange(len(value))
            return value[:at] + self.rng.choice(("", ".", "0", "é", value)) + value[at + 1 :]
        return copy.deepcopy(self.rng.choice(_VALUES))

    def tensors(self, tensors: list[Tensor]) -> list[Tensor]:
        """A valid file of other tensors: parts that are missing or do not fit each other."""
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            if not tensors:
                break
            at = self.rng.randrange(len(tensors))
            name, dtype, shape, data = tensors[at]
            match self.rng.randrange(7):
                case 0:
                    del tensors[at]
                case 1:
                    other = self.rng.choice(tensors)[0]
                    name = other.rpartition(".")[0] + "." + name.rpartition(".")[2]
                    tensors[at] = (name, dtype, shape, data)
                case 2:
                    tensors[at] = self._other_shape(name, dtype, shape, data)
                case 3:
                    tensors[at] = (name, self.rng.choice(_DTYPES), [len(data)], data)
                case 4:
                    tensors.append((name + self.rng.choice((".absmax", "x")), dtype, shape, data))
                case 5:
                    tensors[at] = (name, dtype, shape, self.rng.randbytes(len(data)))
                case 6 if data[:1] == b"{":  # a quant_state
                    text = self._state(data)
                    tensors[at] = (name, dtype, [len(text)], text)
        return tensors

    def _state(self, data: bytes) -> bytes:
        try:
            return self.text(data)
        except ValueError:  # it was changed before
            return self.bytes(data)

    def _other_shape(self, name: str, dtype: str, shape: list[int], data: bytes) -> Tensor:
        """As many elements, or fewer."""
        match self.rng.randrange(4):
            case 0:
                return name, dtype, shape[::-1], data
            case 1:
                return name, dtype, [*shape, 1], data
            case 2 if len(shape) > 1:
                return name, dtype, [shape[0] * shape[1], *shape[2:]], data
            case 3 if shape and shape[0] > 1:
                rows = self.rng.randrange(shape[0])
                return name, dtype, [rows, *shape[1:]], data[: len(data) // shape[0] * rows]
        return name, dtype, shape, data
