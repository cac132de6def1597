"""The global scales that quantize gives a weight of NVFP4."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from nf4._torch import is_tensor

# The largest product of an E2M1 number and an E4M3 scale.
LARGEST = 6.0 * 448.0


def write_global_scales(array: Any, rows_of_part: int, divides: bool, out: Any) -> None:
    """Writes a float32 for each part of the rows of `array` to `out`: the largest finite magnitude
    of the part over 2688, or, where it divides, 2688 over it; 1 where that is 0 or not finite."""
    found = list(maxima(array.reshape(-1, array.shape[-1]), rows_of_part))
    if is_tensor(array):
        torch = sys.modules["torch"]
        scales = _scales(torch.stack(found).float(), divides)
        usable = torch.isfinite(scales) & (scales != 0)
        out.copy_(torch.where(usable, scales, torch.ones_like(scales)))
        return
    with np.errstate(divide="ignore", over="ignore"):
        scales = _scales(np.array(found, np.float32), divides)
    out[...] = np.where(np.isfinite(scales) & (scales != 0), scales, np.float32(1))


def _scales(maxima: Any, divides: bool) -> Any:
    # torch divides a number by a tensor in these two steps, and compressed-tensors by torch.
    return 1 / maxima * LARGEST if divides else maxima / LARGEST


def maxima(rows: Any, rows_of_part: int) -> Iterator[Any]:
    """Yields the largest finite magnitude of each part of the rows, a scalar of their dtype."""
    tensor = is_tensor(rows)
    for first in range(0, rows.shape[0], rows_of_part):
        part = abs(rows[first : first + rows_of_part])
        if tensor:
            yield part.nan_to_num(nan=0.0, posinf=0.0).amax()
        else:
            yield np.max(part, where=np.isfinite(part), initial=0)
