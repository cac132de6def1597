"""The values of scales that are floats of 8 bits, and faults in the values of scales of any kind
of weight."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from nf4.tensor import QuantizedTensor

# float32, by their bytes. A look-up takes half the time of a cast.
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
E8M0 = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32("nan"))
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


def count_problem(
    severity: str, bad: np.ndarray, what: str, part: str
) -> Iterator[tuple[str, str]]:
    """Yields how many elements of a part are bad, if any: (severity, problem)."""
    number = int(np.count_nonzero(bad))
    if number:
        yield severity, f"{part}: {number} of {bad.size} {what}, first at {int(bad.argmax())}"


def scale_problems(
    scales: np.ndarray, part: str, negative: str = "fault"
) -> Iterator[tuple[str, str]]:
    """Yields (severity, problem) for float32 scales; `negative`: the severity of negative ones."""
    yield from count_problem("fault", np.isnan(scales), "are NaN", part)
    yield from count_problem("fault", np.isinf(scales), "are infinite", part)
    yield from count_problem(negative, scales < 0, "are negative", part)
    tiny = (scales != 0) & (np.abs(scales) < _SMALLEST_NORMAL)
    yield from count_problem("warning", tiny, "are subnormal", part)


def decoded_scales(weight: QuantizedTensor) -> np.ndarray:
    """Returns the scales of the blocks of a weight in MXFP4 or NVFP4, float32 [rows, blocks], as
    the kernels compute them (nf4.h, THE ARITHMETIC)."""
    stored = weight.absmax.reshape(-1, weight.shape[-1] // weight.blocksize)
    if weight.nested_absmax is None:
        return E8M0[stored]
    floats = E4M3[stored]
    rows = weight.nested_blocksize or len(floats)
    of_rows = np.repeat(weight.nested_absmax, rows)[: len(floats), None]
    with np.errstate(all="ignore"):
        return floats / of_rows if weight.scale_rule == "divisor" else floats * of_rows


def usable_global_scales(scales: np.ndarray) -> np.ndarray:
    """Returns which global scales of NVFP4 are finite and positive."""
    return np.isfinite(scales) & (scales > 0)


def scale_byte_problems(
    weight: QuantizedTensor, scales: str, of_all: str
) -> Iterator[tuple[str, str]]:
    """Yields (severity, problem) for a weight in MXFP4 or NVFP4. scales, of_all: the names of its
    parts."""
    given = weight.nested_absmax
    if given is not None and not (usable := usable_global_scales(given)).all():
        yield "fault", f"{of_all}: {given[~usable][0]}; expected a positive number"
        return
    yield from scale_problems(decoded_scales(weight).reshape(-1), scales, negative="warning")
