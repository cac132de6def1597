"""tools/quality: each design of the study lessens the error that it is about, and the tables of the
study's page are those of its figures."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch_cases
from conftest import ROOT

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "transformers", "tokenizers")
sys.path.insert(0, str(ROOT / "tools" / "quality"))

import page  # noqa: E402
import study  # noqa: E402
import torch  # noqa: E402
from nf4.torch.calibration import weights  # noqa: E402

DESIGNS = study.designs("cpu", 64)


@pytest.mark.parametrize("name", [name for name, (base, _) in DESIGNS.items() if name != base])
def test_a_design_has_a_smaller_error_than_its_base(name):
    base, design = DESIGNS[name]
    weight, x = torch.randn(48, 192), torch.randn(512, 192) * torch.logspace(-1, 1, 192)
    x = x + x @ torch.randn(192, 192) / 192
    hessian = x.T @ x / len(x)
    error_of = hessian if design.needs_x else torch.eye(192)
    errors = []
    for each in (design, DESIGNS[base][1]):
        lost = each.of(weight, hessian) - weight
        errors.append(((lost @ error_of) * lost).sum().item())
    assert errors[0] < errors[1]


@pytest.mark.parametrize("path", page.PAGES, ids=lambda path: path.parent.name)
def test_tables_of_the_pages_are_those_of_the_figures(path):
    text = path.read_text()
    assert page.rendered(text) == text and ":begin" in text


def test_the_plot_has_the_figures():
    plotted = page.PLOT.read_text()
    for values in page.bars().values():
        assert len(values) == 5 and all(f">{value}<" in plotted for value in values)


def test_the_calibration_that_is_offered_is_the_one_of_the_tables():
    name = f"NF4{page.CALIBRATED}"
    assert DESIGNS[name][1] == dataclasses.replace(
        DESIGNS["NF4, plain"][1], scales="x", damping=weights.DAMPING
    )
