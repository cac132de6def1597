"""Makes tests/golden/llama: a small model of LLaMA's shape with random weights, in the 4 bits that
`nf4 quantize` writes, and what transformers computes from the dequantized weights in fp32.

    python tests/golden/make_llama.py      needs torch and transformers
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import nf4
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent / "llama"
PROMPT = [1, 17, 42, 5, 99, 3]
TOKENS = 24


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=64,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for weight in model.parameters():
        # Larger than at the start of training, so that the next token is no matter of rounding.
        if weight.ndim == 2:
            weight.data.normal_(0, 0.25)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/dense")
        command = [sys.executable, "-m", "nf4", "quantize", f"{folder}/dense", f"{folder}/nf4"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        HERE.mkdir(exist_ok=True)
        for name in ("config.json", "model.safetensors"):
            (HERE / name).write_bytes(Path(folder, "nf4", name).read_bytes())
    dense = {}
    for name, value in nf4.load(HERE / "model.safetensors").items():
        if isinstance(value, nf4.Weight):
            value = nf4.dequantize(value, "fp32")
        dense[name] = torch.from_numpy(np.array(value, np.float32))
    # A new one: the first has rounded its frequencies to bf16 as well.
    model = LlamaForCausalLM(config).float().eval()
    model.load_state_dict(dense)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, -1]
        tokens = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
        )
        rounded = LlamaForCausalLM(config).eval()
        rounded.load_state_dict(dense)
        for weight in rounded.parameters():
            weight.data = weight.data.bfloat16()
        error = rounded(torch.tensor([PROMPT])).logits[0, -1].float() - logits
    expected = {
        "prompt": PROMPT,
        "bf16_rms_error": [round(error.square().mean().sqrt().item(), 6)],
        "logits": [round(value, 6) for value in logits.tolist()],
        "tokens": tokens[0, len(PROMPT) :].tolist(),
    }
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
