"""tools/quality: the rounding whose scales are studied, and the tables of the study's page."""

from __future__ import annotations

import sys

import nf4
import numpy as np
import pytest
from conftest import ROOT

torch = pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "tools" / "quality"))

import page  # noqa: E402
import rounding  # noqa: E402


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal((24, 192)).astype(np.float32))


def output_error(made: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    lost = made - weight
    return ((lost @ hessian) * lost).sum().item()


def test_largest_number_as_scale_is_what_nf4_quantize_does(weight):
    made = nf4.dequantize(nf4.quantize(weight.numpy(), nested_blocksize=0), "fp32")
    np.testing.assert_array_equal(rounding.by_largest(weight).numpy(), made)


def test_choice_has_the_least_error_of_the_grid(weight):
    measures = torch.stack([torch.ones(192), torch.arange(192.0)])
    errors = rounding.errors(weight, measures)
    for at, measure in enumerate(measures):
        made = rounding.with_factors(weight, errors[:, at].argmin(0))
        lost = ((made - weight).square() * measure).reshape(24, 3, 64).sum(-1)
        torch.testing.assert_close(lost, errors[:, at].amin(0))
        largest = rounding.by_largest(weight)
        assert lost.sum() < ((largest - weight).square() * measure).sum()


def test_feedback_lessens_the_error_of_the_output(weight):
    x = (
        torch.randn(512, 192, generator=torch.Generator().manual_seed(0))
        @ torch.linalg.qr(torch.randn(192, 192, generator=torch.Generator().manual_seed(1)))[0]
        * torch.logspace(-1, 1, 192)
    )
    hessian = x.T @ x / len(x)
    largest = output_error(rounding.by_largest(weight), weight, hessian)
    for damping, search in ((0.01, False), (0.1, True)):
        made = rounding.with_feedback(weight, hessian, damping, search)
        assert output_error(made, weight, hessian) < largest
    # Without correlations there is nothing to make up for.
    made = rounding.with_feedback(weight, torch.eye(192), 0.01, False)
    torch.testing.assert_close(made, rounding.by_largest(weight))


def test_tables_of_the_page_are_those_of_its_figures():
    text = page.PAGE.read_text()
    assert page.rendered(text) == text
