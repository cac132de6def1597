"""The checkpoint layouts of MXFP4 and NVFP4 weights: the names, dtypes and shapes of their tensors.

All store the codes of a row (E2M1, the low nibble first) and a scale of 8 bits for each block of a
row. They differ in names, in dtypes, and in what the fp32 scale of NVFP4 does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from nf4._formats import ROWS, rule_for_models
from nf4.checkpoint.header import TensorInfo
from nf4.typing import ScaleRuleName

MXFP4, NVFP4 = "mxfp4", "nvfp4"
# The blocksizes of a format, the usual one first.
BLOCKSIZES = {format: ROWS[format].blocksizes for format in (MXFP4, NVFP4)}
# The field of nf4.QuantizedTensor for each part.
FIELDS = {"packed": "packed", "scales": "absmax", "global": "nested_absmax"}


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """name        the name for `nf4 inspect --json` and `nf4 convert --to`
    format      the format of nf4.QuantizedTensor
    names       part -> what follows the module's name, or the parameter's of a stack
    dtypes      part -> its dtype, by safetensors' name
    scale_rule  that of nf4.QuantizedTensor
    blocks      a stack of experts, whose codes have a last dimension of the bytes of a block
    """

    name: str
    format: str
    names: Mapping[str, str]
    dtypes: Mapping[str, str]
    scale_rule: ScaleRuleName | None = None
    blocks: bool = False

    @property
    def rule(self) -> ScaleRuleName | None:
        """The rule by which weights are quantized."""
        return rule_for_models(self.format, self.scale_rule)

    def tensor(self, module: str, part: str) -> str:
        """Returns the name of a part of a module's weight."""
        return module + self.names[part]

    def shape(self, packed: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the weight, whose codes have this shape."""
        if self.blocks:
            *rows, blocks, of_block = packed
            return (*rows, 2 * blocks * of_block)
        return (*packed[:-1], 2 * packed[-1])

    def shapes(self, shape: tuple[int, ...], blocksize: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the parts of a weight."""
        *rows, cols = shape
        scales = (*rows, cols // blocksize)
        packed = (*scales, blocksize // 2) if self.blocks else (*rows, cols // 2)
        of_one = () if self.name == "modelopt" else (1,)
        return {"packed": packed, "scales": scales, "global": of_one}

    def fits(self, part: str, info: TensorInfo, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Tells if a part has the right shape. The one element of a global scale may have any."""
        if part == "global":
            return math.prod(info.shape) == 1
        return info.shape == shapes[part]


def _layout(name: str, format: str, parts: Mapping[str, tuple[str, str]], **rest: Any) -> Layout:
    """parts: part -> what follows the module's name, and the dtype."""
    names = {part: name for part, (name, _) in parts.items()}
    dtypes = {part: dtype for part, (_, dtype) in parts.items()}
    return Layout(name, format, names, dtypes, **rest)


GPT_OSS = _layout(
    "gpt-oss", MXFP4, {"packed": ("_blocks", "U8"), "scales": ("_scales", "U8")}, blocks=True
)
CT_MXFP4 = _layout(
    "compressed-tensors",
    MXFP4,
    {"packed": (".weight_packed", "U8"), "scales": (".weight_scale", "U8")},
)
CT_NVFP4 = _layout(
    "compressed-tensors",
    NVFP4,
    {
        "packed": (".weight_packed", "U8"),
        "scales": (".weight_scale", "F8_E4M3"),
        "global": (".weight_global_scale", "F32"),
    },
    scale_rule="divisor",
)
MODELOPT_MXFP4 = _layout(
    "modelopt", MXFP4, {"packed": (".weight", "U8"), "scales": (".weight_scale", "U8")}
)
MODELOPT_NVFP4 = _layout(
    "modelopt",
    NVFP4,
    {
        "packed": (".weight", "U8"),
        "scales": (".weight_scale", "F8_E4M3"),
        "global": (".weight_scale_2", "F32"),
    },
)
DEEPSEEK = _layout(
    "deepseek", MXFP4, {"packed": (".weight", "I8"), "scales": (".scale", "F8_E8M0")}
)
# The layouts that are written, by the names of `nf4 convert --to` and `nf4 quantize --layout`, and
# format.
WRITTEN: dict[str, dict[str, Layout]] = {
    "compressed-tensors": {MXFP4: CT_MXFP4, NVFP4: CT_NVFP4},
    "modelopt": {NVFP4: MODELOPT_NVFP4},
    GPT_OSS.name: {MXFP4: GPT_OSS},
}
LAYOUTS = (GPT_OSS, CT_MXFP4, CT_NVFP4, MODELOPT_MXFP4, MODELOPT_NVFP4, DEEPSEEK)
