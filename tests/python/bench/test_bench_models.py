"""The bench of whole models on the CPU: a small model in all three forms, from group to row."""

from __future__ import annotations

import dataclasses

import bench_path  # noqa: F401  (the path)
import pytest

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

import nf4.torch.bitsandbytes  # noqa: E402
from bench_fakes import FakeGpu, bench, wrong  # noqa: E402
from nf4.torch import NF4Linear  # noqa: E402
from nf4bench import (  # noqa: E402
    host,
    models,
    models_cases,
    models_forms,
    models_llama,
    models_steps,
)  # fmt: skip
from nf4bench.models_cases import BOTH, DROP_IN, EAGER, FORMS, GRAPH, Group, Size  # noqa: E402
from nf4bench.models_steps import Models, runner  # noqa: E402
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

TIMED = {"eager": list(FORMS), "graph": [form for form in FORMS if form != DROP_IN]}


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


def test_ours_shares_the_bytes_of_bitsandbytes(peers) -> None:
    weight = models_llama.random_weight(64, 192, "cpu")
    found = models_forms.of(weight, present(peers))
    assert list(found) == list(FORMS) and isinstance(found["libnf4"], NF4Linear)
    assert found[DROP_IN] is found["bitsandbytes"]
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
    elements = 64 * 192
    # packed, scales, one nested scale, its table, the offset; bitsandbytes has a codebook besides.
    ours = elements // 2 + elements // 64 + 4 + 1024 + 4
    sizes = {form: models_forms.bytes_of(each) for form, each in found.items()}
    theirs = ours + 64
    assert sizes == {
        "libnf4": ours, DROP_IN: theirs, "bitsandbytes": theirs, "dense": 2 * elements
    }  # fmt: skip


def test_a_peer_that_libnf4_serves_or_that_fails_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nf4.torch.bitsandbytes.register()
    try:
        loaded = models_forms.load("cpu")
    finally:
        nf4.torch.bitsandbytes.unregister()
    assert "libnf4 serves it" in loaded["bitsandbytes"].reason and "dense" in present(loaded)

    def fails(place: str):
        raise ImportError("no such library")

    monkeypatch.setitem(models_forms.FACTORIES, "dense", fails)
    assert models_forms.load("cpu")["dense"] == Missing("ImportError: no such library")


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


@pytest.mark.parametrize("work", ["decode", "training"])
def test_one_graph_serves_all_layers_of_a_form(
    work: str, tiny: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is compiled computes the same."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(models_steps, "COMPILER", {**models_steps.COMPILER, "backend": "aot_eager"})
    eager = {form: models._compared(step(None)) for form, (_, step) in _again(tiny, work)}
    compiled, graphs = _again(tiny, work, compiled=True), []
    counters.clear()
    for form, (_, step) in compiled:
        found = models._compared(step(None))
        assert torch.dist(found, eager[form]) < 2e-2 * eager[form].norm()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 2, 2, 3]  # the drop-in has bitsandbytes' layers, and its graph


def _again(tiny: Models, work: str, compiled: bool = False):
    """The same step, of the same random tokens."""
    torch.manual_seed(1)
    return list(made(tiny, WORKS[work], runner(compiled)).items())


# ---- Rows -------------------------------------------------------------------------------


def test_a_row_for_each_way_to_launch(tiny: Models) -> None:
    found = rows(made(tiny, DECODE), DECODE)
    assert [row["launch"] for row in found] == ["eager", "graph"]
    for row in found:
        size = [row[name] for name in ("work", "batch", "tokens", "layers", "hidden")]
        assert size == ["decode", 2, 1, 2, 64]
        assert list(row["forms"]) == TIMED[row["launch"]] and row["failed"] == {}
        assert 0 < row["error"] < models_cases.MOST_ERROR["decode"]
        ours, theirs, dense = (row["forms"][form] for form in TIMED["graph"])
        assert "ratio" not in ours and ours["step"] == 1_000_000
        assert ours["weights"] < dense["weights"]
        assert theirs["ratio"] == pytest.approx(theirs["us"] / ours["us"], abs=1e-3)


def _broken(stream):
    raise RuntimeError("out of luck\nand more")


def test_a_form_that_fails_leaves_the_others(tiny: Models) -> None:
    found = dict(made(tiny, DECODE))
    found["bitsandbytes"] = found["bitsandbytes"][0], _broken
    for row in rows(found, DECODE):
        assert row["failed"] == {"bitsandbytes": "RuntimeError: out of luck"}
        left = [form for form in TIMED[row["launch"]] if form != "bitsandbytes"]
        assert list(row["forms"]) == left and row["error"] is None
    found["libnf4"] = found["libnf4"][0], _broken
    (row, _) = rows(found, DECODE)
    assert list(row["forms"]) == [DROP_IN, "dense"] and "ratio" not in row["forms"]["dense"]


@pytest.mark.parametrize("holder, where, calls", [(FakeGpu, "prepare", 4), (models, "in_turns", 1)])
def test_a_graph_that_fails_leaves_the_eager_row(
    holder, where: str, calls: int, tiny: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, left = getattr(holder, where), iter(range(calls))

    def fails_later(*given):
        if next(left, None) is None:
            raise RuntimeError("the GPU is gone")
        return honest(*given)

    monkeypatch.setattr(holder, where, fails_later)
    eager, graph = rows(made(tiny, DECODE), DECODE)
    assert list(eager["forms"]) == list(FORMS) and eager["failed"] == {}
    assert graph["forms"] == {}
    assert graph["failed"] == dict.fromkeys(TIMED["graph"], "RuntimeError: the GPU is gone")


def test_a_wrong_result_ends_it_before_anything_is_timed(tiny: Models) -> None:
    found, of = dict(made(tiny, DECODE)), bench(names=())
    model, step = found["libnf4"]
    found["libnf4"] = model, lambda stream: step(stream) * 1.1
    said = wrong(of, lambda: models.rows_of(of, DECODE, found))
    assert "decode 2x1, 2 layers of 64: libnf4 beside" in said


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
def test_all_figures(peers, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = dataclasses.replace(DECODE, size=ONE, compiled=True)
    figures, said = run([TRAINING, MLP, compiled], peers)
    assert [(row["work"], row["launch"], row["compiled"]) for row in figures["rows"]] == [
        ("training", "eager", False), ("mlp", "eager", False), ("decode", "eager", True),
        ("decode", "graph", True),
    ]  # fmt: skip
    assert all(list(row["forms"]) == TIMED[row["launch"]] for row in figures["rows"])
    assert figures["left_out"] == [] and figures["seconds"] >= figures["build_seconds"]
    assert figures["call"]["shape"] == [64, 64]
    assert list(figures["call"]["forms"]) == list(FORMS)
    assert all(each["gradients"]["us"] > 0 for each in figures["call"]["forms"].values())
    assert any(line.startswith("decode batch 2, 1 layer, compiled, CUDA graph, ") for line in said)

    def fails(self, group, run):
        raise MemoryError("no room for caches")

    monkeypatch.setattr(Models, "inference", fails)
    *decode, mlp = run([DECODE, MLP], peers)[0]["rows"]
    for row in decode:
        assert row["failed"] == dict.fromkeys(FORMS, "MemoryError: no room for caches")
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
    layers = {form: [dict(each[0])] for form, each in tiny.forms.items()}
    broken = layers["bitsandbytes"][0][host.LAYER] = torch.nn.Identity()
    broken.forward = _broken
    figures = host.layer(bench(names=()), layers)
    assert figures["failed"] == {"bitsandbytes": "RuntimeError: out of luck\nand more"}
    assert list(figures["forms"]) == ["libnf4", DROP_IN, "dense"]
