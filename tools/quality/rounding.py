"""Rounds a weight to NF4 in blocks of 64 along its rows, with scales by several measures. What
comes out is what a checkpoint with these codes and fp32 scales dequantizes to."""

from __future__ import annotations

import nf4
import torch
from torch import Tensor

BLOCK = 64
CODEBOOK = torch.from_numpy(nf4.codebook("nf4").copy())
_BETWEEN = (CODEBOOK[1:] + CODEBOOK[:-1]) / 2
# Scales over the block's largest number.
GRID = torch.linspace(0.70, 1.06, 13)


def _rounded(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks: [..., BLOCK]; scales: [...]."""
    scales = scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    return CODEBOOK[torch.bucketize(blocks / scales, _BETWEEN)] * scales


def _blocks(weight: Tensor) -> Tensor:
    return weight.reshape(weight.shape[0], -1, BLOCK)


def by_largest(weight: Tensor) -> Tensor:
    """As bitsandbytes: the scale is the block's largest number."""
    blocks = _blocks(weight)
    return _rounded(blocks, blocks.abs().amax(-1)).reshape(weight.shape)


def errors(weight: Tensor, measures: Tensor) -> Tensor:
    """The error of each block for each scale of GRID, [grid, measure, row, block]. measures: what
    the square error of a column counts, [measure, column]."""
    blocks = _blocks(weight)
    largest = blocks.abs().amax(-1)
    counts = measures.reshape(len(measures), -1, BLOCK)
    return torch.stack(
        [
            torch.einsum(
                "rbk,mbk->mrb", (_rounded(blocks, factor * largest) - blocks).square(), counts
            )
            for factor in GRID
        ]
    )


def with_factors(weight: Tensor, choice: Tensor) -> Tensor:
    """choice: which of GRID each block takes, [row, block]."""
    blocks = _blocks(weight)
    return _rounded(blocks, GRID[choice] * blocks.abs().amax(-1)).reshape(weight.shape)


def with_feedback(weight: Tensor, hessian: Tensor, damping: float, search: bool) -> Tensor:
    """GPTQ: the error of a column is made up for by the columns after it. hessian: the mean of
    x x^T, [column, column]; damping: what is added to its diagonal, over the mean of that. search:
    scales of least error weighted by the damped diagonal, instead of the largest number."""
    damped = hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped.double()))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    left, made = weight.clone(), torch.empty_like(weight)
    for begin in range(0, weight.shape[1], BLOCK):
        columns = slice(begin, begin + BLOCK)
        block = left[:, columns].clone()
        scales = block.abs().amax(1)
        if search:
            choice = errors(block, damped.diagonal()[None, columns])[:, 0].argmin(0)
            scales = GRID[choice[:, 0]] * scales
        own, lost = factor[columns, columns], torch.empty_like(block)
        for at in range(BLOCK):
            made[:, begin + at] = _rounded(block[:, at : at + 1], scales)[:, 0]
            lost[:, at] = (block[:, at] - made[:, begin + at]) / own[at, at]
            block[:, at + 1 :] -= lost[:, at : at + 1] * own[at, at + 1 :]
        left[:, begin + BLOCK :] -= lost @ factor[columns, begin + BLOCK :]
    return made
