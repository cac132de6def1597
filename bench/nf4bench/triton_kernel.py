"""Dequantize as a plain Triton kernel: one fused kernel dequantizes the scales and the weights.

A program takes a tile of whole blocks: their scales once, then the bytes, a lookup for each
nibble, and one store of the interleaved values. It is what one writes who knows Triton and
reads the QLoRA paper: no shared-memory tricks, no cache hints.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from nf4bench.weights import Weight

# Bit-equal to bitsandbytes: the multiply and the add of a scale must not become one. In the
# environment, because torch.compile takes no such option and compiles in other processes.
os.environ["TRITON_DEFAULT_FP_FUSION"] = "0"

# Elements a program, and its warps; the fastest counts.
CONFIGURATIONS = ((1024, 4), (2048, 4), (4096, 4), (4096, 8))


@triton.jit
def _dequantize(
    packed, absmax, nested_absmax, nested_code, nested_offset, codebook, out,
    elements, packed_bytes, blocks,
    BLOCKSIZE: tl.constexpr, NESTED_BLOCKSIZE: tl.constexpr, TILE_BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    scale = tl.load(absmax + block, mask=block < blocks, other=0)
    if NESTED_BLOCKSIZE != 0:
        nested = tl.load(nested_absmax + block // NESTED_BLOCKSIZE, mask=block < blocks, other=0)
        scale = tl.load(nested_code + scale.to(tl.int32)) * nested + tl.load(nested_offset)
    half: tl.constexpr = BLOCKSIZE // 2
    byte = block[:, None] * half + tl.arange(0, half)[None, :]
    both = tl.load(packed + byte, mask=byte < packed_bytes, other=0).to(tl.int32)
    high = tl.load(codebook + (both >> 4)) * scale[:, None]
    low = tl.load(codebook + (both & 15)) * scale[:, None]
    values = tl.interleave(high, low).to(out.dtype.element_ty)
    element = block[:, None] * BLOCKSIZE + tl.arange(0, BLOCKSIZE)[None, :]
    tl.store(out + element, values, mask=element < elements)


def prepare(weight: Weight, configuration: int) -> Callable[[torch.Tensor], None]:
    """What dequantizes the weight into `out`, on torch's current stream."""
    q, case = weight.quantized, weight.case
    tile, warps = CONFIGURATIONS[configuration]
    tile_blocks = max(1, tile // case.blocksize)
    blocks, elements, packed_bytes = weight.sizes.blocks, case.elements, weight.sizes.packed_bytes
    blocksize, nested_blocksize = case.blocksize, case.nested_blocksize
    grid = (triton.cdiv(blocks, tile_blocks),)
    packed, absmax, codebook = q.packed, q.absmax, weight.codebook
    # A flat weight has no nested parts; the kernel never reads what stands for them.
    nested_absmax, nested_code, nested_offset = (
        (q.nested_absmax, q.nested_code, q.nested_offset) if case.nested else (absmax,) * 3
    )

    def launch(out: torch.Tensor) -> None:
        _dequantize[grid](
            packed, absmax, nested_absmax, nested_code, nested_offset, codebook, out, elements,
            packed_bytes, blocks, BLOCKSIZE=blocksize, NESTED_BLOCKSIZE=nested_blocksize,
            TILE_BLOCKS=tile_blocks, num_warps=warps,
        )  # fmt: skip

    return launch
