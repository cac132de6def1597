"""The bench of whole models on the CPU: a small model in all three forms, from group to row."""

from __future__ import annotations

import dataclasses

import bench_path  # noqa: F401  (the path)
import pytest

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

import nf4.torch.bitsandbytes  # noqa: E402
from bench_fakes import FakeGpu, bench  # noqa: E402
from nf4.torch import NF4Linear  # noqa: E402
from nf4bench import (  # noqa: E402
    host,
    models,
    models_cases,
    models_forms,
    models_llama,
    models_steps,
    modes,
)  # fmt: skip
from nf4bench.check import WrongResult  # noqa: E402
from nf4bench.models_cases import BOTH, EAGER, FORMS, GRAPH, Group, Size  # noqa: E402
from nf4bench.models_steps import Models, runner  # noqa: E402
from nf4bench.options import Options  # noqa: E402
from nf4bench.peers import Missing, present  # noqa: E402

TINY = Size(hidden=64, heads=4, intermediate=192, layers=2, vocabulary=50)
ONE = dataclasses.replace(TINY, layers=1)
DECODE = Group("decode", 2, 1, TINY, BOTH)
TRAINING = Group("training", 2, 8, TINY, EAGER)
MLP = Group("mlp", 2, 8, ONE, EAGER)
WORKS = {
    "decode": DECODE, "prefill": Group("prefill", 2, 8, TINY, GRAPH), "training": TRAINING,
    "mlp": MLP,
}  # fmt: skip


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def peers() -> dict:
    return models_forms.load("cpu")


@pytest.fixture(scope="module")
def tiny(peers) -> Models:
    torch.manual_seed(0)
    return Models(TINY, present(peers), "cpu")


def made(tiny: Models, group: Group, run=models_llama.call):
    if group.work == "mlp":
        return models_steps.mlp(group, {}, run, "cpu")
    return (tiny.training if group.work == "training" else tiny.inference)(group, run)


def rows(made_of, group: Group) -> list[dict]:
    return models.rows_of(bench(names=()), group, made_of)


# ---- Forms ------------------------------------------------------------------------------


def test_both_peers_are_here(peers) -> None:
    assert list(peers) == ["bitsandbytes", "dense"] == list(present(peers))


def test_ours_shares_the_bytes_of_bitsandbytes(peers) -> None:
    weight = models_llama.random_weight(64, 192, "cpu")
    found = models_forms.of(weight, present(peers))
    assert list(found) == list(FORMS) and isinstance(found["libnf4"], NF4Linear)
    theirs = found["bitsandbytes"].weight
    assert found["libnf4"].weight.data_ptr() == theirs.data_ptr()
    assert found["libnf4"].absmax.data_ptr() == theirs.quant_state.absmax.data_ptr()
    assert found["dense"].weight.data_ptr() == weight.data_ptr()
    assert not any(part.requires_grad for each in found.values() for part in each.parameters())


def test_without_bitsandbytes_ours_quantizes_the_same_weight(peers) -> None:
    weight = models_llama.random_weight(64, 192, "cpu")
    found = models_forms.of(weight, {"dense": peers["dense"]})
    assert list(found) == ["libnf4", "dense"]
    assert torch.dist(found["libnf4"].dequantize("fp32"), weight.float()) < 0.2 * weight.norm()


def test_bytes_are_those_of_the_four_bits_and_their_scales(peers) -> None:
    found = models_forms.of(models_llama.random_weight(64, 192, "cpu"), present(peers))
    sizes = {form: models_forms.bytes_of(each) for form, each in found.items()}
    elements, blocks = 64 * 192, 64 * 192 // 64
    assert sizes["dense"] == 2 * elements
    # packed, scales, one nested scale, its table, the offset; bitsandbytes has a codebook besides.
    assert sizes["libnf4"] == elements // 2 + blocks + 4 + 1024 + 4
    assert sizes["bitsandbytes"] == sizes["libnf4"] + 64


def test_a_bitsandbytes_that_libnf4_serves_is_no_peer() -> None:
    nf4.torch.bitsandbytes.register()
    try:
        loaded = models_forms.load("cpu")
    finally:
        nf4.torch.bitsandbytes.unregister()
    assert "libnf4 serves it" in loaded["bitsandbytes"].reason and "dense" in present(loaded)


def test_a_peer_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(place: str):
        raise ImportError("no such library")

    monkeypatch.setitem(models_forms.FACTORIES, "bitsandbytes", fails)
    assert models_forms.load("cpu")["bitsandbytes"] == Missing("ImportError: no such library")


# ---- The model --------------------------------------------------------------------------


def test_decoding_with_a_cache_gives_what_a_whole_prompt_gives(tiny: Models) -> None:
    group = Group("prefill", 2, models_cases.CONTEXT, TINY, EAGER)
    model = tiny._llamas(TINY)["dense"]
    tokens, positions = tiny._tokens(group), tiny._positions(group)
    caches = [models_steps._cache(group, positions[:-1], "cpu") for _ in model.layers]
    with torch.no_grad():
        expected = model(tokens, positions)
        model(tokens[:, :-1], positions[:-1], caches)
        last = [each._replace(positions=positions[-1:]) for each in caches]
        found = model(tokens[:, -1:], positions[-1:], last)
    assert found.shape == (2, TINY.vocabulary)
    assert torch.dist(found.float(), expected.float()) < 2e-2 * expected.float().norm()


def test_rotations_depend_on_distances_alone(tiny: Models) -> None:
    q, k = torch.randn(2, 1, 16)
    turns = models_llama.Turns(*(each.float() for each in models_llama._turns(TINY, "cpu")))

    def product(i: int, j: int) -> float:
        at = [models_llama.Turns(*(each[n] for each in turns)) for n in (i, j)]
        return float(models_llama._rotated(q, at[0])[0] @ models_llama._rotated(k, at[1])[0])

    assert product(20, 13) == pytest.approx(product(107, 100), abs=5e-2)
    assert product(0, 0) == pytest.approx(float(q[0] @ k[0]), rel=1e-4)
    assert abs(product(20, 13) - product(20, 17)) > 0.1


@pytest.mark.parametrize("work", WORKS)
def test_all_forms_compute_the_same(work: str, tiny: Models, peers) -> None:
    group = WORKS[work]
    if work == "mlp":
        found = models_steps.mlp(group, present(peers), models_llama.call, "cpu")
    else:
        found = made(tiny, group)
    results = {form: models._compared(step(None)) for form, (_, step) in found.items()}
    theirs = results["bitsandbytes"]
    assert list(results) == list(FORMS) and theirs.norm() > 0
    assert torch.dist(results["libnf4"], theirs) < models_cases.MOST_ERROR[work] * theirs.norm()
    # Dense is what the others were before they were quantized.
    difference = torch.dist(results["dense"], theirs) / theirs.norm()
    assert models_cases.MOST_ERROR[work] < difference < 0.6


def test_gradients_go_to_the_adapters_alone(tiny: Models) -> None:
    found = made(tiny, TRAINING)
    model, step = found["libnf4"]
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert len(trained) == 2 * 2 * TINY.layers
    assert {name.split(".")[-2] for name in trained} == set(models_cases.ADAPTED)
    gradients = step(None)
    assert len(gradients) == len(trained) and all(each.norm() > 0 for each in gradients)


def test_fewer_layers_are_the_first_ones(tiny: Models) -> None:
    few = tiny._llamas(ONE)["dense"]
    assert len(few.layers) == 1
    assert few.layers[0].mlp.up_proj is tiny._llamas(TINY)["dense"].layers[0].mlp.up_proj


@pytest.mark.parametrize("work", ["decode", "training"])
def test_one_graph_serves_all_layers_of_a_form(
    work: str, tiny: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setattr(models_steps, "COMPILER", {**models_steps.COMPILER, "backend": "aot_eager"})
    eager = {form: models._compared(step(None)) for form, (_, step) in _again(tiny, work)}
    compiled, graphs = _again(tiny, work, compiled=True), []
    counters.clear()
    for form, (_, step) in compiled:
        found = models._compared(step(None))
        assert torch.dist(found, eager[form]) < 2e-2 * eager[form].norm()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 2, 3]


def _again(tiny: Models, work: str, compiled: bool = False):
    """The same step, of the same random tokens."""
    torch.manual_seed(1)
    return list(made(tiny, WORKS[work], runner(compiled)).items())


# ---- Rows -------------------------------------------------------------------------------


def test_a_row_for_each_way_to_launch(tiny: Models) -> None:
    eager, graph = rows(made(tiny, DECODE), DECODE)
    assert (eager["launch"], graph["launch"]) == ("eager", "graph")
    for row in (eager, graph):
        assert (row["work"], row["batch"], row["tokens"]) == ("decode", 2, 1)
        assert (row["layers"], row["hidden"], row["intermediate"]) == (2, 64, 192)
        assert list(row["forms"]) == list(FORMS) and row["failed"] == {}
        assert 0 < row["error"] < models_cases.MOST_ERROR["decode"]
        ours = row["forms"]["libnf4"]
        assert "ratio" not in ours and ours["step"] == 1_000_000
        assert ours["weights"] < row["forms"]["dense"]["weights"]
        theirs = row["forms"]["bitsandbytes"]
        assert theirs["ratio"] == pytest.approx(theirs["us"] / ours["us"], abs=1e-3)


def _broken(step):
    def launch(stream):
        raise RuntimeError("out of luck\nand more")

    return launch


def test_a_form_that_fails_leaves_the_others(tiny: Models) -> None:
    found = dict(made(tiny, DECODE))
    model, step = found["bitsandbytes"]
    found["bitsandbytes"] = model, _broken(step)
    for row in rows(found, DECODE):
        assert row["failed"] == {"bitsandbytes": "RuntimeError: out of luck"}
        assert list(row["forms"]) == ["libnf4", "dense"] and row["error"] is None
    found["libnf4"] = found["libnf4"][0], _broken(None)
    (row, _) = rows(found, DECODE)
    assert list(row["forms"]) == ["dense"] and "ratio" not in row["forms"]["dense"]


def test_a_capture_that_fails_leaves_the_eager_row(
    tiny: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(self, launches, eager):
        if not eager:
            raise RuntimeError("cannot be captured")
        return lambda: None

    monkeypatch.setattr(FakeGpu, "prepare", prepare)
    eager, graph = rows(made(tiny, DECODE), DECODE)
    assert list(eager["forms"]) == list(FORMS) and eager["failed"] == {}
    assert graph["forms"] == {} and list(graph["failed"]) == list(FORMS)


def test_turns_that_fail_leave_the_rows_before_them(
    tiny: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = models.in_turns

    def once(work, turns):
        monkeypatch.setattr(models, "in_turns", fails)
        return eager(work, turns)

    def fails(work, turns):
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(models, "in_turns", once)
    eager_row, graph_row = rows(made(tiny, DECODE), DECODE)
    assert list(eager_row["forms"]) == list(FORMS) and eager_row["failed"] == {}
    assert graph_row["failed"] == dict.fromkeys(FORMS, "RuntimeError: the GPU is gone")


def test_a_wrong_result_ends_it_before_anything_is_timed(tiny: Models) -> None:
    found, of = dict(made(tiny, DECODE)), bench(names=())
    model, step = found["libnf4"]
    found["libnf4"] = model, lambda stream: step(stream) * 1.1
    with pytest.raises(WrongResult, match="decode 2x1, 2 layers of 64: libnf4 beside"):
        models.rows_of(of, DECODE, found)
    assert of.gpu.measured == 0


# ---- The program ------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls, and a compiler that is quick."""
    monkeypatch.setattr(host, "HOST_TURNS", 2)
    monkeypatch.setattr(models_steps, "COMPILER", {**models_steps.COMPILER, "backend": "eager"})


def run(groups, peers, limit: float = 1e9) -> tuple[dict, list[str]]:
    said: list[str] = []
    return models.run(bench(names=()), peers, groups, limit, said.append), said


@pytest.mark.usefixtures("short")
def test_all_figures(peers) -> None:
    compiled = dataclasses.replace(DECODE, size=ONE, compiled=True)
    figures, said = run([DECODE, TRAINING, MLP, compiled], peers)
    assert [(row["work"], row["launch"], row["compiled"]) for row in figures["rows"]] == [
        ("decode", "eager", False), ("decode", "graph", False), ("training", "eager", False),
        ("mlp", "eager", False), ("decode", "eager", True), ("decode", "graph", True),
    ]  # fmt: skip
    assert all(list(row["forms"]) == list(FORMS) for row in figures["rows"])
    assert figures["left_out"] == [] and figures["seconds"] >= figures["build_seconds"]
    assert figures["call"]["shape"] == [64, 64]
    assert list(figures["call"]["forms"]) == list(FORMS)
    assert any(line.startswith("decode batch 2, 1 layer, compiled, CUDA graph, ") for line in said)


@pytest.mark.usefixtures("short")
def test_a_group_that_fails_leaves_the_others(peers, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self, group, run):
        raise MemoryError("no room for caches")

    monkeypatch.setattr(Models, "inference", fails)
    figures, _ = run([DECODE, MLP], peers)
    first, second, mlp = figures["rows"]
    assert (first["launch"], second["launch"]) == ("eager", "graph")
    assert first["failed"] == dict.fromkeys(FORMS, "MemoryError: no room for caches")
    assert mlp["failed"] == {} and list(mlp["forms"]) == list(FORMS)


@pytest.mark.usefixtures("short")
def test_a_missing_peer_is_named_and_time_that_is_over_leaves_groups_out(peers) -> None:
    figures, said = run([DECODE], {**peers, "bitsandbytes": Missing("not installed")}, limit=0)
    assert figures["rows"] == [] and figures["left_out"] == ["decode 2x1, 2 layers of 64"]
    assert "bitsandbytes: missing: not installed" in said
    assert "left out, as 0 s were over: decode 2x1, 2 layers of 64" in said
    assert list(figures["call"]["forms"]) == ["libnf4", "dense"]


@pytest.mark.usefixtures("short")
def test_a_layer_whose_call_fails_is_left_out(tiny: Models) -> None:
    def fails(x):
        raise RuntimeError("no kernel")

    layers = {form: [dict(each[0])] for form, each in tiny.weights.forms.items()}
    broken = torch.nn.Identity()
    broken.forward = fails
    layers["bitsandbytes"][0][host.LAYER] = broken
    figures = host.layer(bench(names=()), layers)
    assert figures["failed"] == {"bitsandbytes": "RuntimeError: no kernel"}
    assert list(figures["forms"]) == ["libnf4", "dense"]


def test_the_program_takes_all_groups_or_the_quick_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(modes, "bench", lambda options: bench(names=()))
    monkeypatch.setattr(models, "run", lambda *arguments: asked.append(arguments[2:4]) or {})
    for quick in (False, True):
        modes.run(Options(mode="models", quick=quick), lambda line: None)
    assert asked == [
        (models_cases.full(), models_cases.SECONDS),
        (models_cases.quick(), models_cases.QUICK_SECONDS),
    ]
