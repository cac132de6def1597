"""Weights to test with: seeded, of any shape and dtype, with awkward values where asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import nf4
import numpy as np
import oracle

AWKWARD = np.array(
    [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-39, 2.0**-126, 3.4e38, -3.4e38, 65520.0],
    np.float32,
)


def numbers(seed: int, shape: Any, dtype: str = "fp32") -> np.ndarray:
    """Normal ones."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return np.asarray(values, np.float32).astype(oracle.DTYPES[dtype])


@dataclass(frozen=True)
class Case:
    """The arguments of one quantize, and its source."""

    seed: int
    shape: tuple[int, ...]
    dtype: str
    format: str
    blocksize: int
    nested_blocksize: int
    custom: bool
    awkward: bool

    @property
    def id(self) -> str:
        """A name for a parametrized test."""
        kind = "custom" if self.custom else self.format
        return f"{kind}-{self.dtype}-{self.blocksize}-{self.nested_blocksize}"

    @property
    def codebook(self) -> np.ndarray | None:
        """A codebook of its own from -1 to 1, in no order and with equal entries, or None."""
        if not self.custom:
            return None
        rng = np.random.default_rng(self.seed + 1)
        table = rng.uniform(-1, 1, 16).astype(np.float32)
        table[:3] = [-1, 1, table[5]]
        return rng.permutation(table)

    @property
    def codebook_in_use(self) -> np.ndarray:
        return self.codebook if self.custom else nf4.codebook(self.format)

    @property
    def source(self) -> np.ndarray:
        rng = np.random.default_rng(self.seed)
        values = np.asarray(rng.standard_normal(self.shape), np.float32)
        values *= np.float32(np.exp2(rng.uniform(-20, 6)))
        if self.awkward and values.size:
            places = rng.integers(0, values.size, 1 + values.size // 16)
            values.reshape(-1)[places] = rng.choice(AWKWARD, places.size)
        with np.errstate(over="ignore"):
            return values.astype(oracle.DTYPES[self.dtype])

    @property
    def layout(self) -> dict[str, Any]:
        """The keyword arguments of nf4.quantize."""
        return {
            "format": self.format,
            "blocksize": self.blocksize,
            "nested_blocksize": self.nested_blocksize,
            "codebook": self.codebook,
        }

    def quantized(self, **arguments: Any) -> nf4.QuantizedTensor:
        return nf4.quantize(self.source, **self.layout | arguments)


def all_layouts(seed: int, elements: int) -> list[Case]:
    """Every format, codebook, blocksize, nested blocksize and dtype, each on a shape of its
    own of about so many elements."""
    rng = np.random.default_rng(seed)
    layouts = [
        (dtype, format, blocksize, nested, custom)
        for dtype in oracle.DTYPES
        for format, custom in (("nf4", False), ("fp4", False), ("nf4", True))
        for blocksize in oracle.BLOCKSIZES
        for nested in (0, 4, 256)
    ]
    return [
        Case(
            seed=seed + index,
            shape=(int(rng.integers(1, elements // 64)), int(rng.integers(1, 129))),
            dtype=dtype,
            format=format,
            blocksize=blocksize,
            nested_blocksize=nested,
            custom=custom,
            awkward=index % 2 == 1,
        )
        for index, (dtype, format, blocksize, nested, custom) in enumerate(layouts)
    ]
