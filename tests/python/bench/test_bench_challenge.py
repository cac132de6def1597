"""The challenge's harness on the CPU, with fakes: bits before times, eager and compiled."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import bench_path  # noqa: F401  (the path)
import pytest

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")

from bench_fakes import FakeGpu, FakeLibrary, Peer, quiet, wrong  # noqa: E402
from nf4bench import challenge, check, peers  # noqa: E402
from nf4bench import rows as bench_rows  # noqa: E402
from nf4bench.cases import Case  # noqa: E402
from nf4bench.weights import Weight  # noqa: E402

COMPILED = "works under torch.compile"


class Once(Peer):
    """A peer with one launch variant, so that none is chosen by time."""

    variants = range(1)


def bench(**loaded) -> bench_rows.Bench:
    return bench_rows.Bench(FakeGpu(), FakeLibrary(), loaded, replays=3)


def run(made: bench_rows.Bench) -> dict:
    return json.loads(json.dumps(challenge.run(made, 2, quiet)))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small MLPs, and a compiler that does nothing: what it needs is tested by itself."""
    monkeypatch.setattr(challenge, "MLPS", ((64, 128, "fp16"), (64, 64, "bf16")))
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)


@pytest.mark.parametrize("iterations, made", [(1000, 1200), (5, 7), (1, 4)])
def test_turns_make_the_iterations_and_each_call_is_waited_for(iterations: int, made: int) -> None:
    gpu, order = FakeGpu(), []
    calls = [lambda: order.append(gpu.synchronized)] * 3
    times = challenge.timed(gpu, {"a": calls, "b": calls}, iterations)
    assert set(times) == {"a", "b"} and order == list(range(2 * 3 * made))


def test_the_figures_of_a_run() -> None:
    made = bench(unsloth=Once(), triton=peers.Missing("no compiler"))
    figures, nothing = run(made), challenge.NOTHING
    assert list(figures["eager"]) == ["libnf4", "unsloth", "libnf4 as an operator", nothing]
    assert list(figures["compiled"]) == ["libnf4", "unsloth", nothing]
    assert figures["peers"]["triton"] == {"missing": "no compiler"}
    summary = figures["summary"]
    # The roofline is measured once an MLP, in two launch variants: three replays and a warm-up.
    assert made.gpu.measured == 2 * 2 * (3 + 2)
    assert (summary["calls"], list(summary["ratios"])) == (6, ["unsloth"])
    assert summary["budget_us"] == pytest.approx(summary["roofline_us"] + 6 * 6)
    assert summary["score"] == summary["ratios"]["unsloth"]
    points = {each["asked"]: each["points"] for each in figures["points"]}
    assert points[COMPILED] == points["tested in fp16 and bf16"] == 1
    assert run(bench(unsloth=peers.Missing("no CUDA")))["summary"]["score"] is None


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
    assert said in wrong(made, lambda: run(made))


def refuse(values):
    raise RuntimeError("cannot trace this\nand much more")


def changed(values):
    return values + 1


def compiled_to(monkeypatch: pytest.MonkeyPatch, ours: bool, effect) -> None:
    """torch.compile makes of our calls, or of the peers', what `effect` makes of their results."""

    def compile(call, **options):
        assert options == {"fullgraph": True, "dynamic": False}
        as_operator = "operation" in call.__code__.co_freevars
        return functools.partial(lambda: effect(call())) if ours == as_operator else call

    monkeypatch.setattr(torch, "compile", compile)


@pytest.mark.parametrize(
    "effect, said",
    [(refuse, "RuntimeError: cannot trace this"), (changed, "of 8192 elements differ")],
)
def test_what_does_not_compile_to_the_same_bits(
    effect, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer is an operator then; other bits of libnf4 end the bench, its refusal costs a point."""
    compiled_to(monkeypatch, False, effect)
    compiled = run(bench(unsloth=Once()))["compiled"]
    assert compiled["unsloth"]["refused"].endswith(said)
    assert "us" in compiled["unsloth as an operator"] and "us" in compiled["libnf4"]
    compiled_to(monkeypatch, True, effect)
    if effect is changed:
        with pytest.raises(check.WrongResult, match="libnf4, compiled"):
            run(bench(unsloth=Once()))
    else:
        points = {each["asked"]: each for each in run(bench(unsloth=Once()))["points"]}
        assert (points[COMPILED]["points"], points[COMPILED]["evidence"]) == (-1, said)


def test_the_operator_is_one_opaque_call_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """fullgraph=True, with the tracer alone behind it, so that no C++ compiler is needed."""
    monkeypatch.undo()
    for weight in (Weight(Case(shape), "cpu") for shape in ((64, 64), (128, 64))):
        operated = challenge.operator().prepare(weight, peers.public_call(weight))
        traced = torch.compile(operated, fullgraph=True, dynamic=False, backend="eager")
        check.require_equal("traced", weight.dequantize(None), traced())
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            fake = operated()
        assert (fake.shape, fake.dtype) == (weight.out.shape, weight.out.dtype)


def test_fourteen_points_and_what_costs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def total(speedup: float | None = 2.0, kernels: int = 1, refusal: str = "") -> int:
        return sum(each["points"] for each in challenge.points(speedup, kernels, refusal))

    assert total() == sum(each["of"] for each in challenge.points(2.0, 1, "")) == 14
    assert (total(kernels=4), total(speedup=None), total(speedup=0.9)) == (11, 9, 6)
    assert total(refusal="no") == 12
    speedups = {0.5: -3, 1.0: -3, 1.01: 0, 1.05: 1, 1.1: 3, 1.149: 3, 1.15: 5, 9.0: 5}
    assert {each: challenge.speedup_points(each) for each in speedups} == speedups
    monkeypatch.setattr(challenge, "source_lines", lambda pattern: [])
    assert total() == 10


def test_asm_and_eviction_are_found_where_they_are(tmp_path: Path) -> None:
    assert challenge.source_lines(r"\basm( volatile)?\(") and challenge.source_lines("evict_first")
    source = tmp_path / "lib" / "cuda" / "dequant" / "k.cuh"
    source.parent.mkdir(parents=True)
    source.write_text('int x;\n  asm("nop;");\n')
    assert challenge.source_lines(r"\basm\(", tmp_path) == ["lib/cuda/dequant/k.cuh:2"]
    assert challenge.source_lines("evict", tmp_path) == []
