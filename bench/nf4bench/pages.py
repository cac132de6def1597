"""Makes README's section of figures, docs/bench/README.md, int4.md and sweeps.md from
docs/bench/figures.json. It needs only Python; the plots beside the pages need matplotlib."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from nf4bench import matmul_cases, models_cases, tables
from nf4bench.table import Row, Table, grouped, number, shape, text

PEERS = ("bitsandbytes", "unsloth", "triton", "torch")
SPEEDUP_PLOT = "Speed-up over each peer, by shape"
MATMUL_PLOT = "Matmul: microseconds by rows of x, for each weight"
WORK = {
    "bench": "dequantize and quantize", "challenge": "Unsloth's puzzle", "call": "a call",
    "matmul": "matmul", "models": "whole models", "int4": "integer weights",
    "training": "QLoRA steps", "experts": "mixture of experts", "families": "other GPUs' kernels",
    "sweep": "dequantize", "matmul-sweep": "matmul",
}  # fmt: skip
SHOWN, SWEEPS = tuple(WORK)[:9], {"sweep", "matmul-sweep"}


def note(figures: Row, changed: Collection[str], names: Iterable[str]) -> list[str]:
    """Returns a paragraph for each commit whose figures are from older code, if there are any."""
    older = grouped((n for n in names if n in changed), lambda name: figures[name]["commit"])
    return [
        f"The figures of {_listed([WORK[name] for name in of])} are from commit {commit}; their "
        "code has changed since."
        for commit, of in older.items()
    ]


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def page(
    title: str, name: str, figures: Row, changed: Collection[str], parts: Iterable[str]
) -> str:
    """Returns a page of one mode. The figures have the name of the mode."""
    flag = "" if name == "bench" else f" --{name}"
    older = [] if name == "bench" else note(figures, changed, [name])
    return "\n\n".join([
        f"# {title}",
        "`bench/readme_table.py` makes this page from [figures.json](figures.json); "
        f"`./dev bench{flag}` measures the figures.",
        *older, *parts,
    ]) + "\n"  # fmt: skip


def versions(peers: Mapping[str, Row], texts: Mapping[str, str]) -> list[str]:
    """Returns a sentence that describes the peers, and one for each peer that is missing."""
    there = {name: each["version"] for name, each in peers.items() if "version" in each}
    found = [texts[name].format(version) for name, version in there.items() if name in texts]
    return [
        *([f"{'; '.join(found)}."] if found else []),
        *(
            f"{tables.NAMES[name]} is missing: {each['missing']}."
            for name, each in peers.items()
            if "missing" in each
        ),
    ]


# ---- README -----------------------------------------------------------------------------

LARGE = list(matmul_cases.LARGE)
# The rows that README shows: the set in figures.json, and the fields that select the row.
_USUAL = {"dtype": "bf16", "nested": True, "launch": "plain"}
_MEMORY = _USUAL | {"blocksize": 64, "format": "nf4", "placement": "aligned"}
_WHOLE = {"layers": models_cases.LLAMA_7B.layers, "launch": "graph", "compiled": False}
README_ROWS: list[tuple[str, Row]] = [
    ("bench", {"work": "dequantize", "shape": [4096, 4096], **_MEMORY}),
    ("bench", {"work": "dequantize", "shape": LARGE, **_MEMORY}),
    ("bench", {"work": "quantize", "shape": LARGE, **_MEMORY}),
    *(("matmul", {"weights": 1, "shape": LARGE, "m": m, **_USUAL}) for m in (1, 16, 128, 1024)),
    *(
        ("int4", {"shape": LARGE, "m": m, "dtype": "bf16", "launch": "plain"})
        for m in (1, 16, 1024)
    ),
    *(("experts", {"model": "Qwen3-30B-A3B", "work": "layer", "tokens": m}) for m in (1, 64, 1024)),
    ("models", {"work": "decode", "batch": 1, **_WHOLE}),
    ("models", {"work": "prefill", **_WHOLE}),
    ("models", {"work": "training", **_WHOLE}),
]


_BESIDE = ("bitsandbytes", "dense", "humming")


def _readme_row(name: str, row: Row) -> dict:
    forms = row.get("forms", row.get("peers"))
    over = {n: f"{forms[n]['ratio']:.2f}x" if n in forms else tables.NOTHING for n in _BESIDE}
    made = dict(over)
    if name == "models":
        us = row["forms"]["libnf4"]["us"]
        return made | {
            "work": f"LLaMA-7B, {tables.work(row)}", "shape": tables.NOTHING, "us": f"{us:.0f}",
            "speed": tables.NOTHING,
        }  # fmt: skip
    if name == "experts":
        tokens = "token" if row["tokens"] == 1 else "tokens"
        work = f"{row['model']}, experts of a layer, {row['tokens']} {tokens}"
        speed = f"{row['gb_per_s']:.0f} GB/s of 4-bit weights"
        return made | {
            "work": work, "shape": tables.NOTHING, "us": f"{row['us']:.1f}", "speed": speed,
        }  # fmt: skip
    kind = "GPTQ matmul" if name == "int4" else "matmul"
    work = row["work"] if name == "bench" else f"{kind}, M = {row['m']}"
    speed = f"{row['of_roofline']:.0%} of the roofline"
    if row.get("m", 0) >= matmul_cases.MANY:
        speed = f"{row['tflop_per_s']:.0f} TFLOPS, {tables.of_dense(row)} of dense"
    return made | {"work": work, "shape": shape(row), "us": f"{row['us']:.1f}", "speed": speed}


README = Table(
    text("work", "{work}"), text("weight, N×K", "{shape}"), number("µs", "{us}"),
    number("speed", "{speed}"), *(number(tables.NAMES[n], f"{{{n}}}") for n in _BESIDE),
)  # fmt: skip


def readme(figures: Row, changed: Collection[str] = ()) -> str:
    """Returns README's section. A row without figures is left out."""
    found = [
        _readme_row(name, row)
        for name, wanted in README_ROWS
        for row in figures.get(name, {"rows": []})["rows"]
        if wanted.items() <= row.items() and "libnf4" in row.get("forms", {"libnf4"})
    ]
    bench = figures["bench"]
    last = [
        *note(figures, changed, dict(README_ROWS)),
        "[docs/bench](docs/bench/README.md) has all tables and spreads, and "
        "[docs/performance.md](docs/performance.md) says how they are measured. `./dev bench` "
        "measures on your machine.",
    ]
    return "\n\n".join([
        f"The figures were measured on one {bench['device']} on {bench['date']} in bf16, with CUDA "
        "graphs: NF4 with double quantization, and GPTQ in groups of 128. A weight has N rows and "
        "K columns, and x has M rows. The roofline is the fastest of several kernels that move the "
        "same bytes and do nothing else. Dense is torch.nn.Linear (cuBLAS) in bf16, and grouped_mm "
        "for experts. "
        "Humming is a library of W4A16 kernels (4-bit weights, 16-bit activations). The last three "
        "columns are the other library's time divided by libnf4's; above 1x, libnf4 is faster. "
        "The ratio of quantize is of eager calls, because a CUDA graph cannot capture "
        "bitsandbytes' quantize.",
        README.markdown(found),
        " ".join(last),
    ])  # fmt: skip


# ---- Dequantize, quantize, calls --------------------------------------------------------


def method(bench: Row) -> str:
    most = max(row["of_roofline"] for row in bench["rows"])
    named = {name: f"{tables.NAMES[name]} is {{}}" for name in bench["peers"]}
    return " ".join([
        f"The figures were measured on one {bench['device']} on {bench['date']}, all columns in "
        "one run. They are medians of CUDA-graph replays over rotating buffers, after the bits of "
        "the results were compared. The bandwidth roofline is the fastest of six kernels of libnf4 "
        "that move the same bytes and do nothing else. They are launched in the same way: plainly, "
        "or with programmatic dependent launch (PDL). Where libnf4's launch configuration suits a "
        f"size better than theirs, it reaches more than 100%, here up to {most:.0%}. "
        "bitsandbytes' quantize cannot be captured, so both are timed as eager calls (libnf4's "
        "time follows the ratio); bitsandbytes allocates its outputs, and libnf4 writes into "
        "preallocated ones.",
        *versions(bench["peers"], named),
    ])  # fmt: skip


def _challenge(challenge: Row) -> list[str]:
    summary, (times, points) = challenge["summary"], tables.challenge(challenge)
    return [
        "An iteration has nine dequantizes, with a device synchronize after each. The table has "
        f"microseconds an iteration, over {challenge['iterations']} iterations. Compiled is "
        "torch.compile(fullgraph=True). libnf4, and a peer that torch.compile refuses, are "
        "compiled as a torch operator that the harness registers around the call.",
        times.markdown(),
        f"The roofline kernels take {summary['roofline_us']:.1f} µs; with 6 µs for each of "
        f"{summary['calls']} calls this is {summary['budget_us']:.1f} µs. libnf4 takes "
        f"{summary['libnf4_us']:.1f} µs, {summary['of_budget']:.2f} times as much.",
        points.markdown(),
    ]


# ---- Matmul -----------------------------------------------------------------------------


def _products(matmul: Row, many: bool, several: bool = False) -> str:
    kept = [
        each for each in tables.cases(matmul["rows"])
        if (each["plain"]["weights"] > 1) == several
        and (each["plain"]["m"] >= matmul_cases.MANY) == many
    ]  # fmt: skip
    return tables.matmul(matmul["peers"], many, several).markdown(kept)


def matmul_method(matmul: Row) -> str:
    return " ".join([
        "The product is y = x W^T with M rows of x, timed as above. Each result is first compared "
        "with the product in float64. The bandwidth roofline is one read of the packed weight and "
        "its scales, launched in the same way.",
        *versions(matmul["peers"], {
            "bitsandbytes": "bitsandbytes {} is its matmul_4bit, or at M = 1 its gemv_4bit if that "
            "is faster",
            "dense": "dense is torch {}'s linear (cuBLAS) with the dequantized weight",
            "humming": "Humming {} multiplies rearranged bytes of 4-bit integers in groups of 128, "
            "made from the same numbers",
            "tinygemm": "int4 is torch {}'s int4 kernel in groups of 64, on rearranged bytes of a "
            "separate weight",
        }),
    ])  # fmt: skip


def errors(matmul: Row) -> str:
    """Returns a sentence that compares libnf4's errors with those of a dense product."""
    ratios = [ratio for row in matmul["errors"] if (ratio := tables.over_dense(row))]
    if not ratios:
        return ""
    return (
        f"The error ||y - exact|| / ||exact|| is at most {max(ratios):.2f} times that of a dense "
        f"product with the rounded weight (aim: {matmul_cases.MOST_OF_DENSE:.2f})."
    )


def _matmul_document(matmul: Row, older: list[str]) -> list[str]:
    return [
        "## Matmul",
        *older,
        matmul_method(matmul),
        f"![{MATMUL_PLOT}](matmul_by_weight.svg)",
        f"### Up to {matmul_cases.MANY - 1} rows of x",
        _products(matmul, many=False),
        f"### {matmul_cases.MANY} rows of x and more",
        _products(matmul, many=True),
        "### Two weights that share x",
        "In an MLP, gate and up share x. The table compares one call for both with a call for each "
        "weight, of libnf4 and of each peer, and with the roofline of both weights together.",
        _products(matmul, many=False, several=True),
        "### Errors of matmul",
        "Exact is the product in float64 with the unrounded weight. The table has the largest "
        f"error over the shapes above. {errors(matmul)}".rstrip(),
        tables.worst_errors(matmul["errors"]).markdown(),
        "### A call of matmul from Python",
        "The table has the host overhead of calls without synchronization, and the time with a "
        "device synchronize after each call.",
        tables.matmul_calls(matmul["call"]).markdown(),
        "### Kernels and spreads of matmul",
        tables.MATMUL_SPREADS.markdown(matmul["rows"]),
    ]


# ---- Whole models -----------------------------------------------------------------------


def models_method(models: Row) -> str:
    return " ".join([
        "The model has LLaMA-7B's shape in bf16 with random weights, different in each layer, in "
        "plain torch. The same model is timed with NF4Linear around bitsandbytes' bytes and with "
        "the linear layers of the peers, alternately. Each step outside a CUDA graph follows "
        f"{models_cases.WARM_STEPS} steps that are not timed. Decode is one token for each "
        f"sequence at the end of a context of {models_cases.CONTEXT}. Forward + backward trains "
        f"adapters of rank {models_cases.LORA_RANK} beside q and v, through frozen weights. The "
        "head is dense in all forms. Results are first compared with bitsandbytes'.",
        *versions(models["peers"], {
            "bitsandbytes": "bitsandbytes {} is Linear4bit, NF4 doubly quantized, on its own "
            "kernels; the drop-in is the same layers on libnf4's kernels, timed in eager mode",
            "dense": "dense is torch {}'s Linear in bf16",
        }),
    ])  # fmt: skip


def failures(models: Row) -> list[str]:
    """Returns a sentence for each form that failed, and one for the rows that time left out."""
    found = [
        f"{name} failed in {tables.work(row)}, {tables.layers(row)}, {tables.launched(row)}: "
        f"{reason}."
        for row in models["rows"]
        for name, reason in row["failed"].items()
    ]
    if models["left_out"]:
        found.append(f"Left out, as time was over: {'; '.join(models['left_out'])}.")
    return found


def _models_document(models: Row, older: list[str]) -> list[str]:
    failed = failures(models)
    return [
        "## Whole models",
        *older,
        models_method(models),
        "Compiled is torch.compile of one layer, shared by all layers, without autotuning. The "
        "MLPs are those of LLaMA-7B and LLaMA-65B at both ends of the sweep in the NF4Tensor "
        "study.",
        *([" ".join(failed)] if failed else []),
        tables.MODELS.markdown(models["rows"]),
        "### Memory of whole models",
        "The table has the memory of the weights, including head and embedding, plus the most that "
        "a step takes in addition.",
        tables.memory(models["rows"]).markdown(),
        "### A call of a layer",
        "The table has the host overhead of calls without synchronization.",
        tables.layer_calls(models["call"]).markdown(),
        "### Spreads and errors of whole models",
        "The error is ||y - y'|| / ||y'||, with y from NF4Linear and y' from bitsandbytes. It is "
        "that of the logits, or of the adapters' gradients.",
        tables.forms(models["rows"]).markdown(),
    ]


# ---- Integer weights --------------------------------------------------------------------


def int4(figures: Row, changed: Collection[str] = ()) -> str:
    """Returns docs/bench/int4.md."""
    found = figures["int4"]
    described = found["peers"]
    return page("Integer weights", "int4", figures, changed, [
        f"The figures were measured on one {found['device']} on {found['date']}, in the same way "
        "as those of [NF4](README.md). Weights are 4-bit integers in groups of 128 columns, AWQ "
        "with zero points and the others symmetric, with scales in the dtype of x. The columns of "
        "libnf4 have GPTQ's layout. The columns of the other layouts, of act order (a random "
        "g_idx; reordered means after nf4.reorder) and of NF4 (flat and nested) have weights of "
        "the same shape in the public call, which launches with PDL. The column 'public call' has "
        "the same for GPTQ. The Triton kernels were written for this comparison.",
        *versions(described, {
            "dense": "dense is torch {}'s linear (cuBLAS) with the dequantized weight",
            "humming": "Humming {} multiplies rearranged bytes",
            "split-K": "split-K Triton dequantizes in the kernel and adds parts of K atomically; "
            "AutoGPTQ's Triton uses the algorithm of AutoGPTQ (Triton {})",
        }),
        "## Dequantize",
        tables.rows({}, ()).markdown(tables.cases(found["dequantize"])),
        f"## Matmul, up to {matmul_cases.MANY - 1} rows of x",
        _products(found, many=False),
        f"## Matmul, {matmul_cases.MANY} rows of x and more",
        _products(found, many=True),
        "## Errors of matmul",
        errors(found),
        tables.worst_errors(found["errors"]).markdown(),
        "## Kernels and spreads",
        tables.MATMUL_SPREADS.markdown(found["rows"]),
    ])  # fmt: skip


# ---- The pages --------------------------------------------------------------------------


def document(figures: Row, changed: Collection[str] = ()) -> str:
    """Returns docs/bench/README.md. Matmul and models are in it if there are figures for them."""

    def older(name: str) -> list[str]:
        return note(figures, changed, [name])

    bench = figures["bench"]
    return page("The bench, in full", "bench", figures, changed, [
        method(bench),
        f"![{SPEEDUP_PLOT}](speedup.svg)",
        "## Dequantize and quantize",
        *older("bench"),
        tables.rows(bench["peers"], PEERS).markdown(tables.cases(bench["rows"])),
        "## A consumer that reads the output next",
        "A kernel that reads all of the output follows dequantize, both launched plainly; the time "
        "of dequantize alone is in parentheses. libnf4 chooses its stores by the size of the "
        "output. A ratio below 1 in the last column means that this choice is wrong.",
        tables.CONSUMER.markdown(bench["consumer"]),
        "## Unsloth's puzzle",
        *older("challenge"),
        *_challenge(figures["challenge"]),
        "## A call from Python",
        *older("call"),
        *(each.markdown() for each in tables.calls(figures["call"])),
        "## Spreads, rooflines and configurations",
        tables.SPREADS.markdown(bench["rows"]),
        *(_matmul_document(figures["matmul"], older("matmul")) if "matmul" in figures else []),
        *(_models_document(figures["models"], older("models")) if "models" in figures else []),
    ])  # fmt: skip


def sweeps(figures: Row, changed: Collection[str] = ()) -> str:
    """Returns docs/bench/sweeps.md. Dequantize has a table for each dtype, with configurations by
    shapes; matmul has a table for each weight, with kernels by rows of x."""
    dequantize, matmul = figures["sweep"], figures["matmul-sweep"]
    made = (
        tables.sweep(dequantize, "{dtype}", "configuration", shape),
        tables.sweep(matmul, lambda row: f"{shape(row)} {row['dtype']}", "kernel", "M = {m}"),
    )
    over = "The tables have times relative to the best of each column, which also has its "
    over += "microseconds. The library's choice is bold."
    return "\n\n".join([
        "# Sweeps",
        "This page has every launch configuration of dequantize and every kernel of matmul that "
        "can run the problem. `./dev bench --sweep --json FILE` measures the first and "
        "`--matmul-sweep` the second; `tests/gpu/record.py --add sweep FILE` adds the figures to "
        "figures.json.",
        "## Launch configurations of dequantize",
        *note(figures, changed, ["sweep"]),
        f"The figures were measured on one {dequantize['device']}. {over}",
        *(each.markdown() for each in made[0]),
        "## Kernels of matmul",
        *note(figures, changed, ["matmul-sweep"]),
        f"The figures were measured on one {matmul['device']}, nested, blocksize 64, launched as "
        f"the library launches. {over}",
        *(each.markdown() for each in made[1]),
    ]) + "\n"  # fmt: skip
