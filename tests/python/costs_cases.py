"""A GPU that is not there, and the text and folder of its costs."""

import nf4
import pytest
from nf4 import _costs
from nf4._load import library

GPU = nf4.Device(
    0, True, "", "NF4_STATUS_OK", 1, "NVIDIA A100-SXM4-80GB", (8, 0), 108, 1 << 36, 13000, 13000,
    "sm80", 166912, False,
)  # fmt: skip
LINE = _costs.gpu_line(GPU)
ROWS = ["codebook fp16 skinny 8 1.5 0.25 0 0", "codebook fp16 dense 8 9 0 0 0"]


def text(rows=ROWS, line=LINE, version=None):
    return _costs.text_of(line, rows, version or nf4.version())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns a folder of costs that does not exist yet. No costs are set afterwards."""
    monkeypatch.setenv(_costs.VARIABLE, str(tmp_path / "costs"))
    yield tmp_path / "costs"
    _costs.set_costs(library(), None)
