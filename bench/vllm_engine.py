"""Tokens a second of a LLaMA of 200 million weights in NF4 in vLLM, in one process for each plugin:

    libnf4       nf4.vllm
    drop-in      vllm-bnb-plugin, with bitsandbytes on libnf4's kernels
    bitsandbytes vllm-bnb-plugin, with bitsandbytes' own

The model has random weights. Run it in vLLM's environment, with libnf4, bitsandbytes and
vllm-bnb-plugin installed. Turns alternate; the table has medians.

python bench/vllm_engine.py [--turns 3] [--plugins libnf4,drop-in] [--flat] [--cpu-time]
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

PLUGINS = {
    "libnf4": {},
    "drop-in": {"NF4_VLLM": "0"},
    "bitsandbytes": {"NF4_VLLM": "0", "NF4_BITSANDBYTES": "0"},
}
# Sequences, tokens of a prompt, and new tokens of each.
WORKS = {"decode, batch 1": (1, 16, 32), "decode, batch 8": (8, 16, 16), "prefill": (1, 256, 1)}
VOCABULARY = 32000


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


def measure(model: str, clock: Callable[[], float]) -> dict[str, float]:
    """Tokens a second of each work: new ones, or those of the prompt."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, skip_tokenizer_init=True, max_model_len=1024, enforce_eager=True, seed=0)
    method = llm.llm_engine.model_config.quantization
    print(f"quantization: {method}", file=sys.stderr)
    made = {}
    for work, (batch, length, new) in WORKS.items():
        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        times = []
        for turn in range(3):  # the first one warms up
            ids = [
                [(i * 7919 + j * 104729 + turn) % VOCABULARY for j in range(length)]
                for i in range(batch)
            ]
            began = clock()
            llm.generate([{"prompt_token_ids": each} for each in ids], sampling, use_tqdm=False)
            times.append(clock() - began)
        made[work] = batch * (new if new > 1 else length) / min(times[1:])
    return made


def in_process(plugin: str, model: str, *options: str) -> dict[str, float]:
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--measure", model, *options],
        env=os.environ | environment | PLUGINS[plugin],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens a second in vLLM, by plugin.")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--plugins", default=",".join(PLUGINS))
    parser.add_argument("--flat", action="store_true", help="scales in fp32")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of the process, where a machine does other work"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        clock = time.process_time if arguments.cpu_time else time.perf_counter
        print(json.dumps(measure(arguments.measure, clock)))
        return
    options = ["--cpu-time"] if arguments.cpu_time else []
    plugins = arguments.plugins.split(",")
    found: dict[str, list[dict[str, float]]] = {plugin: [] for plugin in plugins}
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_model(Path(folder), nested=not arguments.flat))
        for _ in range(arguments.turns):
            for plugin in plugins:
                found[plugin].append(in_process(plugin, model, *options))
                print(plugin, found[plugin][-1], file=sys.stderr, flush=True)
    print(f"| tokens/s | {' | '.join(plugins)} |\n|---|{'--:|' * len(plugins)}")
    for work in WORKS:
        medians = (statistics.median(each[work] for each in found[plugin]) for plugin in plugins)
        print(f"| {work} | {' | '.join(f'{each:.1f}' for each in medians)} |")


if __name__ == "__main__":
    main()
