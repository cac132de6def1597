"""transformers' architectures load what nf4 quantize writes, by modules and by names.

Importing transformers takes seconds, so most tests ask meta_model.py in this process.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.interop
for _package in ("torch", "transformers", "accelerate", "bitsandbytes"):
    if importlib.util.find_spec(_package) is None:
        pytest.skip(f"{_package} is not installed", allow_module_level=True)

import checkpoint_helpers as helpers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from nf4.checkpoint import (  # noqa: E402
    FormatError,
    QuantizeOptions,
    architecture,
    audit,
    dequantize_checkpoint,
    meta_model,  # noqa: E402
    quantize_checkpoint,
)
from nf4.checkpoint.architecture import UnknownModel, ask  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import check_architectures as checks  # noqa: E402

# Of every kind that once failed: subclasses of nn.Linear, Conv1D, embeddings and routers by other
# names, layers kept in float32, tied and shared layers, tensors that loading renames or splits.
SAMPLE = """
    FalconForCausalLM FalconModel IBertModel IBertForMaskedLM SiglipModel Siglip2VisionModel
    AriaForConditionalGeneration ClvpModelForConditionalGeneration GPT2LMHeadModel ImageGPTModel
    OpenAIGPTLMHeadModel DecisionTransformerModel VisionEncoderDecoderModel CTRLModel GteModel
    BioGptForCausalLM HrmTextForCausalLM JinaEmbeddingsV3Model GraniteMoeForCausalLM BarkModel
    GraniteSpeechModel EdgeTamVideoModel GroundingDinoForObjectDetection DFineForObjectDetection
    CohereAsrForConditionalGeneration Ernie4_5_VLMoeModel LlavaForConditionalGeneration Blip2Model
    T5ForConditionalGeneration MixtralForCausalLM Llama4ForCausalLM Zamba2ForCausalLM
    XLNetLMHeadModel CamembertForCausalLM LlamaForCausalLM BertForSequenceClassification
    WhisperForConditionalGeneration Wav2Vec2ForXVector JevForDecision EncoderDecoderModel
""".split()


CONV1D = """
    ClvpModelForConditionalGeneration ClvpForCausalLM GPT2LMHeadModel ImageGPTModel
    OpenAIGPTLMHeadModel DecisionTransformerModel
""".split()
_LAYERS = 2


def _require(name: str) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")


@pytest.mark.parametrize("name", SAMPLE)
def test_exactly_what_is_replaced_is_quantized(name):
    _require(name)
    outcome = checks.check(name, layers=_LAYERS)
    assert outcome.error is None
    assert outcome.problems == {"modules": [], "names": []}


@pytest.mark.parametrize("way", checks.WAYS)
@pytest.mark.parametrize("name", CONV1D)
def test_every_conv1d_is_quantized_and_no_other_weight_is_transposed(name, way):
    _require(name)
    found = checks.architecture(name, _LAYERS)
    chosen = checks.choose(found, way).weights
    transposed = {found.model.modules[weight] for weight in chosen if chosen[weight]}
    assert transposed == found.model.conv1d != set()


def test_the_check_sees_transposed_weights():
    found = checks.architecture("GPT2LMHeadModel", _LAYERS)
    choice = checks.choose(found, "modules")
    assert checks.problems(found, choice) == []
    choice.weights["transformer.h.0.attn.c_proj.weight"] = False
    problems = checks.problems(found, choice)
    assert problems == ["transformer.h.0.attn.c_proj: stored transposed"]


@pytest.mark.parametrize(
    ("weights", "skip", "problem"),
    [
        (
            {"embeddings.word_embeddings.weight": False},
            [""],
            "embeddings.word_embeddings: 4-bit, but not replaced",
        ),
        ({}, [], "pooler.dense: replaced, but its weight is dense"),
        (
            {"pooler.dense.weight": False},
            ["pooler", "encoder"],
            "pooler.dense: 4-bit, but not replaced",
        ),
    ],
)
def test_the_check_sees_each_fault(weights, skip, problem):
    found = checks.architecture("BertModel", _LAYERS)
    assert problem in checks.problems(found, checks.Choice(weights, skip))


def _siglip(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.SiglipVisionConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    transformers.SiglipVisionModel(config).save_pretrained(folder)
    return folder


def _linear4bit(path: Path) -> set[str]:
    model = transformers.AutoModel.from_pretrained(path, device_map="cpu")
    return {n for n, m in model.named_modules() if type(m).__name__ == "Linear4bit"}


def test_attention_of_torch_is_left_dense_and_the_model_loads(tmp_path, in_process):
    """By python -m nf4 in the model's folder, which Python itself puts first in sys.path. The child
    process, which imports torch, imports nothing from there."""
    source = _siglip(tmp_path / "dense")
    for name in ("torch", "transformers"):
        (source / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    done = helpers.run_cli("quantize", ".", "../q", "--json", cwd=source)
    assert done.returncode == 0 and not (tmp_path / "ran").exists(), done.stderr
    result = json.loads(done.stdout)
    assert result["chosen_by"].startswith("the modules of SiglipVisionModel (transformers ")
    assert result["left_dense"]["NonDynamicallyQuantizableLinear, not nn.Linear"] == 1
    assert audit(str(tmp_path / "q"))[1] == []
    names = _linear4bit(tmp_path / "q")
    assert len(names) == result["weights"] == 14
    assert not any("head.attention" in name for name in names)


def test_verify_finds_what_transformers_does_not_load(tmp_path, monkeypatch, in_process):
    """Written with names alone and --only, which goes past the rules."""
    source = _siglip(tmp_path / "dense")
    with monkeypatch.context() as patch:
        patch.setattr(architecture.importlib.util, "find_spec", lambda package: None)
        options = QuantizeOptions(only=("position_embedding", "fc1"))
        quantize_checkpoint(str(source), str(tmp_path / "q"), options)
        assert audit(str(tmp_path / "q"))[1] == []
    (finding,) = audit(str(tmp_path / "q"))[1]
    assert finding.severity == "fault" and finding.tensor.endswith("position_embedding.weight")
    assert finding.reason == "transformers does not load it: Embedding, not nn.Linear"
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    entries = config["quantization_config"]["llm_int8_skip_modules"]
    entries.remove(next(entry for entry in entries if entry.endswith("layers.0.mlp.fc2")))
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    reasons = [finding.reason for finding in audit(str(tmp_path / "q"))[1]]
    assert any("lacks" in reason and "layers.0.mlp.fc2" in reason for reason in reasons)


def test_verify_finds_what_the_model_has_no_place_for(tmp_path, in_process):
    """Names that tell nothing are looked up, also where they end as those of a weight or a bias."""
    source = _siglip(tmp_path / "dense")
    quantize_checkpoint(str(source), str(tmp_path / "q"), QuantizeOptions())
    file = tmp_path / "q" / "model.safetensors"
    stored = load_file(file)
    layer = next(name for name in stored if name.endswith("layers.0.mlp.fc1.weight"))
    extra = [layer.replace("fc1", "foo"), layer.replace("fc1.weight", "foo.bias")]
    ones = torch.ones(64)
    save_file(stored | {name: ones.clone() for name in extra}, file, metadata={"format": "pt"})
    findings = audit(str(tmp_path / "q"))[1]
    assert [(each.severity, each.tensor) for each in findings] == [
        ("fault", name) for name in sorted(extra)
    ]
    assert {each.reason for each in findings} == {"the model has no place for it"}
    # One that is neither makes every command ask.
    other = layer.replace("fc1.weight", "odd")
    save_file(stored | {extra[0]: ones, other: ones.clone()}, file, metadata={"format": "pt"})
    assert {each.tensor for each in audit(str(tmp_path / "q"))[1]} == {extra[0], other}
    with pytest.raises(FormatError, match="the model has no place for it"):
        dequantize_checkpoint(str(tmp_path / "q"), str(tmp_path / "out"))


def test_a_model_of_other_linear_layers_has_nothing_to_quantize(tmp_path, in_process):
    torch.manual_seed(0)
    config = transformers.FalconConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=100
    )
    transformers.FalconForCausalLM(config).save_pretrained(tmp_path / "dense")
    with pytest.raises(FormatError, match="nothing to quantize: .*modules of FalconForCausalLM"):
        quantize_checkpoint(str(tmp_path / "dense"), str(tmp_path / "q"), QuantizeOptions())


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LLAMA | {"architectures": ["NoSuchModel"]}, "has no model NoSuchModel"),
        (LLAMA | {"architectures": ["LlamaConfig"]}, "has no model LlamaConfig"),
        (LLAMA | {"model_type": "bert"}, "LlamaForCausalLM is a llama, not a bert"),
    ],
)
def test_models_that_transformers_does_not_have(config, reason):
    with pytest.raises(LookupError, match=reason):
        meta_model.model_class(config)


def test_tensors_of_another_model(in_process):
    reason = "the tensors are not those of config.json's LlamaForCausalLM"
    with pytest.raises(UnknownModel, match=reason):
        ask(LLAMA, {"model.norm.weight": (3, 3)})


def test_a_huge_model_takes_bounded_time(monkeypatch):
    monkeypatch.setattr(architecture, "_TIME_LIMIT", 1)
    with pytest.raises(UnknownModel, match="took longer than 1 s"):
        ask(LLAMA | {"num_hidden_layers": 10**9}, {"model.norm.weight": (3, 3)})


def test_a_config_that_takes_more_memory_than_the_limit(monkeypatch):
    monkeypatch.setattr(architecture, "_MEMORY_LIMIT", 3 << 29)
    with pytest.raises(UnknownModel, match="cannot build LlamaForCausalLM: MemoryError"):
        ask(LLAMA | {"num_labels": 10**9}, {"model.norm.weight": (3, 3)})


def test_remote_code_of_a_part_is_never_run(in_process):
    """The model is built of transformers' own classes."""
    code = {"auto_map": {"AutoModel": "nobody/nowhere--modeling.Evil"}, "num_hidden_layers": 1}
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": {"model_type": "llama", **code},
        "vision_config": {"model_type": "clip_vision_model", **code},
    }
    name = "model.language_model.layers.0.self_attn.q_proj.weight"
    assert ask(config, {name: (4096, 4096)}).reasons == {name: None}


def test_names_alone_decide_for_remote_code(tmp_path):
    source = helpers.write_model(tmp_path / "in", auto_map={"AutoModel": "x.Y"}, **LLAMA)
    result = quantize_checkpoint(str(source), str(tmp_path / "q"), QuantizeOptions())
    assert "remote code" in result.chosen_by and result.weights == 2


# Models of kinds that once failed after quantize_model: they read a layer's weight or its dtype, or
# ask the config whether they are quantized; and one each of text, pixels and sound.
RUN = """
    MambaForCausalLM FalconMambaForCausalLM JambaForCausalLM WavLMModel LlamaForCausalLM ViTModel
    NllbMoeForConditionalGeneration WhisperForConditionalGeneration
""".split()


@pytest.mark.parametrize("name", RUN)
def test_a_model_runs_after_quantize_model(name):
    _require(name)
    outcome = checks.check(name, [checks.RUN])
    assert outcome.error is None and outcome.problems == {checks.RUN: []}
    assert outcome.quantized[checks.RUN] > 0
