"""What is timed: one step of a model in each form. A step is a launch that returns what is compared
before anything is timed; weights, inputs, caches and adapters are made once and shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import nf4.torch
import torch
from torch import Tensor, nn

from nf4bench import models_forms, models_llama
from nf4bench.device import Launch
from nf4bench.models_cases import ADAPTED, CONTEXT, LORA_RANK, Group, Size
from nf4bench.models_llama import DTYPE, Cache, Ends, Linears, Llama, Lora, Mlp

COMPILER: Mapping[str, Any] = {"fullgraph": True, "dynamic": False}  # no autotuning

Run = Callable[..., Tensor]
Made = Mapping[str, tuple[nn.Module, Launch]]  # the model and its step, by form


def weights(
    size: Size, names: Sequence[str], present: Mapping[str, models_forms.Peer], place: str
) -> dict[str, list[Linears]]:
    """The linear layers of a size in every form, by form and layer: each has weights of its own, so
    that a step finds none in the caches."""
    forms: dict[str, list[Linears]] = {name: [] for name in models_forms.names(present)}
    for _ in range(size.layers):
        layer = {
            name: models_forms.of(models_llama.random_weight(*shape, place), present)
            for name, shape in size.linears().items()
            if name in names
        }
        for form, layers in forms.items():
            layers.append({name: each[form] for name, each in layer.items()})
    return forms


def _steps(models: Mapping[str, nn.Module], step: Callable[[nn.Module, int], Any]) -> Made:
    nf4.torch.convert(models["libnf4"], siblings="all")  # whose layers know their siblings then
    return {form: (each, partial(step, each)) for form, each in models.items()}


class Models:
    """A model of the largest size, of which smaller ones take the first layers. forms: its
    linear layers, by form and layer."""

    def __init__(self, size: Size, present: Mapping[str, models_forms.Peer], place: str) -> None:
        self.place = place
        self.forms = weights(size, tuple(size.linears()), present, place)
        self._ends = Ends.random(size, place)
        self._adapters = [_adapters(size, place) for _ in range(size.layers)]

    def _llamas(self, size: Size, adapted: bool = False) -> dict[str, Llama]:
        def layers(plain: list[Linears]) -> list[Linears]:
            return list(map(_with, plain, self._adapters)) if adapted else plain

        return {form: Llama(size, self._ends, layers(each)) for form, each in self.forms.items()}

    def _tokens(self, group: Group) -> Tensor:
        shape = (group.batch, group.tokens)
        return torch.randint(group.size.vocabulary, shape, device=self.place)

    def _positions(self, group: Group) -> Tensor:
        """The last of the context for one token, the first ones for several."""
        first = CONTEXT - 1 if group.tokens == 1 else 0
        return torch.arange(first, first + group.tokens, device=self.place)

    def inference(self, group: Group, run: Run) -> Made:
        """Logits of the last token."""
        tokens, positions = self._tokens(group), self._positions(group)
        models = self._llamas(group.size)
        caches = [_cache(group, positions, self.place) for _ in range(group.size.layers)]
        if group.tokens == 1:
            self._read_prompt(list(models.values())[-1], group, caches)

        @torch.no_grad()
        def step(model: nn.Module, stream: int) -> Tensor:
            return model(tokens, positions, caches, run=run)

        return _steps(models, step)

    @torch.no_grad()
    def _read_prompt(self, model: Llama, group: Group, caches: Sequence[Cache]) -> None:
        """Fills the caches with the keys and values of one model for a prompt as long as they."""
        prompt = replace(group, tokens=CONTEXT)
        positions = self._positions(prompt)
        whole = [each._replace(positions=positions) for each in caches]
        model(self._tokens(prompt), positions, whole)

    def training(self, group: Group, run: Run) -> Made:
        """The gradients of the adapters, of the loss in predicting random tokens."""
        tokens, targets = self._tokens(group), self._tokens(group).view(-1)
        positions, used = self._positions(group), self._adapters[: group.size.layers]
        parameters = [part for layer in used for pair in layer.values() for part in pair]

        def step(model: nn.Module, stream: int) -> tuple[Tensor, ...]:
            logits = model(tokens, positions, training=True, run=run)
            loss = nn.functional.cross_entropy(logits.view(len(targets), -1).float(), targets)
            return torch.autograd.grad(loss, parameters)

        return _steps(self._llamas(group.size, adapted=True), step)


def _adapters(size: Size, place: str) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """down and up of one layer's adapters, by name. None is zero, so that no gradient is."""
    shapes = size.linears()

    def parameter(rows: int, cols: int) -> nn.Parameter:
        return nn.Parameter(models_llama.random_weight(rows, cols, place))

    return {
        name: (parameter(LORA_RANK, shapes[name][1]), parameter(shapes[name][0], LORA_RANK))
        for name in ADAPTED
    }


def _with(
    linears: Linears, adapters: Mapping[str, tuple[nn.Parameter, nn.Parameter]]
) -> dict[str, nn.Module]:
    return {**linears, **{name: Lora(linears[name], *pair) for name, pair in adapters.items()}}


def _cache(group: Group, positions: Tensor, place: str) -> Cache:
    shape = (group.batch, group.size.heads, CONTEXT, group.size.hidden // group.size.heads)
    keys, values = (torch.zeros(shape, dtype=DTYPE, device=place) for _ in range(2))
    return Cache(keys, values, positions)


def mlp(group: Group, present: Mapping[str, models_forms.Peer], run: Run, place: str) -> Made:
    """The MLP of a layer of its own, on normal values."""
    forms = weights(group.size, ("gate_proj", "up_proj", "down_proj"), present, place)
    x = torch.randn(group.batch, group.tokens, group.size.hidden, dtype=DTYPE, device=place)

    @torch.no_grad()
    def step(module: nn.Module, stream: int) -> Tensor:
        return run(module, x)

    return _steps({form: Mlp(layers[0]) for form, layers in forms.items()}, step)


def runner(compiled: bool) -> Run:
    """What runs a layer: a call, or a compiled one, of which nothing is left from before."""
    if not compiled:
        return models_llama.call
    torch.compiler.reset()
    return torch.compile(models_llama.call, **COMPILER)
