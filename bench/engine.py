"""Tokens a second of one sequence on the CPU: examples/cpp/llama on a model in 4 bits, beside
transformers on the same model dense in bf16. In turns, so that a machine's moods meet both; the
median of the turns, each the median of its steps.

    python bench/engine.py [--model FOLDER] [--program FILE] [--threads N] [--turns N]

By default the model is that of `./dev demo`, and the program what `./dev build` makes.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from nf4.checkpoint import QuantizeOptions, quantize_checkpoint
from nf4.cli.console import table
from transformers import LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
PROMPT = (1, 4093, 198, 11, 28, 260, 351, 253)
STEPS = 32
KINDS = {
    "NF4": QuantizeOptions(),
    "integers": QuantizeOptions(format="int4", group_size=64),
}
DTYPES: dict[str, tuple[str, ...]] = {"fp32": (), "bf16": ("--bf16",)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    demo = ROOT / ".cache" / "demo" / "language" / "SmolLM2-135M-Instruct"
    program = ROOT / "build" / "examples" / "cpp_llama"
    parser.add_argument("--model", type=Path, default=demo, help="a dense LLaMA: a directory")
    parser.add_argument("--program", type=Path, default=program)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=7)
    given = parser.parse_args()
    for needed in (given.model / "config.json", given.program):
        if not needed.exists():
            parser.error(f"{needed} is missing; `./dev demo` and `./dev build` make these")
    return given


def of_transformers(folder: Path, threads: int) -> Callable[[], float]:
    """What measures seconds a step; the model alone, without what generate() does around it."""
    torch.set_num_threads(threads)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def measure() -> float:
        found, times = model(torch.tensor([PROMPT])), []
        for _ in range(STEPS):
            began = time.perf_counter()
            token = found.logits[:, -1:].argmax(-1)
            found = model(token, past_key_values=found.past_key_values)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    return measure


def of_engine(
    program: Path, folder: Path, threads: int, dtype: tuple[str, ...]
) -> Callable[[], float]:
    options = ["--cpu", *dtype, "--threads", str(threads), "--tokens", str(STEPS + 1)]
    command = [str(program), str(folder), *options, ",".join(map(str, PROMPT))]

    def measure() -> float:
        result = subprocess.run(command, capture_output=True, text=True)
        found = re.search(r"decode ([\d.]+) ms", result.stderr)
        if result.returncode or not found:
            sys.exit(f"{program} ended with {result.returncode}: {result.stderr}")
        return float(found[1]) / 1e3

    return measure


def main() -> None:
    given = arguments()
    dense = "transformers, dense bf16"
    with tempfile.TemporaryDirectory() as temporary:
        forms = {dense: of_transformers(given.model, given.threads)}
        for kind, options in KINDS.items():
            folder = Path(temporary) / kind
            quantize_checkpoint(str(given.model), str(folder), options)
            for dtype, words in DTYPES.items():
                engine = of_engine(given.program, folder, given.threads, words)
                forms[f"C++ engine, {kind}, {dtype}"] = engine
        turns = [{form: work() for form, work in forms.items()} for _ in range(given.turns)]
    rows = []
    for form in forms:
        seconds = statistics.median(turn[form] for turn in turns)
        ratios = sorted(turn[dense] / turn[form] for turn in turns)
        of_dense = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} .. {ratios[-1]:.2f})"
        rows.append([form, f"{1e3 * seconds:.1f} ms", f"{1 / seconds:.1f}", of_dense])
    print(f"{given.model.name}, {given.threads} threads, load {os.getloadavg()[0]:.1f}")
    print("\n".join(table(["", "a token", "tokens/s", "beside dense"], rows)))


if __name__ == "__main__":
    main()
