"""The bench of integer weights, on the CPU with fakes."""

from __future__ import annotations

from dataclasses import replace

import bench_path  # noqa: F401  (the path)
import pytest

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")

import int4_oracle  # noqa: E402
from bench_fakes import SMALL, bench  # noqa: E402
from nf4bench import int4, int4_cases, matmul, modes, peers  # noqa: E402
from nf4bench.cases import ACT_ORDER  # noqa: E402
from nf4bench.options import Options  # noqa: E402
from nf4bench.weights import weight_of  # noqa: E402


def test_the_program_has_all_figures_and_names_who_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matmul, "ERROR_MS", (1,))
    monkeypatch.setattr(int4_cases, "QUICK_SHAPES", (SMALL,))
    monkeypatch.setattr(modes, "bench", lambda _: bench(names=()))
    said: list[str] = []
    figures = modes.run(Options(mode="int4", quick=True), said.append)
    assert list(figures) == ["device", "torch", "peers", "dequantize", "rows", "errors"]
    assert any(line.startswith("humming: missing: ") for line in said)
    assert [(row["format"], row["launch"]) for row in figures["dequantize"]] == [
        (layout, launch) for layout in int4_cases.LAYOUTS for launch in ("plain", "pdl")
    ]
    assert [row["m"] for row in figures["rows"] if row["launch"] == "plain"] == [1, 16, 128, 1024]
    for row in figures["rows"]:
        assert row["peers"].keys() >= {"dense", *int4.OTHERS} and row["kernel"] == "few"
    kinds = {(row["format"], row["dtype"]) for row in figures["errors"]}
    assert kinds == {(layout, d) for layout in int4_cases.LAYOUTS for d in ("bf16", "fp16")}
    assert all(row["errors"]["libnf4"] < 1.1 * row["errors"]["dense"] for row in figures["errors"])


@pytest.mark.parametrize("placement", ["aligned", ACT_ORDER])
@pytest.mark.parametrize("layout", int4_cases.LAYOUTS)
def test_a_weight_is_compared_with_its_own_numbers(layout: str, placement: str) -> None:
    case = replace(int4_cases.case(SMALL, layout, "fp16"), placement=placement)
    made = weight_of(case, "cpu")
    packed, scales, zeros, g_idx = (
        None if part is None else part.numpy()
        for part in (getattr(made.quantized, name) for name in made.parts[:4])
    )
    expected = int4_oracle.dequantize(
        int4_oracle.Int4Arrays(layout, *SMALL, case.blocksize, packed, scales, zeros, g_idx), "fp32"
    )
    assert torch.equal(peers.dequantized(made), torch.from_numpy(expected))
    assert made.input_bytes == sum(
        each.nbytes for each in (packed, scales, zeros, g_idx) if each is not None
    )
