"""Matmul with GPTQ's weights as plain fused Triton kernels, written for the comparison.

    STUDY     as in the published study of W4A16 with split-K: a program takes a tile of y and a
              part of K, loads scales and zeros once a step, and adds its part of y atomically
    AUTOGPTQ  the algorithm of AutoGPTQ's kernel: no split-K, a program goes through all of K, and
              scales and zeros are found for each k by g_idx, so that act order is no other case

In both a program loads the words of its tile, shifts the nibbles out, and multiplies in 16 bits;
programs that share columns of y run one after the other, for the words to be in L2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nf4bench.weights import Weight


class Configuration(NamedTuple):
    m: int
    n: int
    k: int
    split: int
    by_g_idx: bool
    stages: int
    warps: int


# The fastest counts.
STUDY = tuple(
    Configuration(16, n, k, split, False, stages, warps)
    for n, k, split, stages, warps in (
        (32, 128, 4, 4, 4), (32, 128, 8, 3, 2), (64, 64, 8, 4, 4), (64, 128, 4, 4, 4),
        (64, 128, 8, 3, 8),
    )
)  # fmt: skip
AUTOGPTQ = tuple(
    Configuration(16, n, k, 1, True, stages, warps)
    for n, k, stages, warps in (
        (32, 32, 4, 4), (64, 32, 4, 4), (128, 32, 4, 4), (256, 32, 4, 4), (32, 64, 4, 4),
        (64, 64, 4, 4), (64, 128, 4, 4), (32, 128, 2, 4),
    )
)  # fmt: skip


@triton.jit
def _multiply(
    x, packed, scales, zeros, g_idx, y, m, rows, cols,
    STEPS: tl.constexpr, GROUP: tl.constexpr, ZERO_OFFSET: tl.constexpr, BY_G_IDX: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(m, M)
    at_m = tl.program_id(0) % tiles * M + tl.arange(0, M)
    at_n = tl.program_id(0) // tiles * N + tl.arange(0, N)
    at_k = tl.program_id(1) * K + tl.arange(0, K)
    shift = (at_k % 8 * 4)[:, None]
    zero_shift = (at_n % 8 * 4)[None, :]
    sums = tl.zeros((M, N), dtype=tl.float32)
    for _ in range(STEPS):
        factor = tl.load(x + at_m[:, None] * cols + at_k[None, :], mask=at_m[:, None] < m, other=0)
        words = tl.load(packed + (at_k // 8)[:, None] * rows + at_n[None, :])
        if BY_G_IDX:
            group = tl.load(g_idx + at_k)[:, None]
        else:
            group = tl.min(at_k, axis=0) // GROUP
        scale = tl.load(scales + group * rows + at_n[None, :])
        stored = tl.load(zeros + group * (rows // 8) + (at_n // 8)[None, :])
        zero = ((stored + ZERO_OFFSET) >> zero_shift) & 15
        weight = (((words >> shift) & 15) - zero).to(scale.dtype) * scale
        sums = tl.dot(factor, weight.to(factor.dtype), sums)
        at_k += K * SPLIT
    out = y + at_m[:, None] * rows + at_n[None, :]
    if SPLIT == 1:
        tl.store(out, sums.to(y.dtype.element_ty), mask=at_m[:, None] < m)
    else:
        tl.atomic_add(out, sums.to(y.dtype.element_ty), mask=at_m[:, None] < m, sem="relaxed")


def prepare(weight: Weight, of: Configuration) -> Callable[[torch.Tensor], torch.Tensor]:
    """What multiplies; cols is a multiple of k * split, rows of n."""
    q, (rows, cols) = weight.quantized, weight.case.shape
    group, offset = weight.case.blocksize, weight.descriptor.zero_offset * 0x11111111
    g_idx = torch.arange(cols, device=weight.place, dtype=torch.int32) // group
    new, steps = torch.empty if of.split == 1 else torch.zeros, cols // (of.k * of.split)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        m = len(x)
        y = new(m, rows, dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(m, of.m) * (rows // of.n), of.split)
        _multiply[grid](
            x, q.packed, q.scales, q.zeros, g_idx, y, m, rows, cols, STEPS=steps, GROUP=group,
            ZERO_OFFSET=offset, BY_G_IDX=of.by_g_idx, M=of.m, N=of.n, K=of.k, SPLIT=of.split,
            num_stages=of.stages, num_warps=of.warps,
        )  # fmt: skip
        return y

    return multiply
