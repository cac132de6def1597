"""The fast way, called from Python: what it does, and what it leaves to the general way."""

from __future__ import annotations

import nf4
import numpy as np
import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "_nf4_fast")

import torch  # noqa: E402
import torch_faults  # noqa: E402
from nf4.torch import _fast  # noqa: E402
from nf4.torch._weight import PARTS, Spec, WeightParts  # noqa: E402
from torch_faults import COLS, ROWS, M  # noqa: E402

if not _fast.registered:
    pytest.skip("this torch has not what C++ needs", allow_module_level=True)

FORMAT = 2
INTEGERS = ("rows", "cols", "format", "blocksize", "nested_blocksize")


def operands() -> dict:
    weight = nf4.quantize(torch.randn(ROWS, COLS))
    return {
        "x": torch.randn(M, COLS),
        "bias": torch.randn(ROWS),
        **{name: getattr(weight, name) for name in PARTS},
        **dict(zip(INTEGERS, (ROWS, COLS, FORMAT, 64, 256), strict=True)),
    }


def weight_in(given: dict) -> WeightParts:
    spec = Spec(*(given[name] for name in INTEGERS), (ROWS, COLS), "nf4")
    return WeightParts(*(given[name] for name in PARTS), spec)


def linear(given: dict) -> torch.Tensor | None:
    return _fast.linear(given["x"], given["bias"], weight_in(given))


def test_what_has_no_fault():
    given = operands()
    weight = weight_in(given).quantized()
    y = linear(given)
    assert y.is_contiguous() and torch.equal(y, nf4.matmul(given["x"], weight, bias=given["bias"]))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        out = torch.empty(ROWS, COLS, dtype=dtype)
        assert _fast.dequantize(out, weight_in(given)) is True
        assert torch.equal(out, nf4.dequantize(weight, dtype))


def test_rows_with_gaps_between_them():
    given = operands()
    expected = linear(given)
    wide = torch.zeros(1, 2 * M, COLS + 3)
    wide[:, ::2, :COLS] = given["x"]
    given["x"] = wide[:, ::2, :COLS]
    y = linear(given)
    assert y.shape == (1, M, ROWS) and torch.equal(y[0], expected)


class Subclass(torch.Tensor):
    """With memory, and torch's own __torch_function__."""


class OfParameter(torch.nn.Parameter):
    """As bitsandbytes' Params4bit is one."""


SUBCLASSES = {
    f"{name} of {kind.__name__}": {name: given.as_subclass(kind)}
    for name, given in operands().items()
    if isinstance(given, torch.Tensor)
    for kind in (Subclass, OfParameter)
}
FAULTS = torch_faults.FAULTS | SUBCLASSES | {
    "an array": {"x": np.zeros((M, COLS), np.float32)},
    "none": {"x": None},
    "x of a subclass": {"x": torch.nn.Parameter(torch.zeros(M, COLS), requires_grad=False)},
    "x negated lazily": {"x": torch._neg_view(torch.zeros(M, COLS))},
    "bias negated lazily": {"bias": torch._neg_view(torch.zeros(ROWS))},
    "bias an array": {"bias": np.zeros(ROWS, np.float32)},
    "x of rows that are seen twice": {"x": torch.zeros(M, 1, COLS).expand(M, 2, COLS)},
    "x on meta": {"x": torch.zeros(M, COLS, device="meta")},
    "x sparse": {"x": torch.zeros(M, COLS).to_sparse()},
    "bias on meta": {"bias": torch.zeros(ROWS, device="meta")},
    "format by name": {"format": "nf4"},
    "blocksize -1": {"blocksize": -1},
    "blocksize that the library refuses": {
        "blocksize": 65, "absmax": torch.zeros(8, dtype=torch.uint8)
    },
    "rows of 65 bits": {"rows": 1 << 64},
    "no columns": {"cols": 0},
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_left_alone(fault):
    given = operands() | FAULTS[fault]
    assert linear(given) is None


# Of the weight, so that dequantize has them, too.
OF_WEIGHT = [name for name, fault in FAULTS.items() if not {"x", "bias"} & fault.keys()]


@pytest.mark.parametrize("fault", OF_WEIGHT)
def test_what_is_not_dequantized(fault):
    out = torch.full((ROWS, COLS), 7.0)
    assert _fast.dequantize(out, weight_in(operands() | FAULTS[fault])) is False
    assert (out == 7).all()


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(ROWS, COLS + 1),
        torch.zeros(ROWS, COLS, dtype=torch.int16),
        torch.zeros(COLS, ROWS).t(),
        torch.zeros(ROWS, COLS, device="meta"),
        torch._neg_view(torch.zeros(ROWS, COLS)),
    ],
)
def test_outputs_that_are_left_alone(out):
    assert _fast.dequantize(out, weight_in(operands())) is False
    assert out.is_meta or not out.any()


def test_no_weight_at_all():
    x = torch.randn(M, COLS)
    for weight in (None, (), weight_in(operands())[:6], x, (*weight_in(operands())[:6], None)):
        assert _fast.linear(x, None, weight) is None
        assert _fast.dequantize(x, weight) is False


def test_a_mode_that_makes_another_output():
    """The general way gets along with it, or says what is wrong."""
    from torch.overrides import TorchFunctionMode

    class Short(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.new_empty:
                return torch.zeros(1)
            return function(*args, **(kwargs or {}))

    given = operands()
    with Short():
        assert linear(given) is None


@pytest.mark.parametrize("call", [_fast.linear, _fast.dequantize])
def test_another_number_of_arguments(call):
    with pytest.raises(TypeError, match="14 arguments; expected [23]"):
        call(*range(14))
