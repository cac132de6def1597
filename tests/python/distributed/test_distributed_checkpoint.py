"""A model on meta, sharded and loaded by three processes, each its part; what they check is in
checkpoint_ranks.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch_cases

pytestmark = pytest.mark.interop
torch_cases.require("torch", "transformers")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
import checkpoint_ranks  # noqa: E402


def llama(tied: bool = False, hidden: int = 128) -> transformers.PreTrainedModel:
    torch.manual_seed(hidden)
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, attention_bias=True, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def write_models(data: Path) -> None:
    """dense in two files, tied, of another width, without one file, and in 4 bits."""
    llama().save_pretrained(data / "dense", max_shard_size="700KB")
    llama(tied=True).save_pretrained(data / "tied")
    llama(hidden=192).save_pretrained(data / "wide")
    shutil.copytree(data / "dense", data / "broken")
    (data / "broken" / "model-00002-of-00002.safetensors").unlink()
    model = llama()
    nf4.torch.quantize_model(model)
    model.save_pretrained(data / "quantized")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank says of each check: nothing, or what went wrong."""
    data = tmp_path_factory.mktemp("ranks")
    write_models(data)
    package = str(Path(nf4.__file__).parents[1])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ranks = range(checkpoint_ranks.WORLD)
    processes = [
        subprocess.Popen(
            [sys.executable, checkpoint_ranks.__file__, str(rank), str(data)], env=environment
        )
        for rank in ranks
    ]
    try:
        for process in processes:
            process.wait(timeout=300)
    finally:
        for process in processes:
            process.kill()
    files = [data / f"outcome-{rank}.json" for rank in ranks]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


@pytest.mark.parametrize("name", checkpoint_ranks.CHECKS)
def test_of_three_ranks(outcomes: list[dict[str, str]], name: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.get(name) == "", f"rank {rank}: {outcome.get(name, 'it did not come to it')}"
