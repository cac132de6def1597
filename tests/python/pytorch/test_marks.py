"""The marks of a quantized model, beside those of one that transformers loaded with bitsandbytes,
and what transformers, Trainer, PEFT and accelerate do by them."""

from __future__ import annotations

import copy
import json

import nf4
import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "in_process")]
torch_cases.require("torch", "bitsandbytes", "transformers", "accelerate", "peft")

import nf4.torch  # noqa: E402
import nf4.torch._marks  # noqa: E402
import nf4.torch.distributed  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from nf4.torch import quantize_model  # noqa: E402
from nf4.torch._replacing_layers import is_in_4_bits  # noqa: E402
from transformers.integrations.flash_attention import get_target_dtype  # noqa: E402

TOKENS = torch.arange(14).view(2, 7)
LLAMA = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=100,
)  # fmt: skip
MIXTURE = transformers.Qwen2MoeConfig(
    hidden_size=64, intermediate_size=96, moe_intermediate_size=64, num_hidden_layers=1,
    shared_expert_intermediate_size=64, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=100, num_experts=4, num_experts_per_tok=2,
)  # fmt: skip


def dense(config=LLAMA, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config)).to(dtype).eval()


def of_bitsandbytes(folder):
    dense().save_pretrained(folder / "dense")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder / "dense", quantization_config=config)


def quantized(**options):
    model = dense()
    quantize_model(model, **options)
    return model


def converted(folder):
    model = of_bitsandbytes(folder)
    assert nf4.torch.convert(model)
    return model


def loaded(folder, config=LLAMA, **options):
    model = dense(config)
    quantize_model(model, **options)
    model.save_pretrained(folder / "made")
    return nf4.torch.load(folder / "made")


INTEGERS = {"format": "int4", "group_size": 32}
MODELS = {
    "quantize_model": lambda folder: quantized(),
    "fp4": lambda folder: quantized(format="fp4", nested=False),
    "convert": converted,
    "integers": lambda folder: quantized(**INTEGERS),
    "gptq": lambda folder: quantized(**INTEGERS, layout="gptq"),
    "load": lambda folder: loaded(folder, **INTEGERS),
    "load experts": lambda folder: loaded(folder, MIXTURE, experts=True),
    "empty_model": lambda folder: (
        quantized().save_pretrained(folder / "made")
        or nf4.torch.distributed.empty_model(folder / "made")
    ),
}
LIKE_BITSANDBYTES = {"quantize_model", "fp4", "convert", "empty_model"}


@pytest.mark.parametrize("name", MODELS)
def test_the_marks_are_those_of_bitsandbytes(tmp_path, name):
    theirs, ours = of_bitsandbytes(tmp_path), MODELS[name](tmp_path)
    for mark in ("is_quantized", "is_loaded_in_4bit"):
        assert getattr(ours, mark) is getattr(theirs, mark) is True
    assert ours.config._is_quantized is theirs.config._is_quantized is True
    assert ours.base_model.config._is_quantized
    of_ours, of_theirs = ours.hf_quantizer, theirs.hf_quantizer
    assert of_ours.is_trainable and of_ours.is_serializable() == of_theirs.is_serializable()
    assert of_ours.quantization_config is ours.config.quantization_config
    stored = ours.config.quantization_config.to_dict()
    assert stored["quant_method"] == ours.quantization_method
    if name in LIKE_BITSANDBYTES:
        assert isinstance(of_ours, type(of_theirs))
        assert ours.quantization_method == theirs.quantization_method
        assert stored.keys() == theirs.config.quantization_config.to_dict().keys()


@pytest.mark.parametrize("name", MODELS)
def test_casts_and_a_trainer_without_adapters_are_refused(tmp_path, name):
    model = MODELS[name](tmp_path)
    for cast in (model.half, model.float):
        with pytest.raises(ValueError, match="is not supported for quantized model"):
            cast()
    if name in LIKE_BITSANDBYTES or name == "gptq":
        with pytest.raises(ValueError, match="You cannot cast a"):
            model.to(torch.float16)
    arguments = transformers.TrainingArguments(tmp_path / "out", use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="fine-tuning on purely quantized models"):
        transformers.Trainer(model, arguments)


@pytest.mark.parametrize("name", ["quantize_model", "convert", "integers", "gptq", "load"])
def test_trainer_and_peft_take_it_with_adapters(tmp_path, name):
    model = MODELS[name](tmp_path)
    prepared = peft.prepare_model_for_kbit_training(model)
    assert prepared.is_gradient_checkpointing
    adapted = peft.get_peft_model(prepared, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    arguments = transformers.TrainingArguments(
        tmp_path / "out", use_cpu=True, report_to=[], max_steps=1, save_strategy="no"
    )
    before = {n: p.detach().clone() for n, p in adapted.named_parameters() if p.requires_grad}
    transformers.Trainer(adapted, arguments, train_dataset=data).train()
    after = dict(adapted.named_parameters())
    assert any(not torch.equal(after[each], tensor) for each, tensor in before.items())
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(MODELS[name](tmp_path), tmp_path / "adapter")
    assert again(TOKENS).logits.shape == (2, 7, 100)


@pytest.mark.parametrize("name", ["quantize_model", "convert", "integers", "load", "load experts"])
def test_dequantize_of_transformers_is_to_dense(tmp_path, name):
    model = MODELS[name](tmp_path)
    with torch.no_grad():
        expected = model(TOKENS).logits
        model.dequantize()
        assert torch_cases.error(model(TOKENS).logits, expected) < 1e-5
    assert not any(map(is_in_4_bits, model.modules()))
    for mark in ("quantization_method", "hf_quantizer"):
        assert not hasattr(model, mark)
    assert not model.is_quantized and not model.is_loaded_in_4bit
    assert not hasattr(model.config, "_is_quantized")
    assert not hasattr(model.config, "quantization_config")
    assert model.half().dtype == torch.float16
    model.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again/config.json").read_text())
    assert "quantization_config" not in config
    assert quantize_model(model, **(INTEGERS if name == "integers" else {}))


@pytest.mark.parametrize("options", [{}, INTEGERS])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flash_attention_casts_to_the_dtype_of_the_model(options, dtype):
    model = dense(dtype=dtype)
    quantize_model(model, **options)
    attention = model.model.layers[0].self_attn
    assert get_target_dtype(torch.zeros(1), attention) == dtype


def test_the_dtype_of_the_config_stays_where_parameters_have_it():
    model = dense(dtype=torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.model.embed_tokens.float()
    quantize_model(model)
    assert model.dtype == torch.float32 and model.config.dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, INTEGERS])
def test_a_model_that_asks_its_config_for_the_mark_runs(options):
    """transformers#43145: FalconMamba calls dt_proj where it finds the mark, else it reads its
    weight."""
    config = transformers.FalconMambaConfig(
        hidden_size=64, state_size=8, num_hidden_layers=2, vocab_size=100, time_step_rank=64
    )
    model = dense(config)
    assert quantize_model(model, **options)
    with torch.no_grad():
        found = model(TOKENS).logits
        nf4.torch.to_dense(model)
        assert torch_cases.error(model(TOKENS).logits, found) < 1e-4


def test_bitsandbytes_need_not_be_there(monkeypatch):
    """transformers imports it where a model is_loaded_in_4bit."""
    found = nf4.torch._marks.importlib.util.find_spec
    monkeypatch.setattr(
        nf4.torch._marks.importlib.util,
        "find_spec",
        lambda name, *more: None if name == "bitsandbytes" else found(name, *more),
    )
    model = quantized()
    assert model.is_quantized and not hasattr(model, "is_loaded_in_4bit")
    assert model.num_parameters() > 0
