"""What the repository shows of the bench's figures: README's section and docs/bench. Needs nothing
but Python; the plots beside them need matplotlib."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from nf4bench import matmul_pages, models_pages, tables
from nf4bench.cases import DETAIL, HEADLINE

Row = Mapping[str, Any]
PEERS = ("bitsandbytes", "unsloth", "triton")
ALL_PEERS = (*PEERS, "torch")
PLOTS = {
    "speedup": "Speed-up over each peer, by shape",
    "of_limit": "Percent of the limit, by size of the output",
    "roofline": "GB/s by bytes moved, between the limits",
}
_USUAL = {"dtype": "bf16", "nested": True, "blocksize": 64, "format": "nf4", "placement": "aligned"}
_LARGE = DETAIL[-1]


def matters(row: Row) -> bool:
    """Is it one of the rows that README shows? The usual weight at the headline shapes, and at
    one of them whatever else is different in one thing."""
    shape = tuple(row["shape"])
    different = [name for name, value in _USUAL.items() if row[name] != value]
    if row["work"] == "quantize":
        return not different and shape in DETAIL
    if not different:
        return shape in HEADLINE
    if shape != _LARGE or len(different) > 1:
        return False
    return row["blocksize"] in (32, 64, 4096)


def method(record: Row) -> str:
    bench = record["bench"]
    versions = [
        f"{tables.NAMES[name]} is {each['version']}"
        for name, each in bench["peers"].items()
        if "version" in each
    ]
    return " ".join([
        f"Measured on one {bench['device']} on {bench['date']}, all columns in one run: medians "
        "of CUDA-graph replays over rotating buffers, bits compared first. The limit is the "
        "fastest of six kernels of ours that move the same bytes and do nothing else, launched "
        "alike: plainly, or with programmatic dependent launch (PDL); where ours has a launch "
        f"shape that suits a size better it is over 100%, here up to {_most_of_limit(bench)}. "
        "bitsandbytes' quantize cannot be captured, so its ratio is that of calls, each of which "
        "makes its outputs, over calls of ours (their time after the ratio) into memory made "
        "beforehand.",
        f"{'; '.join(versions)}.", *tables.missing_peers(bench["peers"]),
    ])  # fmt: skip


def _most_of_limit(bench: Row) -> str:
    return f"{max(row['of_limit'] for row in bench['rows']):.0%}"


def _over(ratios: Mapping[str, float]) -> str:
    named = {tables.NAMES[name]: ratio for name, ratio in ratios.items() if name in tables.NAMES}
    return ", ".join(f"{name} {ratio:.2f}x" for name, ratio in named.items()) or "no peer is here"


def calls(record: Row) -> str:
    """The challenge and the cost of a call."""
    summary, call = record["challenge"]["summary"], record["call"]
    waited = call["waited"]
    ratios = {name: each["ratio"] for name, each in waited["calls"].items()}
    return (
        "[Unsloth's puzzle](docs/bench/README.md#unsloths-puzzle), nine dequantizes from Python, "
        f"each waited for: {summary['libnf4_us']:.0f} µs; as many times that take: "
        f"{_over(summary['ratios'])}. One call at {tables.shape_text(waited)} that is waited "
        f"for: {waited['calls']['libnf4']['us']:.1f} µs; {_over(ratios)}. A call keeps the host "
        f"{call['host']['beyond_empty_us']:.1f} µs beyond its torch.empty."
    )


WORK = {
    "bench": "dequantize and quantize", "challenge": "Unsloth's puzzle", "call": "a call",
    "matmul": "matmul", "models": "whole models",
}  # fmt: skip


def note(record: Row, changed: Collection[str], names: Collection[str]) -> list[str]:
    """A paragraph that says which of these figures are of older code; none where none is."""
    older: dict[str, list[str]] = {}
    for name in WORK:
        if name in names and name in changed:
            older.setdefault(record[name]["commit"], []).append(WORK[name])
    return [
        f"The figures of {', '.join(of)} are of commit {commit}; their code has changed since."
        for commit, of in older.items()
    ]


def readme(record: Row, changed: Collection[str] = ()) -> str:
    """README's section; matmul and models are in it where the record has their figures."""
    return "\n\n".join([
        method(record),
        tables.rows_table(record["bench"], matters, PEERS),
        calls(record),
        *(matmul_pages.readme(record["matmul"]) if "matmul" in record else []),
        *(models_pages.readme(record["models"]) if "models" in record else []),
        *note(record, changed, WORK),
        f"![{PLOTS['speedup']}](docs/bench/speedup.svg)",
        "All rows, spreads, limits and plots: [docs/bench](docs/bench/README.md). What falls short "
        "and why, the CPU's figures and what was tried: [notes](tests/bench/NOTES.md). `./dev "
        "bench` measures on your machine, GPU or not.",
    ])  # fmt: skip


def document(record: Row, changed: Collection[str] = ()) -> str:
    """docs/bench/README.md; matmul and models as in `readme`."""
    bench, challenge = record["bench"], record["challenge"]
    parts = [
        "# The bench, in full",
        "Made by `tests/bench/readme_table.py` from [figures.json](figures.json); "
        "`./dev bench` measures.",
        method(record),
        *(f"![{text}]({name}.svg)" for name, text in PLOTS.items()),
        "## Beside the limit and the peers",
        *note(record, changed, ["bench"]),
        tables.rows_table(bench, lambda row: True, ALL_PEERS),
        "## A consumer that reads the output next",
        "Dequantize and a kernel that reads all of its output, both launched plainly; in "
        "parentheses dequantize alone. libnf4 chooses the stores by the output's size; below 1 in "
        "the last column, wrongly.",
        tables.consumer_table(bench["consumer"]),
        "## Unsloth's puzzle",
        *note(record, changed, ["challenge"]),
        f"Nine dequantizes an iteration, each waited for, {challenge['iterations']} iterations; "
        "microseconds of an iteration. compiled: torch.compile(fullgraph=True); libnf4, and a peer "
        "that it refuses, as an operator of torch that the harness registers around the call.",
        tables.challenge_table(challenge),
        _budget(challenge["summary"]),
        tables.points_table(challenge["points"]),
        "## A call from Python",
        *note(record, changed, ["call"]),
        tables.call_tables(record["call"]),
        "## Spreads, limits and configurations",
        tables.spread_table(bench),
        *(
            matmul_pages.document(record["matmul"], note(record, changed, ["matmul"]))
            if "matmul" in record
            else []
        ),
        *(
            models_pages.document(record["models"], note(record, changed, ["models"]))
            if "models" in record
            else []
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _budget(summary: Row) -> str:
    return (
        f"Stream kernels of the same bytes {summary['stream_us']:.1f} µs and 6 µs for each of "
        f"{summary['calls']} calls: {summary['budget_us']:.1f} µs. libnf4 takes "
        f"{summary['libnf4_us']:.1f} µs, {summary['of_budget']:.2f} of that."
    )
