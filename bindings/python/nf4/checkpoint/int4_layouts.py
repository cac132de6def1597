"""The byte layouts of 4-bit integer weights: the names of the tensors, the order of the codes in
their words, and repacking between layouts in numpy. nf4.h has the table."""

from __future__ import annotations

import dataclasses

import numpy as np

_CODES_IN_A_WORD = 8
_PLAIN = (0, 1, 2, 3, 4, 5, 6, 7)
# The zero point of symmetric weights.
SYMMETRIC_ZERO = 8


@dataclasses.dataclass(frozen=True)
class Layout:
    """name         the name for nf4.Int4Tensor.layout and `nf4 convert --to`
    names        part -> the name of its tensor in a module
    order        code i of a word is element order[i] of its eight
    along_rows   a word of codes has eight rows of one column, else eight columns of one row
    by_row       scales are [rows, groups] and words of codes follow the rows, else transposed
    zeros_less   the number subtracted from each word of zero points; a zero point of 0 borrows from
                 the next one
    """

    name: str
    names: dict[str, str]
    order: tuple[int, ...] = _PLAIN
    along_rows: bool = False
    by_row: bool = False
    zeros_less: int = 0

    @property
    def suffix(self) -> str:
        """The last part of the name of the tensor with the codes."""
        return "." + self.names["packed"]

    def tensor(self, module: str, part: str) -> str:
        """Returns the name of a part of a module's weight."""
        return f"{module}.{self.names[part]}"

    def misfit(self, shape: tuple[int, int]) -> str | None:
        """Says why this layout cannot hold a weight of this shape; None if it can."""
        if self.along_rows and shape[0] % _CODES_IN_A_WORD:
            return f"{self.name} has words of 8 rows, and {shape[0]} rows are not a multiple"
        if not (self.along_rows or self.by_row) and shape[1] % _CODES_IN_A_WORD:
            return f"{self.name} has words of 8 columns, and {shape[1]} are not a multiple"
        return None

    def shapes(self, shape: tuple[int, int], groups: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the parts of a weight with this many groups in a row."""
        rows, cols = shape
        row_words, col_words = (-(-extent // _CODES_IN_A_WORD) for extent in shape)
        if self.by_row:
            found = ((rows, col_words), (rows, groups), (row_words, groups))
        else:
            packed = (cols, row_words) if self.along_rows else (col_words, rows)
            found = (packed, (groups, rows), (groups, row_words))
        return {**dict(zip(("packed", "scales", "zeros"), found, strict=True)), "g_idx": (cols,)}

    def codes(self, packed: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        """Returns the codes, uint8 [rows, cols], from the words."""
        if self.along_rows:
            return _unpack(packed, shape[0], self.order).T
        return _unpack(packed if self.by_row else packed.T, shape[1], self.order)

    def packed(self, codes: np.ndarray) -> np.ndarray:
        """Returns the words of codes, uint8 [rows, cols]. Codes past the end are 0."""
        words = _pack(codes.T if self.along_rows else codes, self.order)
        return words if self.along_rows or self.by_row else np.ascontiguousarray(words.T)

    def zeros(self, stored: np.ndarray, rows: int) -> np.ndarray:
        """Returns the zero points, uint8 [groups, rows], from the words."""
        words = np.ascontiguousarray(stored.T if self.by_row else stored).view(np.uint32)
        return _unpack(words + np.uint32(self.zeros_less), rows, self.order)

    def stored_zeros(self, zeros: np.ndarray) -> np.ndarray:
        """Returns the words of zero points, uint8 [groups, rows]. Zero points past the end are
        0."""
        words = _pack(zeros, self.order).view(np.uint32) - np.uint32(self.zeros_less)
        words = words.view(np.int32)
        return np.ascontiguousarray(words.T) if self.by_row else words

    def same_words(self, other: Layout) -> bool:
        """Tells if both layouts store the words of codes as the same bytes."""
        return (self.order, self.along_rows, self.by_row) == (
            other.order,
            other.along_rows,
            other.by_row,
        )


def _unpack(words: np.ndarray, count: int, order: tuple[int, ...]) -> np.ndarray:
    """Unpacks 32-bit words [..., words] to uint8 [..., count]: code i is bits 4 i to 4 i + 3 of a
    word."""
    pairs = np.ascontiguousarray(words).view(np.uint8)
    codes = np.stack((pairs & 15, pairs >> 4), axis=-1).reshape(*words.shape, _CODES_IN_A_WORD)
    if order != _PLAIN:
        codes = codes[..., np.argsort(order)]
    return codes.reshape(*words.shape[:-1], -1)[..., :count]


def _pack(codes: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """The inverse: uint8 [..., count] as int32 [..., ceil(count / 8)]."""
    padding = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % _CODES_IN_A_WORD)]
    codes = np.pad(codes, padding)
    if order != _PLAIN:
        eights = codes.reshape(*codes.shape[:-1], -1, _CODES_IN_A_WORD)
        codes = eights[..., order].reshape(codes.shape)
    return np.ascontiguousarray(codes[..., 0::2] | codes[..., 1::2] << 4).view(np.int32)


_GPTQ_NAMES = {"packed": "qweight", "scales": "scales", "zeros": "qzeros", "g_idx": "g_idx"}
_COMPRESSED_NAMES = {
    "packed": "weight_packed",
    "scales": "weight_scale",
    "zeros": "weight_zero_point",
    "g_idx": "weight_g_idx",
    "shape": "weight_shape",
}
GPTQ = Layout("gptq", _GPTQ_NAMES, zeros_less=0x11111111)
GPTQ_V2 = Layout("gptq_v2", _GPTQ_NAMES)
AWQ = Layout(
    "awq",
    {part: name for part, name in _GPTQ_NAMES.items() if part != "g_idx"},
    order=(0, 2, 4, 6, 1, 3, 5, 7),
    along_rows=True,
)
COMPRESSED_TENSORS = Layout("compressed-tensors", _COMPRESSED_NAMES, by_row=True)
LAYOUTS = {layout.name: layout for layout in (GPTQ, GPTQ_V2, AWQ, COMPRESSED_TENSORS)}
