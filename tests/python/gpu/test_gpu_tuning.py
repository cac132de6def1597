"""A report of a GPU, and costs that are measured on it, with few and small products."""

from __future__ import annotations

from pathlib import Path

import nf4
import pytest
from gpu_cases import NEEDS_GPU
from nf4 import _costs
from nf4._load import library
from nf4.tuning import api, report

pytestmark = [pytest.mark.interop, NEEDS_GPU]
pytest.importorskip("torch")

from nf4.tuning import figures, tune  # noqa: E402


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ((1024, 1024), (1024, 2048), (2048, 1024), (2048, 2048))
    for module, name, value in (
        (tune, "SHAPES", shapes),
        (tune, "ROWS", (1, 16, 64)),
        (tune, "CHECKED_SHAPES", ((1536, 1024),)),
        (figures, "SHAPES", ((1024, 2048),)),
        (figures, "ROWS", (1, 17, 100)),
    ):
        monkeypatch.setattr(module, name, value)


def test_a_report_of_this_gpu(small: None, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    document = api.write_report(path)
    assert report.read(path) == document
    assert document["gpu"]["name"] == nf4.device_info(0).name
    # Times may vary where other programs use the GPU.
    assert report.doubts({**document, "spread": 1.0}) == []
    strategies = {each["strategy"] for each in document["times"]}
    assert tune.DENSE in strategies and len(strategies) > 1
    assert any(each["fused"]["before"] for each in document["figures"])


def test_costs_of_this_gpu(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_costs.VARIABLE, str(tmp_path))
    monkeypatch.setattr(tune, "WIDEST_SPREAD", 1000.0)
    monkeypatch.setattr(tune, "_slower", lambda checks: set())
    found = nf4.tune()
    assert found.path is not None and found.path.parent == tmp_path
    assert found.products and nf4.tune(at_first_use=True) is None
    (used,) = _costs.load(library())
    assert (used.reason, used.gpu_line) == ("", _costs.gpu_line(nf4.device_info(0)))
    api.reset()
