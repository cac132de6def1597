"""Layers in FP8 as mixed checkpoints store them, and their values, computed without the library."""

from __future__ import annotations

import dataclasses
from typing import Any

import e2m1_checkpoints
import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Fp8:
    """A form of FP8 layers. scales: the name of their tensor. block: (rows, columns) that share a
    scale; None: all of them; no columns: all of a row. dtype: that of the scales. squares: the
    scales have the four dimensions that ModelOpt gives those of blocks. flat: they have one."""

    name: str
    scales: str
    block: tuple[int, int] | None
    dtype: Any
    squares: bool = False
    flat: bool = False

    def __str__(self) -> str:
        return self.name

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        rows, cols = self.block or shape
        return rows, cols or shape[1]

    def tensors(self, module: str, shape: tuple[int, int], seed: int = 0) -> dict[str, np.ndarray]:
        rng, (rows, cols) = np.random.default_rng(seed), shape
        codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
        high, wide = self.block_of(shape)
        grid = -(-rows // high), -(-cols // wide)
        if self.dtype in (np.uint8, ml_dtypes.float8_e8m0fnu):
            scales = rng.integers(118, 124, grid, np.uint8).view(self.dtype)
        else:
            scales = rng.uniform(0.01, 0.05, grid).astype(self.dtype)
        if self.block is None:
            scales = scales.reshape(())
        elif self.squares:
            scales = scales.reshape(grid[0], 1, grid[1], 1)
        elif self.flat:
            scales = scales.reshape(-1)
        return {f"{module}.weight": codes, f"{module}.{self.scales}": scales}

    def dense(self, tensors: dict[str, np.ndarray], module: str) -> np.ndarray:
        """float32: the product rounded once."""
        codes = tensors[f"{module}.weight"]
        (rows, cols), (high, wide) = codes.shape, self.block_of(codes.shape)
        scales = tensors[f"{module}.{self.scales}"]
        if scales.dtype == np.uint8:
            values = np.array([e2m1_checkpoints.e8m0(int(each)) for each in scales.reshape(-1)])
        else:
            values = scales.reshape(-1).astype(np.float64)
        grid = values.reshape(-(-rows // high), -(-cols // wide))
        whole = np.kron(grid, np.ones((high, wide)))[:rows, :cols]
        return (codes.astype(np.float64) * whole).astype(np.float32)


FORMS = [
    Fp8("ModelOpt", "weight_scale", None, np.float32),
    Fp8("ModelOpt by rows", "weight_scale", (1, 0), np.float32, flat=True),
    Fp8("ModelOpt in squares", "weight_scale", (128, 128), np.float32, squares=True),
    Fp8("compressed-tensors by rows", "weight_scale", (1, 0), ml_dtypes.bfloat16),
    Fp8("compressed-tensors in squares", "weight_scale", (128, 128), np.float32),
    Fp8("transformers", "weight_scale_inv", (128, 128), np.float32),
    Fp8("DeepSeek-V4", "scale", (128, 128), ml_dtypes.float8_e8m0fnu),
    Fp8("MXFP8", "weight_scale", (1, 32), np.uint8),
]
