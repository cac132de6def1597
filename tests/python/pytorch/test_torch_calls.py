"""_nf4_fast.Calls: what it does itself, and what it leaves to be looked at more closely."""

from __future__ import annotations

import nf4
import numpy as np
import pytest
import torch_cases

pytestmark = pytest.mark.interop
torch_cases.require("torch", "_nf4_fast")

import torch  # noqa: E402
import torch_faults  # noqa: E402
from nf4.torch import _kernels  # noqa: E402
from torch_faults import COLS, ROWS, M  # noqa: E402

FORMAT = 2
INTEGERS = ("format", "blocksize", "nested_blocksize", "rows", "cols")


@pytest.fixture(scope="module")
def calls():
    found = _kernels._calls()
    if found[0] is _kernels._look_closer:
        pytest.skip("this torch lends no tensors by DLPack")
    return found


def operands() -> dict:
    torch.manual_seed(0)
    weight = nf4.quantize(torch.randn(ROWS, COLS))
    parts = {name: getattr(weight, name) for name in _kernels.PARTS}
    return {
        "x": torch.randn(M, COLS),
        "y": torch.full((M, ROWS), 7.0),
        "bias": torch.randn(ROWS),
        "scratch": None,  # on the CPU there is none
        "threads": 2,
        **parts,
        **dict(zip(INTEGERS, (FORMAT, 64, 256, ROWS, COLS), strict=True)),
    }


def test_what_is_faultless(calls):
    matmul, dequantize = calls
    given = operands()
    weight = _kernels.quantized_tensor(*list(given.values())[5:11], (ROWS, COLS), "nf4", 64, 256)
    assert matmul(*given.values()) == 0
    assert torch.equal(given["y"], nf4.matmul(given["x"], weight, bias=given["bias"]))
    out = torch.empty(ROWS, COLS, dtype=torch.float16)
    assert dequantize(out, *list(given.values())[4:]) == 0
    assert torch.equal(out, nf4.dequantize(weight, "fp16"))


def test_rows_with_gaps_between_them(calls):
    given = operands()
    expected = operands()
    calls[0](*expected.values())
    wide = torch.zeros(1, 2 * M, COLS + 3)
    wide[:, ::2, :COLS] = given["x"]
    given["x"] = wide[:, ::2, :COLS]
    assert calls[0](*given.values()) == 0
    assert torch.equal(given["y"], expected["y"])


FAULTS = torch_faults.FAULTS | {
    "an array": {"x": np.zeros((M, COLS), np.float32)},
    "none": {"x": None},
    "x of rows that are seen twice": {
        "x": torch.zeros(M, 1, COLS).expand(M, 2, COLS), "y": torch.full((M, 2, ROWS), 7.0)
    },
    "x on meta": {"x": torch.zeros(M, COLS, device="meta")},
    "x sparse": {"x": torch.zeros(M, COLS).to_sparse()},
    "bias on meta": {"bias": torch.zeros(ROWS, device="meta")},
    "format by name": {"format": "nf4"},
    "blocksize -1": {"blocksize": -1},
    "rows of 65 bits": {"rows": 1 << 64},
    "no columns": {"cols": 0},
    "threads -1": {"threads": -1},
    "threads of 33 bits": {"threads": 1 << 32},
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_left_alone(fault, calls):
    given = operands() | FAULTS[fault]
    assert calls[0](*given.values()) is None
    assert (given["y"] == 7).all()


@pytest.mark.parametrize(
    "y",
    [
        torch.zeros(M, ROWS + 1),
        torch.zeros(M, ROWS).half(),
        torch.zeros(ROWS, M).t(),
        torch.zeros(M, ROWS, device="meta"),
    ],
)
def test_outputs_that_are_left_alone(y, calls):
    assert calls[0](*(operands() | {"y": y}).values()) is None
    assert y.is_meta or not y.any()
    assert calls[1](y, *list(operands().values())[4:]) is None


def test_what_the_library_refuses_is_a_status(calls):
    given = operands() | {"blocksize": 65, "absmax": torch.zeros(8, dtype=torch.uint8)}
    assert calls[0](*given.values()) == nf4.InvalidArgument.status
    assert (given["y"] == 7).all()


@pytest.mark.parametrize("way", [0, 1])
def test_another_number_of_arguments(way, calls):
    with pytest.raises(TypeError, match="14 arguments; expected 1[36]"):
        calls[way](*range(14))
