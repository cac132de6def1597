"""A step of QLoRA over a model of gpt-oss-20b's shape, whose experts are in MXFP4 or NVFP4, beside
the same model dense. Each model has PEFT's adapters on the attention, or on its experts too. The
gradients are compared before anything is timed, with the experts that the dense model chooses in
both models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from nf4.torch.experts import quantize_stack
from torch import Tensor, nn

from nf4bench import models_forms, training_model
from nf4bench.experts_weights import DTYPE
from nf4bench.matmul_cases import MOST_ERROR
from nf4bench.measure import taken
from nf4bench.product import require
from nf4bench.rows import Bench, Report, begin
from nf4bench.training import Step, figures_of, timed
from nf4bench.training_cases import ALPHA, RANK, TURNS, WARM_UP, Group

STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ROUTER = "mlp.router"
# The products with experts that a gradient passes in a layer: two forward, and their gradients.
PRODUCTS = 4


@dataclass(frozen=True)
class Size:
    """vocabulary: a share of the model's, as are the layers. tokens: sequences and their length."""

    layers: int = 4
    hidden: int = 2880
    intermediate: int = 2880
    experts: int = 32
    top_k: int = 4
    heads: int = 64
    key_value_heads: int = 8
    head_dim: int = 64
    vocabulary: int = 201088 * 4 // 24
    tokens: tuple[int, int] = (4, 512)


GPT_OSS = Size()


def _model(size: Size, place: str) -> nn.Module:
    import transformers

    config = transformers.GptOssConfig(
        hidden_size=size.hidden, intermediate_size=size.intermediate,
        num_local_experts=size.experts, num_experts_per_tok=size.top_k,
        num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads, head_dim=size.head_dim,
        vocab_size=size.vocabulary, use_cache=False, pad_token_id=0, eos_token_id=0,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    with torch.device(place):
        return transformers.GptOssForCausalLM._from_config(config, dtype=DTYPE)


def _models(size: Size, place: str, format: str) -> dict[str, nn.Module]:
    """Returns the model with experts in 4 bits, and the dense one, which has the same numbers."""
    made = {"libnf4": _model(size, place), "dense": _model(size, place)}
    names = [name for name, _ in made["dense"].named_parameters() if name.endswith(STACKS)]
    rule = {"scale_rule": "even"} if format == "mxfp4" else {}
    for name in names:
        quantize_stack(made["libnf4"], name, None, format=format, **rule)
        dense = made["libnf4"].get_submodule(name).dequantize()
        made["dense"].get_parameter(name).data.copy_(dense.transpose(1, 2))
    return made


def _adapted(model: nn.Module, on_experts: bool) -> nn.Module:
    import peft

    more = {"target_parameters": list(STACKS)} if on_experts else {}
    lora = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(ATTENTION), lora_dropout=0.0,
        task_type="CAUSAL_LM", **more,
    )  # fmt: skip
    return peft.get_peft_model(model, lora).train()


@contextmanager
def _routed(model: nn.Module, chosen: dict[str, Tensor]) -> Iterator[None]:
    """Routers choose the experts in `chosen`, by the router's name. A router that is not there
    chooses itself, and its choice is added. Without this, rounding to bf16 would change choices."""

    def hook_of(name: str) -> Any:
        def hook(router: nn.Module, given: Any, made: Any) -> Any:
            logits, _, own = made
            indices = chosen.setdefault(name, own)
            return logits, logits.gather(1, indices).softmax(1, dtype=logits.dtype), indices

        return hook

    routers = [each for each in model.named_modules() if each[0].endswith(ROUTER)]
    hooks = [router.register_forward_hook(hook_of(name)) for name, router in routers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _checked(bench: Bench, what: str, layers: int, steps: Mapping[str, Step]) -> float:
    """The distance of the gradients. Raises WrongResult if it is more than that of all products
    with experts that a gradient passes, each with the largest error that nf4.h allows."""
    found, chosen = {}, dict[str, Tensor]()
    for form in ("dense", "libnf4"):
        with models_forms.kernels_of(form), _routed(steps[form].model, chosen):
            made = bench.gpu.run(steps[form].gradients)
        found[form] = torch.cat([each.double().view(-1) for each in made])
    most = layers * PRODUCTS * MOST_ERROR["bf16"]
    return require(what, most, found["dense"], found["libnf4"])


def row(
    bench: Bench, models: Mapping[str, nn.Module], size: Size, on_experts: bool
) -> dict[str, Any]:
    """Raises WrongResult before anything is timed."""
    place, adapters = bench.gpu.place, "attention and experts" if on_experts else "attention"
    held = {form: models_forms.bytes_of(model) for form, model in models.items()}
    models = {form: _adapted(model, on_experts) for form, model in models.items()}
    tokens = torch.randint(size.vocabulary, size.tokens, device=place)
    group = Group("bf16", checkpointing=False)
    steps = {form: Step(model, group, tokens) for form, model in models.items()}
    error = _checked(bench, f"adapters on {adapters}", size.layers, steps)
    peaks = {}
    for form, step in steps.items():
        with models_forms.kernels_of(form):
            peaks[form] = held[form] + bench.gpu.peak_bytes(step)
    work = {form: partial(timed, bench, form, step) for form, step in steps.items()}
    times = taken(work, bench.replays or TURNS, WARM_UP, rotate=True)
    whole = {form: figures_of(each)[0] for form, each in times.items()}
    return {
        "adapters": adapters, "layers": size.layers, "tokens": list(size.tokens),
        "error": float(f"{error:.3e}"),
        "time_over_dense": round(whole["libnf4"].us / whole["dense"].us, 3),
        "bytes_over_dense": round(peaks["libnf4"] / peaks["dense"], 3),
        "forms": {
            form: {**each.figures(), "bytes": peaks[form], "model_bytes": held[form]}
            for form, each in whole.items()
        },
    }  # fmt: skip


def _line(made: Mapping[str, Any]) -> str:
    forms = ", ".join(
        f"{form} {each['us'] / 1e3:.1f} ms {each['bytes'] / 1e9:.2f} GB"
        for form, each in made["forms"].items()
    )
    return (
        f"adapters on {made['adapters']}: {forms}; over dense: time {made['time_over_dense']}, "
        f"memory {made['bytes_over_dense']}; gradients {made['error']}"
    )


def run(bench: Bench, format: str, report: Report, size: Size = GPT_OSS) -> dict[str, Any]:
    """All figures. Raises WrongResult before a row is timed."""
    figures = begin(bench, {}, report) | {"format": format, "rows": []}
    figures["versions"] = training_model.versions()
    for on_experts in (False, True):
        models = _models(size, bench.gpu.place, format)
        figures["rows"].append(row(bench, models, size, on_experts))
        report(_line(figures["rows"][-1]))
        del models
        bench.gpu.release()
    return figures
