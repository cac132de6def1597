"""The arithmetic of nf4.h in numpy, written from its words and not from the library.

Every binary32 operation is a numpy operation of its own, so nothing is fused.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

DTYPES = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
SMALLEST_NORMAL = np.float32(2.0**-126)


def codes_of(packed: np.ndarray, elements: int) -> np.ndarray:
    """The 4-bit codes, high nibble first."""
    return np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)[:elements]


def scales_of(q) -> np.ndarray:
    """The float32 scale of each block of a nf4.QuantizedTensor of numpy arrays."""
    if not q.nested:
        return q.absmax
    with np.errstate(all="ignore"):
        factors = np.repeat(q.nested_absmax, q.nested_blocksize)[: q.absmax.size]
        products = q.nested_code[q.absmax] * factors
        return products + np.float32(q.nested_offset)


def dequantize(q, codebook: np.ndarray, dtype: str) -> np.ndarray:
    """value = RN_dtype(RN(codebook[code] * scale)), in the shape of the weight."""
    codes = codes_of(q.packed, q.elements)
    scales = np.repeat(scales_of(q), q.blocksize)[: q.elements]
    with np.errstate(all="ignore"):
        return (codebook[codes] * scales).astype(DTYPES[dtype]).reshape(q.shape)


def blocks_of(values: np.ndarray, blocksize: int) -> np.ndarray:
    """Rows of a block each; the last one filled up with zeros."""
    return np.pad(values, (0, -values.size % blocksize)).reshape(-1, blocksize)


def normalised(values: np.ndarray, blocksize: int) -> tuple[np.ndarray, np.ndarray]:
    """absmax of each block, and the elements brought to [-1, 1]."""
    blocks = blocks_of(values, blocksize)
    with np.errstate(all="ignore"):
        absmax = np.where(np.isfinite(blocks), np.abs(blocks), np.float32(0)).max(axis=1)
        inverse = np.float32(1) / np.maximum(absmax, SMALLEST_NORMAL)
        scaled = blocks * inverse[:, None]
    scaled = np.where(np.isinf(blocks), np.sign(blocks), scaled)
    scaled = np.where(np.isnan(blocks), np.float32(0), scaled)
    return absmax.astype(np.float32), scaled.reshape(-1)[: values.size].astype(np.float32)


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The index of the entry nearest to each value: above the midpoint of two neighbours is
    the upper one, the midpoint itself is the lower one's; of equal entries the first."""
    entries, first = np.unique(table, return_index=True)
    midpoints = np.float32(0.5) * (entries[:-1] + entries[1:])
    return first[np.searchsorted(midpoints, values, side="left")].astype(np.uint8)


def tree_sum(values: np.ndarray) -> np.float64:
    """The sum over the complete binary tree: zeros that fill it up change no partial sum."""
    sums = np.zeros(1 << max(values.size - 1, 0).bit_length(), np.float64)
    sums[: values.size] = values
    while sums.size > 1:
        sums = sums[0::2] + sums[1::2]
    return sums[0]


def quantize(
    values: np.ndarray,
    *,
    blocksize: int,
    nested_blocksize: int,
    codebook: np.ndarray,
    scale_code: np.ndarray,
) -> dict[str, np.ndarray]:
    """The bytes that quantize should write, by part. `values` has one element at least."""
    flat = values.astype(np.float32).reshape(-1)
    absmax, scaled = normalised(flat, blocksize)
    codes = np.pad(nearest(scaled, codebook), (0, flat.size % 2))
    parts = {"packed": codes[0::2] << 4 | codes[1::2], "absmax": absmax}
    if nested_blocksize:
        offset = np.float32(tree_sum(absmax) / np.float64(absmax.size))
        nested_absmax, centred = normalised(absmax - offset, nested_blocksize)
        parts["absmax"] = nearest(centred, scale_code)
        parts["nested_absmax"] = nested_absmax
        parts["nested_offset"] = offset
    return parts


def bits(array: np.ndarray) -> np.ndarray:
    """The bits of an array, all NaNs as one."""
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize]
    raw = np.array(array).view(unsigned)
    if array.dtype != np.uint8:
        raw[np.isnan(array)] = np.iinfo(unsigned).max
    return raw


def differing(a: np.ndarray, b: np.ndarray) -> int:
    """How many elements differ in any bit; NaNs are alike. Shape and dtype must agree."""
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, a.dtype, b.shape, b.dtype)
    return int(np.count_nonzero(bits(a) != bits(b)))


def matmul(
    q, codebook: np.ndarray, x: np.ndarray, bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """y = x W^T + bias in binary64, of the unrounded codebook * scale; and how far a y may be from
    it: a weight rounded to the dtype of x, a sum in binary32, one rounding to that dtype, and for
    16 bits three factors rounded to 11 bits."""
    codes = codes_of(q.packed, q.elements)
    scales = np.repeat(scales_of(q), q.blocksize)[: q.elements].astype(np.float64)
    shape = math.prod(q.shape[:-1]), q.shape[-1]
    weight = (codebook.astype(np.float64)[codes] * scales).reshape(shape)
    added = np.float64(0) if bias is None else bias.astype(np.float64)
    wide = x.astype(np.float64)
    y = wide @ weight.T + added
    magnitude = np.abs(wide) @ np.abs(weight).T + np.abs(added)
    limits = ml_dtypes.finfo(x.dtype)
    unit = float(limits.eps) / 2
    factors = 0 if x.dtype == np.float32 else 3 * 2.0**-11
    relative = factors + unit + (q.shape[-1] + 2) * 2.0**-24
    return y, relative * magnitude + 2 * unit * np.abs(y) + float(limits.smallest_subnormal)
