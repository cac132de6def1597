"""The formats of codes with a codebook, a row each. typing.FormatName lists their names."""

from __future__ import annotations

from typing import NamedTuple

from nf4 import _abi
from nf4.typing import ScaleRuleName


class Format(NamedTuple):
    """code              the nf4_format
    blocksizes        the first is the default. Formats with float32 scales take other powers of two
    nested_blocksize  the default
    scale_rules       the numbers of rules; the first is the default. Only formats whose scales are
                      floats of 8 bits have some
    best_rule         the rule for weights of models, where the rule does not change how a weight
                      is read
    global_scales     nested_absmax has a float32 scale for some or all rows
    """

    code: int
    blocksizes: tuple[int, ...]
    nested_blocksize: int
    scale_rules: dict[ScaleRuleName, int] = {}
    best_rule: ScaleRuleName | None = None
    global_scales: bool = False


ROWS = {
    "nf4": Format(_abi.FORMAT_NF4, (64,), 256),
    "fp4": Format(_abi.FORMAT_FP4, (64,), 256),
    "mxfp4": Format(
        _abi.FORMAT_MXFP4,
        (32,),
        0,
        {"floor": _abi.SCALE_FLOOR, "even": _abi.SCALE_EVEN, "ceil": _abi.SCALE_CEIL},
        best_rule="even",  # as compressed-tensors; it has the smallest error
    ),
    "nvfp4": Format(
        _abi.FORMAT_NVFP4,
        (16, 32),
        0,
        {"factor": _abi.GLOBAL_FACTOR, "divisor": _abi.GLOBAL_DIVISOR},
        global_scales=True,
    ),
}
FORMATS = {name: row.code for name, row in ROWS.items()}
SCALE_RULES = {name: row.scale_rules for name, row in ROWS.items() if row.scale_rules}


def has_global_scales(format: str) -> bool:
    return format in ROWS and ROWS[format].global_scales


def rule_for_models(format: str, own: ScaleRuleName | None) -> ScaleRuleName | None:
    """Returns the rule by which weights of models are quantized. own: the rule of the weight."""
    return ROWS[format].best_rule or own
