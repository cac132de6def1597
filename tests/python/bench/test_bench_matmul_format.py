"""The bench of products in MXFP4 and NVFP4 on the CPU with fakes."""

from __future__ import annotations

import sys
from types import ModuleType

import bench_path  # noqa: F401  (the path)
import pytest

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")

from bench_fakes import bench  # noqa: E402
from nf4bench import matmul_format  # noqa: E402
from nf4bench.check import WrongResult  # noqa: E402
from nf4bench.peers import Missing  # noqa: E402

SHAPE = (96, 128)


class FakeLayer:
    """What the bench calls of Humming's layer. `factor`: what its products are multiplied with."""

    factor = 1.0

    def __init__(self, shape_n: int, shape_k: int, torch_dtype, weight_config: dict) -> None:
        assert torch_dtype == torch.bfloat16 and weight_config["dtype"] == "float4e2m1"
        self.shape, self.group = (shape_n, shape_k), weight_config["group_size"]

    def cuda(self) -> FakeLayer:
        return self

    def load_from_tensors(self, tensors: dict) -> None:
        rows, cols = self.shape
        packed = tensors.pop("weight")
        assert packed.dtype == torch.int32 and packed.shape == (rows, cols // 8)
        codes = torch.stack([packed >> 4 * i & 15 for i in range(8)], dim=-1).view(rows, -1)
        scales = tensors.pop("weight_scale").float() * tensors.pop("weight_scale_2", torch.ones(1))
        assert scales.shape == (rows, cols // self.group) and not tensors
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        values = torch.cat([magnitudes, -magnitudes])[codes.long()]
        self.weight = (values * scales.repeat_interleave(self.group, 1)).bfloat16()

    def transform(self) -> None:
        pass

    def __call__(self, x):
        return x @ self.weight.t() * self.factor


@pytest.fixture
def humming(monkeypatch: pytest.MonkeyPatch) -> None:
    package, layer = ModuleType("humming"), ModuleType("humming.layer")
    package.__version__, layer.HummingLayer = "1.2", FakeLayer
    monkeypatch.setitem(sys.modules, "humming", package)
    monkeypatch.setitem(sys.modules, "humming.layer", layer)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_every_form_is_timed(format: str, humming: None) -> None:
    said: list[str] = []
    made, found = bench(names=()), matmul_format.load("cpu")
    figures = matmul_format.run(made, found, format, said.append, [SHAPE], (1, 5))
    assert figures["format"] == format and figures["peers"]["humming"]["version"] == "1.2"
    assert [(row["shape"], row["m"]) for row in figures["rows"]] == [([96, 128], 1), ([96, 128], 5)]
    for row in figures["rows"]:
        assert list(row["peers"]) == ["NF4", "dense", "humming"] and 0 < row["error"] < 4e-3
        assert row["peers"]["NF4"]["ratio"] == round(row["peers"]["NF4"]["us"] / row["us"], 3)
    assert said[-1].startswith("96x128, M = 5: libnf4 ") and "humming" in said[-1]


def test_without_humming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)
    found = matmul_format.load("cpu")
    assert isinstance(found["humming"], Missing)
    figures = matmul_format.run(bench(names=()), found, "mxfp4", print, [SHAPE], (1,))
    assert list(figures["rows"][0]["peers"]) == ["NF4", "dense"]


def test_a_wrong_product_ends_it(humming: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLayer, "factor", 1.1)
    made = bench(names=())
    with pytest.raises(WrongResult, match=r"^humming: \(96, 128\), M = 1: "):
        matmul_format.run(made, matmul_format.load("cpu"), "mxfp4", print, [SHAPE], (1,))
    assert made.gpu.measured == 0
