"""The performance table of README.md, made from tests/gpu/record.json.

    python tests/bench/readme_table.py [--check]

Rewrites what is between the bench markers; with --check, only says whether it is up to date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
LAYOUT = {True: "nested", False: "flat"}


def peer(row: dict, name: str) -> str:
    found = row["peers"].get(name)
    return f"{found['us']:.1f} ({found['ratio']:.2f}x)" if found else "not installed"


def table(record: dict) -> str:
    bench = record["bench"]
    lines = [
        f"Measured on one {record['device']} on {record['date']}, all columns in one run: "
        "medians of CUDA-graph replays over rotating buffers, blocksize 64. The limit is the "
        "fastest of our own kernels that move the same packed and dense bytes and do nothing "
        "else (dequantize), or that read the input once (quantize). bitsandbytes is "
        f"{bench['peers']['bitsandbytes']}; its quantize cannot be captured, so it is timed as "
        "calls.",
        "",
        "| work | shape | dtype | scales | µs | GB/s | of the limit | bitsandbytes µs (ratio) |",
        "|---|---|---|---|--:|--:|--:|--:|",
    ]
    for row in bench["rows"]:
        shape = "×".join(map(str, row["shape"]))
        lines.append(
            f"| {row['work']} | {shape} | {row['dtype']} | {LAYOUT[row['nested']]} "
            f"| {row['us']:.1f} | {row['gb_per_s']:.0f} | {row['of_limit']:.0%} "
            f"| {peer(row, 'bitsandbytes')} |"
        )
    return "\n".join(lines)


def with_table(readme: str, record: dict) -> str:
    """The README with its table made anew."""
    before, _, rest = readme.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"README.md has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table(record)}\n{END}{after}"


def main() -> int:
    path = ROOT / "README.md"
    readme = path.read_text()
    record = json.loads((ROOT / "tests" / "gpu" / "record.json").read_text())
    made = with_table(readme, record)
    if "--check" in sys.argv[1:]:
        return made != readme
    path.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
