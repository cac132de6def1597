"""Integer weights to test with: the oracle's as nf4 takes them, and what nf4.h says of quantize."""

from __future__ import annotations

from typing import Any, NamedTuple

import int4_oracle
import ml_dtypes
import nf4
import numpy as np
import oracle
from hypothesis import strategies as st
from int4_oracle import Int4Arrays

AWKWARD_SCALES = np.array([0, -0.0, -1.5, 6e-8, -6e-8, 6e4, np.inf, -np.inf, np.nan], np.float32)


def as_dtype(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Scales or a result of the oracle, which has bf16 as uint16."""
    return bits.view(ml_dtypes.bfloat16) if dtype == "bf16" else bits


def tensor_of(a: Int4Arrays, **changes: Any) -> nf4.Int4Tensor:
    """Around the same arrays."""
    fields = {
        "layout": a.layout,
        "shape": (a.rows, a.cols),
        "group_size": a.group_size,
        "packed": a.packed,
        "scales": as_dtype(a.scales, a.scale_dtype),
        "zeros": a.zeros,
        "g_idx": a.g_idx,
    }
    return nf4.Int4Tensor(**fields | changes)


def arrays_of(q: nf4.Int4Tensor) -> Int4Arrays:
    """The other way; without its permutation."""
    scales = q.scales.view(np.uint16) if q.scales_dtype == "bf16" else q.scales
    return Int4Arrays(q.layout, *q.shape, q.group_size, q.packed, scales, q.zeros, q.g_idx)


def dequantized(a: Int4Arrays, dtype: str) -> np.ndarray:
    return as_dtype(int4_oracle.dequantize(a, dtype), dtype)


class Case(NamedTuple):
    """The arguments of one random weight; `units` is its rows and groups, before the layout has
    made whole words of them."""

    seed: int
    layout: str
    units: tuple[int, int]
    group_size: int
    symmetric: bool
    scale_dtype: str
    act_order: bool
    awkward: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, count = self.units
        words_along_cols = self.layout.startswith("gptq")
        cols = count * (self.group_size if self.group_size != -1 else 8 if words_along_cols else 1)
        return (8 * rows if self.layout == "awq" else rows), cols

    @property
    def arrays(self) -> Int4Arrays:
        rng = np.random.default_rng(self.seed)
        a = int4_oracle.random_int4(
            rng,
            self.layout,
            *self.shape,
            self.group_size,
            symmetric=self.symmetric,
            scale_dtype=self.scale_dtype,
            act_order=self.act_order and self.layout != "awq",
        )
        if self.awkward:
            places = rng.integers(0, a.scales.size, 1 + a.scales.size // 8)
            scales = as_dtype(a.scales, self.scale_dtype).reshape(-1)
            with np.errstate(over="ignore"):
                scales[places] = rng.choice(AWKWARD_SCALES, places.size).astype(scales.dtype)
        return a


def any_int4(**fixed: Any) -> st.SearchStrategy[Case]:
    """Any case; `fixed` ties fields to a strategy of their own."""
    fields = {
        "seed": st.integers(0, 2**32),
        "layout": st.sampled_from(int4_oracle.LAYOUTS),
        "units": st.tuples(st.integers(1, 40), st.integers(1, 5)),
        "group_size": st.sampled_from([-1, 8, 24, 32, 64, 128]),
        "symmetric": st.booleans(),
        "scale_dtype": st.sampled_from(["fp16", "bf16"]),
        "act_order": st.booleans(),
        "awkward": st.booleans(),
    }
    return st.builds(Case, **fields | fixed)


def quantize(
    values: np.ndarray, layout: str, group_size: int, symmetric: bool, scales_dtype: str
) -> Int4Arrays:
    """The arrays that quantize_int4 should write, by nf4.h."""
    rows, cols = values.shape
    x = values.astype(np.float32).reshape(rows, -1, cols if group_size == -1 else group_size)
    finite = np.where(np.isfinite(x), x, np.float32(0))
    low, high = np.minimum(finite.min(axis=2), 0), np.maximum(finite.max(axis=2), 0)
    with np.errstate(all="ignore"):
        exact = np.float32(2) * np.maximum(high, -low) if symmetric else high - low
        scales = (np.abs(exact) / np.float32(15)).astype(oracle.DTYPES[scales_dtype])  # not -0
        raw = scales.view(np.uint16)
        raw[...] = np.clip(raw, 1, {"fp16": 0x7BFF, "bf16": 0x7F7F}[scales_dtype])
        wide = scales.astype(np.float32)
        zeros = np.clip(np.rint(-low / wide), 0, 15)
        if symmetric:
            zeros[...] = 8
        steps = np.rint(x / wide[..., None]) + zeros[..., None]
    codes = np.where(np.isnan(x), zeros[..., None], np.clip(steps, 0, 15)).reshape(rows, cols)
    absent = symmetric and layout == "compressed-tensors"
    bits = raw if scales_dtype == "bf16" else scales
    packed_zeros = None if absent else zeros.astype(np.uint8)
    return int4_oracle.pack(layout, codes.astype(np.uint8), packed_zeros, bits, group_size)
