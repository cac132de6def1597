"""Text from a LLaMA-shaped model in 4 bits, on the GPU if there is one: every linear layer is an
NF4Linear, and what it generates is what the same weights generate when they are dense.

The weights are random, made here. On a GPU the model is large enough to be worth a look at the
clock.

python examples/python/generate.py
"""

import copy
import sys
import time

import nf4

try:
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)
import nf4.torch

TOKENS = 32


def config_for(device: str) -> transformers.LlamaConfig:
    sizes = (2048, 5632, 8) if device == "cuda" else (128, 352, 2)
    hidden, intermediate, layers = sizes
    return transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        eos_token_id=None,
    )


def quantize(model: transformers.PreTrainedModel) -> int:
    """Swaps the linear layers for NF4Linear, all but the head. Returns their bytes."""
    names = nf4.torch.quantize_model(model)
    return sum(model.get_submodule(name).quantized.nbytes for name in names)


def dequantized(model: torch.nn.Module) -> torch.nn.Module:
    """A copy whose linear layers are dense, with the same numbers."""
    model = copy.deepcopy(model)
    nf4.torch.to_dense(model)
    return model


def generated(model: torch.nn.Module, prompt: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Tokens, and the milliseconds that each took."""
    options = {"do_sample": False, "pad_token_id": 0}
    model.generate(prompt, max_new_tokens=2, **options)
    began = time.perf_counter()
    tokens = model.generate(prompt, max_new_tokens=TOKENS, **options).cpu()
    return tokens, (time.perf_counter() - began) * 1e3 / TOKENS


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = transformers.LlamaForCausalLM(config_for(device)).to(device, dtype).eval()
    size = quantize(model)
    dense = dequantized(model)
    prompt = torch.arange(1, 9, device=device)[None]
    with torch.no_grad():
        found, expected = model(prompt).logits.double(), dense(prompt).logits.double()
    difference = ((found - expected).norm() / expected.norm()).item()
    tokens, milliseconds = generated(model, prompt)
    _, dense_milliseconds = generated(dense, prompt)
    print(f"{size / 1e6:.1f} MB of layers on {device}, logits off by {difference:.1e}")
    print(f"{milliseconds:.1f} ms a token, dense {dense_milliseconds:.1f} ms")
    print("tokens:", *tokens[0, 8:].tolist())
    assert tokens.shape == (1, 8 + TOKENS)
    assert difference < (2e-2 if dtype == torch.bfloat16 else 1e-5)


if __name__ == "__main__":
    main()
