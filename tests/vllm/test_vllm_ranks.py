"""Engines of vLLM on two ranks say what transformers says of the dequantized checkpoint in fp32."""

from __future__ import annotations

from pathlib import Path

import gpt_oss_models
import models
import nf4
import pytest
from conftest import Engines
from models import Made, require_same
from safetensors.torch import load_file, save_file

TENSORS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
EXPERTS = TENSORS | {"enable_expert_parallel": True}
# vLLM's CPU backend makes the tensors that a stage receives in the run that warms up a compiled
# model. Without one, its second stage fails with any weights.
TRACED = {"mode": 2, "backend": "eager"}
STAGES = {
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "enforce_eager": False,
    "compilation_config": TRACED,
}


def test_checkpoints(engines: Engines, made: Made) -> None:
    stacks = made.checkpoint("qwen3_moe", experts=True)
    runs = [
        (made.checkpoint("llama"), TENSORS),
        (made.checkpoint("phi3"), TENSORS),
        (made.checkpoint("llama"), STAGES),
        (stacks, TENSORS),
        (stacks, EXPERTS),
        (made.checkpoint("mixtral", experts=True), EXPERTS),
    ]
    said = engines(*({"model": str(checkpoint)} | ranks for checkpoint, ranks in runs))
    for (checkpoint, _), each in zip(runs, said, strict=True):
        require_same(each, made.reference(checkpoint))


def test_nested_scales_that_are_cut(engines: Engines, made: Made) -> None:
    """A rank's rows of gate and up end inside a nested block of 256 blocks of 64 values, and its
    columns of down inside a block."""
    checkpoint = made.checkpoint("llama_narrow")
    gate = nf4.load(checkpoint)["model.layers.0.mlp.gate_proj.weight"]
    elements = gate.shape[0] // 2 * gate.shape[1]
    assert gate.nested and elements % (gate.blocksize * gate.nested_blocksize)
    assert gate.shape[0] // 2 % gate.blocksize
    (said,) = engines({"model": str(checkpoint)} | TENSORS)
    require_same(said, made.reference(checkpoint))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with gpt-oss in MXFP4 and dense, whose logits differ clearly."""
    folder, sizes = tmp_path_factory.mktemp("gpt-oss"), {"head_dim": 32, "vocab_size": 512}
    state = gpt_oss_models.write(folder / "mxfp4", **sizes)
    dense = gpt_oss_models.dense_model(state, **sizes)
    stored = load_file(folder / "mxfp4" / "model.safetensors")
    for tensor in (stored["lm_head.weight"], dense.lm_head.weight.data):
        tensor *= 20
    save_file(stored, folder / "mxfp4" / "model.safetensors", {"format": "pt"})
    dense.save_pretrained(folder / "dense")
    return folder


def test_gpt_oss(engines: Engines, gpt_oss: Path) -> None:
    """In MXFP4. Of two tensor parallel ranks one has 64 columns of the experts, the other 32."""
    expected = models.greedy(gpt_oss / "dense")
    one = {"model": str(gpt_oss / "mxfp4"), "quantization": "nf4"}
    for said in engines(one, one | {"reload": one["model"]}, one | TENSORS, one | EXPERTS):
        require_same(said, expected)


def test_gpt_oss_of_nf4_quantize(engines: Engines, gpt_oss: Path) -> None:
    options = {"format": "mxfp4", "layout": "gpt-oss"}
    ours = models.quantized(gpt_oss / "dense", gpt_oss / "ours", **options)
    (said,) = engines({"model": str(ours), "quantization": "nf4"})
    require_same(said, models.reference(ours, gpt_oss / "ours-dense"))
