"""Tensors beside integer weights that nothing reads: each is named, unless it changes no weight."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import checkpoint_helpers as helpers
import int4_checkpoints as models
import nf4
import numpy as np
import pytest
from int4_checkpoints import LAYER, Case
from nf4.checkpoint import FormatError
from nf4.checkpoint.leftovers import PART
from nf4.cli import main
from safetensors.numpy import load_file, save_file

ONES = np.ones(64, np.float16)
UNREAD = {
    "model.layers.0.mlp.act.scales": "scales is a part of something quantized",  # ScaledActivation
    "transformer.h.0.mlp.gelu_impl.scales": "scales is a part of something quantized",
    f"{LAYER}.input_scale": f"beside the 4-bit {LAYER}",
    f"{LAYER}.pre_quant_scale": f"beside the 4-bit {LAYER}",
    f"{LAYER}.weight_global_scale": f"beside the 4-bit {LAYER}",
    f"{LAYER}.weight_scale_inv": f"beside the 4-bit {LAYER}",
    f"{LAYER}.smooth": f"beside the 4-bit {LAYER}",
    f"{LAYER}.lut": f"beside the 4-bit {LAYER}",
    f"{LAYER}.lora_A.weight": f"beside the 4-bit {LAYER}",
    f"{LAYER}.lora_A.default.bias": f"beside the 4-bit {LAYER}",
    "model.layers.0.mlp.smooth_scales": "smooth_scales is a part of something quantized",
    "model.layers.0.mlp.down_proj.weight_scale_inv": "weight_scale_inv is a part of",
    "model.layers.0.mlp.down_proj.SCB": "SCB is a part of something quantized",
    "model.layers.0.mlp.down_proj.input_scale": "input_scale is a part of something quantized",
}
HARMLESS = {
    f"{LAYER}.bias": ONES,
    "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    "transformer.h.0.attn.bias": np.ones((1, 1, 4, 4), np.uint8),
    "transformer.h.0.attn.masked_bias": np.ones((), np.float32),
    "model.embeddings.position_ids": np.ones((1, 8), np.int64),
    "model.layers.0.self_attn.k_scale": np.ones((), np.float32),
}
OF_MODELS = {
    "model.norm.scale": ONES,
    "logit_scale": np.ones((), np.float32),
    "model.layers.0.layer_scale": ONES,
    "model.layers.0.router.per_expert_scale": ONES,
}


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("layout", ["awq", "gptq", "compressed-tensors"])
def test_what_nothing_reads_is_named_by_every_command(layout, name, tmp_path, capsys):
    case = Case(layout)
    stored = models.tensors(case.weights()[LAYER]) | {name: ONES}
    source = models.write(tmp_path / "q", stored, case.config)
    (fault,) = models.findings("fault", source)
    assert UNREAD[name] in fault and fault.endswith("is not read")
    to = "gptq_v2" if layout == "gptq" else "gptq"
    for command in (["inspect"], ["dequantize"], ["quantize"], ["convert", "--to", to]):
        out = [] if command == ["inspect"] else [str(tmp_path / "out")]
        assert main([command[0], str(source), *out, *command[1:]]) == 3
        stderr = capsys.readouterr().err
        assert name in stderr or "is quantized by" in stderr
        assert stderr.count("\n") == 1
    with pytest.raises(FormatError, match=name):
        nf4.load(source)
    assert helpers.listing(tmp_path) == ["q"]


@pytest.mark.parametrize("layout", ["awq", "gptq", "compressed-tensors"])
def test_what_changes_no_weight_is_copied(layout, tmp_path):
    case = Case(layout)
    stored = models.tensors(case.weights()[LAYER]) | HARMLESS
    source = models.write(tmp_path / "q", stored, case.config)
    assert models.findings("fault", source) == []
    to = "gptq_v2" if layout == "gptq" else "gptq"
    for arguments in (["dequantize"], ["convert", "--to", to]):
        out = tmp_path / arguments[0]
        assert main([arguments[0], str(source), str(out), *arguments[1:]]) == 0
        found = helpers.load_all(out)
        assert all(found[name][2] == array.tobytes() for name, array in HARMLESS.items())


def test_scales_that_models_have_are_copied(tmp_path):
    """No config.json tells the model, so that names decide."""
    source, out = tmp_path / "q.safetensors", tmp_path / "out.safetensors"
    stored = models.tensors(Case("awq").weights()[LAYER]) | OF_MODELS
    source.write_bytes(helpers.file_bytes(stored))
    assert models.findings("fault", source) == []
    assert main(["dequantize", str(source), str(out)]) == 0
    found = helpers.load_all(out)
    assert all(found[name][2] == array.tobytes() for name, array in OF_MODELS.items())


def test_beside_a_weight_of_bitsandbytes_too(tmp_path, capsys):
    dense = helpers.write_model(tmp_path / "dense")
    assert main(["quantize", str(dense), str(tmp_path / "q")]) == 0
    extra = {"model.layers.0.proj.input_scale": ONES, "model.layers.0.act.scales": ONES}
    stored = {**load_file(tmp_path / "q" / "model.safetensors"), **extra}
    save_file(stored, tmp_path / "q" / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "q")]) == 1
    found = capsys.readouterr().out
    assert all(name in found for name in extra)
    assert main(["dequantize", str(tmp_path / "q"), str(tmp_path / "out")]) == 3


def test_no_model_of_transformers_has_a_parameter_of_such_a_name():
    """The names that are refused by themselves, held against the source of all models."""
    found = importlib.util.find_spec("transformers")
    if found is None:
        pytest.skip("transformers is not installed")
    own = re.compile(r"self\.(\w+) *= *(?:torch\.)?nn\.(?:Parameter|Buffer)\(")
    named = re.compile(r"register_(?:buffer|parameter)\(\s*\"(\w+)\"")
    folder = Path(found.origin).parent / "models"
    names: set[str] = set()
    for path in folder.rglob("modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        names.update(own.findall(text), named.findall(text))
    assert len(names) > 200
    assert [name for name in sorted(names) if PART.fullmatch(name)] == []
