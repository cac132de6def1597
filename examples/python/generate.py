"""Generates text from a LLaMA-shaped model in 4 bits, in every form that serves it. Prints tokens a
second of each form and of the dense model:

    quantize_model   a dense model, quantized in place: NF4Linear
    bitsandbytes     saved, and loaded by from_pretrained as Linear4bit, on bitsandbytes' kernels
    drop-in          the same with libnf4 registered behind bitsandbytes
    convert          the same bytes in NF4Linear

The weights are random. On a GPU the layers are LLaMA-7B's, and the decode steps are compiled with a
static cache, which captures them in CUDA graphs. There, one call multiplies q, k and v, and one
call multiplies gate and up. The forms of bitsandbytes need bitsandbytes and accelerate.

python examples/python/generate.py [--layers 8] [--tokens 64] [--forms dense,convert]
"""

import argparse
import copy
import gc
import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator

import nf4

try:
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)
import nf4.torch
from nf4.torch import bitsandbytes as drop_in

FORMS = ("dense", "quantize_model", "bitsandbytes", "drop-in", "convert")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
# The error of logits against those of a dense model in fp32: bitsandbytes computes in bf16 on some
# CPUs. In the bf16 of a GPU the dense model has an error, too.
MOST_ERROR = 2e-2
MOST_OF_DENSE = 1.5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokens a second of a 4-bit model, form by form.")
    parser.add_argument("--layers", type=int, default=8 if DEVICE == "cuda" else 2)
    parser.add_argument("--tokens", type=int, default=64 if DEVICE == "cuda" else 8)
    parser.add_argument("--forms", default=",".join(FORMS))
    return parser.parse_args()


def config_for(layers: int) -> transformers.LlamaConfig:
    hidden, intermediate = (4096, 11008) if DEVICE == "cuda" else (128, 384)
    return transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        eos_token_id=None,
    )


def quantized(layers: int) -> transformers.PreTrainedModel:
    """All linear layers but the head are NF4Linear."""
    with torch.device(DEVICE):
        model = transformers.LlamaForCausalLM(config_for(layers)).to(DTYPE).eval()
    names = nf4.torch.quantize_model(model)
    size = sum(model.get_submodule(name).quantized.nbytes for name in names)
    print(f"{layers} layers on {DEVICE}, {size / 1e6:.1f} MB in {len(names)} linear layers")
    return model


def dense_of(model: torch.nn.Module, dtype: torch.dtype = DTYPE) -> torch.nn.Module:
    """A copy whose linear layers are dense, with the same numbers."""
    model = copy.deepcopy(model)
    nf4.torch.to_dense(model, dtype=dtype)
    return model.to(dtype)


def logits_of(model: torch.nn.Module, prompt: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt).logits.double()


def reloaded(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """By bitsandbytes: the checkpoint has its format."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPE, device_map={"": DEVICE}
        ).eval()


def each_form(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    yield "dense", dense_of(model)
    yield "quantize_model", model
    needed = ("bitsandbytes", "accelerate")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(f"bitsandbytes' forms are left out: no {' nor '.join(missing)}")
        return
    import bitsandbytes  # noqa: F401  registers libnf4, where pip installed it

    drop_in.unregister()
    yield "bitsandbytes", reloaded(model)
    drop_in.register()
    model = reloaded(model)
    yield "drop-in", model
    nf4.torch.convert(model)
    yield "convert", model


def generated(model: torch.nn.Module, prompt: torch.Tensor, tokens: int) -> tuple[list[int], float]:
    """Tokens, and how many a second once everything is compiled."""
    options = {"do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    # transformers compiles no model that bitsandbytes quantized; libnf4 has no such limit, and on
    # bitsandbytes' own kernels it works, too.
    model.hf_quantizer = None
    torch.compiler.reset()
    model.__dict__.pop("_compiled_call", None)
    for _ in range(2):  # the second captures
        model.generate(prompt, max_new_tokens=tokens, **options)
    began = time.perf_counter()
    found = model.generate(prompt, max_new_tokens=tokens, **options)[0, prompt.shape[1] :].tolist()
    return found, tokens / (time.perf_counter() - began)


def main() -> None:
    torch.manual_seed(0)
    given = arguments()
    prompt = torch.arange(1, 9, device=DEVICE)[None]
    first = quantized(given.layers)
    exact = logits_of(dense_of(first, torch.float32), prompt)
    most, dense_speed = MOST_ERROR, None
    for form, model in each_form(first):
        difference = ((logits_of(model, prompt) - exact).norm() / exact.norm()).item()
        if form == "dense":
            most = max(most, MOST_OF_DENSE * difference)
        assert difference <= most, f"{form}: logits off by {difference:.1e}; {most:.1e} at most"
        if form in given.forms.split(","):
            tokens, speed = generated(model, prompt, given.tokens)
            dense_speed = speed if form == "dense" else dense_speed
            beside = f"{speed / dense_speed:.2f} of dense, " if dense_speed else ""
            print(f"{form}: {speed:.0f} tokens/s, {beside}logits off by {difference:.1e}")
            print("    ", *tokens[:16], flush=True)
        del model
        gc.collect()


if __name__ == "__main__":
    main()
