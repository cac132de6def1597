"""The bench's Linear4bit on the CPU: both forms are compared before they are timed."""

from __future__ import annotations

import bench_path  # noqa: F401  (the path)
import pytest

pytestmark = pytest.mark.interop
pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

from nf4bench import cpu_layers, ggml  # noqa: E402
from nf4bench.errors import WrongResult  # noqa: E402
from nf4bench.peers import PeerMissing  # noqa: E402


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for name, value in {"MS": (1, 9), "TURNS": 1, "PAUSE": 0, "ROTATED_BYTES": 0}.items():
        monkeypatch.setattr(cpu_layers, name, value)


def test_rows():
    lines = []
    rows = cpu_layers.run([(64, 128)], 2, lines.append)
    each = [(1, 1), (1, 9), (2, 1), (2, 9)]
    assert [(row["dtype"], row["threads"], row["m"]) for row in rows] == [
        (dtype, *one) for dtype in ("bf16", "fp32", "fp16") for one in each
    ]
    assert all(row["error"] <= cpu_layers.MOST_ERROR for row in rows)
    assert len(lines) == 12 and lines[0].startswith("Linear4bit, bf16, 64×128, 1 threads, 1 M, ")


def test_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(cpu_layers, "MOST_ERROR", -1)
    monkeypatch.setattr(cpu_layers, "turn", None)
    with pytest.raises(WrongResult, match="M = 1: an error of "):
        cpu_layers.run([(64, 128)], 1)


def test_without_ggml(monkeypatch, tmp_path):
    monkeypatch.setenv("NF4_GGML", str(tmp_path))
    with pytest.raises(PeerMissing, match="libggml-base.so"):
        ggml.Ggml("Q4_0", 1)
