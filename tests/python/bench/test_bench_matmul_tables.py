"""Matmul's figures as text, markdown and pages, and which products are measured."""

from __future__ import annotations

import bench_path
from bench_path import matmul, matmul_error, matmul_row, record, row, timing
from nf4bench import matmul_cases, matmul_pages, matmul_tables, pages


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_a_line_says_everything() -> None:
    line = matmul_tables.line(matmul_row(launch="pdl", weights=2, m=8))
    assert line == (
        "matmul 2 x 14336x4096 M=8    bf16, nested, PDL, few2: 10.00 us (9.50..10.50) 12 TFLOP/s, "
        "80.0% of reading 8.00 us, error 2.40e-03, bitsandbytes 30.00 us (3.00x), "
        "dense 35.00 us (3.50x)"
    )


def test_weights_in_one_call_are_beside_a_call_each() -> None:
    apart = {"apart": timing(12.0) | {"ratio": 1.2}, "weights": 2}
    row = matmul_row(**apart)
    assert "error 2.40e-03, a call each 12.00 us (1.20x), bits" in matmul_tables.line(row)
    figures = matmul(row, matmul_row(8.0, launch="pdl", **apart), matmul_row(weights=3))
    table = cells(matmul_tables.rows_table(figures, lambda row: True, several=True))
    assert table[0][7:9] == ["a call each µs (ratio)", "with PDL µs (ratio)"]
    assert [line[7:9] for line in table[2:]] == [["12.0 (1.20x)", "12.0 (1.20x)"], ["–", "–"]]


def test_both_ways_to_launch_are_in_one_line_and_a_missing_peer_is_named() -> None:
    figures = matmul(matmul_row(), matmul_row(8.0, launch="pdl"), matmul_row(20.0, m=128, peers={}))
    table = cells(matmul_tables.rows_table(figures, lambda row: True))
    assert table[0][-3:] == ["bitsandbytes µs (ratio)", "dense µs (ratio)", "int4 µs (ratio)"]
    assert table[2:] == [
        ["14336×4096", "bf16, nested", "1", "10.0", "80%", "8.0", "100%", "30.0 (3.00x)",
         "35.0 (3.50x)", "missing"],
        ["14336×4096", "bf16, nested", "128", "20.0", "40%", "–", "–", "–", "–", "missing"],
    ]  # fmt: skip


def test_the_spread_table_has_every_row_and_its_kernel() -> None:
    rows = [matmul_row(), matmul_row(launch="pdl", weights=2, dtype="fp16", nested=False)]
    table = cells(matmul_tables.spread_table(rows))
    assert table[2:] == [
        ["14336×4096", "bf16, nested", "plain", "few2", "1", "10.00", "9.50..10.50", "12", "8.00",
         "2.40e-03"],
        ["2 of 14336×4096", "fp16, flat", "pdl", "few2", "1", "10.00", "9.50..10.50", "12", "8.00",
         "2.40e-03"],
    ]  # fmt: skip


def test_the_error_table_has_the_worst_of_all_shapes() -> None:
    rows = [
        matmul_error(),
        matmul_error(1.8e-3, shape=[4096, 4096]),
        matmul_error(m=8, errors={"libnf4": 3e-3}),
    ]
    table = cells(matmul_tables.error_table(rows))
    assert table[2:] == [
        ["bf16, nested", "normal", "1", "2.20e-03", "2.50e-03", "2.00e-03", "1.100x"],
        ["bf16, nested", "normal", "8", "3.00e-03", "–", "–", "–"],
    ]
    assert matmul_tables.error_line(rows[0]) == (
        "error  14336x4096 M=1    bf16, nested, normal: libnf4 2.20e-03, bitsandbytes 2.50e-03, "
        "dense 2.00e-03"
    )


def test_the_cost_of_a_call_as_text_and_a_table() -> None:
    figures = matmul()["call"]
    assert "one call, waited for, microseconds\n  libnf4 " in matmul_tables.call_text(figures)
    table = cells(matmul_tables.call_table(figures))
    assert table[0][0] == "one call at 4096×4096, M = 1"
    assert table[3] == ["dense", "12.00", "1.50x", "12.0", "1.50x"]


def _swept(m: int, chosen: int, *times: dict) -> dict:
    return {"shape": [64, 64], "dtype": "bf16", "m": m, "chosen": chosen, "times": list(times)}


SWEEP = {
    "device": "GPU of a test",
    "configurations": ["tiled", "few2"],
    "rows": [
        _swept(1, 1, timing(5.0) | {"ratio": 1.25}, timing(4.0) | {"ratio": 1.0}),
        _swept(64, 0, timing(9.0) | {"ratio": 1.0}, {"refused": "status 1"}),
        _swept(1, 0, timing(5.0) | {"ratio": 1.25}, timing(4.0) | {"ratio": 1.0})
        | {"shape": [128, 64]},
    ],
}


def test_the_sweep_has_a_table_for_each_weight() -> None:
    tables = [
        cells(part) for part in matmul_tables.sweep_tables(SWEEP).split("\n\n") if "|" in part
    ]
    assert [table[0] for table in tables] == [
        ["64×64 bf16: kernel", "M = 1", "M = 64"], ["128×64 bf16: kernel", "M = 1"],
    ]  # fmt: skip
    assert tables[0][2:] == [
        ["tiled", "1.250", "**1.000 = 9.00 µs**"],
        ["few2", "**1.000 = 4.00 µs**", "refused"],
    ]
    line = matmul_tables.sweep_line(SWEEP, SWEEP["rows"][2])
    assert line == ("     128x64 M=1    bf16: best few2 4.00 us; chosen tiled 5.00 us (1.250)")


# ---- Pages ------------------------------------------------------------------------------


def test_readme_shows_what_matters_and_names_what_is_missing() -> None:
    shown = [matmul_row(), matmul_row(m=300), matmul_row(m=1024, shape=[28672, 8192])]
    hidden = [
        matmul_row(m=2), matmul_row(dtype="fp16"), matmul_row(weights=2),
        matmul_row(m=300, shape=[4096, 4096]), matmul_row(nested=False),
    ]  # fmt: skip
    assert all(map(matmul_pages.matters, shown)) and not any(map(matmul_pages.matters, hidden))
    text = "\n\n".join(matmul_pages.readme(matmul(*shown, *hidden)))
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 2 + len(shown)
    assert "bitsandbytes 0.1 is its matmul_4bit" in text and "dense is torch 2's linear" in text
    assert "int4 is missing: no such operator." in text
    assert "at most 1.10 times that of a dense product" in text
    assert "](docs/bench/matmul.svg)" in text


def test_the_document_has_every_row_and_those_that_share_x_apart() -> None:
    figures = matmul(matmul_row(), matmul_row(9.0, launch="pdl"), matmul_row(17.0, weights=2))
    text = "\n\n".join(matmul_pages.document(figures))
    first, _, rest = text.partition("### Two weights that share x")
    assert "| 10.0 | 80% | 9.0 | 89% |" in first and "| 17.0 |" not in first
    assert "| 17.0 | 47% |" in rest and "| 2 of 14336×4096 |" in rest
    assert "| bf16, nested | normal | 1 | 2.20e-03 |" in rest
    assert "](matmul.svg)" in first


def test_errors_without_a_dense_product_to_compare_with_say_nothing() -> None:
    figures = matmul() | {"errors": [matmul_error(errors={"libnf4": 2e-3})]}
    assert matmul_pages.errors(figures) == ""
    assert "times that of" not in "\n".join(matmul_pages.readme(figures))


def test_a_record_without_matmul_makes_the_pages_that_it_made() -> None:
    without = record(row())
    with_it = without | {"matmul": matmul(matmul_row())}
    for page in (pages.readme, pages.document):
        assert "Matmul" not in page(without)
        assert set(page(without).splitlines()) < set(page(with_it).splitlines())


# ---- Cases ------------------------------------------------------------------------------


def test_every_product_is_measured_once() -> None:
    groups = matmul_cases.full()
    products = [(group.case, group.together, m) for group in groups for m in group.ms]
    assert len(products) == len(set(products))
    usual = {g.case.shape: g.ms for g in groups if g.together == 1 and g.case.dtype == "bf16"}
    assert set(usual) == set(matmul_cases.SHAPES)
    assert usual[28672, 8192] == tuple(m for m in matmul_cases.MS if m <= 1024)
    assert usual[14336, 4096] == usual[4096, 14336] == usual[4096, 4096] == matmul_cases.MS
    assert {(g.case.dtype, g.together) for g in groups} == {("bf16", 1), ("fp16", 1), ("bf16", 2)}
    assert {group.case.work for group in groups} == {"matmul"}
    assert str(groups[0].case) == "matmul 14336x4096 bf16 nested"


def test_what_readme_shows_is_measured() -> None:
    for group in matmul_cases.full():
        if group.together == 1 and group.case.dtype == "bf16":
            large = group.case.shape == matmul_cases.LARGE
            shown = matmul_pages.LARGE_MS if large else matmul_pages.OTHER_MS
            assert set(shown) <= set(group.ms)


def test_quick_and_given_shapes_are_part_of_the_whole() -> None:
    assert sum(len(g.ms) for g in matmul_cases.quick()) < 15
    (given,) = matmul_cases.of_shapes([(64, 128)])
    assert given == matmul_cases.Group(matmul_cases.weight_case((64, 128)), matmul_cases.MS)
    for name in matmul_cases.PEERS:
        assert name in matmul_tables.NAMES and name in bench_path.matmul()["peers"]
