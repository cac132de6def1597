"""Tokens a second of a LLaMA of 200 million weights in NF4 in vLLM, in one process for each plugin:

    libnf4       nf4.vllm
    drop-in      vllm-bnb-plugin, with bitsandbytes on libnf4's kernels
    bitsandbytes vllm-bnb-plugin, with bitsandbytes' own

The model has random weights. vLLM compiles it, as it does by default. Run this in vLLM's
environment, with libnf4, bitsandbytes and vllm-bnb-plugin installed. Turns alternate; the table has
medians. With --parts a second table has the shares of the first plugin's time.

python bench/vllm_engine.py [--turns 3] [--plugins libnf4,drop-in] [--flat] [--eager] [--cpu-time]
                            [--parts]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLUGINS = {
    "libnf4": {},
    "drop-in": {"NF4_VLLM": "0"},
    "bitsandbytes": {"NF4_VLLM": "0", "NF4_BITSANDBYTES": "0"},
}
# Sequences, tokens of a prompt, and new tokens of each.
WORKS = {"decode, batch 1": (1, 16, 32), "decode, batch 8": (8, 16, 16), "prefill": (1, 256, 1)}
VOCABULARY = 32000
# The parts of the time, by what the names of their operators contain.
PARTS = {
    "products of libnf4": ("nf4::",),
    "head": ("onednn_mm",),
    "attention": ("attention", "attn", "kv_cache", "rotary"),
}


def make_model(folder: Path, nested: bool) -> Path:
    import transformers
    from nf4.checkpoint import QuantizeOptions, quantize_checkpoint

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        dtype="bfloat16",
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.bfloat16().save_pretrained(folder / "dense")
    quantize_checkpoint(folder / "dense", folder / "nf4", QuantizeOptions(nested=nested))
    return folder / "nf4"


def measure(model: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """For each work the tokens a second, new ones or those of the prompt, and the parts' shares."""
    from vllm import LLM

    arguments = {"max_model_len": 1024, "enforce_eager": options.eager, "seed": 0}
    llm = LLM(model, skip_tokenizer_init=True, **arguments)
    method = llm.llm_engine.model_config.quantization
    print(f"quantization: {method}", file=sys.stderr)
    clock = time.process_time if options.cpu_time else time.perf_counter
    made = {}
    for work, (batch, length, new) in WORKS.items():
        generate(llm, work, 0)  # warms up
        times = []
        for turn in (1, 2):
            began = clock()
            generate(llm, work, turn)
            times.append(clock() - began)
        made[work] = {"tokens": batch * (new if new > 1 else length) / min(times)}
        if options.parts:
            made[work] |= shares(lambda work=work: generate(llm, work, 3), min(times))
    return made


def generate(llm: Any, work: str, turn: int) -> None:
    from vllm import SamplingParams

    batch, length, new = WORKS[work]
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    ids = [
        [(i * 7919 + j * 104729 + turn) % VOCABULARY for j in range(length)] for i in range(batch)
    ]
    llm.generate([{"prompt_token_ids": each} for each in ids], sampling, use_tqdm=False)


def shares(call: Callable[[], None], seconds: float) -> dict[str, float]:
    """The shares that the parts have of `seconds`, the time of a call without the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    found = dict.fromkeys(PARTS, 0.0)
    for event in profiled.key_averages():
        for part, words in PARTS.items():
            if any(word in event.key for word in words):
                found[part] += event.self_cpu_time_total / 1e6 / seconds
                break
    return found | {"the rest": 1 - sum(found.values())}


def in_process(plugin: str, model: str, options: list[str]) -> dict[str, dict[str, float]]:
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--measure", model, *options],
        env=os.environ | environment | PLUGINS[plugin],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def table(found: dict[str, list[dict[str, dict[str, float]]]], names: list[str]) -> None:
    """Prints the medians of these numbers: tokens a second of each plugin, or the shares of one."""
    columns = [(plugin, name) for plugin in found for name in names]
    titles = [plugin if name == "tokens" else name for plugin, name in columns]
    print(f"| work | {' | '.join(titles)} |\n| --- |{' ---: |' * len(columns)}")
    for work in WORKS:
        medians = (statistics.median(e[work][n] for e in found[p]) for p, n in columns)
        digits = 1 if names == ["tokens"] else 2
        print(f"| {work} | {' | '.join(f'{each:.{digits}f}' for each in medians)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens a second in vLLM, by plugin.")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--plugins", default=",".join(PLUGINS))
    parser.add_argument("--flat", action="store_true", help="scales in fp32")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of the process, where a machine does other work"
    )
    parser.add_argument("--parts", action="store_true", help="what the first plugin's time is")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments)))
        return
    flags = {"--eager": arguments.eager, "--cpu-time": arguments.cpu_time}
    options = [flag for flag, is_given in flags.items() if is_given]
    plugins = arguments.plugins.split(",")
    found: dict[str, list[dict[str, dict[str, float]]]] = {plugin: [] for plugin in plugins}
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_model(Path(folder), nested=not arguments.flat))
        for _ in range(arguments.turns):
            for plugin in plugins:
                parts = ["--parts"] if arguments.parts and plugin == plugins[0] else []
                found[plugin].append(in_process(plugin, model, options + parts))
                print(plugin, found[plugin][-1], file=sys.stderr, flush=True)
    table(found, ["tokens"])
    if arguments.parts:
        table({plugins[0]: found[plugins[0]]}, [*PARTS, "the rest"])


if __name__ == "__main__":
    main()
