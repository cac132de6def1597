"""Do adapters learn the same? The model of examples/python/qlora.py, trained from the same seed by
PEFT over bitsandbytes' own kernels, the drop-in, NF4Linear and the same weights dequantized: how
far their losses are apart."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import nf4.torch
import torch

from nf4bench import models_forms
from nf4bench.models_cases import DROP_IN
from nf4bench.training_model import DTYPES

EXAMPLE = Path(__file__).parents[2] / "examples/python/qlora.py"
STEPS = 200
AVERAGED = 10  # steps, as a single one of bf16 is noise


def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nf4_example_qlora", EXAMPLE)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


class _Dequantized(torch.nn.Module):
    """A Linear4bit's product by torch alone, with its weight in the dtype that it computes in."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        dequantize = importlib.import_module("bitsandbytes.functional").dequantize_4bit
        dense = dequantize(layer.weight.data, layer.weight.quant_state)
        self.register_buffer("dense", dense.to(layer.compute_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.to(self.dense.dtype), self.dense).to(x.dtype)


def _dequantize_bases(model: torch.nn.Module) -> None:
    linear = importlib.import_module("bitsandbytes.nn").Linear4bit
    for adapted in list(model.modules()):
        if isinstance(getattr(adapted, "base_layer", None), linear):
            adapted.base_layer = _Dequantized(adapted.base_layer)


def _losses(example: ModuleType, form: str, dtype: torch.dtype, steps: int) -> torch.Tensor:
    torch.manual_seed(0)
    with models_forms.kernels_of(form), tempfile.TemporaryDirectory() as folder:
        base = example.base_model(folder, dtype)
        if form == "libnf4":
            nf4.torch.convert(base)
        model = example.adapted(base)
        if form == "dense":
            _dequantize_bases(model)
        return torch.tensor(example.train(model.train(), steps))


def _means(losses: torch.Tensor) -> torch.Tensor:
    return losses.view(-1, AVERAGED).mean(1)


def rows() -> list[dict[str, Any]]:
    """Of each form beside bitsandbytes: the largest difference of a step's loss, of the mean of
    ten steps, and both last means; and how far the means of both are from bitsandbytes' in
    fp32."""
    example, found, exact = _example(), [], None
    for name, dtype in {"fp32": torch.float32, "bf16": DTYPES["bf16"]}.items():
        expected = _losses(example, "bitsandbytes", dtype, STEPS)
        exact = _means(expected) if exact is None else exact
        for form in ("libnf4", DROP_IN, "dense"):
            losses = _losses(example, form, dtype, STEPS)
            means, others = _means(losses), _means(expected)
            found.append(
                {
                    "form": form,
                    "dtype": name,
                    "steps": STEPS,
                    "largest": (losses - expected).abs().max().item(),
                    "largest_mean": (means - others).abs().max().item(),
                    "from_fp32": (means - exact).abs().max().item(),
                    "bitsandbytes_from_fp32": (others - exact).abs().max().item(),
                    "last": means[-1].item(),
                    "last_bitsandbytes": others[-1].item(),
                }
            )
    return found
