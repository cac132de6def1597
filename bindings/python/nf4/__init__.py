"""libnf4: 4-bit weights, on the GPU and the CPU: NormalFloat (NF4), FP4, and the integers of GPTQ,
AWQ and compressed-tensors.

    import nf4
    q = nf4.quantize(weight)           # a numpy array of float32, float16 or bfloat16
    weight = nf4.dequantize(q)
    y = nf4.matmul(x, q)               # x W^T
    q = nf4.quantize_int4(weight)      # groups of 128; Int4Tensor has the parts of a checkpoint
    tensors = nf4.load("model/")       # a checkpoint's, by name; nf4.save writes one

Every function is thread-safe. nf4.typing has the types of their arguments.
"""

from typing import TYPE_CHECKING, Any

from nf4 import _interrupt  # noqa: F401  first: it ends the command at a Ctrl-C
from nf4._dequantize import dequantize
from nf4._grouped import matmul_grouped, matmul_grouped_grad, matmul_grouped_workspace_bytes
from nf4._load import get_include, get_library, library_path
from nf4._lora import Lora
from nf4._lora_grad import lora_grad
from nf4._matmul import matmul, matmul_grad, matmul_workspace_bytes
from nf4._matmul_batch import matmul_batch, matmul_batch_workspace_bytes
from nf4._quantize import quantize
from nf4._quantize_int4 import quantize_int4, reorder
from nf4.errors import (
    CudaError,
    Error,
    InvalidArgument,
    LibraryNotFound,
    NoCuda,
    NoDevice,
    UnsupportedDevice,
)
from nf4.info import (
    Device,
    build_info,
    codebook,
    cpu_variant,
    device_info,
    scale_code,
    version,
)
from nf4.int4 import Int4Tensor
from nf4.tensor import QuantizedTensor, Sizes, sizes
from nf4.weight import Weight

if TYPE_CHECKING:
    from nf4.checkpoint.tensors import load, save
    from nf4.tuning.api import tune

__all__ = [
    "CudaError",
    "Device",
    "Error",
    "Int4Tensor",
    "InvalidArgument",
    "LibraryNotFound",
    "Lora",
    "NoCuda",
    "NoDevice",
    "QuantizedTensor",
    "Sizes",
    "UnsupportedDevice",
    "Weight",
    "build_info",
    "codebook",
    "cpu_variant",
    "dequantize",
    "device_info",
    "get_include",
    "get_library",
    "library_path",
    "load",
    "lora_grad",
    "matmul",
    "matmul_batch",
    "matmul_batch_workspace_bytes",
    "matmul_grad",
    "matmul_grouped",
    "matmul_grouped_grad",
    "matmul_grouped_workspace_bytes",
    "matmul_workspace_bytes",
    "quantize",
    "quantize_int4",
    "reorder",
    "save",
    "scale_code",
    "sizes",
    "tune",
    "version",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # the library's, which is loaded when it is first asked
        return version()
    if name in ("load", "save"):  # nf4.checkpoint imports what is above
        from nf4.checkpoint import tensors

        return getattr(tensors, name)
    if name == "tune":
        from nf4.tuning.api import tune

        return tune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
