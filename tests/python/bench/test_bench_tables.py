"""The bench's tables and pages, and which cases are measured. No GPU, no torch."""

from __future__ import annotations

import bench_path
import pytest
from bench_path import (
    bench,
    matmul,
    matmul_error,
    matmul_row,
    models,
    models_row,
    record,
    row,
    stamp,
    timing,
)  # fmt: skip
from nf4bench import cases, matmul_cases, models_cases, pages, table, tables
from nf4bench.measure import Candidate, Timing, fastest, in_turns, measure, queued, summary
from nf4bench.models_cases import FORMS, LLAMA_7B
from nf4bench.options import PEERS

TRAINING = {"work": "training", "batch": 4, "tokens": 256, "launch": "eager"}
MLP = {"work": "mlp", "batch": 32, "tokens": 512, "layers": 1, "compiled": True, "launch": "eager"}


def cells(markdown: str) -> list[list[str]]:
    """The lines of a table, without the rule."""
    found = [line.strip("|").split("|") for line in markdown.splitlines()]
    return [[cell.strip() for cell in line] for line in [found[0], *found[2:]]]


# ---- A table as data --------------------------------------------------------------------


def test_a_table_is_markdown_and_lines_of_one_spec() -> None:
    made = table.Table(
        table.text("shape", table.shape), table.number("µs", "{us:.1f}"),
        table.number("PDL µs", table.optional("pdl", "{us:.1f}")),
    )  # fmt: skip
    rows = [{"shape": [2, 3], "us": 1.25, "pdl": {"us": 1}}, {"shape": [4, 5], "us": 2}]
    assert made.markdown(rows) == (
        "| shape | µs | PDL µs |\n| --- | --: | --: |\n| 2×3 | 1.2 | 1.0 |\n| 4×5 | 2.0 | – |"
    )
    assert [made.line(row) for row in rows] == ["2×3, 1.2 µs, 1.0 PDL µs", "4×5, 2.0 µs"]


def test_a_section_is_made_anew_between_its_markers() -> None:
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb"
    assert table.with_section(text, "x", "new") == text.replace("old", "new")
    with pytest.raises(ValueError, match="there is no <!-- y:begin -->"):
        table.with_section(text, "y", "new")


# ---- Tables -----------------------------------------------------------------------------


def test_both_ways_to_launch_are_in_one_line_and_a_missing_peer_is_named() -> None:
    figures = bench(row(), row(8.0, launch="pdl"), row(20.0, dtype="fp32", format="fp4"))
    made = tables.rows(figures["peers"], pages.PEERS).markdown(tables.cases(figures["rows"]))
    head, *lines = cells(made)
    assert head[-4:] == [f"{each} µs (ratio)" for each in ("bitsandbytes", "Unsloth", "Triton",
                                                           "torch")]  # fmt: skip
    assert lines == [
        ["dequantize", "4096×1024", "bf16", "nested", "10.0", "1000", "90%", "8.0", "112%",
         "25.0 (2.50x)", "missing", "–", "–"],
        ["dequantize", "4096×1024", "fp32", "nested, FP4", "20.0", "500", "45%", "–", "–",
         "25.0 (1.25x)", "missing", "–", "–"],
    ]  # fmt: skip


def test_a_ratio_of_calls_names_our_time() -> None:
    case = {"plain": row(as_calls=timing(50.0))}
    assert tables.peer_cell("bitsandbytes", {})(case) == "25.0 (2.50x of 50.0)"


def test_spreads_name_rooflines_and_configuration() -> None:
    bounds = {"read": timing(3.0), "write": timing(7.0)}
    _, full, bare = cells(tables.SPREADS.markdown([row(**bounds), row(configuration=None)]))
    assert full[5:] == ["256x2 pdl", "10.00", "9.50..10.50", "9.00", "3.00", "7.00"]
    assert bare[5:] == ["–", "10.00", "9.50..10.50", "9.00", "–", "–"]


def test_the_challenge_has_who_is_only_eager_or_only_compiled() -> None:
    lines = cells(tables.CHALLENGE.markdown(tables.challenge_rows(bench_path.challenge())))
    assert lines[1:] == [
        ["libnf4", "100.0", "110.0", "1.00x"],
        ["Unsloth", "250.0", "refused", "2.50x"],
        ["libnf4 as an operator", "130.0", "–", "1.30x"],
    ]


def test_products_of_few_rows_are_beside_a_read_and_of_many_beside_dense() -> None:
    rows = [matmul_row(), matmul_row(8.0, launch="pdl"), matmul_row(20.0, m=128), matmul_row(m=9)]
    figures = matmul(*rows)
    few, many = (
        cells(tables.matmul(figures["peers"], many).markdown(tables.products(some)))
        for many, some in ((False, rows[:2]), (True, rows[2:3]))
    )
    assert few[0][3:7] == ["µs", "of the roofline", "with PDL µs", "of the roofline"]
    assert few[1][2:] == [
        "1",
        "10.0",
        "80%",
        "8.0",
        "100%",
        "30.0 (3.00x)",
        "35.0 (3.50x)",
        "missing",
    ]
    assert many[0][3:7] == ["µs", "TFLOPS", "of dense", "with PDL µs"]
    assert many[1][2:7] == ["128", "20.0", "12", "175%", "–"]
    assert tables.of_dense(matmul_row(peers={})) == "–"


def test_weights_in_one_call_are_beside_a_call_each() -> None:
    apart = {"apart": timing(12.0) | {"ratio": 1.2}, "weights": 2}
    figures = matmul(matmul_row(**apart), matmul_row(8.0, launch="pdl", **apart), matmul_row(m=2))
    made = tables.matmul(figures["peers"], several=True)
    head, both, none = cells(made.markdown(tables.products(figures["rows"])))
    assert head[7:9] == ["a call each µs (ratio)", "with PDL µs (ratio)"]
    assert (both[7:9], none[7:9]) == (["12.0 (1.20x)"] * 2, ["–", "–"])
    line = cells(tables.MATMUL_SPREADS.markdown([matmul_row(**apart)]))[1]
    assert line[0] == "2 of 14336×4096" and line[3] == "skinny_2" and line[-1] == "2.40e-03"


def test_the_error_table_has_the_worst_of_all_shapes() -> None:
    rows = [
        matmul_error(),
        matmul_error(1.8e-3, shape=[4096, 4096]),
        matmul_error(m=8, errors={"libnf4": 3e-3}),
    ]
    assert cells(tables.ERRORS.markdown(tables.worst_errors(rows)))[1:] == [
        ["bf16, nested", "normal", "1", "2.20e-03", "2.50e-03", "2.00e-03", "1.100x"],
        ["bf16, nested", "normal", "8", "3.00e-03", "–", "–", "–"],
    ]


def test_calls_of_matmul_and_of_layers() -> None:
    call = matmul()["call"]
    head, _, dense = cells(tables.matmul_call(call).markdown(tables.matmul_calls(call)))
    assert head[0] == "one call at 4096×4096, M = 1"
    assert dense == ["dense", "12.00", "1.50x", "12.0", "1.50x"]
    call = models()["call"]
    lines = cells(tables.layer_call(call).markdown(tables.layer_calls(call)))
    assert lines[1:] == [["libnf4", "8.00", "1.00x"], ["bitsandbytes", "20.00", "2.50x"]]


def swept(chosen: int, *times: dict, **more: object) -> dict:
    return {"shape": [64, 64], "dtype": "bf16", "chosen": chosen, "times": list(times), **more}


FAST, SLOW = timing(4.0) | {"ratio": 1.0}, timing(5.0) | {"ratio": 1.25}
SWEEP = {
    "device": "GPU of a test", "configurations": ["mma_64x64", "skinny_2"],
    "rows": [
        swept(1, SLOW, FAST, m=1), swept(0, FAST, {"refused": "status 1"}, m=64),
        swept(0, SLOW, FAST, m=1) | {"shape": [128, 64]},
    ],
}  # fmt: skip


def test_a_sweep_has_a_table_for_each_weight_or_dtype() -> None:
    one, other = map(cells, pages.matmul_sweep_tables(SWEEP)[1:])
    assert one == [
        ["64×64 bf16: kernel", "M = 1", "M = 64"],
        ["mma_64x64", "1.250", "**1.000 = 4.00 µs**"],
        ["skinny_2", "**1.000 = 4.00 µs**", "refused"],
    ]
    assert other[0] == ["128×64 bf16: kernel", "M = 1"]
    (both,) = map(cells, pages.sweep_tables(SWEEP)[1:])
    assert both[0] == ["bf16: configuration", "64×64", "64×64", "128×64"]
    line = tables.sweep_line(SWEEP, SWEEP["rows"][2])
    assert line == "128×64 bf16 M=1: best skinny_2 4.00 us; chosen mma_64x64 **1.250**"
    assert tables.sweep_line(SWEEP, swept(-1, SLOW, FAST)).endswith("the library takes none")


def without(row: dict, form: str, reason: str) -> dict:
    forms = {name: each for name, each in row["forms"].items() if name != form}
    return row | {"forms": forms, "failed": {form: reason}}


def test_models_have_each_form_and_say_who_failed() -> None:
    rows = [
        models_row(),
        models_row(150_000.0, **TRAINING),
        without(models_row(compiled=True, layers=8), "bitsandbytes", "RuntimeError: a break"),
        models_row(forms={}, failed=dict.fromkeys(FORMS, "MemoryError")),
        without(models_row(**MLP), "dense", "x"),
    ]
    head, *lines = cells(tables.MODELS.markdown(rows))
    assert head == [
        "work",
        "model",
        "launched",
        "ms",
        "bitsandbytes ms (ratio)",
        "dense ms (ratio)",
    ]
    assert lines == [
        ["decode batch 1", "32 layers", "CUDA graph", "3.00", "6.00 (2.00x)", "6.60 (2.20x)"],
        ["forward + backward 4×256", "32 layers", "eager", "150", "6.00 (0.04x)", "6.60 (0.04x)"],
        ["decode batch 1", "8 layers", "compiled, CUDA graph", "3.00", "failed", "6.60 (2.20x)"],
        ["decode batch 1", "32 layers", "CUDA graph", "failed", "failed", "failed"],
        [
            "MLP, forward 32×512, 4096/11008",
            "1 layer",
            "compiled",
            "3.00",
            "6.00 (2.00x)",
            "failed",
        ],
    ]


def test_memory_is_shown_once_for_each_work_and_spreads_for_each_form() -> None:
    rows = [models_row(), models_row(launch="eager"), models_row(compiled=True)]
    rows.append(without(models_row(**TRAINING), "dense", "x"))
    both = ["4.00 + 0.02", "4.00 + 0.02"]
    assert cells(tables.MODELS_MEMORY.markdown(tables.memory_rows(rows)))[1:] == [
        ["decode batch 1", "32 layers", *both, "13.50 + 0.00"],
        ["decode batch 1, compiled", "32 layers", *both, "13.50 + 0.00"],
        ["forward + backward 4×256", "32 layers", *both, "–"],
    ]
    lines = cells(tables.MODELS_SPREADS.markdown(tables.forms([models_row()])))
    assert [line[3:] for line in lines[1:]] == [
        ["libnf4", "3.00", "3.00..3.00", "1.20e-02"],
        ["bitsandbytes", "6.00", "6.00..6.00", "–"],
        ["dense", "6.60", "6.60..6.60", "–"],
    ]


# ---- Pages ------------------------------------------------------------------------------


def test_readme_has_a_row_for_each_figure_that_it_wants() -> None:
    large = {"shape": [14336, 4096]}
    figures = record(
        row(**large), row(**large, work="quantize"), row(shape=[4096, 4096]),
        row(**large, launch="pdl"), row(**large, dtype="fp16"), row(**large, blocksize=32),
    )  # fmt: skip
    _, *lines = cells(pages.readme(figures).split("\n\n")[1])
    assert lines[0] == ["dequantize", "4096×4096", "10.0 µs", "1000 GB/s, 90% of roofline",
                        "2.50x", "–"]  # fmt: skip
    assert [line[0] for line in lines] == ["dequantize", "dequantize", "quantize"]
    figures["matmul"] = stamp(matmul(matmul_row(), matmul_row(m=128), matmul_row(m=2)))
    failed = without(models_row(work="prefill"), "libnf4", "x")
    figures["models"] = stamp(models(models_row(), models_row(layers=8), failed))
    lines = cells(pages.readme(figures).split("\n\n")[1])[4:]
    assert lines == [
        ["matmul, M = 1", "14336×4096", "10.0 µs", "80% of roofline", "3.00x", "3.50x"],
        ["matmul, M = 128", "14336×4096", "10.0 µs", "12 TFLOPS, 350% of dense", "3.00x", "3.50x"],
        ["LLaMA-7B, decode batch 1", "–", "3.0 ms", "–", "2.00x", "2.20x"],
    ]


def test_what_readme_shows_is_measured() -> None:
    groups = {(g.case.shape, m) for g in matmul_cases.full() if g.together == 1 for m in g.ms}
    full = {(case.work, case.shape) for case in cases.full()}
    for name, wanted in pages.README_ROWS:
        if name == "matmul":
            assert (tuple(wanted["shape"]), wanted["m"]) in groups
        elif name == "bench":
            assert (wanted["work"], tuple(wanted["shape"])) in full


def test_the_document_shows_every_row_once_in_each_table() -> None:
    text = pages.document(record(row(), row(8.0, launch="pdl"), row(format="own", peers={})))
    assert text.count("own codebook") == 2
    assert "on one GPU of a test on 2026-01-02" in text
    assert "Unsloth is missing: no such library." in text and "triton is 3" not in text
    assert "| 4096×1024 | bf16 | 8 | 6.0 (4.0) | 7.5 (4.5) | 6.5 (4.2) | 1.25x |" in text
    assert "it calls ctypes" not in text and "| one kernel | 1 in the graph | 3 of 3 |" in text
    for name in pages.PLOTS:
        assert f"]({name}.svg)" in text
    for name in ("Matmul", "hole models"):
        assert name not in text


def test_the_document_has_products_by_rows_of_x_and_those_that_share_x_apart() -> None:
    products = matmul(
        matmul_row(), matmul_row(9.0, launch="pdl"), matmul_row(33.0, m=64),
        matmul_row(17.0, weights=2),
    )  # fmt: skip
    text = pages.document(record(row()) | {"matmul": stamp(products)})
    few, _, rest = text.partition("### 64 rows of x and more")
    many, _, rest = rest.partition("### Two weights that share x")
    assert "| 10.0 | 80% | 9.0 | 89% |" in few and "| 33.0 |" not in few
    assert "| 33.0 | 12 | 106% | – |" in many and "| 17.0 | 47% |" in rest
    assert "bitsandbytes 0.1 is its matmul_4bit" in text and "dense is torch 2's linear" in text
    assert "int4 is missing: no such operator." in text
    assert "at most 1.10 times that of a dense product" in text
    assert pages.errors(matmul() | {"errors": [matmul_error(errors={"libnf4": 2e-3})]}) == ""


def test_the_document_has_whole_models_and_what_failed() -> None:
    broken = without(models_row(**MLP), "libnf4", "OutOfMemoryError: no room")
    figures = models(models_row(), broken) | {"left_out": ["decode 8x1", "mlp 32x512"]}
    text = pages.document(record(row()) | {"models": stamp(figures)})
    assert "| MLP, forward 32×512, 4096/11008 | 1 layer | compiled | failed |" in text
    assert (
        "libnf4 failed in MLP, forward 32×512, 4096/11008, 1 layer, compiled: OutOfMemoryError: "
        "no room. Left out, as time was over: decode 8x1; mlp 32x512." in text
    )
    assert "bitsandbytes 0.1 is Linear4bit" in text and "dense is missing: no such library" in text
    assert pages.failures(models(models_row())) == []


def test_pages_say_which_figures_are_of_older_code() -> None:
    figures = record(row()) | {"matmul": stamp(matmul(matmul_row())) | {"commit": "def"}}
    figures |= {"sweep": stamp(SWEEP), "matmul-sweep": stamp(SWEEP)}
    older = "are of commit {}; their code has changed since."
    for page in (pages.readme, pages.document):
        assert "changed since" not in page(figures, set())
        assert f"The figures of matmul {older.format('def')}" in page(figures, {"matmul"})
    text = pages.readme(figures, {"bench", "call", "matmul"})
    assert f"The figures of dequantize and quantize, a call {older.format('abc')}" in text
    text = pages.document(figures, {"bench", "call"})
    assert text.index(f"The figures of a call {older.format('abc')}") > text.index("## A call")
    text = pages.sweeps(figures, {"sweep"})
    assert text.count("changed since") == 1 and "64×64 bf16: kernel" in text


# ---- What is measured -------------------------------------------------------------------


def test_every_case_is_measured_once() -> None:
    full = cases.full()
    assert len(full) == len(set(full))
    assert {case.shape for case in full} >= set(cases.HEADLINE) | set(cases.llama_shapes())
    assert {case.work for case in full} == {"dequantize", "quantize", "consumer"}
    assert {case.blocksize for case in full} == {32, 64, 128, 256, 1024, 4096}
    assert {case.format for case in full} == {"nf4", "fp4", "own"}
    assert {case.placement for case in full} == {"aligned", "out + 1 element", "packed + 1 byte"}
    assert any(case.elements % 2 for case in full)
    by_dtype = {(case.work, case.dtype, case.nested) for case in full}
    for work in ("dequantize", "quantize"):
        assert {each[1:] for each in by_dtype if each[0] == work} == set(cases.CLASSES)
    for shape in cases.HEADLINE:
        assert cases.Case(shape, peers=PEERS, bounds=True) in full
    # Peers that load vectors fault on unaligned memory.
    assert [case for case in full if case.placement != "aligned" and case.peers] == []
    assert set(cases.quick()) < set(full) and len(cases.quick()) < len(full) / 4
    given = cases.of_shapes([(64, 64), (128, 64)])
    assert {(case.shape, case.work) for case in given} == {
        (shape, work) for shape in ((64, 64), (128, 64)) for work in ("dequantize", "quantize")
    }
    assert str(cases.Case((8, 9), nested=False, format="own", blocksize=32)) == (
        "dequantize 8x9 bf16 flat own codebook blocksize 32"
    )


def test_every_product_is_measured_once() -> None:
    groups = matmul_cases.full()
    products = [(group.case, group.together, m) for group in groups for m in group.ms]
    assert len(products) == len(set(products))
    usual = {g.case.shape: g.ms for g in groups if g.together == 1 and g.case.dtype == "bf16"}
    assert set(usual) == set(matmul_cases.SHAPES)
    assert usual[28672, 8192] == tuple(m for m in matmul_cases.MS if m <= 1024)
    assert usual[14336, 4096] == usual[4096, 14336] == usual[4096, 4096] == matmul_cases.MS
    assert {(g.case.dtype, g.together) for g in groups} == {("bf16", 1), ("fp16", 1), ("bf16", 2)}
    assert sum(len(g.ms) for g in matmul_cases.quick()) < 15
    (given,) = matmul_cases.of_shapes([(64, 128)])
    assert given == matmul_cases.Group(matmul_cases.weight_case((64, 128)), matmul_cases.MS)


def test_every_work_of_models_is_measured_once() -> None:
    groups, both = models_cases.full(), models_cases.BOTH
    assert len(groups) == len(set(groups)) == len(set(map(str, groups)))
    whole = {(g.work, g.batch, g.launches) for g in groups if g.size == LLAMA_7B}
    assert whole == {
        ("decode", 1, both), ("decode", 8, both), ("prefill", 4, both), ("training", 4, both),
    }  # fmt: skip
    assert {g.work for g in groups if g.compiled} == {"decode", "training", "mlp"}
    assert {g.work for g in groups} <= set(tables.WORKS) & set(models_cases.MOST_ERROR)
    eager = {(g.work, g.batch, g.size) for g in groups if not g.compiled}
    assert all(
        (g.work, g.batch, g.size) in eager for g in groups if g.compiled and g.work != "decode"
    )
    quick = models_cases.quick()
    assert {(g.work, g.batch, g.tokens, g.size) for g in quick} < {
        (g.work, g.batch, g.tokens, g.size) for g in groups
    }
    assert not any(group.compiled for group in quick)
    weights = LLAMA_7B.layers * sum(
        rows * cols for rows, cols in LLAMA_7B.linears().values()
    ) + 2 * LLAMA_7B.vocabulary * LLAMA_7B.hidden  # fmt: skip
    assert round(weights / 1e9, 2) == 6.74


# ---- How it is timed --------------------------------------------------------------------


def test_the_median_and_the_outer_deciles() -> None:
    found = summary([float(value) for value in range(1, 100)])
    assert found.us == 50
    assert found.spread == (10, 90)
    assert Timing(1.23456, (1.0, 2.0)).figures() == {"us": 1.235, "spread": [1.0, 2.0]}


def test_candidates_take_turns_and_the_first_turns_do_not_count() -> None:
    order = []

    def taking(name: str, *times: float):
        left = iter(times)

        def once() -> float:
            order.append(name)
            return next(left)

        return once

    work = {"a": taking("a", 900, 900, 1, 2, 3), "b": taking("b", 900, 900, 4, 5, 6)}
    times = in_turns(work, 3)
    assert order == ["a", "b"] * 5
    assert (times["a"].us, times["b"].us) == (2, 5)


def test_a_graph_holds_the_whole_rotation_and_its_time_is_of_one_launch() -> None:
    class Gpu:
        def prepare(self, launches, eager):
            assert eager == (launches[0] == "eager")
            return len(launches)

        def microseconds(self, count):
            return 7.0 * count

    times = measure(Gpu(), {"x": ["one"] * 5, "y": ["eager"] * 40}, 3, eager=("y",))
    assert times["x"].us == times["y"].us == 7.0


def test_the_fastest_launch_variant_counts_of_those_launched_alike() -> None:
    times = {
        Candidate("roofline", "plain", 0): Timing(5, (5, 5)),
        Candidate("roofline", "plain", 1): Timing(4, (4, 4)),
        Candidate("roofline", "pdl", 0): Timing(3, (3, 3)),
    }
    assert fastest(times, "roofline").variant == 1
    assert fastest(times, "roofline", "pdl").timing.us == 3
    assert fastest(times, "read") is None


def test_host_overhead_is_of_calls_that_nothing_waits_for() -> None:
    class Gpu:
        synchronized = 0

        def synchronize(self):
            self.synchronized += 1

    gpu, made = Gpu(), []
    assert queued(gpu, lambda: made.append(gpu.synchronized), 5) > 0
    assert made == [1] * 5 and gpu.synchronized == 2
