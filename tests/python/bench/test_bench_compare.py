"""Two builds in turns: which products, whose turn, and what is said of the ratios."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import bench_path  # noqa: F401  (the path)
import pytest
from conftest import ROOT
from nf4bench import cases, compare, models_cases
from nf4bench.compare import Product

PRODUCT = Product("matmul", "4096x4096 M=1", {"m": 1})


class FakeBuild:
    """Answers at once. times: the microseconds of its turns, the last of them again and again."""

    def __init__(self, *times: float, bits: int = 7, **errors: str) -> None:
        self.times, self.bits, self.errors = list(times), bits, errors
        self.asked: list[str] = []
        self._answers: list[dict] = []

    def send(self, do: str, **arguments: object) -> None:
        self.asked.append(do)
        us = self.times.pop(0) if do == "time" and len(self.times) > 1 else self.times[0]
        answers = {
            "hello": {"nf4": "here", "device": "a GPU", "torch": "2"},
            "prepare": {"bits": self.bits, "us": us},
            "time": {"us": us},
            "release": {},
        }
        error = self.errors.get(do)
        self._answers.append({"error": error} if error else answers[do])

    def fetch(self) -> dict:
        return self._answers.pop(0)


def test_quick_products_cover_each_group_and_full_has_more() -> None:
    quick, full = compare.products(True), compare.products(False)
    groups = {"host overhead", "control", "dequantize", "quantize", "matmul", "whole models"}
    assert {each.group for each in quick} == {each.group for each in full} == groups
    for every in (quick, full):
        names = [(each.group, each.name) for each in every]
        assert len(set(names)) == len(names)
        json.dumps([dataclasses.asdict(each) for each in every])  # they go through a pipe
    memory = {e.name for e in quick if e.group in ("dequantize", "quantize")}
    assert memory < {e.name for e in full if e.group in ("dequantize", "quantize")}
    assert any("compiled" in each.name for each in full if each.group == "whole models")
    assert not any("compiled" in each.name for each in quick)


def test_turns_alternate_and_the_first_ones_do_not_count() -> None:
    before = FakeBuild(*[100.0] * 3, 10.0)  # prepare, and two turns to warm up
    after = FakeBuild(*[500.0] * 3, 10.2)
    row = compare.measured([before, after], PRODUCT)
    assert row["ratio"] == 1.02 and row["same_bits"] and not row["again"]
    assert (row["before"]["us"], row["after"]["us"]) == (10.0, 10.2)
    assert before.asked == ["prepare", *["time"] * (compare.WARM_UP + compare.TURNS), "release"]


def test_the_ratio_is_of_turns_side_by_side() -> None:
    """Clocks that change during the run change both times of a turn."""
    drift = [10.0 + turn for turn in range(20)]
    row = compare.measured(
        [FakeBuild(1.0, *drift), FakeBuild(1.0, *(1.01 * us for us in drift))], PRODUCT
    )
    assert row["ratio"] == 1.01


def test_what_seems_slower_is_measured_again_with_more_turns() -> None:
    before = FakeBuild(10.0)
    slow_once = FakeBuild(*[11.0] * (compare.WARM_UP + compare.TURNS + 1), 10.0)
    row = compare.measured([before, slow_once], PRODUCT)
    assert row["again"] and row["ratio"] == 1.0
    assert before.asked.count("time") == 2 * compare.WARM_UP + compare.TURNS + compare.AGAIN
    row = compare.measured([FakeBuild(10.0), FakeBuild(11.0)], PRODUCT)
    assert row["again"] and row["ratio"] == 1.1 and compare.line(row).endswith("1.100 slower")


@pytest.mark.parametrize("do", ["prepare", "time"])
def test_a_product_that_fails_is_said_and_the_others_go_on(do: str) -> None:
    builds = [FakeBuild(10.0), FakeBuild(10.0, **{do: "RuntimeError: no kernel"})]
    found = compare.run(builds, [PRODUCT], 60, lambda text: None)
    assert "no kernel" in found["products"][0]["failed"] and found["summary"] == {}
    assert "no kernel" in compare.table(found) and not compare.within_bounds(found)
    assert builds[0].asked[-1] == "release"


def test_a_build_that_cannot_start_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(compare.Failed, match="after: torch sees no GPU"):
        compare.run(
            [FakeBuild(1.0), FakeBuild(1.0, hello="torch sees no GPU")], [], 60, lambda text: None
        )
    with pytest.raises(compare.Failed, match="there is no .*libnf4.so"):
        compare.Build(tmp_path, tmp_path / "build")


def test_no_product_begins_when_time_is_over() -> None:
    found = compare.run([FakeBuild(1.0), FakeBuild(1.0)], [PRODUCT], -1, lambda text: None)
    assert found["products"] == [] and found["left_out"] == ["matmul: 4096x4096 M=1"]
    assert "left out, as time was over: matmul: 4096x4096 M=1" in compare.table(found)


def test_means_and_bounds() -> None:
    def row(name: str, ratio: float, **more: object) -> dict:
        times = {"before": {"us": 10.0}, "after": {"us": 10.0 * ratio}}
        return {"group": "matmul", "name": name, "ratio": ratio, "same_bits": True, **times, **more}

    def figures(*rows: dict) -> dict:
        return {"products": list(rows), "left_out": [], "summary": compare.summarized(rows)}

    good = figures(row("a", 0.98), row("b", 1.02))
    assert good["summary"]["matmul"] == {
        "products": 2, "mean": 0.9998, "worst": "b", "worst_ratio": 1.02, "slower": [],
    }  # fmt: skip
    assert compare.within_bounds(good)
    assert "| matmul | 2 | 0.9998 | b | 1.020 | 0 |" in compare.table(good)
    assert compare.table(good).endswith("yes: mean within 1%, none over 3% slower, same bits")
    noise = figures(row("a", 1.0), row("b", 1.2, group=compare.CONTROL))
    assert compare.within_bounds(noise) and "1.200 slower" in compare.table(noise)
    slow, mean = figures(row("a", 0.9), row("b", 1.04)), figures(row("a", 1.02), row("b", 1.02))
    bits = figures(row("a", 1.0, same_bits=False))
    for bad, said in ((slow, "1.040 slower"), (mean, "NO: mean"), (bits, "OTHER BITS")):
        assert not compare.within_bounds(bad) and said in compare.table(bad)


# ---- The process of a build --------------------------------------------------------------

TINY = dataclasses.asdict(
    models_cases.Size(hidden=64, heads=4, intermediate=192, layers=2, vocabulary=50)
)


def weight(*arguments: object, **more: object) -> dict:
    return {"case": dataclasses.asdict(cases.Case((64, 256), *arguments, **more))}


def model(work: str, tokens: int) -> dict:
    return {
        "launch": "graph",
        "group": {"work": work, "batch": 2, "tokens": tokens, "size": TINY, "launches": ["graph"]},
    }


WORK = [
    ("dequantize", weight()), ("dequantize", weight("fp32", False)),
    ("dequantize", weight(format="own", placement="packed + 1 byte")),
    ("quantize", weight(work="quantize")), ("quantize", weight("bf16", False, work="quantize")),
    ("matmul", weight() | {"m": 3, "together": 1}), ("matmul", weight() | {"m": 2, "together": 2}),
    ("whole models", model("decode", 1)), ("whole models", model("prefill", 4)),
    ("whole models", model("training", 4)),
    *((p.group, p.spec | weight()) for p in compare._host()
      if p.spec["mode"] in ("", "no_grad", "gradient") and "batch" not in p.name),
]  # fmt: skip


@pytest.fixture
def worker():
    pytest.importorskip("torch")
    from bench_fakes import FakeGpu
    from nf4bench.compare_worker import Worker

    return Worker(FakeGpu())


@pytest.mark.interop
@pytest.mark.parametrize("group, spec", WORK)
def test_every_kind_of_product_is_prepared_and_timed(worker, group: str, spec: dict) -> None:
    product = json.loads(json.dumps({"group": group, "name": "", "spec": spec}))
    first = worker.answer({"do": "prepare", "product": product})
    assert "error" not in first and first["us"] > 0
    assert worker.answer({"do": "time"})["us"] > 0
    assert (first["bits"] != 0) == (group in ("dequantize", "quantize", "matmul"))
    assert worker.answer({"do": "release"}) == {}
    assert "error" in worker.answer({"do": "time"})


@pytest.mark.interop
def test_equal_bits_have_equal_checksums_in_two_processes(worker) -> None:
    from bench_fakes import FakeGpu
    from nf4bench.compare_worker import Worker, checksum

    torch = pytest.importorskip("torch")
    requests = [
        {"do": "prepare", "product": {"group": group, "name": "", "spec": spec}}
        for group, spec in WORK[:7]
    ]
    other = Worker(FakeGpu())
    for request in requests:
        assert worker.answer(dict(request))["bits"] == other.answer(dict(request))["bits"]
    ones = torch.ones(100, dtype=torch.bfloat16)
    changed, swapped = ones.clone(), torch.arange(100.0)
    changed[7] = 1.0078125
    assert checksum(ones) == checksum([ones.clone()]) != checksum(changed)
    assert checksum(swapped) != checksum(swapped.flip(0))


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
    started = compare.Build(ROOT, build)
    assert compare.ask([started], do="hello") == [{"error": "torch sees no GPU"}]
    started.close()
    assert started._process.returncode == 0
    monkeypatch.setattr(sys, "executable", "false")
    ended = compare.Build(ROOT, build)
    with pytest.raises(compare.Failed, match="the process has ended"):
        compare.ask([ended] * 2, do="hello")
    ended.close()
