"""A LLaMA-shaped model in plain torch around linear layers of any form: RMSNorm, rotary
embeddings, attention by torch's scaled_dot_product_attention over a static key-value cache, SwiGLU.
x is [batch, tokens, hidden]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from nf4bench.models_cases import CONTEXT, Size

DTYPE = torch.bfloat16
GAIN = 0.5  # the gain of a linear layer with random weights
EPSILON, THETA = 1e-5, 10000.0

Linears = Mapping[str, nn.Module]  # the linear layers of one layer, by name


class Turns(NamedTuple):
    """What rotates queries and keys, each [tokens, head size]: x cos + swapped(x) sin, where
    `swapped` exchanges the halves of a head and sin has the signs."""

    cos: Tensor
    sin: Tensor


class Cache(NamedTuple):
    """Keys and values of one layer, [batch, heads, CONTEXT, head size], and the positions [tokens]
    that a step writes."""

    keys: Tensor
    values: Tensor
    positions: Tensor


def random_weight(rows: int, cols: int, place: str) -> Tensor:
    """Its y is GAIN times as large as x at any size: what rounding does to a model is then alike
    in a large and in a small one."""
    return torch.empty(rows, cols, dtype=DTYPE, device=place).normal_(std=GAIN * cols**-0.5)


@dataclass
class Ends:
    """What is dense in every form, and shared by all: embedding and head, [vocabulary, hidden],
    the norms' weights, and the rotations of all positions."""

    embedding: Tensor
    head: Tensor
    norm: Tensor
    turns: Turns

    @classmethod
    def random(cls, size: Size, place: str) -> Ends:
        embedding, head = (random_weight(size.vocabulary, size.hidden, place) for _ in range(2))
        norm = torch.ones(size.hidden, dtype=DTYPE, device=place)
        return cls(embedding, head, norm, _turns(size, place))


def _turns(size: Size, place: str) -> Turns:
    width = size.hidden // size.heads
    frequencies = THETA ** (-torch.arange(0, width, 2, device=place) / width)
    angles = torch.outer(torch.arange(CONTEXT, device=place), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return Turns(torch.cat((cos, cos), -1).to(DTYPE), torch.cat((-sin, sin), -1).to(DTYPE))


def _rotated(x: Tensor, turns: Turns) -> Tensor:
    return torch.addcmul(x * turns.cos, x.roll(x.shape[-1] // 2, -1), turns.sin)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, linears: Linears) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linears["gate_proj"], linears["up_proj"]
        self.down_proj = linears["down_proj"]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    def __init__(self, heads: int, linears: Linears) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = linears["q_proj"], linears["k_proj"]
        self.v_proj, self.o_proj = linears["v_proj"], linears["o_proj"]

    def _by_head(self, x: Tensor) -> Tensor:
        """[batch, heads, tokens, head size]"""
        batch, tokens, _ = x.shape
        return x.view(batch, tokens, self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, turns: Turns, cache: Cache | None) -> Tensor:
        """Several tokens see each other up to themselves; one sees the whole cache."""
        q = _rotated(self._by_head(self.q_proj(x)), turns)
        k = _rotated(self._by_head(self.k_proj(x)), turns)
        v = self._by_head(self.v_proj(x))
        if cache is not None:
            cache.keys.index_copy_(2, cache.positions, k)
            cache.values.index_copy_(2, cache.positions, v)
        if cache is not None and x.shape[1] == 1:
            seen = functional.scaled_dot_product_attention(q, cache.keys, cache.values)
        else:
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(seen.transpose(1, 2).reshape(x.shape))


class Layer(nn.Module):
    def __init__(self, size: Size, norm: Tensor, linears: Linears) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(size.heads, linears), Mlp(linears)
        self.register_buffer("norm", norm)

    def _normed(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.norm.shape, self.norm, EPSILON)

    def forward(self, x: Tensor, turns: Turns, cache: Cache | None = None) -> Tensor:
        x = x + self.attention(self._normed(x), turns, cache)
        return x + self.mlp(self._normed(x))


def call(module: nn.Module, *arguments: Any) -> Tensor:
    """What a compiler compiles in place of."""
    return module(*arguments)


class Llama(nn.Module):
    def __init__(self, size: Size, ends: Ends, linears: Sequence[Linears]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(size, ends.norm, each) for each in linears[: size.layers])
        for name in ("embedding", "head", "norm"):
            self.register_buffer(name, getattr(ends, name))
        self.turns = ends.turns

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        caches: Sequence[Cache] | None = None,
        training: bool = False,
        run: Callable[..., Tensor] = call,
    ) -> Tensor:
        """Logits [batch, vocabulary] of the last of the tokens [batch, tokens]; in training of all,
        [batch, tokens, vocabulary]. `run` runs a layer."""
        x = functional.embedding(tokens, self.embedding)
        if training:
            # PEFT prepares 4-bit models so; all layers are alike then, and compiled once.
            x.requires_grad_()
        turns = Turns(self.turns.cos[positions], self.turns.sin[positions])
        for i, layer in enumerate(self.layers):
            x = run(layer, x, turns, None if caches is None else caches[i])
        if not training:
            x = x[:, -1]
        return functional.linear(
            functional.rms_norm(x, self.norm.shape, self.norm, EPSILON), self.head
        )


class Lora(nn.Module):
    """A linear layer with an adapter beside it: down [rank, in], up [out, rank]."""

    def __init__(self, base: nn.Module, down: nn.Parameter, up: nn.Parameter) -> None:
        super().__init__()
        self.base_layer, self.down, self.up = base, down, up  # the first as in PEFT

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + functional.linear(functional.linear(x, self.down), self.up)
