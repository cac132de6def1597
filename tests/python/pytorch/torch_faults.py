"""Faults of the arguments of a product: _nf4_fast.linear leaves them alone, and
torch.ops.nf4._linear refuses them by the name that begins each."""

from __future__ import annotations

import torch

ROWS, COLS, M = 6, 80, 3


def without_memory(*shape, dtype=torch.float32):
    """A tensor as one is left that is sharded, or offloaded, until it is gathered again."""
    tensor = torch.zeros(shape, dtype=dtype)
    tensor.untyped_storage().resize_(0)
    return tensor


FAULTS = {
    "x of other columns": {"x": torch.zeros(M, COLS - 1)},
    "x of no dimensions": {"x": torch.zeros(())},
    "x of float64": {"x": torch.zeros(M, COLS).double()},
    "x in columns": {"x": torch.zeros(COLS, M).t()},
    "x of one row for all": {"x": torch.zeros(1, COLS).expand(M, COLS)},
    "x of rows that overlap": {"x": torch.zeros(M * COLS).as_strided((M, COLS), (COLS - 1, 1))},
    "bias of another dtype": {"bias": torch.zeros(ROWS).half()},
    "bias too short": {"bias": torch.zeros(ROWS - 1)},
    "bias with gaps": {"bias": torch.zeros(2 * ROWS)[::2]},
    "packed too short": {"packed": torch.zeros(3, dtype=torch.uint8)},
    "packed of int8": {"packed": torch.zeros(ROWS * COLS // 2, dtype=torch.int8)},
    "packed with gaps": {"packed": torch.zeros(ROWS * COLS, dtype=torch.uint8)[::2]},
    "absmax of float32": {"absmax": torch.zeros(8)},
    "nested_absmax too long": {"nested_absmax": torch.zeros(2)},
    "nested_absmax missing": {"nested_absmax": None},
    "nested_code too short": {"nested_code": torch.zeros(255)},
    "nested_offset of float16": {"nested_offset": torch.zeros(()).half()},
    "codebook too long": {"codebook": torch.zeros(17)},
    "x without its memory": {"x": without_memory(M, COLS)},
    "bias without its memory": {"bias": without_memory(ROWS)},
    "absmax without its memory": {"absmax": without_memory(8, dtype=torch.uint8)},
    "codebook without its memory": {"codebook": without_memory(16)},
    "blocksize 0": {"blocksize": 0},
    "blocksize of 33 bits": {"blocksize": 1 << 32},
    "nested_blocksize -1": {"nested_blocksize": -1},
    "shape of -1 rows": {"rows": -1},
    "shape of too many elements": {"rows": 1 << 62},
    "format 5": {"format": 5},
}
