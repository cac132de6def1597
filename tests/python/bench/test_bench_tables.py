"""The bench's figures as text, markdown and pages, and the bookkeeping of the challenge."""

from __future__ import annotations

from pathlib import Path

import bench_path
import pytest
from bench_path import bench, call, challenge, matmul, matmul_row, record, row, stamp
from nf4bench import pages, score, tables
from nf4bench.measure import Candidate, Timing, fastest, in_turns, measure, summary


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_a_line_says_everything() -> None:
    bounds = {"read": bench_path.timing(3.0), "write": bench_path.timing(7.0)}
    assert tables.line(row(format="fp4", launch="pdl", **bounds)) == (
        "dequantize   4096x1024 bf16 nested, FP4, PDL: 10.00 us (9.50..10.50) 1000 GB/s, "
        "90.0% of stream 9.00 us, read 3.00 us, write 7.00 us, bitsandbytes 25.00 us (2.50x)"
    )


def test_both_ways_to_launch_are_in_one_line_and_a_missing_peer_is_named() -> None:
    figures = bench(row(), row(8.0, launch="pdl"), row(20.0, dtype="fp32"))
    table = cells(tables.rows_table(figures, lambda row: True, pages.ALL_PEERS))
    assert table[0][-4:] == [
        "bitsandbytes µs (ratio)", "Unsloth µs (ratio)", "Triton µs (ratio)", "torch µs (ratio)",
    ]  # fmt: skip
    assert table[2:] == [
        ["dequantize", "4096×1024", "bf16", "nested", "10.0", "1000", "90%", "8.0", "112%",
         "25.0 (2.50x)", "missing", "–", "–"],
        ["dequantize", "4096×1024", "fp32", "nested", "20.0", "500", "45%", "–", "–",
         "25.0 (1.25x)", "missing", "–", "–"],
    ]  # fmt: skip
    assert {len(line) for line in table} == {13}
    assert tables.missing_peers(figures["peers"]) == ["Unsloth is missing: no such library."]


def test_the_spread_table_has_every_row_and_its_configuration() -> None:
    figures = bench(row(write=bench_path.timing(7.0)), row(launch="pdl", configuration=None))
    table = cells(tables.spread_table(figures))
    assert len(table) == 4
    assert table[2][4:] == ["plain", "256x2 pdl", "10.00", "9.50..10.50", "9.00", "–", "7.00"]
    assert table[3][4:6] == ["pdl", "–"]


SWEEP = {
    "device": "GPU of a test",
    "configurations": ["a", "b", "c"],
    "rows": [
        {
            "shape": [64, 64], "dtype": "bf16", "chosen": 1,
            "times": [
                bench_path.timing(4.0) | {"ratio": 1.0}, bench_path.timing(5.0) | {"ratio": 1.25},
                {"refused": "status 1"},
            ],
        }
    ],
}  # fmt: skip


def test_the_sweep_marks_the_best_and_the_chosen() -> None:
    text = tables.sweep_tables(SWEEP)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[2:] == ["| a | 1.000 = 4.00 µs |", "| b | **1.250** |", "| c | refused |"]
    line = tables.sweep_line(SWEEP, SWEEP["rows"][0])
    assert line == "      64x64 bf16: best a 4.00 us; chosen b 5.00 us (1.250)"
    none = SWEEP["rows"][0] | {"chosen": -1}
    assert tables.sweep_line(SWEEP, none).endswith("the library takes one of none")


def test_the_challenge_as_text_and_tables() -> None:
    text = tables.challenge_text(challenge())
    assert "score (Unsloth over libnf4): 2.50" in text
    assert "triton: missing: no compiler" in text
    assert "refused: it calls ctypes" in text
    assert text.endswith(" 2 of 4")
    table = cells(tables.challenge_table(challenge()))
    assert table[2:] == [
        ["libnf4", "100.0", "110.0", "1.00x"],
        ["Unsloth", "250.0", "refused", "2.50x"],
        ["libnf4 as an operator", "130.0", "–", "1.30x"],
    ]


def test_the_cost_of_a_call_as_text_and_tables() -> None:
    text = tables.call_text(call())
    assert "beyond torch.empty              3.75" in text
    assert "triton: missing: no compiler" in text
    assert "| Unsloth | 64.0 | 4.00x |" in tables.call_tables(call())


def test_a_section_is_replaced_between_its_markers_alone() -> None:
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n"
    made = tables.with_section(text, "x", "new")
    assert made == "a\n<!-- x:begin -->\nnew\n<!-- x:end -->\nb\n"
    assert tables.with_section(made, "x", "new") == made
    for broken in ("a", "<!-- x:end --><!-- x:begin -->", "<!-- x:begin -->"):
        with pytest.raises(ValueError, match="there is no <!-- x:begin -->"):
            tables.with_section(broken, "x", "new")


def test_readme_shows_what_matters_and_names_what_is_missing() -> None:
    shown = [
        row(), row(shape=[14336, 4096], dtype="fp32"), row(shape=[14336, 4096], blocksize=4096),
        row(shape=[14336, 4096], nested=False), row(shape=[14336, 4096], work="quantize"),
    ]  # fmt: skip
    hidden = [
        row(shape=[4096, 11008]), row(dtype="fp32"), row(shape=[14336, 4096], blocksize=128),
        row(shape=[14336, 4096], dtype="fp32", nested=False), row(work="quantize"),
    ]  # fmt: skip
    assert all(map(pages.matters, shown)) and not any(map(pages.matters, hidden))
    text = pages.readme(record(*shown, *hidden))
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(table) == 2 + len(shown)
    assert "on one GPU of a test on 2026-01-02" in text
    assert "Unsloth is missing: no such library." in text
    assert "as many times that take: Unsloth 2.50x." in text
    assert "16.0 µs; Unsloth 4.00x" in text and "3.8 µs beyond its torch.empty" in text


def test_the_document_shows_every_row_once_in_each_table() -> None:
    rows = [row(), row(8.0, launch="pdl"), row(format="own", peers={})]
    text = pages.document(record(*rows))
    assert text.count("own codebook") == 2
    assert "| 4096×1024 | bf16 | 8 | 6.0 (4.0) | 7.5 (4.5) | 6.5 (4.2) | 1.25x |" in text
    assert "it calls ctypes" not in text and "| one kernel | 1 in the graph | 3 of 3 |" in text
    for name in pages.PLOTS:
        assert f"]({name}.svg)" in text


def test_pages_say_which_figures_are_of_older_code() -> None:
    figures = record(row()) | {"matmul": stamp(matmul(matmul_row())) | {"commit": "def"}}
    older = "are of commit {}; their code has changed since."
    for page in (pages.readme, pages.document):
        assert "changed since" not in page(figures, set())
        assert f"The figures of matmul {older.format('def')}" in page(figures, {"matmul"})
    text = pages.readme(figures, {"bench", "call", "matmul"})
    assert f"The figures of dequantize and quantize, a call {older.format('abc')}" in text
    text = pages.document(figures, {"bench", "call"})
    assert text.index(f"The figures of a call {older.format('abc')}") > text.index("## A call")


# ---- What is behind the figures ---------------------------------------------------------


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


def test_the_fastest_launch_shape_counts_of_those_launched_alike() -> None:
    times = {
        Candidate("stream", "plain", 0): Timing(5, (5, 5)),
        Candidate("stream", "plain", 1): Timing(4, (4, 4)),
        Candidate("stream", "pdl", 0): Timing(3, (3, 3)),
    }
    assert fastest(times, "stream").variant == 1
    assert fastest(times, "stream", "pdl").timing.us == 3
    assert fastest(times, "read") is None


def test_the_puzzle_has_nine_weights() -> None:
    found = score.cases()
    assert len(found) == 9
    assert [case.shape for case in found[:3]] == [(8192, 2048), (8192, 2048), (2048, 8192)]
    assert {case.dtype for case in found} == {"fp16", "bf16"}
    assert {(case.blocksize, case.nested_blocksize) for case in found} == {(64, 256)}


@pytest.mark.parametrize(
    "speedup, expected",
    [(0.5, -3), (1.0, -3), (1.01, 0), (1.05, 1), (1.1, 3), (1.149, 3), (1.15, 5), (9.0, 5)],
)
def test_points_for_speed(speedup: float, expected: int) -> None:
    assert score.speedup_points(speedup) == expected


def evidence(**changes) -> score.Evidence:
    full = {
        "speedup": 2.0, "kernels": 1, "compiled_refusal": "", "dtypes": ("fp16", "bf16", "bf16"),
        "asm": ["a.cuh:1"], "eviction": ["a.cuh:2"],
    }  # fmt: skip
    return score.Evidence(**full | changes)


def total(found: score.Evidence) -> int:
    return sum(each["points"] for each in score.points(found))


def test_fourteen_points_and_what_costs_them() -> None:
    assert total(evidence()) == sum(each["of"] for each in score.points(evidence())) == 14
    assert total(evidence(kernels=4)) == 11
    assert total(evidence(speedup=None)) == 9
    assert total(evidence(speedup=0.9)) == 6
    assert total(evidence(compiled_refusal="no")) == 12
    assert total(evidence(asm=[])) == 11
    assert total(evidence(eviction=[])) == 13
    assert total(evidence(dtypes=("bf16",))) == 12


def test_the_budget_is_the_streams_and_six_microseconds_a_call() -> None:
    found = score.summary({"libnf4": 120.0, "libnf4 as an operator": 150.0, "unsloth": 300.0}, 66.0)
    assert (found["budget_us"], found["of_budget"], found["score"]) == (120.0, 1.0, 2.5)
    assert found["ratios"] == {"unsloth": 2.5}
    assert score.summary({"libnf4": 1.0}, 1.0)["score"] is None


def test_asm_and_eviction_are_found_where_they_are() -> None:
    for pattern, wanted in ((r"\basm( volatile)?\(", "asm"), ("evict_first", "evict_first")):
        found = score.source_lines(pattern)
        assert found
        for place in found:
            name, number = place.split(":")
            line = (bench_path.ROOT / name).read_text().splitlines()[int(number) - 1]
            assert wanted in line


def test_no_asm_in_sources_without_it(tmp_path: Path) -> None:
    (tmp_path / "lib" / "cuda" / "dequant").mkdir(parents=True)
    (tmp_path / "lib" / "cuda" / "dequant" / "k.cuh").write_text('int x;\n  asm("nop;");\n')
    assert score.source_lines(r"\basm\(", tmp_path) == ["lib/cuda/dequant/k.cuh:2"]
    assert score.source_lines("evict", tmp_path) == []
