"""Quantizes a Qwen3-shaped mixture of experts to 4 bits on the CPU, with its stacks of experts.
Prints its size, compares its logits with the dense model's, and generates a few tokens. The weights
are random.

python examples/python/experts.py
"""

import copy
import sys

import nf4

try:
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)
import nf4.torch

TOKENS = torch.arange(16).view(1, 16)
# The error in the norm of rounding weights to 4 bits, which is about 0.1 for each product.
ALLOWED = 0.4


def dense_model() -> transformers.PreTrainedModel:
    config = transformers.Qwen3MoeConfig(
        hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=512,
        num_experts=16, num_experts_per_tok=4,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).eval()


def megabytes(model: torch.nn.Module) -> float:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6


def main() -> None:
    torch.manual_seed(0)
    dense = dense_model()
    model = copy.deepcopy(dense)
    replaced = nf4.torch.quantize_model(model, experts=True)
    stacks = [name for name in replaced if ".experts." in name]
    with torch.no_grad():
        expected, logits = dense(TOKENS).logits, model(TOKENS).logits
        made = model.generate(TOKENS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    error = ((logits - expected).norm() / expected.norm()).item()
    print(f"{len(replaced)} weights in 4 bits, {len(stacks)} of them stacks of experts")
    print(
        f"{megabytes(dense):.1f} MB dense, {megabytes(model):.1f} MB now; logits off by {error:.2f}"
    )
    print("tokens:", made[0, TOKENS.shape[1] :].tolist())
    assert stacks and error < ALLOWED


if __name__ == "__main__":
    main()
