"""Rounds the linear layers of a model one after the other, each by what it sees when the layers
before it are rounded."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nf4.errors import InvalidArgument


class Seen(NamedTuple):
    """What a layer sees: the mean of x x^T, [columns, columns] in fp32, of so many tokens."""

    hessian: Tensor
    tokens: int


Round = Callable[[str, nn.Module, Seen], None]
_Hook = Callable[..., None]


class _Stop(Exception):
    """Ends a forward pass whose rest is of no use."""


@dataclasses.dataclass
class _Calls:
    """How a decoder layer is called for each batch: x, which the layers before it make, and the
    other arguments, which are those of the dense model."""

    x: list[Tensor] = dataclasses.field(default_factory=list)
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = dataclasses.field(default_factory=list)

    def run(self, decoder: nn.Module, batch: int) -> Tensor:
        args, kwargs = self.others[batch]
        found = decoder(self.x[batch], *args, **kwargs)
        return _x_of(found)


def _x_of(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple) else found


def decoder_layers(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Returns the modules of the nn.ModuleList that has the most of the layers `names`, by name. If
    the model says which part is its decoder, other parts, such as a vision tower, are left out.
    Raises InvalidArgument if no list has any."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    within = set(decoder.modules())
    modules = model.named_modules()
    lists = {
        name: each for name, each in modules if isinstance(each, nn.ModuleList) and each in within
    }
    counts = {list: sum(name.startswith(f"{list}.") for name in names) for list in lists}
    # A list within another one has no more layers, and comes later.
    best = max(counts, key=counts.__getitem__, default="")
    if not counts.get(best):
        raise InvalidArgument("model has no list of decoder layers, which calibration needs")
    return {f"{best}.{at}": each for at, each in enumerate(lists[best])}


@torch.no_grad()
def round_layers(
    model: nn.Module,
    names: Sequence[str],
    batches: Sequence[Tensor],
    rounds: Round,
    advance: Callable[[str], None] = lambda name: None,
    restore: Callable[[str], bool] = lambda name: False,
) -> None:
    """Calls rounds(name, layer, seen) for the linear layers `names` in the order in which the model
    calls them. `rounds` changes or replaces the layer; what later layers see follows from that.
    Layers that are not called for the first batch, or not in a decoder layer, are left out. If a
    decoder layer calls a layer several times, x of all these calls counts, and what later calls see
    before the layer is rounded.

    batches   token ids, [windows, tokens] each
    advance   called with the name of each decoder layer that is done
    restore   called with the name of each decoder layer at its turn; true if it has rounded its
              linear layers itself

    Memory beside the model: the x of a decoder layer for all tokens, and x x^T of a linear layer.
    Raises InvalidArgument for a model without decoder layers, or whose decoder layers are not
    called once each with what the one before returns, and if x has NaN or Inf.
    """
    decoders = decoder_layers(model, names)
    calls = _first_calls(model, decoders, batches)
    for name, following in zip(decoders, [*list(decoders)[1:], None], strict=True):
        if not restore(name):
            own = {each: model.get_submodule(each) for each in names if each.startswith(f"{name}.")}
            _round_decoder(decoders[name], own, calls[name], rounds)
        for batch in range(len(batches)) if following else ():
            calls[following].x.append(calls[name].run(decoders[name], batch))
        del calls[name]
        advance(name)


def _round_decoder(
    decoder: nn.Module, own: Mapping[str, nn.Module], calls: _Calls, rounds: Round
) -> None:
    for group, once in _groups(decoder, own, calls):
        seen = _seen(decoder, own[group[0]], calls, once)
        if not seen.hessian.isfinite().all():
            raise InvalidArgument(f"{group[0]}: x has NaN or Inf for the calibration")
        for each in group:
            rounds(each, own[each], seen)


@contextlib.contextmanager
def _hooked(hooks: Mapping[nn.Module, _Hook], with_kwargs: bool = False) -> Iterator[None]:
    """Has hooks before calls of modules."""
    handles = [
        each.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
        for each, hook in hooks.items()
    ]
    try:
        yield
    finally:
        for each in handles:
            each.remove()


def _first_calls(
    model: nn.Module, decoders: Mapping[str, nn.Module], batches: Sequence[Tensor]
) -> dict[str, _Calls]:
    """Returns how the dense model calls each decoder layer, with the x of the first one alone."""
    calls = {name: _Calls() for name in decoders}
    first, last = next(iter(decoders)), next(reversed(decoders))
    # The names of the decoder layers that a forward pass is still to call, and the last one's x.
    left, made = list[str](), list[Tensor]()

    def returned(_: nn.Module, _args: tuple[Any, ...], found: Any) -> None:
        made[:] = [_x_of(found)]

    def hook(name: str) -> _Hook:
        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kwargs = dict(kwargs)
            x, *rest = args or (kwargs.pop("hidden_states"),)
            if name != left.pop(0) or (name != first and not _same(x, made[0])):
                raise InvalidArgument(
                    f"{name} is not called once, with what the decoder layer before it returns; "
                    f"calibration needs that"
                )
            if name == first:
                calls[name].x.append(x)
            calls[name].others.append((tuple(rest), kwargs))
            if name == last:
                raise _Stop

        return keep

    options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    with contextlib.ExitStack() as stack:
        hooks = {each: hook(name) for name, each in decoders.items()}
        stack.enter_context(_hooked(hooks, with_kwargs=True))
        for each in hooks:
            stack.callback(each.register_forward_hook(returned).remove)
        for batch in batches:
            left[:] = decoders
            with contextlib.suppress(_Stop):
                model(input_ids=batch, **options)
    if not calls[last].others:
        raise InvalidArgument(f"model does not call {last} for token ids, which calibration needs")
    return calls


def _same(x: Tensor, made: Tensor) -> bool:
    return x is made or torch.equal(x, made.to(x.device))


def _groups(
    decoder: nn.Module, own: Mapping[str, nn.Module], calls: _Calls
) -> list[tuple[list[str], bool]]:
    """Returns the linear layers in the order of their first calls, with whether it is the only one.
    Those that get the same x in their only call are together."""
    xs: dict[str, list[Tensor]] = {}

    def hook(name: str) -> _Hook:
        def keep(_: nn.Module, args: tuple[Any, ...]) -> None:
            xs.setdefault(name, []).append(args[0])

        return keep

    with _hooked({each: hook(name) for name, each in own.items()}):
        calls.run(decoder, 0)
    groups: list[tuple[list[str], bool]] = []
    for name, (x, *more) in xs.items():
        last = groups[-1] if groups else None
        if last and last[1] and not more and xs[last[0][0]][0] is x:
            last[0].append(name)
        else:
            groups.append(([name], not more))
    return groups


def _seen(decoder: nn.Module, layer: nn.Module, calls: _Calls, once: bool) -> Seen:
    """once: whether the decoder layer calls the layer no more than once."""
    sums, tokens = [], 0

    def add(_: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal tokens
        x = args[0].flatten(0, -2).float()
        tokens += len(x)
        sums[:] = [x.T @ x + sums[0] if sums else x.T @ x]
        if once:
            raise _Stop

    with _hooked({layer: add}):
        for batch in range(len(calls.x)):
            with contextlib.suppress(_Stop):
                calls.run(decoder, batch)
    return Seen(sums[0] / tokens, tokens)
