"""Two builds in turns: which products, whose turn, and what is said of the ratios."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import bench_path  # noqa: F401  (the path)
import pytest
from conftest import ROOT
from nf4bench import cases, compare, models_cases
from nf4bench.compare import Failed, Product

PRODUCT = Product("matmul", "4096x4096 M=1", ())


class FakeBuild:
    """Answers at once. times: the microseconds of its turns, the last of them again and again."""

    def __init__(self, *times: float, bits: int = 7, **errors: str) -> None:
        self.side = f"build {id(self)}"
        self.times, self.bits, self.errors = list(times), bits, errors
        self.asked: list[str] = []

    def send(self, do: str, **arguments: object) -> None:
        self.asked.append(do)

    def fetch(self) -> dict:
        do = self.asked[-1]
        us = self.times.pop(0) if do == "time" and len(self.times) > 1 else self.times[0]
        if do in self.errors:
            return {"error": self.errors[do]}
        return {"nf4": "here", "device": "a GPU", "torch": "2", "bits": self.bits, "us": us}


def run(*builds: FakeBuild, limit: float = 60) -> dict:
    return compare.run(builds, True, limit, lambda text: None)


def test_quick_products_cover_each_group_and_full_has_more() -> None:
    quick, full = compare.products(True), compare.products(False)
    groups = {"host overhead", "control", "dequantize", "quantize", "matmul", "whole models"}
    for every in (quick, full):
        assert {each.group for each in every} == groups
        assert len({each[:2] for each in every}) == len(every)
    memory = {each for each in quick if each.group in ("dequantize", "quantize")}
    assert memory < set(full)
    compiled = [[each for each in every if "compiled" in each.name] for every in (quick, full)]
    assert not compiled[0] and compiled[1]


def test_turns_alternate_and_the_first_ones_do_not_count() -> None:
    before, after = FakeBuild(*[100.0] * 2, 10.0), FakeBuild(*[500.0] * 2, 10.2)
    row = compare.measured([before, after], 0, PRODUCT)
    assert row["ratio"] == 1.02 and row["same_bits"] and not row["again"]
    assert (row["before"]["us"], row["after"]["us"]) == (10.0, 10.2)
    assert before.asked == ["prepare", *["time"] * (2 + compare.TURNS), "release"]
    # The ratio is of turns side by side: clocks that change during the run change both.
    drift = [10.0 + turn for turn in range(20)]
    builds = [FakeBuild(*drift), FakeBuild(*(1.01 * us for us in drift))]
    assert compare.measured(builds, 0, PRODUCT)["ratio"] == 1.01


def test_what_seems_slower_is_measured_again_with_more_turns() -> None:
    before, slow_once = FakeBuild(10.0), FakeBuild(*[11.0] * (2 + compare.TURNS), 10.0)
    row = compare.measured([before, slow_once], 0, PRODUCT)
    assert row["again"] and row["ratio"] == 1.0
    assert before.asked.count("time") == 2 * 2 + compare.TURNS + compare.AGAIN
    row = compare.measured([FakeBuild(10.0), FakeBuild(11.0)], 0, PRODUCT)
    assert row["again"] and row["ratio"] == 1.1 and compare.line(row).endswith("1.100 slower")


@pytest.mark.parametrize("do", ["prepare", "time"])
def test_a_product_that_fails_is_said_and_the_others_go_on(
    do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "products", lambda quick: [PRODUCT] * 2)
    builds = FakeBuild(10.0), FakeBuild(10.0, **{do: "RuntimeError: no kernel"})
    found = run(*builds)
    assert len(found["products"]) == 2 and found["summary"] == {}
    assert "no kernel" in found["products"][0]["failed"]
    assert "no kernel" in compare.table(found) and not compare.within_bounds(found)
    assert builds[0].asked[-1] == "release"
    late = run(FakeBuild(1.0), FakeBuild(1.0), limit=-1)
    assert late["products"] == [] and late["left_out"] == ["matmul: 4096x4096 M=1"] * 2
    assert "left out, as time was over: matmul: 4096x4096 M=1" in compare.table(late)


def test_a_build_that_cannot_start_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="torch sees no GPU"):
        run(FakeBuild(1.0), FakeBuild(1.0, hello="torch sees no GPU"))
    with pytest.raises(Failed, match="there is no .*libnf4.so"):
        compare.Build("before", tmp_path, tmp_path / "build")


def _row(ratio: float, **more: object) -> dict:
    times = {"before": {"us": 10.0}, "after": {"us": 10.0 * ratio}}
    return {"group": "matmul", "name": "a", "ratio": ratio, "same_bits": True, **times, **more}


@pytest.mark.parametrize(
    "rows, within, said",
    [
        ([_row(0.98), _row(1.02, name="b")], True, "| matmul | 2 | 0.9998 | b | 1.020 | 0 |"),
        ([_row(1.0), _row(1.2, group=compare.CONTROL)], True, "1.200 slower"),
        ([_row(0.9), _row(1.04)], False, "1.040 slower"),
        ([_row(1.02), _row(1.02)], False, "NO: mean within 1%, none over 3% slower, same bits"),
        ([_row(1.0, same_bits=False)], False, "OTHER BITS"),
    ],
)
def test_means_and_bounds(rows: list[dict], within: bool, said: str) -> None:
    figures = {"products": rows, "left_out": [], "summary": compare.summarized(rows)}
    assert compare.within_bounds(figures) is within and said in compare.table(figures)


# ---- The process of a build --------------------------------------------------------------

CASE = cases.Case((64, 256))
TINY = models_cases.Size(hidden=64, heads=4, intermediate=192, layers=2, vocabulary=50)
MODELS = [models_cases.Group(work, 2, tokens, TINY, ("graph",))
          for work, tokens in (("decode", 1), ("prefill", 4), ("training", 4))]  # fmt: skip
WORK = [
    *(("dequantize", (case,)) for case in (
        CASE, cases.Case((64, 256), "fp32", False),
        cases.Case((64, 256), format="own", placement="packed + 1 byte"),
    )),
    *(("quantize", (cases.Case((64, 256), nested=nested, work="quantize"),))
      for nested in (True, False)),
    ("matmul", (CASE, 3, 1)), ("matmul", (CASE, 2, 2)),
    *(("whole models", (group, "graph")) for group in MODELS),
    *((p.group, (p.given[0], CASE)) for p in compare._host()),
]  # fmt: skip


@pytest.fixture
def worker() -> Callable:
    pytest.importorskip("torch")
    from bench_fakes import FakeGpu
    from nf4bench.compare_worker import Worker

    return lambda: Worker(FakeGpu())


@pytest.mark.interop
@pytest.mark.parametrize("group, given", WORK)
def test_every_kind_of_product_is_prepared_and_timed_alike_in_two_processes(
    worker: Callable, group: str, given: tuple
) -> None:
    one, other = worker(), worker()
    first, second = (each.prepare(Product(group, "", given)) for each in (one, other))
    assert first["us"] > 0 and one.answer("time")["us"] > 0 and first["bits"] == second["bits"]
    assert (first["bits"] != 0) == (group in ("dequantize", "quantize", "matmul"))
    assert one.answer("release") == {} and "error" in one.answer("time")


@pytest.mark.interop
def test_a_changed_bit_or_order_changes_the_checksum() -> None:
    torch = pytest.importorskip("torch")
    from nf4bench.compare_worker import checksum

    ones, rising = torch.ones(100, dtype=torch.bfloat16), torch.arange(100.0)
    changed = ones.clone()
    changed[7] = 1.0078125
    assert checksum(ones) == checksum([ones.clone()]) != checksum(changed)
    assert checksum(rising) != checksum(rising.flip(0))


@pytest.mark.interop
def test_a_process_answers_on_its_own_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU it says so; a process that ends is said as well."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    from nf4._load import library

    build = tmp_path / "build"
    (build / "lib").mkdir(parents=True)
    (build / "lib" / "libnf4.so").symlink_to(Path(library()._name).resolve())
    started = compare.Build("before", ROOT, build)
    with pytest.raises(Failed, match="before: torch sees no GPU"):
        compare.ask([started], do="hello", quick=True)
    started.close()
    assert started._process.returncode == 0
    monkeypatch.setattr(sys, "executable", "false")
    ended = compare.Build("after", ROOT, build)
    with pytest.raises(Failed, match="after: the process has ended"):
        compare.ask([ended] * 2, do="hello", quick=True)
    ended.close()
