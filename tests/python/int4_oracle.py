"""4-bit integer weights in numpy, written from the layouts' definitions and not from the library.

w[n, k] = scale[n, g(k)] * (code[n, k] - zero[n, g(k)]), codes and zeros in 0..15. A scale of 16
bits times an integer of -15..15 is exact in binary32, so dequantize rounds once. With rows N, cols
K and groups G = ceil(K / group_size):

    layout               packed              zeros               scales  stored zero
    gptq                 int32 [K/8, N]      int32 [G, ceil N/8] [G, N]  (zero - 1) modulo 16
    gptq_v2              int32 [K/8, N]      int32 [G, ceil N/8] [G, N]  zero
    awq                  int32 [K, N/8]      int32 [G, N/8]      [G, N]  zero
    compressed-tensors   int32 [N, ceil K/8] int32 [ceil N/8, G] [N, G]  zero

A word holds eight nibbles, low first; in awq nibble i is column AWQ_ORDER[i] of the word's eight.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

LAYOUTS = ("gptq", "gptq_v2", "awq", "compressed-tensors")
ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)
SYMMETRIC_ZERO = 8
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "golden_int4.npz"


class Int4Arrays(NamedTuple):
    """A weight as a checkpoint stores it. Scales are float16, or the bits of bfloat16 as uint16;
    group_size -1 is one group of the whole row; zeros None: all are 8; g_idx None: k // group_size.
    """

    layout: str
    rows: int
    cols: int
    group_size: int
    packed: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None
    g_idx: np.ndarray | None = None

    @property
    def scale_dtype(self) -> str:
        return "bf16" if self.scales.dtype == np.uint16 else "fp16"

    @property
    def groups(self) -> int:
        return group_count(self.cols, self.group_size)


def group_count(cols: int, group_size: int) -> int:
    return 1 if group_size == -1 else -(-cols // group_size)


def plain_groups(cols: int, group_size: int) -> np.ndarray:
    """The group of each column without act order."""
    return np.arange(cols) // (cols if group_size == -1 else group_size)


def pack_nibbles(values: np.ndarray, order: tuple[int, ...] = ORDER) -> np.ndarray:
    """[..., count] values of 0..15 as int32 words [..., ceil(count / 8)]; the tail is zeros."""
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % 8)]
    eights = np.pad(values, padding).reshape(*values.shape[:-1], -1, 8)[..., order]
    words = np.bitwise_or.reduce(eights.astype(np.uint32) << SHIFTS, axis=-1)
    return np.ascontiguousarray(words).view(np.int32)  # reduce keeps the order of a transpose


def unpack_nibbles(words: np.ndarray, count: int, order: tuple[int, ...] = ORDER) -> np.ndarray:
    """The inverse: [..., words] as uint8 [..., count]."""
    nibbles = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> SHIFTS) & 15
    values = np.empty(nibbles.shape, np.uint8)
    values[..., order] = nibbles
    return values.reshape(*words.shape[:-1], -1)[..., :count]


def codes_of(a: Int4Arrays) -> np.ndarray:
    """uint8 [N, K]."""
    if a.layout == "compressed-tensors":
        return unpack_nibbles(a.packed, a.cols)
    if a.layout == "awq":
        return unpack_nibbles(a.packed, a.rows, AWQ_ORDER).T
    return unpack_nibbles(a.packed.T, a.cols)


def zeros_of(a: Int4Arrays) -> np.ndarray:
    """uint8 [N, G]."""
    if a.zeros is None:
        return np.full((a.rows, a.groups), SYMMETRIC_ZERO, np.uint8)
    if a.layout == "compressed-tensors":
        return unpack_nibbles(a.zeros.T, a.rows).T
    words = a.zeros.view(np.uint32) + offset_of(a.layout)
    return unpack_nibbles(words, a.rows, AWQ_ORDER if a.layout == "awq" else ORDER).T


def offset_of(layout: str) -> np.uint32:
    """What GPTQ v1 subtracts from each word of zeros: a zero of 0 borrows from the next."""
    return np.uint32(0x11111111 if layout == "gptq" else 0)


def groups_of(a: Int4Arrays) -> np.ndarray:
    """int64 [K]: the group of each column."""
    return plain_groups(a.cols, a.group_size) if a.g_idx is None else a.g_idx.astype(np.int64)


def scales_of(a: Int4Arrays) -> np.ndarray:
    """float32 [N, G]."""
    scales = a.scales.view(ml_dtypes.bfloat16) if a.scale_dtype == "bf16" else a.scales
    return (scales if a.layout == "compressed-tensors" else scales.T).astype(np.float32)


def dequantize(a: Int4Arrays, dtype: str) -> np.ndarray:
    """[N, K] in "fp32", "fp16" or "bf16" (its bits as uint16): the exact product, rounded once."""
    groups = groups_of(a)
    steps = codes_of(a).astype(np.float32) - zeros_of(a)[:, groups].astype(np.float32)
    with np.errstate(all="ignore"):
        product = scales_of(a)[:, groups] * steps
        if dtype == "bf16":
            return product.astype(ml_dtypes.bfloat16).view(np.uint16)
        return product.astype({"fp32": np.float32, "fp16": np.float16}[dtype])


def pack(
    layout: str,
    codes: np.ndarray,
    zeros: np.ndarray | None,
    scales: np.ndarray,
    group_size: int,
    g_idx: np.ndarray | None = None,
) -> Int4Arrays:
    """codes [N, K], zeros [N, G] or None, scales [N, G] (float16 or the bits of bfloat16): the
    arrays of `layout`. A padding nibble is 0."""
    rows, cols = codes.shape
    if layout not in LAYOUTS:
        raise ValueError(f"no layout {layout!r}")
    if layout in ("gptq", "gptq_v2") and cols % 8:
        raise ValueError(f"{layout} has words along cols, and {cols} is not a multiple of 8")
    if layout == "awq" and (rows % 8 or g_idx is not None):
        raise ValueError(f"awq has words along rows and no g_idx; rows are {rows}")
    by_row = layout == "compressed-tensors"
    order = AWQ_ORDER if layout == "awq" else ORDER
    packed = pack_nibbles(codes.T, order).T if layout == "awq" else pack_nibbles(codes)
    stored = None
    if zeros is not None:
        words = pack_nibbles(zeros.T.astype(np.uint8), order).view(np.uint32)
        stored = (words - offset_of(layout)).view(np.int32)
    return Int4Arrays(
        layout,
        rows,
        cols,
        group_size,
        np.ascontiguousarray(packed if by_row else packed.T),
        np.ascontiguousarray(scales if by_row else scales.T),
        stored if stored is None or not by_row else np.ascontiguousarray(stored.T),
        None if g_idx is None else g_idx.astype(np.int32),
    )


def random_int4(
    rng: np.random.Generator,
    layout: str,
    rows: int,
    cols: int,
    group_size: int,
    *,
    symmetric: bool,
    scale_dtype: str,
    act_order: bool,
) -> Int4Arrays:
    """Codes and zeros of all 16 values, scales of several binades. A symmetric one has its zeros
    written out, but in compressed-tensors, which has none; act order deals the members of whole
    groups out at random."""
    groups = group_count(cols, group_size)
    zeros: np.ndarray | None = rng.integers(0, 16, (rows, groups), np.uint8)
    if symmetric:
        absent = layout == "compressed-tensors"
        zeros = None if absent else np.full((rows, groups), SYMMETRIC_ZERO, np.uint8)
    exact = rng.uniform(1, 2, (rows, groups)) * 2.0 ** -rng.integers(3, 10, (rows, groups))
    bf16 = scale_dtype == "bf16"
    scales = exact.astype(ml_dtypes.bfloat16).view(np.uint16) if bf16 else exact.astype(np.float16)
    g_idx = rng.permutation(plain_groups(cols, group_size)) if act_order else None
    codes = rng.integers(0, 16, (rows, cols), np.uint8)
    return pack(layout, codes, zeros, scales, group_size, g_idx)


class Golden(NamedTuple):
    """A tensor of tests/golden: `stored` is the checkpoint's own arrays by their names, `expected`
    what its project dequantizes it to, in the scales' dtype (bf16 as its bits)."""

    arrays: Int4Arrays
    expected: np.ndarray
    stored: dict[str, np.ndarray]
    quantization_config: dict[str, Any]


def golden() -> dict[str, Golden]:
    """The tensors of golden_int4.npz by name."""
    parts: dict[str, dict[str, np.ndarray]] = {}
    with np.load(GOLDEN) as file:
        for key in file:
            name, part = key.rsplit("/", 1)
            parts.setdefault(name, {})[part] = file[key]
    return {name: golden_of(arrays) for name, arrays in parts.items()}


def golden_of(stored: dict[str, np.ndarray]) -> Golden:
    config, expected = json.loads(str(stored.pop("config"))), stored.pop("expected")
    by_row = config["layout"] == "compressed-tensors"
    prefix = "weight_" if by_row else ""
    arrays = Int4Arrays(
        config["layout"],
        config["rows"],
        config["cols"],
        config["group_size"],
        stored["weight_packed" if by_row else "qweight"],
        stored["weight_scale" if by_row else "scales"],
        stored.get("weight_zero_point" if by_row else "qzeros"),
        stored.get(prefix + "g_idx"),
    )
    return Golden(arrays, expected, stored, config["quantization_config"])
