"""The state_dict of a model with MXFP4 and NVFP4 layers in the layout of its checkpoint, for
save_pretrained."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import nf4
from nf4.checkpoint.e2m1_layouts import FIELDS, LAYOUTS, Layout
from nf4.checkpoint.e2m1_plan import fused_with
from nf4.errors import InvalidArgument
from nf4.torch._global_scales import with_global_scale
from nf4.torch.modules.nf4_weight import NF4Weight

_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def as_stored(model: nn.Module) -> dict[str, Tensor] | None:
    """Returns the state_dict; None if the model has no such layers. Raises InvalidArgument for
    experts of which the checkpoint has a matrix each, and for layers that were in FP8, which the
    settings name. Warns of layers that engines fuse and that cannot have one global scale."""
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
    weights = {f"{name}.weight": layer.quantized for name, layer in layers.items()}
    _share_scales(weights)
    state = model.state_dict()
    for name, layer in layers.items():
        own = f"{name}.weight"
        for key in [key for key in state if key == own or key.startswith(f"{own}.")]:
            del state[key]
        state.update(_stored(name, layer, weights[own]))
    return state


def _share_scales(weights: dict[str, nf4.QuantizedTensor[Tensor]]) -> None:
    """Gives weights that engines fuse one global scale of NVFP4, without loss. Warns of those that
    cannot have one. weights: by the name of the layer's weight."""
    every: dict[str, Any] = {name: weight.nested_absmax for name, weight in weights.items()}
    scaled = {
        name: scale.reshape(())
        for name, scale in every.items()
        if scale is not None and scale.numel() == 1
    }
    for name in scaled:
        fused = fused_with(name, scaled)
        scales = torch.stack([scaled[each].cpu() for each in fused])
        if name != fused[0] or bool(torch.all(scales == scales[0])):
            continue
        # The scale of the largest blocks.
        shared = scales.min() if weights[name].scale_rule == "divisor" else scales.max()
        made = {each: with_global_scale(weights[each], shared) for each in fused}
        found = {each: weight for each, weight in made.items() if weight is not None}
        if len(found) == len(fused):
            weights.update(found)
        else:
            warnings.warn(
                f"the global scales of {', '.join(fused)} differ, and not by a power of two that "
                f"the scales of their blocks can take. Engines that fuse these layers, such as "
                f"vLLM, use one scale for all, and compute with other weights. quantize_model "
                f"shares the scales: quantize the dense model by it",
                stacklevel=5,
            )


def _stored(
    name: str, layer: NF4Weight, weight: nf4.QuantizedTensor[Tensor]
) -> Iterator[tuple[str, Tensor]]:
    layout = _layout(name, layer)
    shapes = layout.shapes(weight.shape, weight.blocksize)
    for part, dtype in layout.dtypes.items():
        tensor = getattr(weight, FIELDS[part])
        yield layout.tensor(name, part), tensor.view(_DTYPES[dtype]).reshape(shapes[part])


def _layout(name: str, layer: NF4Weight) -> Layout:
    for layout in LAYOUTS:
        if (layout.name, layout.format) == (layer.stored_layout, layer.format):
            return layout
    raise InvalidArgument(
        f"no layout of checkpoints has a place for {name} in {layer.format}, such as experts that "
        f"were one matrix each; expected a model that nf4.torch.to_dense made dense"
    )
