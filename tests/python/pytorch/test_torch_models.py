"""Models of transformers and adapters of PEFT on libnf4's kernels, on the CPU."""

from __future__ import annotations

import copy

import nf4
import pytest
import torch_cases
from torch_cases import error

pytestmark = pytest.mark.interop
torch_cases.require("torch", "transformers", "accelerate", "bitsandbytes", "peft")

import bitsandbytes as bnb  # noqa: E402
import nf4.torch  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from nf4.torch import bitsandbytes as backend  # noqa: E402

TOKENS = torch.tensor([[1, 5, 9, 2, 7], [3, 3, 8, 0, 6]])
# Rows that are no multiple of 32 are among them, for which bitsandbytes' own kernels fail.
HIDDEN, INTERMEDIATE, LINEARS = 96, 200, 14
# Two layers in fp32: what is left is the order of sums.
CLOSE = 1e-5


@pytest.fixture(autouse=True, scope="module")
def served():
    yield backend.register()
    backend.unregister()


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A folder with a small LLaMA-shaped model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
    )
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", **options)


def in_4bit(folder, nested=True):
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return load(folder, quantization_config=config)


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def dequantized(folder, model):
    """A dense model with the numbers of a quantized one."""
    made = load(folder, dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            weight = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            made.get_submodule(name).weight.data = weight.float()
    return made


@pytest.mark.parametrize("nested", [False, True])
def test_load_in_4bit_saved_and_loaded_again(nested, dense, tmp_path):
    model = in_4bit(dense, nested)
    found = logits(model)
    assert error(found, logits(dequantized(dense, model))) <= CLOSE
    model.save_pretrained(tmp_path / "q")
    assert torch.equal(logits(load(tmp_path / "q")), found)


def test_a_converted_model_computes_and_saves_the_same(dense, tmp_path):
    model = in_4bit(dense)
    found = logits(model)
    names = nf4.torch.convert(model)
    assert len(names) == LINEARS and "model.layers.0.mlp.gate_proj" in names
    assert torch.equal(logits(model), found)
    model.save_pretrained(tmp_path / "q")
    again = load(tmp_path / "q")
    assert sum(isinstance(each, bnb.nn.Linear4bit) for each in again.modules()) == LINEARS
    assert torch.equal(logits(again), found)


def test_what_is_dense_again_is_saved_as_such(dense, tmp_path):
    model = in_4bit(dense)
    found = logits(model)
    nf4.torch.convert(model)
    nf4.torch.to_dense(model, "fp32")
    model.save_pretrained(tmp_path / "d")
    again = load(tmp_path / "d", dtype=torch.float32)
    kinds = {type(each) for each in again.modules() if isinstance(each, torch.nn.Linear)}
    assert kinds == {torch.nn.Linear}
    assert error(logits(again), found) <= CLOSE
    assert next(model.half().parameters()).dtype == torch.float16


@pytest.mark.parametrize("converted", [False, True])
def test_generation_is_that_of_the_dense_model(converted, dense):
    model = in_4bit(dense)
    expected = dequantized(dense, model)
    if converted:
        nf4.torch.convert(model)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found = model.generate(TOKENS[:1], **options)
    assert torch.equal(found, expected.generate(TOKENS[:1], **options))


def with_lora(model):
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


def trained(model, steps=3):
    """The losses of a few steps on one batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model.train()(input_ids=TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("way", ["bitsandbytes", "converted before", "converted after"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_trains_as_beside_dense_weights(way, checkpointing, dense, tmp_path):
    base = in_4bit(dense)
    reference = with_lora(dequantized(dense, base))
    if way == "converted before":
        nf4.torch.convert(base)
    base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=checkpointing)
    model = with_lora(base)
    if way == "converted after":
        assert len(nf4.torch.convert(model)) == LINEARS
    losses, expected = trained(model), trained(reference)
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(expected, rel=1e-3)
    found = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    again = in_4bit(dense)
    if way != "bitsandbytes":
        nf4.torch.convert(again)
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
    assert error(logits(again), found) <= CLOSE


def test_a_model_with_adapters_is_copied(dense):
    base = in_4bit(dense)
    nf4.torch.convert(base)
    model = with_lora(base)
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))


@pytest.mark.parametrize("safe", [False, True])
def test_adapters_are_merged_into_what_is_dense_again(safe, dense):
    base = in_4bit(dense)
    reference = dequantized(dense, base)
    nf4.torch.convert(base)
    model = with_lora(base)
    trained(model)
    found = logits(model)
    in_4_bits = logits(copy.deepcopy(model).merge_and_unload(safe_merge=safe))
    assert CLOSE < error(in_4_bits, found) < 0.2  # the sum is rounded to 4 bits
    assert len(nf4.torch.to_dense(model, "fp32")) == LINEARS
    assert error(logits(model), found) <= CLOSE
    merged = model.merge_and_unload(safe_merge=safe)
    assert error(logits(merged), found) <= CLOSE
    assert error(logits(reference), found) > CLOSE


def test_hooks_of_accelerate_go_along():
    """As they are where a device_map names several devices."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    class Noted(AlignDevicesHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            self.calls += 1
            return super().pre_forward(module, *args, **kwargs)

    layer = bnb.nn.Linear4bit(64, 24, quant_type="nf4", compute_dtype=torch.float32).to("cpu")
    hook = Noted(execution_device="cpu", io_same_device=True)
    model = torch.nn.Sequential(add_hook_to_module(layer, hook))
    x = torch.randn(3, 64)
    expected = model(x)
    assert nf4.torch.convert(model) == ["0"]
    assert type(model[0]) is nf4.torch.NF4Linear and error(model(x), expected) <= CLOSE
    assert hook.calls == 2


def test_an_offloaded_layer_is_refused():
    from accelerate import cpu_offload

    layer = bnb.nn.Linear4bit(64, 24, quant_type="nf4").to("cpu")
    model = cpu_offload(torch.nn.Sequential(layer), execution_device=torch.device("cpu"))
    with pytest.raises(nf4.InvalidArgument, match="^0: the weight is on meta, where accelerate"):
        nf4.torch.convert(model)
    assert model[0] is layer
