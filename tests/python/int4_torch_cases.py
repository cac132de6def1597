"""Integer weights of the oracle as torch has them."""

from __future__ import annotations

from typing import Any

import int4_oracle
import nf4
import numpy as np
import torch

IN, OUT, GROUP = 64, 24, 32

# layout, symmetric, act order
CASES = {
    "gptq": ("gptq", False, False),
    "gptq symmetric, act order": ("gptq", True, True),
    "gptq_v2, act order": ("gptq_v2", False, True),
    "awq": ("awq", False, False),
    "compressed-tensors": ("compressed-tensors", True, False),
    "compressed-tensors, zeros, act order": ("compressed-tensors", False, True),
}


def arrays_of(case: str = "gptq", seed: int = 0, **given: Any) -> int4_oracle.Int4Arrays:
    layout, symmetric, act_order = CASES[case]
    options = {
        "rows": OUT, "cols": IN, "group_size": GROUP, "scale_dtype": "fp16",
        "symmetric": symmetric, "act_order": act_order,
    } | given  # fmt: skip
    return int4_oracle.random_int4(np.random.default_rng(seed), layout, **options)


def tensor(array: np.ndarray, bf16: bool = False) -> torch.Tensor:
    """With memory of its own; bf16: of bits."""
    made = torch.from_numpy(np.array(array.view(np.int16) if bf16 else array, order="C"))
    return made.view(torch.bfloat16) if bf16 else made


def weight_of(case: str = "gptq", seed: int = 0, **given: Any) -> nf4.Int4Tensor[torch.Tensor]:
    a = arrays_of(case, seed, **given)
    return nf4.Int4Tensor(
        layout=a.layout,
        shape=(a.rows, a.cols),
        group_size=a.group_size,
        packed=tensor(a.packed),
        scales=tensor(a.scales, a.scale_dtype == "bf16"),
        zeros=None if a.zeros is None else tensor(a.zeros),
        g_idx=None if a.g_idx is None else tensor(a.g_idx),
    )


def dense_of(a: int4_oracle.Int4Arrays, dtype: str = "fp32") -> torch.Tensor:
    """What the oracle dequantizes."""
    bits = int4_oracle.dequantize(a, dtype)
    return tensor(bits.view(np.int16), bf16=True) if dtype == "bf16" else tensor(bits)
