"""The bench of mixture of experts on the CPU with fakes: small stacks, from group to page."""

from __future__ import annotations

import bench_path  # noqa: F401  (the path)
import pytest

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")
for _name in ("bitsandbytes", "transformers"):
    pytest.importorskip(_name)
if not hasattr(torch.nn.functional, "grouped_mm"):
    pytest.skip("torch without grouped_mm", allow_module_level=True)

from bench_fakes import bench  # noqa: E402
from nf4bench import experts, experts_decode, experts_pages  # noqa: E402
from nf4bench.check import WrongResult  # noqa: E402
from nf4bench.experts_cases import DENSE, DEQUANTIZED, GROUPED_NF4, Group, Model  # noqa: E402

SMALL = Model("small", 4, 64, 128, 2)
GROUPS = [
    Group(SMALL, "gate_up", (1, 5)), Group(SMALL, "layer", (3,), (DENSE, DEQUANTIZED)),
    Group(SMALL, "gradient", (4,)),
]  # fmt: skip
DECODED = experts_decode.Size(Model("tiny", 4, 64, 64, 2), 1, 2, 1, 32, 96)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler takes longer than all the rest."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setattr(experts_decode, "CONTEXT", 8)
    monkeypatch.setattr(experts, "host_times", lambda gpu, work: host_times(work))


def host_times(work: dict) -> dict:
    from nf4bench.measure import in_turns

    return in_turns({name: lambda each=each: len(each()) for name, each in work.items()}, 2)


def test_from_groups_to_the_page(eager: None) -> None:
    said: list[str] = []
    found = experts.run(bench(names=()), experts.load("cpu"), GROUPS, DECODED, said.append)
    assert any(line.startswith(f"{GROUPED_NF4}: missing: ") for line in said)
    assert [(row["work"], row["tokens"]) for row in found["rows"]] == [
        ("gate_up", 1), ("gate_up", 5), ("layer", 3), ("gradient", 4),
    ]  # fmt: skip
    for row in found["rows"]:
        assert list(row["peers"]) == [DENSE, DEQUANTIZED]
        assert row["us"] > 0 and 0 < row["error"] < 4e-3 and 1 <= row["active"] <= 4
    # Two of four experts have a token: packed bytes, their scales, and the scales of those.
    first = found["rows"][0]
    assert first["active"] == 2 and first["bytes"] == 2 * 256 * 64 * (1 / 2 + 1 / 64 + 4 / 64 / 256)
    assert [each["name"] for each in found["call"]][-1] == experts.GROUPED_MM
    decoded = {each["name"]: each for each in found["decode"]["forms"]}
    assert list(decoded) == ["libnf4", "dense, grouped_mm", "dense, batched_mm"]
    assert 0 < decoded["libnf4"]["error"] < 0.05
    figures = {"experts": found | {"date": "1 Jan", "commit": "abc"}}
    page = experts_pages.page(figures, {"experts"})
    assert "commit abc; their code has changed since" in page
    assert "| small | layer | 3 |" in page and "small: 4 experts of 64 and 128" in page
    assert f"{GROUPED_NF4} is missing" in page


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_another_format(format: str) -> None:
    groups = [Group(SMALL, work, (1, 5), (DENSE,)) for work in ("layer", "gradient")]
    peer = {DENSE: experts.Dense("cpu")}
    found = experts.run_format(bench(names=()), peer, groups, format, print)
    assert found["format"] == format and len(found["rows"]) == 4
    size = 32 if format == "mxfp4" else 16
    for row in found["rows"]:
        assert list(row["peers"]) == [DENSE] and 0 < row["error"] < 4e-3
        matrices = 1 if row["work"] == "gradient" else 1.5
        elements = row["active"] * matrices * 256 * 64
        assert row["bytes"] == pytest.approx(elements * (1 / 2 + 1 / size), rel=0.03)


@pytest.mark.parametrize("name", ["libnf4", DENSE])
def test_a_wrong_product_ends_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, found = bench(names=()), experts.load("cpu")
    peer = found[DENSE]
    right = experts.libnf4 if name == "libnf4" else peer.prepare

    def wrong(each, routing):
        call = right(each, routing)
        return lambda stream: call(stream).mul_(1.1)

    if name == "libnf4":
        monkeypatch.setattr(experts, name, wrong)
    else:
        monkeypatch.setattr(peer, "prepare", wrong)
    with pytest.raises(WrongResult, match=f"^{name}: small gate_up, 1 tokens: "):
        experts.rows(made, {DENSE: peer}, GROUPS, print)
    assert made.gpu.measured == 0
