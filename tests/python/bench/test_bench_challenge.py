"""The challenge's harness on the CPU, with fakes: bits before times, eager and compiled."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import bench_path
import pytest

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")

from bench_fakes import FakeGpu, FakeLibrary, Peer, quiet  # noqa: E402
from nf4bench import challenge, check, peers  # noqa: E402
from nf4bench import rows as bench_rows  # noqa: E402
from nf4bench.cases import Case  # noqa: E402
from nf4bench.weights import Weight  # noqa: E402

MLPS = ((64, 128, "fp16"), (64, 64, "bf16"))


class Once(Peer):
    """A peer with one launch variant, so that none is chosen by time."""

    variants = range(1)


def bench(**loaded) -> bench_rows.Bench:
    return bench_rows.Bench(FakeGpu(), FakeLibrary(), loaded, replays=3)


def run(made: bench_rows.Bench) -> dict:
    return challenge.run(made, 2, quiet)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small MLPs, and a compiler that does nothing: what it needs is tested by itself."""
    monkeypatch.setattr(challenge, "MLPS", MLPS)
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)


def test_an_iteration_calls_each_weight_and_waits_after_each() -> None:
    gpu, order = FakeGpu(), []
    calls = [lambda name=name: order.append((name, gpu.synchronized)) for name in "abc"]
    assert challenge.iterate(gpu, calls, 2) > 0
    assert order == [("a", 0), ("b", 1), ("c", 2), ("a", 3), ("b", 4), ("c", 5)]
    assert gpu.synchronized == 6


@pytest.mark.parametrize("iterations, made", [(1000, 1200), (5, 7), (1, 4)])
def test_turns_make_the_iterations_and_two_warm_up(iterations: int, made: int) -> None:
    counts = {"a": 0, "b": 0}

    def count(name: str) -> None:
        counts[name] += 1

    calls = {name: [functools.partial(count, name)] for name in counts}
    times = challenge.timed(FakeGpu(), calls, iterations)
    assert set(counts.values()) == {made}
    assert set(times) == {"a", "b"}


def test_the_figures_of_a_run() -> None:
    made = bench(unsloth=Once(), triton=peers.Missing("no compiler"))
    figures = run(made)
    assert json.loads(json.dumps(figures)) == figures
    nothing = challenge.NOTHING
    assert list(figures["eager"]) == ["libnf4", "unsloth", "libnf4 as an operator", nothing]
    assert list(figures["compiled"]) == ["libnf4", "unsloth", nothing]
    assert figures["peers"] == {
        "unsloth": {"version": "fake"},
        "triton": {"missing": "no compiler"},
    }
    summary = figures["summary"]
    # Three weights of an MLP are of one size: its roofline is measured once, in two launch
    # shapes, three replays each and two that warm up.
    assert made.gpu.measured == len(MLPS) * 2 * (3 + 2)
    assert summary["calls"] == 6
    assert summary["budget_us"] == pytest.approx(summary["roofline_us"] + 6 * 6)
    assert summary["score"] == summary["ratios"]["unsloth"]
    points = {each["asked"]: each["points"] for each in figures["points"]}
    assert points["works under torch.compile"] == 1
    assert points["tested in fp16 and bf16"] == 1


@pytest.mark.parametrize(
    "peer, said",
    [
        ({"triton": Peer(wrong=1)}, "triton, launch variant 0: 1 of 8192"),
        ({"unsloth": Once(wrong=2)}, "fp16 nested: unsloth, eager: 2 of 8192"),
    ],
)
def test_a_wrong_peer_ends_it_before_any_time(
    monkeypatch: pytest.MonkeyPatch, peer: dict, said: str
) -> None:
    made = bench(**peer)
    monkeypatch.setattr(challenge, "timed", None)
    with pytest.raises(check.WrongResult, match=said):
        run(made)
    assert made.gpu.measured == 0


def compiled_to(monkeypatch: pytest.MonkeyPatch, name: str, effect) -> None:
    """torch.compile makes of the calls of `name` what `effect` makes of their results."""

    def compile(call, **options):
        assert options == {"fullgraph": True, "dynamic": False}
        ours = "operation" in call.__code__.co_freevars
        return (lambda: effect(call())) if ours == (name == "libnf4") else call

    monkeypatch.setattr(torch, "compile", compile)


def refuse(values):
    raise RuntimeError("cannot trace this\nand much more")


def changed(values):
    return values + 1


@pytest.mark.parametrize(
    "effect, said",
    [(refuse, "RuntimeError: cannot trace this"), (changed, "of 8192 elements differ")],
)
def test_a_peer_that_compiles_to_nothing_right_is_an_operator(
    effect, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_to(monkeypatch, "unsloth", effect)
    figures = run(bench(unsloth=Once()))
    assert figures["compiled"]["unsloth"]["refused"].endswith(said)
    assert "us" in figures["compiled"]["unsloth as an operator"]
    assert "us" in figures["compiled"]["libnf4"] and "us" in figures["eager"]["unsloth"]


def test_ours_compiled_must_be_right_and_costs_a_point_if_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled_to(monkeypatch, "libnf4", refuse)
    figures = run(bench(unsloth=Once()))
    points = {each["asked"]: each for each in figures["points"]}
    assert points["works under torch.compile"]["points"] == -1
    assert points["works under torch.compile"]["evidence"] == "RuntimeError: cannot trace this"
    compiled_to(monkeypatch, "libnf4", changed)
    with pytest.raises(check.WrongResult, match="libnf4, compiled"):
        run(bench(unsloth=Once()))


def test_the_operator_is_one_opaque_call_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """fullgraph=True, with the tracer alone behind it, so that no C++ compiler is needed."""
    monkeypatch.undo()
    weights = [Weight(Case(shape), "cpu") for shape in ((64, 64), (128, 64))]
    for weight in weights:
        call = peers.public_call(weight)
        operated = challenge.operator().prepare(weight, call)
        traced = torch.compile(operated, fullgraph=True, dynamic=False, backend="eager")
        check.require_equal("traced", weight.dequantize(None), traced())
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            fake = operated()
        assert (fake.shape, fake.dtype) == (weight.out.shape, weight.out.dtype)


# ---- Score and points -------------------------------------------------------------------


def test_the_puzzle_has_nine_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = challenge.cases()
    assert [case.shape for case in found[:3]] == [(8192, 2048), (8192, 2048), (2048, 8192)]
    assert len(found) == 9 and {case.dtype for case in found} == {"fp16", "bf16"}


@pytest.mark.parametrize(
    "speedup, expected",
    [(0.5, -3), (1.0, -3), (1.01, 0), (1.05, 1), (1.1, 3), (1.149, 3), (1.15, 5), (9.0, 5)],
)
def test_points_for_speed(speedup: float, expected: int) -> None:
    assert challenge.speedup_points(speedup) == expected


def test_fourteen_points_and_what_costs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def total(speedup: float | None = 2.0, kernels: int = 1, refusal: str = "") -> int:
        return sum(each["points"] for each in challenge.points(speedup, kernels, refusal))

    assert total() == sum(each["of"] for each in challenge.points(2.0, 1, "")) == 14
    assert (total(kernels=4), total(speedup=None), total(speedup=0.9)) == (11, 9, 6)
    assert total(refusal="no") == 12
    monkeypatch.setattr(challenge, "source_lines", lambda pattern: [])
    assert total() == 10


def test_the_budget_is_the_rooflines_and_six_microseconds_a_call() -> None:
    totals = {"libnf4": 96.0, "libnf4 as an operator": 150.0, "unsloth": 240.0}
    found = challenge.summary(totals, 60.0)
    assert (found["calls"], found["budget_us"], found["of_budget"]) == (6, 96.0, 1.0)
    assert (found["score"], found["ratios"]) == (2.5, {"unsloth": 2.5})
    assert challenge.summary({"libnf4": 1.0}, 1.0)["score"] is None


def test_asm_and_eviction_are_found_where_they_are(tmp_path: Path) -> None:
    for pattern, wanted in ((r"\basm( volatile)?\(", "asm"), ("evict_first", "evict_first")):
        found = challenge.source_lines(pattern)
        assert found
        for place in found:
            name, number = place.split(":")
            line = (bench_path.ROOT / name).read_text().splitlines()[int(number) - 1]
            assert wanted in line
    (tmp_path / "lib" / "cuda" / "dequant").mkdir(parents=True)
    (tmp_path / "lib" / "cuda" / "dequant" / "k.cuh").write_text('int x;\n  asm("nop;");\n')
    assert challenge.source_lines(r"\basm\(", tmp_path) == ["lib/cuda/dequant/k.cuh:2"]
    assert challenge.source_lines("evict", tmp_path) == []
