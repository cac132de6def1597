"""What the repository shows of whole models in the GPU record: a table in README's section, and a
section of docs/bench. Needs nothing but Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nf4bench import models_tables, tables
from nf4bench.models_cases import CONTEXT, LLAMA_7B, LORA_RANK

Row = Mapping[str, Any]


def matters(row: Row) -> bool:
    """Is it one of the rows that README shows? Those of the whole model."""
    return row["layers"] == LLAMA_7B.layers


def method(figures: Row) -> str:
    peers = figures["peers"]
    theirs = {
        "bitsandbytes": "bitsandbytes {} is Linear4bit, NF4 doubly quantized, on its own kernels",
        "dense": "dense is torch {}'s Linear in bf16",
    }
    described = [
        theirs[name].format(each["version"]) for name, each in peers.items() if "version" in each
    ]
    return " ".join([
        "LLaMA-7B's shape in bf16 with random weights, of each layer its own, in plain torch: the "
        "same model with NF4Linear around bitsandbytes' bytes, and with its peers' linear layers, "
        "timed in turns. Decode is one token for each sequence at the end of a context of "
        f"{CONTEXT}; forward + backward is of adapters of rank {LORA_RANK} beside q and v, through "
        "frozen weights. The head is dense in all. Results are first compared with bitsandbytes'.",
        *([f"{'; '.join(described)}."] if described else []),
        *tables.missing_peers(peers, models_tables.NAMES),
    ])  # fmt: skip


def failures(figures: Row) -> list[str]:
    """A sentence for each form that failed, and one for what time left out."""
    found = [
        f"{name} failed in {models_tables.work_text(row)}, "
        f"{models_tables.layers_text(row)}, {models_tables.launch_text(row)}: {reason}."
        for row in figures["rows"]
        for name, reason in row["failed"].items()
    ]
    if figures["left_out"]:
        found.append(f"Left out, as time was over: {'; '.join(figures['left_out'])}.")
    return found


def readme(figures: Row) -> list[str]:
    """Paragraphs of README's section."""
    return [
        f"**Whole models.** {method(figures)}",
        models_tables.rows_table(figures, matters),
    ]


def document(figures: Row, note: Sequence[str] = ()) -> list[str]:
    """Paragraphs of docs/bench/README.md; `note` beneath the title."""
    failed = failures(figures)
    return [
        "## Whole models",
        *note,
        method(figures),
        "Compiled is torch.compile of one layer, which all share, without autotuning. The MLPs are "
        "those of LLaMA-7B and LLaMA-65B at both ends of the sweep in the NF4Tensor study.",
        *([" ".join(failed)] if failed else []),
        models_tables.rows_table(figures, lambda row: True),
        "### Memory of whole models",
        "The weights, head and embedding among them, and the most that a step takes beside them.",
        models_tables.memory_table(figures["rows"]),
        "### A call of a layer",
        "On the host, where nothing is waited for.",
        models_tables.call_table(figures["call"]),
        "### Spreads and errors of whole models",
        "The error is ||y - y'|| / ||y'||, y of NF4Linear and y' of bitsandbytes: of logits, or of "
        "the adapters' gradients.",
        models_tables.spread_table(figures["rows"]),
    ]
