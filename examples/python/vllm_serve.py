"""vLLM's OpenAI server on a model in 4 bits answers a request.

The model is a small LLaMA with random weights, which `nf4 quantize` quantizes, and its words are
numbers. With --model the server runs a checkpoint of yours.

python examples/python/vllm_serve.py [--model model-nf4/] [--prompt "1 17 42"]
"""

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

if importlib.util.find_spec("vllm") is None:
    print("skipped: vLLM is not installed")
    sys.exit(77)
import tokenizers
import transformers
from nf4.checkpoint import QuantizeOptions, quantize_checkpoint

WORDS = 512


def make_model(folder: Path) -> Path:
    """Returns a checkpoint in NF4, with a tokenizer."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "dense")
    vocabulary = {str(i): i for i in range(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="2")
    tokenizer.save_pretrained(folder / "dense")
    quantize_checkpoint(folder / "dense", folder / "nf4", QuantizeOptions())
    return folder / "nf4"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def ask(address: str, model: str, prompt: str) -> str:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["text"]


def wait_until_ready(address: str, server: subprocess.Popen) -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
            return
        except OSError:
            time.sleep(1)
    sys.exit("the server ended; what it said is above")


def main() -> None:
    parser = argparse.ArgumentParser(description="A model in 4 bits in vLLM's OpenAI server.")
    parser.add_argument("--model")
    parser.add_argument("--prompt", default="1 17 42")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or str(make_model(Path(folder)))
        port = free_port()
        command = ["-m", "vllm.entrypoints.openai.api_server", "--model", model]
        options = ["--port", str(port), "--max-model-len", "256", "--enforce-eager"]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
        server = subprocess.Popen([sys.executable, *command, *options], env=environment)
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until_ready(address, server)
            print("answer:", ask(address, model, arguments.prompt))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
