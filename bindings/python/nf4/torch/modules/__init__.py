"""Linear layers and experts with quantized weights."""

from nf4.torch._packed_codes import PackedCodes
from nf4.torch.modules.base import QuantizedLinear
from nf4.torch.modules.int4_experts import Int4Experts
from nf4.torch.modules.int4_linear import Int4Linear
from nf4.torch.modules.nf4_experts import NF4Experts
from nf4.torch.modules.nf4_linear import NF4Linear

__all__ = [
    "Int4Experts",
    "Int4Linear",
    "NF4Experts",
    "NF4Linear",
    "PackedCodes",
    "QuantizedLinear",
]
