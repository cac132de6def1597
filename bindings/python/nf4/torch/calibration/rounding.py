"""Rounds a matrix to 4 bits by what its columns of x were: scales that make the error of the output
small, and GPTQ's error feedback, by which later columns make up for the errors of earlier ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nf4.checkpoint.bnb import NESTED_BLOCKSIZE
from nf4.checkpoint.int4_layouts import SYMMETRIC_ZERO
from nf4.info import codebook, scale_code

# These factors of the scale that the largest magnitude gives are tried. 1 comes first, and stays if
# no column of the block counts.
_FACTORS = [1.0, *(at / 100 for at in range(70, 107, 3) if at != 100)]
# How many weights' scales are searched at a time, and of how many columns errors are passed on
# together.
_CHUNK, _COLUMNS = 1 << 20, 128
_TINY = torch.finfo(torch.float32).tiny


class Scales(NamedTuple):
    """A scale for each block of the flat matrix and, for integers, its zero point, as floats."""

    scale: Tensor
    zero: Tensor | None = None

    def at(self, index: Any) -> Scales:
        return Scales(*(None if part is None else part[index] for part in self))


class Nested(NamedTuple):
    """Scales of 8 bits: scale = code[codes] * absmax (of each 256) + offset, rounded twice."""

    codes: Tensor
    absmax: Tensor
    offset: Tensor
    code: Tensor


class Codebook:
    """Codes into 16 floats, times a scale for each `blocksize` weights of the flat matrix."""

    def __init__(self, format: str, blocksize: int, device: torch.device):
        self.blocksize = blocksize
        values, codes = torch.sort(torch.from_numpy(codebook(format) + 0), stable=True)
        # FP4 has two codes of 0, of which the lower one is taken.
        first = torch.cat([torch.tensor([True]), values[1:] != values[:-1]])
        self._values, self._codes = values[first].to(device), codes[first].byte().to(device)
        self._between = (self._values[1:] + self._values[:-1]) / 2

    def largest(self, blocks: Tensor) -> Scales:
        """The scales that bitsandbytes takes. blocks: [blocks, blocksize]."""
        return Scales(blocks.abs().amax(1))

    def scaled(self, scales: Scales, factor: float) -> Scales:
        return Scales(scales.scale * factor)

    def nearest(self, x: Tensor, scales: Scales) -> Tensor:
        """The places of the nearest codes in ascending order of what they are worth."""
        return torch.bucketize(x / scales.scale, self._between)

    def worth(self, places: Tensor, scales: Scales) -> Tensor:
        return self._values[places] * scales.scale

    def codes(self, places: Tensor) -> Tensor:
        return self._codes[places]


class Integers:
    """Integers of 4 bits with a scale of 16 bits for each `blocksize` weights of a row, and a zero
    point, which is 8 if they are symmetric."""

    def __init__(self, group_size: int, symmetric: bool, dtype: torch.dtype):
        self.blocksize, self._symmetric, self._dtype = group_size, symmetric, dtype

    def largest(self, blocks: Tensor) -> Scales:
        """The scales and zero points of rounding to nearest. blocks: [blocks, group_size]."""
        low, high = blocks.amin(1).clamp_max(0), blocks.amax(1).clamp_min(0)
        if self._symmetric:
            scale = self._stored(torch.maximum(-low, high) / 7.5)
            return Scales(scale, torch.full_like(scale, SYMMETRIC_ZERO))
        scale = self._stored((high - low) / 15)
        return Scales(scale, (-low / scale).round().clamp(0, 15))

    def scaled(self, scales: Scales, factor: float) -> Scales:
        return Scales(self._stored(scales.scale * factor), scales.zero)

    def nearest(self, x: Tensor, scales: Scales) -> Tensor:
        """The nearest codes, as floats."""
        return ((x / scales.scale).round_() + scales.zero).clamp_(0, 15)

    def worth(self, places: Tensor, scales: Scales) -> Tensor:
        return (places - scales.zero) * scales.scale

    def codes(self, places: Tensor) -> Tensor:
        return places.byte()

    def _stored(self, scale: Tensor) -> Tensor:
        limits = torch.finfo(self._dtype)
        return scale.to(self._dtype).clamp(limits.tiny * limits.eps, limits.max).float()


Grid = Codebook | Integers


def blocks_of(weight: Tensor, blocksize: int) -> Tensor:
    """The flat matrix in blocks, the last one filled up with 0."""
    flat = weight.flatten()
    rest = -len(flat) % blocksize
    return (torch.nn.functional.pad(flat, (0, rest)) if rest else flat).view(-1, blocksize)


def largest_scales(weight: Tensor, grid: Grid) -> Scales:
    return grid.largest(blocks_of(weight, grid.blocksize))


def searched_scales(weight: Tensor, grid: Grid, counts: Tensor) -> Scales:
    """The scales of least square error, where that of a column counts so much. weight: [rows,
    columns] in fp32; counts: [columns], not negative."""
    found, begin = [], 0
    for part in blocks_of(weight, grid.blocksize).split(max(1, _CHUNK // grid.blocksize)):
        at = torch.arange(begin, begin + part.numel(), device=weight.device) % weight.shape[1]
        found.append(_least(part, grid, counts[at].view_as(part)))
        begin += part.numel()
    parts = zip(*found, strict=True)
    return Scales(*(None if part[0] is None else torch.cat(part) for part in parts))


def _least(blocks: Tensor, grid: Grid, counts: Tensor) -> Scales:
    largest = grid.largest(blocks)
    best, least = largest.scale, torch.full_like(largest.scale, torch.inf)
    for factor in _FACTORS:
        scales = grid.scaled(largest, factor)
        worth = _round(blocks, grid, scales)[1]
        error = ((worth - blocks).square() * counts).sum(1)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, scales.scale, best)
    return Scales(best, largest.zero)


def _round(blocks: Tensor, grid: Grid, scales: Scales) -> tuple[Tensor, Tensor]:
    """The places of the nearest codes, and what they are worth."""
    scales = scales.at((slice(None), None))
    places = grid.nearest(blocks, scales._replace(scale=_divisor(scales.scale)))
    return places, grid.worth(places, scales)


def _divisor(scale: Tensor) -> Tensor:
    """The scale without zeros. One of 8 bits may be below 0."""
    return scale.where(scale.abs() >= _TINY, _TINY)


def nested(scale: Tensor) -> tuple[Scales, Nested]:
    """Quantizes scales to 8 bits as nf4.quantize does, and returns what they are worth then."""
    code = torch.from_numpy(scale_code().copy()).to(scale.device)
    offset = scale.double().mean().float()
    blocks = blocks_of(scale - offset, NESTED_BLOCKSIZE)
    absmax = blocks.abs().amax(1)
    between = (code[1:] + code[:-1]) / 2
    codes = torch.bucketize(blocks / absmax.clamp_min(_TINY)[:, None], between)
    worth = (code[codes] * absmax[:, None]).flatten()[: len(scale)] + offset
    return Scales(worth), Nested(codes.byte().flatten()[: len(scale)], absmax, offset, code)


def nearest(weight: Tensor, grid: Grid, scales: Scales) -> tuple[Tensor, Tensor]:
    """The nearest codes and what they are worth, [rows, columns]."""
    places, worth = _round(blocks_of(weight, grid.blocksize), grid, scales)
    count, shape = weight.numel(), weight.shape
    return grid.codes(places).flatten()[:count].view(shape), worth.flatten()[:count].view(shape)


def with_feedback(
    weight: Tensor,
    grid: Grid,
    scales: Scales,
    hessian: Tensor,
    damping: float,
    ordered: bool = True,
) -> tuple[Tensor, Tensor]:
    """GPTQ with given scales: columns are rounded in the order of falling mean x^2, and those that
    are left make up for the error of each. Returns the codes and what they are worth, [rows,
    columns].

    weight    [rows, columns] in fp32
    hessian   the mean of x x^T, [columns, columns]
    damping   what is added to its diagonal, over the mean of the diagonal; more than 0
    """
    rows, columns = weight.shape
    order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = _inverse_factor(hessian[order][:, order], damping)
    first = torch.arange(rows, device=weight.device) * columns
    scales = scales._replace(scale=_divisor(scales.scale))
    left = weight.T[order].contiguous()
    codes = torch.empty(columns, rows, dtype=torch.uint8, device=weight.device)
    for begin in range(0, columns, _COLUMNS):
        own, after = slice(begin, begin + _COLUMNS), slice(begin + _COLUMNS, None)
        of_part = scales.at((first + order[own, None]) // grid.blocksize)
        codes[own], lost = _round_part(left[own], grid, of_part, factor[own, own])
        left[after].addmm_(factor[own, after].T, lost, alpha=-1)
    back = order.argsort()
    return codes[back].T.contiguous(), left[back].T.contiguous()


def _round_part(part: Tensor, grid: Grid, scales: Scales, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds columns in place, with the scales of each weight, all [columns, rows]. Returns the
    codes and what the other columns have to make up for."""
    diagonal, lost, places = factor.diagonal().tolist(), torch.empty_like(part), []
    for at, x in enumerate(part):
        own = scales.at(at)
        places.append(grid.nearest(x, own))
        worth = grid.worth(places[-1], own)
        torch.sub(x, worth, out=lost[at]).div_(diagonal[at])
        x.copy_(worth)
        part[at + 1 :].addr_(factor[at, at + 1 :], lost[at], alpha=-1)
    return grid.codes(torch.stack(places)), lost


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper triangular U of which U^T U is the inverse of the damped Hessian."""
    damped = hessian.double()
    mean = damped.diagonal().mean()
    damped.diagonal().add_(damping * mean if mean > 0 else 1)
    upper = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    one = torch.eye(len(upper), dtype=upper.dtype, device=upper.device)
    return torch.linalg.solve_triangular(upper, one, upper=True).float()
