"""The element types of safetensors: sizes, and the numpy types of those that numpy knows."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BITS: dict[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

NUMPY: dict[str, np.dtype] = {
    "U8": np.dtype(np.uint8),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
}

# libnf4's name, torch's name (quant_state JSON, config.json) and safetensors' name of each
# dtype that can be quantized or dequantized to.
FLOATS: tuple[tuple[str, str, str], ...] = (
    ("fp32", "float32", "F32"),
    ("fp16", "float16", "F16"),
    ("bf16", "bfloat16", "BF16"),
)
TORCH_TO_NF4 = {torch: nf4 for nf4, torch, _ in FLOATS}
NF4_TO_TORCH = {nf4: torch for nf4, torch, _ in FLOATS}
NF4_TO_FILE = {nf4: file for nf4, _, file in FLOATS}
FILE_TO_NF4 = {file: nf4 for nf4, _, file in FLOATS}

# The dtypes that bitsandbytes lets packed bytes be viewed as (bnb_4bit_quant_storage).
STORAGE: dict[str, str] = {
    "uint8": "U8",
    "int8": "I8",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
STORAGE_NAMES = {file: torch for torch, file in STORAGE.items()}
