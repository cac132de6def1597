"""The bench's tables and pages, and which cases are measured. No GPU, no torch.

tests/python/gpu/test_record.py compares the pages of the repository with their figures, byte for
byte; here is what those figures do not have, and what is easily mistaken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from bench_path import figures, matmul_row, models_row, peer, row, timing
from nf4bench import cases, matmul_cases, models_cases, pages, table, tables
from nf4bench.measure import Candidate, Timing, fastest, in_turns, measure, queued, summary, taken
from nf4bench.options import PEERS

PDL = {"launch": "pdl"}
MLP = {"work": "mlp", "batch": 32, "tokens": 512, "layers": 1, "compiled": True, "launch": "eager"}


def cells(markdown: str) -> list[list[str]]:
    """The lines of a table, without its head and rule."""
    return [line.strip("| ").split(" | ") for line in markdown.splitlines()[2:]]


# ---- Tables -----------------------------------------------------------------------------


def test_a_table_is_markdown_and_lines_of_one_spec() -> None:
    made = table.Table(
        table.text("shape", table.shape), table.number("µs", "{us:.1f}"),
        table.number("PDL µs", table.optional("pdl", "{us:.1f}")),
    )  # fmt: skip
    filled = table.Filled(made, [{"shape": [2, 3], "us": 1.25, "pdl": {"us": 1}},
                                 {"shape": [4, 5], "us": 2}])  # fmt: skip
    assert filled.markdown() == (
        "| shape | µs | PDL µs |\n| --- | --: | --: |\n| 2×3 | 1.2 | 1.0 |\n| 4×5 | 2.0 | – |"
    )
    assert filled.lines() == ["2×3, 1.2 µs, 1.0 PDL µs", "4×5, 2.0 µs"]


def test_a_section_is_made_anew_between_its_markers() -> None:
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb"
    assert table.with_section(text, "x", "new") == text.replace("old", "new")
    with pytest.raises(ValueError, match="there is no <!-- y:begin -->"):
        table.with_section(text, "y", "new")


NONE = {"unsloth": {"missing": "x"}, "triton": {"version": "3"}, "dense": {"missing": "y"}}
APART = {"apart": timing(12.0) | {"ratio": 1.2}, "weights": 2}
BOUNDS = {"read": timing(3.0), "write": timing(7.0), "configuration": None}
TABLES = [
    (tables.rows(NONE, pages.PEERS), {"plain": row(), "pdl": row(8.0, **PDL)},
     "dequantize | 4096×1024 | bf16 | nested | 10.0 | 1000 | 90% | 8.0 | 112% | 25.0 (2.50x) | "
     "missing | – | –"),
    (tables.rows(NONE, ["bitsandbytes"]), {"plain": row(format="fp4", as_calls=timing(50.0))},
     "dequantize | 4096×1024 | bf16 | nested, FP4 | 10.0 | 1000 | 90% | – | – | "
     "25.0 (2.50x of 50.0)"),
    (tables.SPREADS, row(**BOUNDS),
     "dequantize | 4096×1024 | bf16 | nested | plain | – | 10.00 | 9.50..10.50 | 9.00 | 3.00 | "
     "7.00"),
    (tables.matmul({}, many=True), {"plain": matmul_row(peers={})},
     "14336×4096 | bf16, nested | 1 | 10.0 | 12 | – | –"),
    (tables.matmul({}, several=True), {"plain": matmul_row(**APART), "pdl": matmul_row()},
     "14336×4096 | bf16, nested | 1 | 10.0 | 80% | 10.0 | 80% | 12.0 (1.20x) | –"),
    (tables.MODELS, models_row(without="dense", **MLP),
     "MLP, forward 32×512, 4096/11008 | 1 layer | compiled | 3.00 | – | 6.00 (2.00x) | failed"),
]  # fmt: skip


@pytest.mark.parametrize("made, one, line", TABLES)
def test_the_cells_of_a_row(made: table.Table, one: dict, line: str) -> None:
    assert made.markdown([one]).splitlines()[2] == f"| {line} |"


def test_both_ways_to_launch_are_one_case_and_another_weight_is_another() -> None:
    found = tables.cases([row(), row(8.0, **PDL), row(format="fp4"), matmul_row(), matmul_row(m=2)])
    assert [list(each) for each in found] == [["plain", "pdl"], ["plain"], ["plain"], ["plain"]]


def test_the_challenge_has_who_is_only_eager_or_only_compiled() -> None:
    times, _ = tables.challenge({
        "eager": {"libnf4": timing(100.0), "unsloth": timing(250.0)}, "points": [],
        "compiled": {"unsloth": {"refused": "ctypes"}, "unsloth as an operator": timing(90.0)},
    })  # fmt: skip
    assert cells(times.markdown()) == [
        ["libnf4", "100.0", "–", "1.00x"], ["Unsloth", "250.0", "refused", "2.50x"],
        ["Unsloth as an operator", "–", "90.0", "–"],
    ]  # fmt: skip


def test_without_a_dense_product_nothing_is_said_of_errors() -> None:
    of = {"dtype": "bf16", "nested": True, "x": "normal"}
    rows = [of | {"m": 1, "errors": {"libnf4": 2.2e-3, "dense": 2e-3}},
            of | {"m": 8, "errors": {"libnf4": 3e-3}},
            of | {"m": 8, "errors": {"libnf4": 2e-3}}]  # fmt: skip
    assert cells(tables.worst_errors(rows).markdown()) == [
        ["bf16, nested", "normal", "1", "2.20e-03", "–", "2.00e-03", "1.100x"],
        ["bf16, nested", "normal", "8", "3.00e-03", "–", "–", "–"],
    ]
    assert "at most 1.10 times that" in pages.errors({"errors": rows})
    assert pages.errors({"errors": rows[1:]}) == ""


FAST, SLOW = timing(4.0) | {"ratio": 1.0}, timing(5.0) | {"ratio": 1.25}


def test_a_sweep_marks_the_best_the_chosen_and_the_refused() -> None:
    one = {"shape": [64, 64], "dtype": "bf16", "m": 1, "chosen": 1, "times": [SLOW, FAST]}
    refused = one | {"m": 64, "chosen": 0, "times": [FAST, {"refused": "status 1"}]}
    other = one | {"shape": [128, 64], "chosen": 0}
    swept = {"configurations": ["mma", "skinny"], "rows": [one, refused, other], "device": "x"}
    made, _ = tables.sweep(swept, table.shape, "kernel", "M = {m}")
    assert made.markdown().startswith("| 64×64: kernel | M = 1 | M = 64 |\n")
    assert cells(made.markdown()) == [
        ["mma", "1.250", "**1.000 = 4.00 µs**"], ["skinny", "**1.000 = 4.00 µs**", "refused"],
    ]  # fmt: skip
    line = tables.sweep_line(swept, other)
    assert line == "128×64 bf16 M=1: best skinny 4.00 us; chosen mma **1.250**"
    none = tables.sweep_line(swept, one | {"chosen": -1})
    assert none.endswith("the library takes none")


# ---- Pages ------------------------------------------------------------------------------


def test_readme_has_its_rows_and_only_what_it_wants() -> None:
    recorded = {name: figures(name) for name in ("bench", "matmul", "models")}
    large = {"shape": [14336, 4096]}
    recorded["bench"] = figures("bench", row(**large), row(**large, **PDL), row(dtype="fp16"))
    recorded["matmul"] = figures("matmul", matmul_row(), matmul_row(m=128), matmul_row(m=2))
    broken = models_row(work="prefill", without="libnf4")
    recorded["models"] = figures("models", models_row(), models_row(layers=8), broken)
    assert cells(pages.readme(recorded).split("\n\n")[1]) == [
        ["dequantize", "14336×4096", "10.0", "90% of the roofline", "2.50x", "–", "–"],
        ["matmul, M = 1", "14336×4096", "10.0", "80% of the roofline", "3.00x", "3.50x", "–"],
        [
            "matmul, M = 128",
            "14336×4096",
            "10.0",
            "12 TFLOPS, 350% of dense",
            "3.00x",
            "3.50x",
            "–",
        ],
        ["LLaMA-7B, decode batch 1", "–", "3000", "–", "2.00x", "2.20x", "–"],
    ]  # fmt: skip


def test_the_document_says_who_is_missing_what_failed_and_what_is_older() -> None:
    broken = models_row(without="libnf4", **MLP)
    found = {name: figures(name, commit="abc") for name in ("challenge", "call")} | {
        "bench": figures("bench", row(), missing="unsloth", commit="def"),
        "matmul": figures("matmul", matmul_row(33.0, m=64), matmul_row(17.0, weights=2)),
        "models": figures("models", models_row(), broken, left_out=["mlp 32x512"]),
    }
    text = pages.document(found, {"bench", "call"})
    assert "on one GPU of a test on 2026-01-02" in text
    assert "Unsloth is missing: no such library." in text
    few, _, rest = text.partition("### 64 rows of x and more")
    many, _, rest = rest.partition("### Two weights that share x")
    assert "| 33.0 | 12 | 106% |" in many and "| 33.0 |" not in few and "| 17.0 | 47% |" in rest
    assert (
        "libnf4 failed in MLP, forward 32×512, 4096/11008, 1 layer, compiled: RuntimeError: no "
        "room. Left out, as time was over: mlp 32x512." in text
    )
    older = "The figures of {} are from commit {}; their code has changed since."
    assert text.count("changed since") == 2
    assert text.index(older.format("a call", "abc")) > text.index("## A call from Python")
    assert older.format("dequantize and quantize", "def") in text
    assert "changed since" not in pages.document(found) + pages.readme(found)
    readme = pages.readme(found, {"bench", "challenge"})  # which has no row of the second
    assert older.format("dequantize and quantize", "def") in readme and "puzzle" not in readme
    without = {name: found[name] for name in ("bench", "challenge", "call")}
    assert "Matmul" not in pages.document(without) and "# Whole" not in pages.document(without)


def test_the_page_of_integer_weights_says_who_is_missing() -> None:
    product = matmul_row(format="gptq", peers={"humming": peer(15.0, 10.0)})
    page = pages.int4({"int4": figures("int4", product, missing="AutoGPTQ")})
    assert "AutoGPTQ's Triton is missing: no such library." in page
    # The peers are columns in this order: dense, Humming, split-K, AutoGPTQ's Triton.
    assert "| bf16, GPTQ | 1 | 10.0 | 80% | – | – | – | 15.0 (1.50x) | – | missing |" in page


# ---- What is measured -------------------------------------------------------------------


def test_every_case_is_measured_once() -> None:
    full = cases.full()
    assert len(full) == len(set(full)) and set(cases.quick()) < set(full)
    # Peers that load vectors fault on unaligned memory.
    assert [case for case in full if case.placement != "aligned" and case.peers] == []
    for shape in cases.HEADLINE:
        assert cases.Case(shape, peers=PEERS, bounds=True) in full
    assert str(cases.Case((8, 9), nested=False, format="own", blocksize=32)) == (
        "dequantize 8x9 bf16 flat own codebook blocksize 32"
    )
    groups = matmul_cases.full()
    products = [(group.case, group.together, m) for group in groups for m in group.ms]
    assert len(products) == len(set(products))
    assert matmul_cases.measured((28672, 8192))[-1] == 1024
    models = models_cases.full()
    assert len(models) == len(set(models)) == len(set(map(str, models)))
    assert {g.work for g in models} == set(tables.WORKS) == set(models_cases.MOST_ERROR)


# ---- How it is timed --------------------------------------------------------------------


def test_candidates_take_turns_and_the_first_turns_do_not_count() -> None:
    order: list[str] = []
    left = {"a": iter((900, 900, 1, 2, 3)), "b": iter((900, 900, 4, 5, 6))}
    work = {name: lambda n=name: order.append(n) or next(left[n]) for name in left}
    times = in_turns(work, 3)
    assert order == ["a", "b"] * 5 and (times["a"].us, times["b"].us) == (2, 5)
    order.clear()
    taken({name: lambda n=name: order.append(n) for name in left}, 2, warm_up=0, rotate=True)
    assert order == ["a", "b", "b", "a"]
    found = summary([float(value) for value in range(1, 100)])
    assert (found.us, found.spread) == (50, (10, 90))


def test_a_graph_holds_the_whole_rotation_and_its_time_is_of_one_launch() -> None:
    prepared: list[tuple[int, bool]] = []
    gpu = SimpleNamespace(
        prepare=lambda launches, eager: prepared.append((len(launches), eager)) or len(launches),
        microseconds=lambda count: 7.0 * count,
    )
    times = measure(gpu, {"x": ["one"] * 5, "y": ["other"] * 40}, 3, eager=("y",))
    assert times["x"].us == times["y"].us == 7.0 and prepared == [(20, False), (40, True)]


def test_the_fastest_launch_variant_counts_of_those_launched_alike() -> None:
    times = {
        Candidate("roofline", launch, variant): Timing(us, (us, us))
        for launch, variant, us in (("plain", 0, 5), ("plain", 1, 4), ("pdl", 0, 3))
    }
    assert fastest(times, "roofline").variant == 1
    assert fastest(times, "roofline", "pdl").timing.us == 3
    assert fastest(times, "read") is None


def test_host_overhead_is_of_calls_that_nothing_waits_for() -> None:
    order: list[str] = []
    gpu = SimpleNamespace(synchronize=lambda: order.append("wait"))
    assert queued(gpu, lambda: order.append("call"), 3) > 0
    assert order == ["wait", "call", "call", "call", "wait"]
