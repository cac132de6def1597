"""A real model of 135 million numbers, which a Python package ships, through `nf4 quantize` and the
engine in examples/cpp/llama: its greedy tokens are those of transformers on the same weights."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import nf4
import numpy as np
import pytest
import torch_cases
from conftest import ROOT
from llama_program import program
from nf4.checkpoint import QuantizeOptions, quantize_checkpoint

torch_cases.require("torch", "transformers")

import torch  # noqa: E402
from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: E402

sys.path.insert(0, str(ROOT / "tools" / "demo"))
import gguf_llama  # noqa: E402
from packaged import packaged_file  # noqa: E402

pytestmark = pytest.mark.interop
TOKENS = 64
CASES = {
    "Why is the sky blue?": QuantizeOptions(),
    "Once upon a time there was a small robot who": QuantizeOptions(format="int4", group_size=64),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    try:
        metadata.version(gguf_llama.PACKAGE)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{gguf_llama.PACKAGE} is not installed; `./dev test` installs it")
    folder = tmp_path_factory.mktemp("model") / gguf_llama.NAME
    gguf_llama.convert(packaged_file(gguf_llama.PACKAGE, ".gguf"), folder)
    return folder


def greedy(folder: Path, prompt: list[int]) -> list[int]:
    """What the engine says."""
    options = ["--cpu", "--threads", "1", "--tokens", str(TOKENS)]
    command = [program(), folder, *options, ",".join(map(str, prompt))]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [int(token) for token in result.stdout.split(",")]


@pytest.fixture
def one_thread():
    """More threads than cores slow each other down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("in_process", "one_thread")
@pytest.mark.parametrize("text", CASES)
def test_the_engine_says_what_transformers_says(dense, tmp_path, text):
    """Where two logits are equal but for rounding, either token will do."""
    quantize_checkpoint(str(dense), str(tmp_path / "4-bit"), CASES[text])
    tokenizer = AutoTokenizer.from_pretrained(dense)
    prompt = tokenizer(text).input_ids
    answer = greedy(tmp_path / "4-bit", prompt)
    assert len(answer) == TOKENS
    model = LlamaForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    state = {
        name: torch.from_numpy(nf4.dequantize(weight, "fp32"))
        for name, weight in nf4.load(tmp_path / "4-bit").items()
        if isinstance(weight, nf4.Weight)
    }
    assert len(state) == 7 * model.config.num_hidden_layers
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    taken = logits[torch.arange(TOKENS), torch.tensor(answer)]
    # The largest are 14 to 35 here, and the engine's are off by 1e-4 at most.
    assert (logits.amax(1) - taken).max() < 1e-3
    assert (logits.argmax(1).numpy() == np.array(answer)).mean() > 0.9
    said = tokenizer.decode(answer)
    assert said.isascii() and len(said.split()) > 30
