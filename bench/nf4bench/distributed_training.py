"""A step of QLoRA over several GPUs, as each of torchrun's processes runs it: transformers' decoder
layers of LLaMA-70B's shape with PEFT's adapters, sharded by FSDP2. In three forms, by turns:
NF4Linear sharded, bitsandbytes' Linear4bit sharded (its recipe: bf16 as quant_storage), and
NF4Linear whole on each GPU, which has the same work but no communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from nf4.torch import NF4Linear
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from nf4bench import models_forms, training_model
from nf4bench.errors import WrongResult
from nf4bench.measure import summary, taken
from nf4bench.models_llama import DTYPE, random_weight
from nf4bench.product import relative_error, require

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 8192, 28672, 64, 8
LAYERS, TOKENS = 8, (1, 2048)
STEPS, TURNS = 2, 5
SHARDED, THEIRS, ONE = "libnf4", "bitsandbytes", "libnf4, one GPU"
SAME_ERROR = 1e-2  # means over ranks are rounded to bf16, whose rounding is 4e-3


def _config() -> Any:
    import transformers

    return transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, num_hidden_layers=LAYERS, vocab_size=32, use_cache=False,
    )  # fmt: skip


def _model(linear_of: Callable[[int, str, nn.Linear], nn.Module], is_4bit: bool, place: str) -> Any:
    """The decoder layers with adapters."""
    import transformers

    made = training_model.adapted(transformers.LlamaModel, _config(), linear_of, is_4bit, place)
    torch.manual_seed(0)
    for parameter in training_model.trained(made):
        fresh = torch.empty_like(parameter, dtype=DTYPE, device=place)
        parameter.data = fresh.normal_(std=0.5 * parameter.shape[1] ** -0.5)
    return made


def models(place: str) -> dict[str, nn.Module]:
    """By form, around the same bytes before they are sharded."""
    theirs: dict[tuple[int, str], nn.Module] = {}
    bitsandbytes = models_forms.Bitsandbytes(place)

    def their(at: int, name: str, linear: nn.Linear) -> nn.Module:
        weight = random_weight(*linear.weight.shape, place)
        theirs[at, name] = bitsandbytes.linear(weight, quant_storage=DTYPE)
        return theirs[at, name]

    def our(at: int, name: str, linear: nn.Linear) -> nn.Module:
        return NF4Linear.from_bitsandbytes(theirs[at, name])

    with models_forms.kernels_of(THEIRS):
        made = {THEIRS: _model(their, True, place)}
    made |= {ONE: _model(our, False, place), SHARDED: _model(our, False, place)}
    for form in (SHARDED, THEIRS):
        layers = made[form].base_model.model.layers
        for at, layer in enumerate(layers):
            # The backward pass begins with the last one.
            fully_shard(layer, reshard_after_forward=at + 1 < len(layers))
        fully_shard(made[form])
    return made


class Step:
    def __init__(self, form: str, model: nn.Module, x: Tensor) -> None:
        self.form, self.model, self.x = form, model, x
        self.optimizer = torch.optim.AdamW(training_model.trained(model), lr=1e-5, fused=x.is_cuda)

    def forward(self) -> Tensor:
        return self.model(inputs_embeds=self.x).last_hidden_state

    def backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        # Neither the sum of normed outputs nor the sum of their squares says much.
        self.forward()[..., ::2].float().sum().backward()

    def gradients(self) -> Tensor:
        """Of all adapters. Means over ranks that have the same x are what each has."""
        self.backward()
        trained = [each.grad for each in training_model.trained(self.model)]
        whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in trained]
        return torch.cat([each.double().view(-1) for each in whole])

    def __call__(self) -> None:
        self.backward()
        self.optimizer.step()


def _kernels_of(form: str) -> Any:
    return models_forms.kernels_of(THEIRS if form == THEIRS else "libnf4")


def _checked(steps: Mapping[str, Step]) -> dict[str, float]:
    """How far y of each form is from that of one GPU. Raises WrongResult for ours, whose y is
    the same sums, and whose gradients are means of the same. bitsandbytes' bytes are copied as
    bf16, which changes those that are a NaN's."""
    ys, gradients = {}, {}
    for form, step in steps.items():
        with _kernels_of(form), torch.no_grad():
            ys[form] = step.forward().double().view(-1)
        if form != THEIRS:
            gradients[form] = step.gradients()
    if not torch.equal(ys[ONE], ys[SHARDED]):
        raise WrongResult(f"{SHARDED}: y has other bits than that of one GPU")
    require(f"{SHARDED}: gradients", SAME_ERROR, gradients[ONE], gradients[SHARDED])
    return {form: float(f"{relative_error(y, ys[ONE]):.3e}") for form, y in ys.items()}


def _timed(step: Step) -> float:
    """Microseconds of a step, of the rank that takes longest."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with _kernels_of(step.form):
        step()
        torch.cuda.synchronize()
        dist.barrier()
        began.record()
        for _ in range(STEPS):
            step()
        ended.record()
        torch.cuda.synchronize()
    longest = torch.tensor(began.elapsed_time(ended) * 1e3 / STEPS, device=step.x.device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def _peak(step: Step) -> int:
    """Bytes that a step needs beyond what is there before it."""
    with _kernels_of(step.form):
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _weights(model: nn.Module) -> int:
    return sum(
        each.in_features * each.out_features
        for each in model.modules()
        if isinstance(each, NF4Linear)
    )


def _resident(model: nn.Module) -> int:
    """Bytes of a rank's quantized weights between steps."""
    found = 0
    for layer in model.modules():
        if isinstance(layer, NF4Linear):
            for each in (layer.weight, *layer.buffers(recurse=False)):
                found += (each.to_local() if hasattr(each, "to_local") else each).nbytes
    return found


def _parts(model: nn.Module) -> int:
    """Bytes of the parts that are sharded, of all ranks together, by their shapes and dtypes."""
    return sum(
        layer.weight.nbytes + layer.absmax.nbytes
        for layer in model.modules()
        if isinstance(layer, NF4Linear)
    )


def run(place: str) -> Mapping[str, Any]:
    """The figures; the same on every rank. Raises WrongResult before anything is timed."""
    torch.manual_seed(0)
    x = torch.randn(*TOKENS, HIDDEN, dtype=DTYPE, device=place)
    steps = {form: Step(form, model, x) for form, model in models(place).items()}
    errors = _checked(steps)
    times = taken({f: partial(_timed, each) for f, each in steps.items()}, TURNS, 1, rotate=True)
    figures = {form: summary(each).figures() for form, each in times.items()}
    for form, step in steps.items():
        figures[form] |= {"error": errors[form], "step_bytes": _peak(step)}
    ours, one = steps[SHARDED].model, steps[ONE].model
    figures[SHARDED]["sharded_bytes_a_weight"] = round(_parts(ours) / _weights(ours), 4)
    for form, model in ((SHARDED, ours), (ONE, one)):
        figures[form]["resident_bytes"] = _resident(model)
    return figures
