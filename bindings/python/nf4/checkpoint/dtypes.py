"""The dtypes of safetensors: sizes, and their names in numpy, torch and libnf4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

_NAMES_BY_BITS = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    16: "I16 U16 F16 BF16",
    32: "I32 U32 F32",
    64: "C64 F64 I64 U64",
}
BITS: dict[str, int] = {
    name: bits for bits, names in _NAMES_BY_BITS.items() for name in names.split()
}

# All except F4 and F6, which are smaller than a byte, and those that an old ml_dtypes lacks.
_NUMPY_TYPES = {
    "BOOL": np.bool_,
    **{f"{sign.upper()}{bits}": getattr(np, f"{kind}{bits}")
       for sign, kind in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)},
    **{f"F{bits}": getattr(np, f"float{bits}") for bits in (16, 32, 64)},
    "C64": np.complex64,
    "BF16": ml_dtypes.bfloat16,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": getattr(ml_dtypes, "float8_e8m0fnu", None),
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip
NUMPY: dict[str, np.dtype] = {
    name: np.dtype(type) for name, type in _NUMPY_TYPES.items() if type is not None
}

# The dtypes of dense weights, by the names of libnf4, torch (in quant_state and config.json) and
# safetensors.
FLOATS: tuple[tuple[str, str, str], ...] = (
    ("fp32", "float32", "F32"),
    ("fp16", "float16", "F16"),
    ("bf16", "bfloat16", "BF16"),
)
TORCH_TO_NF4 = {torch: nf4 for nf4, torch, _ in FLOATS}
NF4_TO_TORCH = {nf4: torch for nf4, torch, _ in FLOATS}
NF4_TO_FILE = {nf4: file for nf4, _, file in FLOATS}
FILE_TO_NF4 = {file: nf4 for nf4, _, file in FLOATS}
# The keys for the weights' dtype in config.json: today's, and that before transformers 4.56.
DTYPE_KEYS = ("dtype", "torch_dtype")

# bnb_4bit_quant_storage, the dtypes that packed bytes can be viewed as: torch's name ->
# safetensors' name.
STORAGE: dict[str, str] = {
    "uint8": "U8",
    "int8": "I8",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
STORAGE_NAMES = {file: torch for torch, file in STORAGE.items()}


def model_dtype(config: Mapping[str, Any]) -> str | None:
    """Returns the model's dtype in config.json, by libnf4's name; None if that is not a float
    dtype."""
    for key in DTYPE_KEYS:
        value = config.get(key)
        if isinstance(value, str) and value in TORCH_TO_NF4:
            return TORCH_TO_NF4[value]
    return None
