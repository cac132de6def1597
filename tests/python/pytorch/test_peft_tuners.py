"""All of PEFT's tuners over NF4Linear: as over the dense layer of the same weight, and as over
bitsandbytes' Linear4bit wherever that works."""

from __future__ import annotations

import os
import re
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "served")]
torch_cases.require("torch", "bitsandbytes", "peft", "transformers", "_nf4_fast")

import peft  # noqa: E402
import peft_tuners  # noqa: E402
import torch  # noqa: E402
from nf4.errors import InvalidArgument  # noqa: E402
from peft_tuners import TUNERS, adapted, config_of, gradients, in_four_bits, logits  # noqa: E402

# Two weights in NF4 of one dense weight, quantized after different roundings.
TIES = 2e-2
# ||W' - W|| / ||W|| where W' is W in NF4 and normally distributed is 0.09.
QUANTIZED = 0.12


@pytest.fixture(autouse=True)
def environment():
    """BOFT sets CC and CXX, and leaves them so if it cannot compile its kernels."""
    with unittest.mock.patch.dict(os.environ):
        yield


def outcome(do: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result, or the error."""
    try:
        return do(*arguments)
    except Exception as error:
        return error


def is_close(a: Any, b: Any, most: float) -> bool:
    if isinstance(a, Exception) or isinstance(b, Exception):
        return False
    return a.shape == b.shape and (a - b).norm() <= most * b.norm()


@pytest.fixture
def three(tuner, tmp_path):
    """Models with the tuner over NF4Linear, dense layers and Linear4bit, or the error."""
    try:
        config = config_of(tuner, tmp_path)
        dense = adapted("dense", config)
    except ImportError as error:
        pytest.skip(str(error))
    ours, theirs = (outcome(adapted, kind, config) for kind in ("NF4Linear", "Linear4bit"))
    if isinstance(ours, Exception):  # the same for whatever is no plain torch.nn.Linear
        assert type(ours) is type(theirs) is ValueError
        pytest.skip(str(ours))
    return ours, dense, theirs


def require_as(ours: Any, dense: Any, most: float) -> None:
    """The same result, or the same refusal."""
    if isinstance(dense, Exception):
        assert type(ours) is type(dense) and str(ours) == str(dense)
    else:
        assert is_close(ours, dense, most), ours


@pytest.mark.parametrize("tuner", TUNERS)
def test_forward_and_backward(tuner, three):
    ours, dense, theirs = three
    assert ours.get_nb_trainable_parameters() == dense.get_nb_trainable_parameters()
    for do in (logits, gradients):
        require_as(outcome(do, ours, tuner), outcome(do, dense, tuner), 3e-6)
    if is_close(outcome(logits, theirs, tuner), outcome(logits, dense, tuner), 3e-6):
        assert ours.get_nb_trainable_parameters() == theirs.get_nb_trainable_parameters()


def merged(model: peft.PeftModel, safe: bool) -> torch.Tensor:
    model.merge_adapter(safe_merge=safe)
    return peft_tuners.weights(model)


def unmerged(model: peft.PeftModel) -> torch.Tensor:
    model.unmerge_adapter()
    return peft_tuners.weights(model)


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize("safe", [False, True])
def test_merge_and_unmerge(tuner, three, safe):
    ours, dense, theirs = three
    before = peft_tuners.weights(ours)
    works = is_close(outcome(logits, theirs, tuner), outcome(logits, dense, tuner), 3e-6)
    expected, found = outcome(merged, dense, safe), outcome(merged, ours, safe)
    if isinstance(expected, Exception):
        require_as(found, expected, 0)
        assert torch.equal(peft_tuners.weights(ours), before)
        return
    assert is_close(found, in_four_bits(expected), TIES), found
    of_theirs = outcome(merged, theirs, safe)
    if works and not isinstance(of_theirs, Exception):
        assert is_close(found, of_theirs, TIES)
    after, expected = outcome(unmerged, ours), outcome(unmerged, dense)
    if isinstance(expected, Exception):
        require_as(after, expected, 0)
    else:  # the weight was rounded twice
        assert (after - expected).norm() <= QUANTIZED * (found.norm() + before.norm())


@pytest.mark.parametrize("tuner", TUNERS)
def test_what_is_not_finite_is_not_merged(tuner, three):
    """Four bits have neither NaN nor Inf, and would not show that an adapter is broken. One check
    finds both, whatever the tuner, so that tuners have them in turn."""
    value = (float("nan"), float("inf"))[TUNERS.index(tuner) % 2]
    ours, dense, _ = three
    before = peft_tuners.weights(ours)
    for model in (ours, dense):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.flatten()[0] = value
    expected = outcome(merged, dense, False)
    if isinstance(expected, torch.Tensor) and not expected.isfinite().all():
        found = outcome(merged, ours, False)
        assert isinstance(found, ValueError), found
        assert re.search("has NaN or Inf|not finite; adapter default", str(found))
        assert torch.equal(peft_tuners.weights(ours), before)


@pytest.mark.parametrize("tuner", TUNERS)
def test_saved_and_loaded(tuner, three, tmp_path):
    model = three[0].eval()
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(peft_tuners.model_of("NF4Linear"), tmp_path / "adapter")
    require_as(outcome(logits, again.eval(), tuner), outcome(logits, model, tuner), 3e-6)


@pytest.mark.parametrize("tuner", TUNERS)
def test_over_integers(tuner, tmp_path):
    """Adapters stay beside them."""
    try:
        config = config_of(tuner, tmp_path)
        dense = adapted("dense integers", config)
    except ImportError as error:
        pytest.skip(str(error))
    ours = outcome(adapted, "Int4Linear", config)
    if isinstance(ours, StopIteration):  # of an attention without a parameter, whose device it asks
        assert tuner == "ADAPTION_PROMPT"
        return
    if isinstance(ours, ValueError):
        assert re.search("not a plain torch.nn.Linear|into an Int4Linear", str(ours))
        return
    for do in (logits, gradients):
        require_as(outcome(do, ours, tuner), outcome(do, dense, tuner), 3e-6)
    before = peft_tuners.weights(ours)
    expected, found = outcome(merged, dense, False), outcome(merged, ours, False)
    if not isinstance(expected, Exception) and not torch.equal(expected, before):
        assert isinstance(found, InvalidArgument), found
        assert re.search("into an Int4Linear.*stay beside it", str(found))
    assert torch.equal(peft_tuners.weights(ours), before)
