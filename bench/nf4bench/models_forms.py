"""The forms of a linear layer: dense, bitsandbytes' Linear4bit, the same served by libnf4 (the
drop-in), and NF4Linear around the bytes of that. Each is made from one dense weight in bf16
[rows, cols], without a bias, and frozen."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from nf4.torch import NF4Linear
from torch import Tensor, nn

from nf4bench import peers
from nf4bench.models_cases import DROP_IN, FORMS, PEERS
from nf4bench.models_llama import random_weight
from nf4bench.peers import Missing, PeerMissing


class Peer(Protocol):
    version: str

    def linear(self, weight: Tensor) -> nn.Module: ...


class Dense:
    """torch.nn.Linear, which is cuBLAS, on the weight itself."""

    def __init__(self, place: str) -> None:
        self.version = torch.__version__

    def linear(self, weight: Tensor) -> nn.Linear:
        rows, cols = weight.shape
        made = nn.Linear(cols, rows, bias=False, device="meta")
        made.weight = nn.Parameter(weight, requires_grad=False)
        return made


class Bitsandbytes:
    """Linear4bit: NF4, doubly quantized, computing in the dtype of the weight, on its own
    kernels."""

    def __init__(self, place: str) -> None:
        self.version = peers.Bitsandbytes(place).version
        self._nn = importlib.import_module("bitsandbytes.nn")
        if importlib.import_module("nf4.torch.bitsandbytes").served() is not None:
            raise PeerMissing("libnf4 serves it; nf4.torch.bitsandbytes.unregister() ends that")

    def linear(self, weight: Tensor, **storage: torch.dtype) -> nn.Module:
        """It stays in training mode, in which it keeps its bytes on CPUs, too. storage: its
        quant_storage."""
        (rows, cols), options = weight.shape, {"quant_type": "nf4", **storage}
        made = self._nn.Linear4bit(
            cols, rows, bias=False, compute_dtype=weight.dtype, device="meta", **options
        )
        dense = self._nn.Params4bit(
            weight, requires_grad=False, compress_statistics=True, module=made, **options
        )
        made.weight = dense.to(weight.device)  # quantizes it
        return made


FACTORIES: dict[str, Any] = {"bitsandbytes": Bitsandbytes, "dense": Dense}


def load(place: str) -> dict[str, Peer | Missing]:
    """Each peer that can multiply and go backward here, or why it is missing."""

    def make(name: str) -> Peer:
        peer = FACTORIES[name](place)
        _try_out(peer, place)
        return peer

    return peers.load_each(PEERS, make)


def _try_out(peer: Peer, place: str) -> None:
    weight = random_weight(64, 256, place)
    x = torch.randn(2, 256, device=place, dtype=weight.dtype, requires_grad=True)
    peer.linear(weight)(x).sum().backward()


def names(present: Mapping[str, Peer]) -> list[str]:
    """The forms that are here, ours first."""
    here = {"libnf4", *present} | ({DROP_IN} if "bitsandbytes" in present else set())
    return [form for form in FORMS if form in here]


@contextmanager
def kernels_of(form: str) -> Iterator[None]:
    """Puts libnf4's behind bitsandbytes' layers for the drop-in, which are the same layers, and
    gives PEFT its own functions back for a peer."""
    if form == "libnf4":
        yield
        return
    backend = importlib.import_module(f"nf4.torch.{'bitsandbytes' if form == DROP_IN else 'peft'}")
    before, after = backend.register, backend.unregister
    if form != DROP_IN:
        before, after = after, before
    before()
    try:
        yield
    finally:
        after()


def of(weight: Tensor, present: Mapping[str, Peer]) -> dict[str, nn.Module]:
    """The weight in every form that is here. Ours has bitsandbytes' bytes, or where
    that is missing its own."""
    theirs = {name: peer.linear(weight) for name, peer in present.items()}
    if "bitsandbytes" in theirs:
        ours = NF4Linear.from_bitsandbytes(theirs["bitsandbytes"])
    else:
        ours = NF4Linear.from_linear(Dense(weight.device.type).linear(weight))
    made = {"libnf4": ours, DROP_IN: theirs.get("bitsandbytes"), **theirs}
    return {form: made[form] for form in names(present)}


def _of_quant_state(state: Any) -> Iterator[Tensor]:
    """The tensors of bitsandbytes' QuantState, which are no parameters of its layer."""
    for each in vars(state).values():
        if isinstance(each, Tensor):
            yield each
        elif type(each) is type(state):
            yield from _of_quant_state(each)


def bytes_of(module: nn.Module) -> int:
    """Of all tensors that a model holds, each counted once."""
    found: dict[int, int] = {}

    def count(tensors: Iterable[Tensor]) -> None:
        found.update((each.data_ptr(), each.numel() * each.element_size()) for each in tensors)

    count(module.parameters())
    count(module.buffers())
    for parameter in module.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            count(_of_quant_state(state))
    return sum(found.values())
