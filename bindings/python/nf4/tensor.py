"""A quantized weight, as its parts."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from nf4 import _abi, _convert
from nf4._formats import SCALE_RULES, has_global_scales
from nf4._load import check, library
from nf4.errors import InvalidArgument
from nf4.typing import DTypeName, FormatName, MemoryLike, ScaleRuleName
from nf4.weight import Packed, Part, Weight


@dataclass(frozen=True)
class Sizes:
    """The sizes of the parts of a quantized weight.

    elements         elements of the weight
    blocks           elements of absmax
    nested_blocks    elements of nested_absmax; 0 if flat or "mxfp4"
    packed_bytes, absmax_bytes
    workspace_bytes  the workspace that quantize needs
    """

    elements: int
    blocks: int
    nested_blocks: int
    packed_bytes: int
    absmax_bytes: int
    workspace_bytes: int


def descriptor(
    shape: Iterable[int],
    format: str,
    blocksize: int,
    nested_blocksize: int,
    scale_rule: str | None = None,
) -> _abi.Tensor:
    """An nf4_tensor without pointers. rows is the product of all dimensions but the last."""
    dimensions = _convert.shape(shape)
    # The product of two negative ones would pass the library's check.
    if any(extent < 0 for extent in dimensions):
        raise InvalidArgument(f"shape is {dimensions}; expected dimensions of 0 or more")
    return _abi.Tensor(
        struct_size=ctypes.sizeof(_abi.Tensor),
        format=_convert.format_code(format),
        blocksize=_convert.integer("blocksize", blocksize, 32),
        nested_blocksize=_convert.integer("nested_blocksize", nested_blocksize, 32),
        scale_rule=_convert.scale_rule(format, scale_rule),
        rows=_convert.integer("the number of rows of shape", math.prod(dimensions[:-1]), 64),
        cols=_convert.integer("cols", dimensions[-1] if dimensions else 1, 64),
    )


def sizes_of(tensor: _abi.Tensor) -> Sizes:
    """The sizes of an nf4_tensor, whose pointers are not read."""
    counts = _abi.Sizes(struct_size=ctypes.sizeof(_abi.Sizes))
    workspace = ctypes.c_size_t()
    status = library().nf4_tensor_sizes(ctypes.byref(tensor), ctypes.byref(counts))
    check(status, {"rows * cols": "rows * cols of shape"})
    check(library().nf4_quantize_workspace_size(ctypes.byref(tensor), ctypes.byref(workspace)))
    return Sizes(
        elements=counts.elements,
        blocks=counts.blocks,
        nested_blocks=counts.nested_blocks,
        packed_bytes=counts.packed_bytes,
        absmax_bytes=counts.absmax_bytes,
        workspace_bytes=workspace.value,
    )


def sizes(
    shape: Iterable[int],
    *,
    format: FormatName = "nf4",
    blocksize: int | None = None,
    nested_blocksize: int | None = None,
) -> Sizes:
    """Returns the sizes of the parts of a weight of this shape, to allocate them.

    format, blocksize and nested_blocksize: as for quantize.

    Raises InvalidArgument.
    """
    own = _convert.blocksizes(format, blocksize, nested_blocksize)
    return sizes_of(descriptor(shape, format, *own))


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantizedTensor(Weight[Packed]):
    """A weight in 4 bits. It holds the objects that it is given and copies none.

    packed         uint8 [ceil(n / 2)]; element 2i is in the high nibble of byte i, or in the low
                   nibble in "mxfp4" and "nvfp4"
    absmax         float32 [ceil(n / blocksize)]; uint8 if nested. "mxfp4": uint8, E8M0;
                   "nvfp4": uint8, E4M3
    shape          the shape of the weight, which has n elements. In "mxfp4" and "nvfp4" the last
                   dimension is a multiple of blocksize
    nested_absmax  float32 [ceil(blocks / nested_blocksize)]; None if flat. "nvfp4": the global
                   scales, one for every nested_blocksize rows; one for all rows if that is 0
    nested_code    float32 [256], ascending; None unless nested
    nested_offset  float32 [1]; None unless nested
    codebook       float32 [16] that replaces the format's own, or None
    blocksize      a power of two, 32..4096; "mxfp4": 32; "nvfp4": 16 or 32
    scale_rule     "nvfp4": "factor" (None) or "divisor": whether the global scale multiplies or
                   divides the scales of blocks. "mxfp4": "floor" (None), "even" or "ceil": how
                   quantize chooses scales (nf4.h)
    dtype          "fp16", "bf16" or "fp32": the dtype of the weight before it was quantized

    Any part may have any shape with that many elements. Each is a numpy array, a torch
    tensor, an object with __cuda_array_interface__ or __dlpack__, or a raw address. All are
    in host memory or all in device memory. QuantizedTensor[torch.Tensor] has a tensor for
    `packed`.

    The parts are read when the weight is first used. Afterwards their sizes must stay the same
    and, except for torch tensors, their addresses too. A torch tensor may be moved, as
    torch.nn.Module.to() does.

    Raises InvalidArgument for an invalid blocksize, shape or dtype, and if the nested parts and
    nested_blocksize disagree; other errors are found at the first use.
    """

    prefix = "nf4_"

    packed: Packed = field(repr=False)
    absmax: MemoryLike = field(repr=False)
    shape: tuple[int, ...]
    nested_absmax: MemoryLike | None = field(default=None, repr=False)
    nested_code: MemoryLike | None = field(default=None, repr=False)
    nested_offset: MemoryLike | None = field(default=None, repr=False)
    codebook: MemoryLike | None = field(default=None, repr=False)
    format: FormatName = "nf4"
    blocksize: int = 64
    nested_blocksize: int = 0
    scale_rule: ScaleRuleName | None = None
    dtype: DTypeName = "fp32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _convert.shape(self.shape))
        object.__setattr__(self, "dtype", _convert.dtype_name(self.dtype))
        for name in ("blocksize", "nested_blocksize"):
            object.__setattr__(self, name, _convert.integer(name, getattr(self, name), 32))
        for name in ("nested_absmax", "nested_code", "nested_offset"):
            needed = self.nested or (name == "nested_absmax" and has_global_scales(self.format))
            if needed != (getattr(self, name) is not None):
                given = "is None" if needed else "is given"
                why = f"nested_blocksize is {self.nested_blocksize}"
                if self.scale_bytes:
                    why = f'format is "{self.format}"'
                raise InvalidArgument(f"{name} {given}, but {why}")

    def descriptor(self) -> _abi.Tensor:
        """The nf4_tensor of this weight, without its pointers."""
        return descriptor(
            self.shape, self.format, self.blocksize, self.nested_blocksize, self.scale_rule
        )

    def parts(self) -> list[Part]:
        counts = self.sizes
        found = [
            Part("packed", "uint8", counts.packed_bytes),
            Part("absmax", "uint8" if self.nested or self.scale_bytes else "fp32", counts.blocks),
        ]
        if self.nested_absmax is not None:
            found.append(Part("nested_absmax", "fp32", counts.nested_blocks))
        if self.nested:
            found += [
                Part("nested_code", "fp32", 256),
                Part("nested_offset", "fp32", 1),
            ]
        if self.codebook is not None:
            found.append(Part("codebook", "fp32", 16))
        return found

    @functools.cached_property
    def sizes(self) -> Sizes:
        """The sizes that the parts should have."""
        return sizes_of(self.descriptor())

    @property
    def nested(self) -> bool:
        """Are the scales quantized too (double quantization)?"""
        return self.nested_blocksize != 0 and not self.scale_bytes

    @property
    def scale_bytes(self) -> bool:
        """Are the scales floats of 8 bits, as in "mxfp4" and "nvfp4"?"""
        return self.format in SCALE_RULES

    @property
    def blocks(self) -> int:
        """Elements of absmax."""
        return self.sizes.blocks

    @property
    def nbytes(self) -> int:
        """Bytes of packed, absmax, nested_absmax and nested_offset. nested_code and codebook are
        not counted, as weights share them."""
        counts = self.sizes
        nested_bytes = 4 * counts.nested_blocks + 4 * self.nested
        return counts.packed_bytes + counts.absmax_bytes + nested_bytes
