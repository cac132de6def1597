"""Recognises the quantized linear layers of GPTQModel, AutoAWQ and compressed-tensors, and reads
the weights in them, without importing these packages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import nf4
from nf4.errors import InvalidArgument, kind_of
from nf4.torch._int4_weight import KEYS
from nf4.torch.modules.base import QuantizedModule

_WORDS = frozenset(("qweight", "qzeros", "scales"))
# The classes of GPTQModel and AutoAWQ that compute with the words as the checkpoint stores them.
# All other classes may have reordered them without changing the shape.
_AS_STORED = frozenset((
    "TorchLinear", "TorchQuantLinear", "TritonV2Linear", "TritonV2QuantLinear",
    "AwqTorchLinear", "AwqTorchQuantLinear", "AwqGEMMLinear", "AwqGEMMQuantLinear",
    "WQLinear_GEMM",
))  # fmt: skip


def _has(layer: nn.Module, names: Iterable[str]) -> bool:
    return all(isinstance(getattr(layer, name, None), Tensor) for name in names)


def is_quantized(layer: nn.Module) -> bool:
    """Tells if a layer has the tensors of such a layer, of any number of bits, and is not ours."""
    if isinstance(layer, QuantizedModule):
        return False
    return _has(layer, _WORDS) or _has(layer, ("weight_packed", "weight_scale"))


def _scheme(layer: nn.Module) -> Any:
    """Returns the QuantizationScheme of compressed-tensors."""
    return getattr(layer, "quantization_scheme", None)


def why_left_alone(layer: nn.Module) -> str | None:
    """Says why Int4Linear cannot replace a quantized layer: what that computes differently."""
    if _has(layer, _WORDS):
        bits = getattr(layer, "bits", getattr(layer, "w_bit", 4))
        return None if bits == 4 else f"it has {bits} bits"
    scheme = _scheme(layer)
    weights = getattr(scheme, "weights", None)
    if weights is None:
        return "it has no quantization_scheme"
    for name, expected in (("num_bits", 4), ("type", "int")):
        found = getattr(weights, name, expected)
        if getattr(found, "value", found) != expected:
            return f"{name} of its weights is {getattr(found, 'value', found)}"
    if getattr(scheme, "input_activations", None) or getattr(scheme, "output_activations", None):
        return "its activations are quantized"
    return None


def has_own_forward(layer: nn.Module) -> bool:
    """Tells if a layer has a forward of its own that its library did not put there.
    compressed-tensors puts one on each layer."""
    return "forward" in vars(layer) and _scheme(layer) is None


def weight_and_bias(layer: nn.Module) -> tuple[nf4.Int4Tensor[Tensor], nn.Parameter | None]:
    """Returns the weight and the bias, on the layer's memory. Raises InvalidArgument for any other
    layer, and for one that has repacked its codes."""
    if not isinstance(layer, nn.Module) or not is_quantized(layer):
        raise InvalidArgument(
            f"layer is {kind_of(layer)}; expected a 4-bit linear layer of GPTQModel, AutoAWQ or "
            f"compressed-tensors: from_linear takes a dense torch.nn.Linear"
        )
    why = why_left_alone(layer)
    if why is not None:
        raise InvalidArgument(f"layer is {kind_of(layer)}, and {why}; expected 4-bit integers")
    weight = _of_words(layer) if _has(layer, _WORDS) else _of_compressed_tensors(layer)
    if weight.packed.is_meta:
        raise InvalidArgument("the weight is on meta; expected a loaded one")
    bias = getattr(layer, "bias", None)
    if bias is None or isinstance(bias, nn.Parameter):
        return weight, bias
    return weight, nn.Parameter(bias, requires_grad=False)


def _of_words(layer: nn.Module) -> nf4.Int4Tensor[Tensor]:
    name = type(layer).__name__
    if name not in _AS_STORED:
        raise InvalidArgument(
            f"layer is {kind_of(layer)}, which may hold its codes in an order of its own; "
            f"expected one of {', '.join(sorted(_AS_STORED))}: load the model with the backend "
            f"torch"
        )
    if getattr(layer, "adapter", None) is not None:
        raise InvalidArgument("layer has an adapter, which would be lost; expected one without")
    shape = (layer.out_features, layer.in_features)
    layout = _layout_of_words(layer, shape)
    g_idx = getattr(layer, "g_idx", None) if layout != "awq" else None
    return _int4_tensor(layer, layout, shape, layer.group_size, g_idx)


def _layout_of_words(layer: nn.Module, shape: tuple[int, int]) -> str:
    rows, cols = shape
    if tuple(layer.qweight.shape) == (cols, rows // 8):
        return "awq"
    if tuple(layer.qweight.shape) != (cols // 8, rows):
        raise InvalidArgument(
            f"qweight is of shape {tuple(layer.qweight.shape)}; expected {(cols // 8, rows)} or "
            f"{(cols, rows // 8)}"
        )
    # GPTQModel converts the zeros of GPTQ v1 when it loads them; qzero_format says so.
    asked = getattr(layer, "qzero_format", None)
    stored = asked() if callable(asked) else 1
    format = getattr(layer, "format", None)
    is_v2 = stored == 2 or getattr(format, "value", format) == "gptq_v2"
    return "gptq_v2" if is_v2 else "gptq"


def _of_compressed_tensors(layer: nn.Module) -> nf4.Int4Tensor[Tensor]:
    scheme = _scheme(layer)
    format = getattr(scheme, "format", None)
    if getattr(format, "value", format) not in (None, "pack-quantized"):
        raise InvalidArgument(f"format of the layer is {format}; expected pack-quantized")
    if not _has(layer, ("weight_shape",)):
        raise InvalidArgument("layer has no weight_shape; expected one beside weight_packed")
    if getattr(layer, "weight_global_scale", None) is not None:
        raise InvalidArgument("layer has a weight_global_scale; expected 4-bit integers without")
    rows, cols = layer.weight_shape.tolist()
    group_size = getattr(scheme.weights, "group_size", None)
    group_size = -1 if group_size is None else group_size
    g_idx = getattr(layer, "weight_g_idx", None)
    return _int4_tensor(layer, "compressed-tensors", (rows, cols), group_size, g_idx)


def _int4_tensor(
    layer: nn.Module, layout: str, shape: tuple[int, int], group_size: int, g_idx: Tensor | None
) -> nf4.Int4Tensor[Tensor]:
    keys = KEYS[layout]
    parts = {name: getattr(layer, keys[name], None) for name in ("packed", "scales", "zeros")}
    parts["g_idx"] = g_idx
    held = {name: part.detach() for name, part in parts.items() if part is not None}
    if held["scales"].dtype not in (torch.float16, torch.bfloat16):
        raise InvalidArgument(
            f"{keys['scales']} is of {held['scales'].dtype}; expected float16 or bfloat16"
        )
    return nf4.Int4Tensor(layout=layout, shape=shape, group_size=group_size, **held)
