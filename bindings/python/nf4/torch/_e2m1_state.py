"""The state_dict of a model with MXFP4 and NVFP4 layers in the layout of its checkpoint, for
save_pretrained."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from nf4.checkpoint.e2m1_layouts import LAYOUTS, Layout
from nf4.checkpoint.e2m1_plan import fused_with
from nf4.errors import InvalidArgument
from nf4.torch.modules.nf4_weight import NF4Weight

_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_PARTS = {"packed": "packed", "scales": "absmax", "global": "nested_absmax"}


def as_stored(model: nn.Module) -> dict[str, Tensor] | None:
    """Returns the state_dict; None if the model has no such layers. Raises InvalidArgument for
    experts of which the checkpoint has a matrix each, and for layers that were in FP8, which the
    settings name. Warns of layers that engines fuse and whose global scales differ."""
    layers = {
        name: layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, NF4Weight) and layer.quantized.scale_bytes
    }
    if not layers:
        return None
    for name, module in model.named_modules():
        if getattr(module, "was_in_fp8", False):
            raise InvalidArgument(
                f"{name} was in FP8 in its checkpoint, and is dense now; expected a model that "
                f"nf4.torch.to_dense made dense"
            )
    _warn_of_unequal_scales(layers)
    state = model.state_dict()
    for name, layer in layers.items():
        own = f"{name}.weight"
        for key in [key for key in state if key == own or key.startswith(f"{own}.")]:
            del state[key]
        state.update(_stored(name, layer))
    return state


def _warn_of_unequal_scales(layers: Mapping[str, NF4Weight]) -> None:
    scales = {
        f"{name}.weight": layer.quantized.nested_absmax
        for name, layer in layers.items()
        if layer.format == "nvfp4"
    }
    for name, scale in scales.items():
        fused = fused_with(name, scales)
        if name == fused[0] and not all(torch.equal(scale, scales[each]) for each in fused):
            warnings.warn(
                f"the global scales of {', '.join(fused)} differ, as after an adapter is merged "
                f"into one of them. Engines that fuse these layers, such as vLLM, use one scale "
                f"for all, and compute with other weights. Merge into a dense model, and quantize "
                f"it by quantize_model, which shares the scales",
                stacklevel=5,
            )


def _stored(name: str, layer: NF4Weight) -> Iterator[tuple[str, Tensor]]:
    layout, weight = _layout(name, layer), layer.quantized
    shapes = layout.shapes(weight.shape, weight.blocksize)
    for part, dtype in layout.dtypes.items():
        tensor = getattr(weight, _PARTS[part])
        yield layout.tensor(name, part), tensor.view(_DTYPES[dtype]).reshape(shapes[part])


def _layout(name: str, layer: NF4Weight) -> Layout:
    for layout in LAYOUTS:
        if (layout.name, layout.format) == (layer.stored_layout, layer.format):
            return layout
    raise InvalidArgument(
        f"{name} is in {layer.format} of no checkpoint's layout, as are experts of which the "
        f"checkpoint has a matrix each; expected a model that nf4.torch.to_dense made dense"
    )
