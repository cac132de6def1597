"""Trains adapters beside a small LLaMA-shaped model in 4 bits (QLoRA), on a GPU or a CPU, with
transformers, PEFT and bitsandbytes, which runs on libnf4's kernels.

The script makes the model, so it downloads nothing. The model learns to count in steps.

python examples/python/qlora.py
"""

import sys
import tempfile
import time

import nf4

try:
    import accelerate  # noqa: F401  transformers asks for it
    import bitsandbytes as bnb
    import peft
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)
import nf4.torch

VOCABULARY, LENGTH, BATCH, STEPS = 64, 32, 16, 150
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def base_model(folder: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """A dense model of random weights, saved and loaded again in 4 bits."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return in_4bit(folder, dtype)


def in_4bit(folder: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=dtype, device_map=DEVICE
    )


def sequences(count: int) -> torch.Tensor:
    """Numbers that grow by a step of 1 to 4 and begin anew at the end of the vocabulary."""
    start = torch.randint(VOCABULARY, (count, 1))
    step = torch.randint(1, 5, (count, 1))
    return ((start + step * torch.arange(LENGTH)) % VOCABULARY).to(DEVICE)


def adapted(base: transformers.PreTrainedModel) -> peft.PeftModel:
    base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    config = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base, config)


def train(model: torch.nn.Module, steps: int = STEPS) -> list[float]:
    """The loss of each step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    losses = []
    for _ in range(steps):
        batch = sequences(BATCH)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.manual_seed(0)
    # An nf4 that pip installed is found by bitsandbytes; one in a checkout is not.
    served = nf4.torch.register_bitsandbytes()
    print(f"bitsandbytes on libnf4's kernels: {', '.join(served.operators)}")
    with tempfile.TemporaryDirectory() as folder:
        model = adapted(base_model(f"{folder}/base"))
        layers = sum(isinstance(each, bnb.nn.Linear4bit) for each in model.modules())
        began = time.perf_counter()
        losses = train(model.train())
        first, last = losses[0], sum(losses[-10:]) / 10
        seconds = time.perf_counter() - began
        print(f"{layers} layers in 4 bits, {STEPS} steps in {seconds:.1f} s: "
              f"loss {first:.2f} to {last:.2f}")  # fmt: skip
        assert last < 0.6 * first

        model.save_pretrained(f"{folder}/adapter")
        again = peft.PeftModel.from_pretrained(in_4bit(f"{folder}/base"), f"{folder}/adapter")
        batch = sequences(4)
        with torch.no_grad():
            found, expected = (each.eval()(batch).logits for each in (again, model))
        difference = ((found - expected).norm() / expected.norm()).item()
        print(f"the adapter, saved and loaded: logits differ by {difference:.0e}")
        assert difference < 1e-5


if __name__ == "__main__":
    main()
