"""A LLaMA in numpy, whose linear layers are dense arrays or 4-bit weights multiplied by nf4.matmul:
the least that turns a checkpoint into text and a perplexity where torch is not installed.

Everything is fp32, for one sequence. What bounds it is numpy's way from call to call; an engine is
examples/cpp/llama.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nf4
import numpy as np
from nf4.checkpoint import FormatError

# Rows of a text at once, which bounds the memory of logits.
_ROWS = 256


def _normed(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _rotated(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """RoPE: each number of the first half of a head with its partner in the second."""
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Llama:
    """The model of a checkpoint, dense or in 4 bits, and keys and values of what it has read.
    FormatError where config.json asks for what is not computed."""

    def __init__(self, folder: Path):
        self.config = json.loads((folder / "config.json").read_text())
        rope = self.config.get("rope_parameters") or {}
        scaling = self.config.get("rope_scaling") or {}
        for name, found, computed in (
            ("model_type", self.config.get("model_type", "llama"), "llama"),
            ("hidden_act", self.config.get("hidden_act", "silu"), "silu"),
            ("rope_type", rope.get("rope_type", "default"), "default"),
            ("rope_scaling", scaling.get("rope_type", scaling.get("type", "default")), "default"),
            ("attention_bias", self.config.get("attention_bias", False), False),
            ("mlp_bias", self.config.get("mlp_bias", False), False),
        ):
            if found != computed:
                raise FormatError(
                    folder / "config.json", f"{name} is {found}; only {computed} is computed"
                )
        self.theta = rope.get("rope_theta", self.config.get("rope_theta", 10000.0))
        self.tensors: dict[str, Any] = nf4.load(folder)
        for name, tensor in self.tensors.items():
            if isinstance(tensor, np.ndarray):
                self.tensors[name] = tensor.astype(np.float32)
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config.get("num_key_value_heads") or self.heads
        self.head_size = self.config.get("head_dim") or self.config["hidden_size"] // self.heads
        self.forget()

    def forget(self) -> None:
        empty = np.zeros((self.kv_heads, 0, self.head_size), np.float32)
        self.cache = [(empty, empty)] * self.config["num_hidden_layers"]

    def logits(self, tokens: list[int]) -> np.ndarray:
        """[tokens, vocabulary], after what was read before; this is remembered, too."""
        x = self.tensors["model.embed_tokens.weight"][tokens]
        past = self.cache[0][0].shape[1]
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            x = x + self._attention(
                f"{layer}.self_attn", index, past, self._norm(layer, "input_layernorm", x)
            )
            x = x + self._mlp(f"{layer}.mlp", self._norm(layer, "post_attention_layernorm", x))
        tied = self.config.get("tie_word_embeddings", False)
        return self._linear(
            "model.embed_tokens" if tied else "lm_head", self._norm("model", "norm", x)
        )

    def greedy(self, tokens: list[int], count: int) -> Iterator[int]:
        """The likeliest token after `tokens`, the next after that, and so on."""
        for _ in range(count):
            token = int(self.logits(tokens)[-1].argmax())
            yield token
            tokens = [token]

    def perplexity(self, tokens: list[int]) -> float:
        """exp of the mean cross entropy of each token after those before it."""
        self.forget()
        total = 0.0
        for begin in range(0, len(tokens) - 1, _ROWS):
            right = tokens[begin + 1 : begin + 1 + _ROWS]
            logits = self.logits(tokens[begin : begin + len(right)])
            logits -= logits.max(-1, keepdims=True)
            total += float(np.log(np.exp(logits).sum(-1)).sum())
            total -= float(logits[np.arange(len(right)), right].sum())
        self.forget()
        return math.exp(total / (len(tokens) - 1))

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        weight = self.tensors[f"{name}.weight"]
        return x @ weight.T if isinstance(weight, np.ndarray) else nf4.matmul(x, weight)

    def _norm(self, module: str, name: str, x: np.ndarray) -> np.ndarray:
        return _normed(x, self.tensors[f"{module}.{name}.weight"], self.config["rms_norm_eps"])

    def _mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        gate, up = (self._linear(f"{name}.{part}_proj", x) for part in ("gate", "up"))
        return self._linear(f"{name}.down_proj", _silu(gate) * up)

    def _attention(self, name: str, layer: int, past: int, x: np.ndarray) -> np.ndarray:
        rows, size = len(x), self.head_size
        # Each as [heads, rows, head_size].
        q, k, v = (
            self._linear(f"{name}.{part}_proj", x).reshape(rows, -1, size).swapaxes(0, 1)
            for part in "qkv"
        )
        places = np.arange(past, past + rows)
        frequencies = self.theta ** (-np.arange(0, size, 2) / size)
        angles = np.outer(places, frequencies).astype(np.float32)
        before = self.cache[layer]
        k = np.concatenate([before[0], _rotated(k, angles)], axis=1)
        v = np.concatenate([before[1], v], axis=1)
        self.cache[layer] = (k, v)
        # Several heads of q share one of k and v.
        q = _rotated(q, angles).reshape(self.kv_heads, -1, rows, size)
        scores = q @ k[:, None].swapaxes(-1, -2) / np.float32(np.sqrt(size))
        scores = np.where(np.arange(past + rows) <= places[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        y = weights / weights.sum(-1, keepdims=True) @ v[:, None]
        return self._linear(
            f"{name}.o_proj", y.reshape(self.heads, rows, size).swapaxes(0, 1).reshape(rows, -1)
        )
