"""Layers in FP8 (E4M3) beside weights in MXFP4 or NVFP4, as mixed checkpoints have them: finds,
checks and dequantizes them. libnf4 does not multiply FP8: such a layer is dense in a model."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from nf4.checkpoint.dtypes import NF4_TO_FILE, NUMPY, model_dtype
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.scales import E4M3, E8M0
from nf4.checkpoint.source import Checkpoint

FP8 = "F8_E4M3"
# The names of a module's scales end so, in this order: ModelOpt and compressed-tensors,
# transformers, DeepSeek-V4. All of them multiply.
FP8_SCALES = ("weight_scale", "weight_scale_inv", "scale")
_E8M0 = ("U8", "F8_E8M0")
# The sides of a square block, and the columns of a block of MXFP8.
_SIDE, _COLUMNS = 128, 32
_AT_ONCE = 1 << 22


@dataclasses.dataclass(frozen=True)
class Fp8Weight:
    """A weight in FP8. name: the dense weight's. block: the rows and columns that share a scale.
    dtype: libnf4's name, of the dense weight. path: that of the file with its codes."""

    name: str
    codes: TensorInfo
    scales: TensorInfo
    block: tuple[int, int]
    dtype: str
    path: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def elements(self) -> int:
        return self.codes.elements

    @property
    def nbytes(self) -> int:
        """The weight's bytes in the file, with its scales."""
        return self.codes.nbytes + self.scales.nbytes

    def read_scales(self, checkpoint: Checkpoint) -> np.ndarray:
        """Returns the scales, float32, a row of them for each row of blocks."""
        stored = checkpoint.read(self.scales.name)
        if self.scales.dtype in _E8M0:
            scales = E8M0[stored.view(np.uint8)]
        else:
            scales = stored.view(NUMPY[self.scales.dtype]).astype(np.float32)
        return scales.reshape(-(-self.shape[0] // self.block[0]), -1)

    def read_codes(self, checkpoint: Checkpoint) -> np.ndarray:
        return checkpoint.read(self.codes.name).view(np.uint8).reshape(self.shape)

    def dense(self, checkpoint: Checkpoint, dtype: str) -> np.ndarray:
        """Returns the dense weight, RN_dtype(RN(code * scale)): the product is rounded to float32
        first."""
        codes, scales = self.read_codes(checkpoint), self.read_scales(checkpoint)
        rows, cols = self.shape
        made = np.empty(self.shape, NUMPY[NF4_TO_FILE[dtype]])
        step = max(1, _AT_ONCE // max(1, cols))
        for first in range(0, rows, step):
            part = E4M3[codes[first : first + step]]
            of_rows = scales[np.arange(first, first + len(part)) // self.block[0]]
            with np.errstate(all="ignore"):
                part *= np.repeat(of_rows, self.block[1], axis=1)[:, :cols]
                made[first : first + step] = part
        return made


def _block(shape: tuple[int, ...], scales: TensorInfo) -> tuple[int, int]:
    """Returns the rows and columns that share a scale, which the number of scales tells. Raises
    ValueError for another number."""
    rows, cols = shape
    given = scales.shape
    if len(given) == 4 and given[1::2] == (1, 1):  # as ModelOpt stores those of square blocks
        given = given[::2]
    if scales.dtype in _E8M0 and cols % _COLUMNS == 0 and given == (rows, cols // _COLUMNS):
        return 1, _COLUMNS
    if math.prod(given) == 1:
        return rows, cols
    if given in ((rows, 1), (rows,)):
        return 1, cols
    if given == (-(-rows // _SIDE), -(-cols // _SIDE)):
        return _SIDE, _SIDE
    raise ValueError(
        f"its {scales.name.rpartition('.')[2]} is of shape {list(scales.shape)}; expected one "
        f"scale, one for each row, one for {_SIDE} x {_SIDE} or, in E8M0, for {_COLUMNS} columns"
    )


def fp8_weight(checkpoint: Checkpoint, info: TensorInfo) -> Fp8Weight:
    """Returns the weight whose codes are in this tensor. Raises FormatError if it is not one."""
    module, path = info.name.removesuffix(".weight"), checkpoint.owner[info.name].path
    found = [each for name in FP8_SCALES if (each := f"{module}.{name}") in checkpoint]
    try:
        if len(info.shape) != 2 or 0 in info.shape:
            raise ValueError(f"it is in FP8 of shape {list(info.shape)}; expected two dimensions")
        if len(found) != 1:
            has = " and ".join(found) or "no scales"
            raise ValueError(f"it is in FP8 beside {has}; expected one of {', '.join(FP8_SCALES)}")
        scales = checkpoint.info(found[0])
        known = (*NF4_TO_FILE.values(), *_E8M0)
        if scales.dtype not in known:
            raise ValueError(f"{found[0]} is {scales.dtype}; expected one of {', '.join(known)}")
        block = _block(info.shape, scales)
    except ValueError as error:
        raise FormatError(path, str(error), info.name) from None
    dtype = model_dtype(checkpoint.config) or "bf16"
    return Fp8Weight(info.name, info, scales, block, dtype, path)
