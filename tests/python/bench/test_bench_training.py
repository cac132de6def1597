"""The bench of QLoRA steps on the CPU: a small model in all four forms, from group to row."""

from __future__ import annotations

import bench_path  # noqa: F401  (the path)
import pytest

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")
for _name in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(_name)

from bench_fakes import bench  # noqa: E402
from nf4bench import (  # noqa: E402
    convergence,
    models_forms,
    training,
    training_cases,
    training_experts,
    training_pages,
)  # fmt: skip
from nf4bench.check import WrongResult  # noqa: E402
from nf4bench.models_cases import FORMS, Size  # noqa: E402
from nf4bench.training_cases import Group  # noqa: E402

TINY = Size(hidden=64, heads=4, intermediate=192, layers=2, vocabulary=50)
GROUPS = [Group("fp32", False, TINY, (2, 8)), Group("bf16", True, TINY, (2, 8))]


def run() -> tuple[dict, list[str]]:
    lines: list[str] = []
    made = bench(names=())
    made.replays, training.LAYER_CALLS, training.LAYER_TURNS = 3, 2, 2
    training.PRODUCTS = {(128, 64): (1, 8)}
    convergence.STEPS = 10
    return training.run(made, models_forms.load("cpu"), GROUPS, lines.append), lines


@pytest.fixture(scope="module")
def figures() -> tuple[dict, list[str]]:
    return run()


def test_a_row_for_each_group_with_every_form(figures) -> None:
    figures, lines = figures
    assert [(row["adapters"], row["checkpointing"]) for row in figures["rows"]] == [
        ("fp32", False),
        ("bf16", True),
    ]
    for row in figures["rows"]:
        assert list(row["forms"]) == list(FORMS)
        for form, each in row["forms"].items():
            assert each["us"] > 0 and each["host_us"] > 0 and each["step_bytes"] > 0
            assert (each["error"] is None) == (form in ("bitsandbytes", "dense"))
    profiles = [("profile" in each) for row in figures["rows"] for each in row["forms"].values()]
    assert profiles == [True] * 4 + [False] * 4
    assert any(line.startswith("Host time of drop-in") for line in lines)
    for table in (training_pages.STEPS, training_pages.HOST, training_pages.MEMORY):
        assert len(table.markdown(figures["rows"]).splitlines()) == 4


def test_a_row_for_each_product(figures) -> None:
    rows = figures[0]["products"]
    assert [(row["work"], row["m"]) for row in rows] == [
        (work, m) for m in (1, 8) for work in ("gradient", "adapted", "adapted backward")
    ]
    assert [list(row["forms"]) for row in rows[:3]] == [
        ["libnf4", "dequantize + dense", "bitsandbytes", "dense"],
        ["libnf4", "as PEFT", "base alone"],
        ["libnf4", "as PEFT", "dense gradient alone"],
    ]
    assert all(each["us"] > 0 for row in rows for each in row["forms"].values())
    assert any(line.startswith("adapted backward, 128×64, 8") for line in figures[1])


def test_losses_beside_bitsandbytes(figures) -> None:
    """Which multiplies in bf16 on some CPUs, whatever it is asked for."""
    rows = figures[0]["convergence"]
    assert [(row["form"], row["dtype"]) for row in rows] == [
        (form, dtype) for dtype in ("fp32", "bf16") for form in ("libnf4", "drop-in", "dense")
    ]
    for row in rows:
        assert row["largest_mean"] <= row["largest"] < 0.05 < row["last"] < 5


def test_the_page(figures) -> None:
    found = {"training": figures[0] | {"date": "1 Jan", "commit": "abc"}}
    page = training_pages.page(found, {"training"})
    assert "commit abc; their code has changed since" in page
    assert "### Host time of drop-in" in page and "| drop-in | fp32 |" in page
    assert page.count("| torch.nn.Linear | none |") == 2
    assert page.count("| adapted backward | 128×64 |") == 2
    assert "| drop-in | bf16 | 10 |" in page


def test_a_wrong_gradient_ends_it(monkeypatch) -> None:
    monkeypatch.setattr(training, "MOST_ERROR", 0.0)
    with pytest.raises(WrongResult, match="adapters in fp32: (drop-in|libnf4)"):
        run()


def test_the_cases_are_all_four_steps() -> None:
    assert len({(each.adapters, each.checkpointing) for each in training_cases.full()}) == 4
    assert training_cases.quick() == training_cases.full()[:2]


SMALL = training_experts.Size(
    layers=1, hidden=64, intermediate=32, experts=4, top_k=2, heads=4, key_value_heads=2,
    head_dim=16, vocabulary=64, tokens=(2, 8),
)  # fmt: skip


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_experts_in_another_format(format: str) -> None:
    made, lines = bench(names=()), []
    made.replays = 3
    found = training_experts.run(made, format, lines.append, SMALL)
    assert [row["adapters"] for row in found["rows"]] == ["attention", "attention and experts"]
    for row in found["rows"]:
        assert list(row["forms"]) == ["libnf4", "dense"] and 0 <= row["error"] < 0.016
        ours, dense = row["forms"].values()
        assert 0 < ours["model_bytes"] < dense["model_bytes"] and row["bytes_over_dense"] < 1
    assert any(line.startswith("adapters on attention and experts: libnf4") for line in lines)


def test_wrong_experts_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = training_experts._models

    def wrong(*given):
        models = made(*given)
        models["dense"].get_parameter("model.layers.0.mlp.experts.down_proj").data.neg_()
        return models

    monkeypatch.setattr(training_experts, "_models", wrong)
    with pytest.raises(WrongResult, match="adapters on attention: off by"):
        training_experts.run(bench(names=()), "mxfp4", print, SMALL)


def test_both_models_take_the_same_experts() -> None:
    model, x = training_experts._model(SMALL, "cpu"), torch.randn(9, SMALL.hidden).bfloat16()
    router = model.get_submodule("model.layers.0.mlp.router")
    logits, scores, first = router(x)
    chosen: dict[str, torch.Tensor] = {}
    with training_experts._routed(model, chosen):
        made = router(x)
        assert all(map(torch.equal, made, (logits, scores, first)))
        router.weight.data.neg_()
        negated, others, second = router(x)
    assert len(chosen) == 1 and torch.equal(second, first)
    assert torch.equal(others, negated.gather(1, first).softmax(1))
    assert not torch.equal(router(x)[2], first)
