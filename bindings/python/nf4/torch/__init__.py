"""libnf4 for PyTorch: operators for autograd and torch.compile, and linear layers.

    import nf4.torch
    layer = nf4.torch.NF4Linear.from_linear(linear)  # quantizes it
    nf4.torch.quantize_model(model)                  # a dense transformers model, in place
    nf4.torch.convert(model)                         # replaces other libraries' 4-bit layers
    model = nf4.torch.load("model/")                 # GPTQ, AWQ or compressed-tensors

Importing this registers torch.ops.nf4.quantize, .dequantize, .linear and .linear_backward, and the
same with _int4 for integer weights. They enqueue on torch's current stream, or run on the CPU with
torch.get_num_threads() threads. Package nf4 itself never imports torch.
"""

# isort: off
from nf4.torch import _torch_version  # noqa: F401  first: it says what is missing

# isort: on
from nf4.torch import _distributed, _transformers
from nf4.torch import peft as _peft
from nf4.torch.bitsandbytes import register as register_bitsandbytes
from nf4.torch.conversion import convert
from nf4.torch.dense import to_dense
from nf4.torch.functional import dequantize, linear, linear_grouped, quantize, quantize_int4
from nf4.torch.loading import load
from nf4.torch.modules import Int4Experts, Int4Linear, NF4Experts, NF4Linear
from nf4.torch.quantizing import quantize_model
from nf4.torch.unsloth import fast_dequantize as unsloth_fast_dequantize
from nf4.torch.unsloth import patch_unsloth

__all__ = [
    "Int4Experts",
    "Int4Linear",
    "NF4Experts",
    "NF4Linear",
    "convert",
    "dequantize",
    "linear",
    "linear_grouped",
    "load",
    "patch_unsloth",
    "quantize",
    "quantize_int4",
    "quantize_model",
    "register_bitsandbytes",
    "to_dense",
    "unsloth_fast_dequantize",
]

_peft.register()
_distributed.register()
_transformers.register()
