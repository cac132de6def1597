"""The figures of whole models as text, markdown and pages, and which works are measured."""

from __future__ import annotations

from bench_path import models, models_row, record, row
from nf4bench import models_cases, models_pages, models_tables, pages
from nf4bench.models_cases import FORMS, LLAMA_7B

TRAINING = {"work": "training", "batch": 4, "tokens": 256, "launch": "eager"}
MLP = {"work": "mlp", "batch": 32, "tokens": 512, "layers": 1, "compiled": True, "launch": "eager"}


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def without(row: dict, form: str, reason: str) -> dict:
    forms = {name: each for name, each in row["forms"].items() if name != form}
    return row | {"forms": forms, "failed": {form: reason}}


def test_a_line_says_everything() -> None:
    assert models_tables.line(models_row()) == (
        "decode batch 1, 32 layers, CUDA graph: libnf4 3000.0 us (2999.5..3000.5) 4.00 + 0.02 GB, "
        "bitsandbytes 6000.0 us (2.00x) (5999.5..6000.5) 4.00 + 0.02 GB, "
        "dense 6600.0 us (2.20x) (6599.5..6600.5) 13.50 + 0.00 GB, error 1.20e-02"
    )
    failed = without(models_row(**MLP, error=None), "dense", "OutOfMemoryError: no room")
    line = models_tables.line(failed)
    assert line.startswith("MLP, forward 32x512, 4096/11008, 1 layer, compiled: libnf4 ")
    assert line.endswith(", dense failed: OutOfMemoryError: no room")


def test_the_cost_of_a_call_as_text_and_a_table() -> None:
    figures = models()["call"]
    said = models_tables.call_text(figures).splitlines()
    assert said[0] == "host time of one layer's call at 4096x4096, M=1, microseconds"
    assert said[2].split() == ["bitsandbytes", "20.00", "(2.50x)"]
    assert said[3] == "  dense failed: no kernel"
    table = cells(models_tables.call_table(figures))
    assert table[2:] == [["libnf4", "8.00", "1.00x"], ["bitsandbytes", "20.00", "2.50x"]]


def test_rows_have_each_form_and_say_who_failed() -> None:
    figures = models(
        models_row(),
        models_row(150_000.0, **TRAINING),
        without(models_row(compiled=True, layers=8), "bitsandbytes", "RuntimeError: a break"),
        models_row(forms={}, failed=dict.fromkeys(FORMS, "MemoryError")),
    )
    table = cells(models_tables.rows_table(figures, lambda row: True))
    assert table[0] == ["work", "model", "launched", "ms", "bitsandbytes ms (ratio)",
                        "dense ms (ratio)"]  # fmt: skip
    assert table[2:] == [
        ["decode batch 1", "32 layers", "CUDA graph", "3.00", "6.00 (2.00x)", "6.60 (2.20x)"],
        ["forward + backward 4×256", "32 layers", "eager", "150", "6.00 (0.04x)", "6.60 (0.04x)"],
        ["decode batch 1", "8 layers", "compiled, CUDA graph", "3.00", "failed", "6.60 (2.20x)"],
        ["decode batch 1", "32 layers", "CUDA graph", "failed", "failed", "failed"],
    ]


def test_memory_is_shown_once_for_each_work() -> None:
    rows = [models_row(), models_row(launch="eager"), models_row(compiled=True)]
    table = cells(
        models_tables.memory_table([*rows, without(models_row(**TRAINING), "dense", "x")])
    )
    both = ["4.00 + 0.02", "4.00 + 0.02"]
    assert table[2:] == [
        ["decode batch 1", "32 layers", *both, "13.50 + 0.00"],
        ["decode batch 1, compiled", "32 layers", *both, "13.50 + 0.00"],
        ["forward + backward 4×256", "32 layers", *both, "–"],
    ]


def test_the_spread_table_has_every_form_and_our_error() -> None:
    table = cells(models_tables.spread_table([models_row()]))
    assert [line[3:] for line in table[2:]] == [
        ["libnf4", "3.00", "3.00..3.00", "1.20e-02"],
        ["bitsandbytes", "6.00", "6.00..6.00", "–"],
        ["dense", "6.60", "6.60..6.60", "–"],
    ]


# ---- Pages ------------------------------------------------------------------------------


def test_readme_shows_the_whole_model_and_names_who_is_missing() -> None:
    text = "\n\n".join(models_pages.readme(models(models_row(), models_row(layers=8))))
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 2 + 1
    assert "bitsandbytes 0.1 is Linear4bit" in text
    assert "dense is missing: no such library." in text


def test_the_document_has_every_row_and_what_failed() -> None:
    broken = without(models_row(**MLP), "libnf4", "OutOfMemoryError: no room")
    figures = models(models_row(), broken) | {"left_out": ["decode 8x1", "mlp 32x512"]}
    text = "\n\n".join(models_pages.document(figures))
    assert "| MLP, forward 32×512, 4096/11008 | 1 layer | compiled | failed |" in text
    assert (
        "libnf4 failed in MLP, forward 32×512, 4096/11008, 1 layer, compiled: OutOfMemoryError: "
        "no room. Left out, as time was over: decode 8x1; mlp 32x512." in text
    )
    whole = "\n\n".join(models_pages.document(models(models_row())))
    assert "failed" not in whole and "Left out" not in whole


def test_a_record_without_models_makes_the_pages_that_it_made() -> None:
    without_it = record(row())
    with_it = without_it | {"models": models(models_row())}
    for page in (pages.readme, pages.document):
        assert "hole models" not in page(without_it)
        assert set(page(without_it).splitlines()) < set(page(with_it).splitlines())


# ---- Cases ------------------------------------------------------------------------------


def test_every_work_is_measured_once() -> None:
    groups = models_cases.full()
    assert len(groups) == len(set(groups)) == len(set(map(str, groups)))
    whole = {(g.work, g.batch, g.launches) for g in groups if g.size == LLAMA_7B}
    both = models_cases.BOTH
    assert whole == {
        ("decode", 1, both), ("decode", 8, both), ("prefill", 4, both), ("training", 4, both),
    }  # fmt: skip
    assert {g.work for g in groups if g.compiled} == {"decode", "training", "mlp"}
    assert {g.size.layers for g in groups if g.compiled} == {1, 8}
    assert {g.work for g in groups} <= set(models_tables.WORKS) & set(models_cases.MOST_ERROR)


def test_what_is_compiled_is_measured_eager_too_where_it_is_compared() -> None:
    eager = {(g.work, g.batch, g.size) for g in models_cases.full() if not g.compiled}
    for group in models_cases.full():
        if group.compiled and group.work != "decode":
            assert (group.work, group.batch, group.size) in eager


def test_quick_is_part_of_the_whole_model() -> None:
    whole = {(g.work, g.batch, g.tokens, g.size) for g in models_cases.full()}
    quick = models_cases.quick()
    assert {(g.work, g.batch, g.tokens, g.size) for g in quick} < whole
    assert not any(group.compiled for group in quick)


def test_the_model_is_llama_7b() -> None:
    weights = LLAMA_7B.layers * sum(
        rows * cols for rows, cols in LLAMA_7B.linears().values()
    ) + 2 * LLAMA_7B.vocabulary * LLAMA_7B.hidden  # fmt: skip
    assert round(weights / 1e9, 2) == 6.74
