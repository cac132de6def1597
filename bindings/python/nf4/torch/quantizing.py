"""quantize_model: quantizes a dense transformers model to 4 bits, in place."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from nf4 import _torch
from nf4.checkpoint.dtypes import NF4_TO_TORCH
from nf4.checkpoint.e2m1_layouts import MXFP4, NVFP4, WRITTEN, Layout
from nf4.checkpoint.e2m1_plan import fused_with, global_scale
from nf4.checkpoint.errors import OptionError
from nf4.checkpoint.quantize_plan import QuantizeOptions
from nf4.errors import InvalidArgument, kind_of, shown
from nf4.tensor import QuantizedTensor
from nf4.torch import _siblings, functional
from nf4.torch._annotations import PreTrainedModel
from nf4.torch._checks import require_finite, require_transformers, torch_dtype
from nf4.torch._replacing_layers import is_in_4_bits, made_of, replace_one
from nf4.torch.calibration import models as calibrating
from nf4.torch.calibration import weights as calibrated
from nf4.torch.calibration.layers import Seen
from nf4.torch.calibration.models import Quantized
from nf4.torch.experts import quantize_stack, save_as_stacks
from nf4.torch.modules import Int4Linear, NF4Linear
from nf4.torch.modules.base import torch_device
from nf4.torch.modules.nf4_weight import quantize_into, zeros
from nf4.typing import DTypeLike, Int4Layout

_FORMATS = ("nf4", "fp4", "int4", "mxfp4", "nvfp4")
_QUANTIZED = (
    "model is quantized already; expected a dense one, as to_dense(model) makes it: convert(model) "
    "takes the layers of bitsandbytes and GPTQ as they are"
)


def quantize_model(
    model: PreTrainedModel,
    *,
    format: Literal["nf4", "fp4", "int4", "mxfp4", "nvfp4"] = "nf4",
    skip: Sequence[str] = (),
    only: Sequence[str] = (),
    blocksize: int | None = None,
    nested: bool = True,
    layout: Int4Layout | Literal["modelopt", "gpt-oss"] = "compressed-tensors",
    group_size: int = 128,
    symmetric: bool = True,
    compute_dtype: DTypeLike | None = None,
    device: torch.device | str | int | None = None,
    allow_nonfinite: bool = False,
    experts: bool = False,
    calibration: Tensor | None = None,
) -> list[str]:
    """Quantizes a dense transformers model in place: its linear layers become NF4Linear, or
    Int4Linear for "int4", and the model gets the marks of a quantized model that transformers
    loaded, such as a quantization_config: casts are refused, and Trainer asks for adapters.
    save_pretrained then writes the checkpoint that `nf4 quantize` makes of the dense one.
    transformers loads it with bitsandbytes, and integers, MXFP4 and NVFP4 with the package of their
    layout; nf4.torch.load loads these too.

    skip, only   patterns of modules, as --skip and --only of `nf4 quantize`. The rules are the
                 same: embeddings, output heads, routers, experts (but see below) and tied weights
                 stay dense
    blocksize, nested
                 for "nf4" and "fp4": weights that share a scale, by default 64, and whether scales
                 have 8 bits. Blocks of "mxfp4" have 32 weights, and those of "nvfp4" 16
    layout       for "int4", as in quantize_int4. For "mxfp4" "compressed-tensors" or "gpt-oss",
                 which has the experts of gpt-oss alone; for "nvfp4" "compressed-tensors" or
                 "modelopt". A layer that the layout cannot hold stays dense
    group_size, symmetric
                 for "int4", as in quantize_int4. A warning names a group size with which no layer
                 stays dense
    compute_dtype
                 as for NF4Linear. The default is the dtype of x for the layers, and that of most
                 weights in the quantization_config
    device       each layer is quantized on this device, and in the end the rest is moved there. By
                 default everything stays where it is
    allow_nonfinite
                 quantize NaN as 0 and Inf as the largest value of its block or group
    experts      also quantize stacks of experts ("nf4" and "fp4"), in models where transformers
                 lets other libraries compute their products: each becomes an NF4Experts.
                 transformers loads the saved model if nf4.torch is imported
    calibration  for "nf4", "fp4" and symmetric "int4": token ids of text of the kinds that the
                 model is to read, [windows, tokens], at least 2048. Scales and codes are then those
                 of small error in each layer's output for this text, in the same bytes. The model
                 runs on it, layer by layer; device moves it there first. Layers outside the decoder
                 layers, and those that no token reaches, are quantized without calibration

    Only one layer at a time exists both dense and quantized. In NVFP4 layers that engines fuse,
    such as q_proj, k_proj and v_proj, share a global scale. Hooks and siblings are handled as in
    convert. Returns the names of the replaced layers.

    Raises InvalidArgument, and replaces nothing, for a model that is not of transformers, is
    quantized already or has no layer to replace; for a layer to replace that is on meta, has NaN or
    Inf or has a forward of its own; for any tensor on meta if device is given; for a pattern that
    names nothing; and for too little calibration, windows longer than the model takes, ids that it
    has no embedding of, and decoder layers that are not called once in their order.
    If a layer's x has NaN or Inf for the calibration, earlier layers have been replaced.

    Any other failure, such as out of memory, leaves the earlier layers replaced, and model.config
    without a quantization_config: do not save such a model. The same call again replaces the rest.
    It may change device and allow_nonfinite; other options raise InvalidArgument.
    """
    _require_model(model)
    dtype = None if compute_dtype is None else torch_dtype(compute_dtype, "compute_dtype")
    moved_to = torch_device(device)
    if format not in _FORMATS:
        raise InvalidArgument(f"format is {shown(format)}; expected one of {', '.join(_FORMATS)}")
    try:
        options = QuantizeOptions(
            format=format,
            blocksize=blocksize,
            nested=nested,
            skip=skip if isinstance(skip, str) else tuple(skip),
            only=only if isinstance(only, str) else tuple(only),
            compute=None if dtype is None else NF4_TO_TORCH[_torch.dtype_name(dtype)],
            layout=layout,
            group_size=group_size,
            symmetric=symmetric,
            experts=experts,
        )
        plan = _begun(model, options) or _plan(model, options)
    except OptionError as error:
        raise InvalidArgument(str(error)) from None
    if calibration is not None:
        calibrating.require(calibration, options, model)
    if moved_to is not None:
        _require_loaded(model)
    left = [name for name in plan.modules if not is_in_4_bits(model.get_submodule(name))]
    quantized = maker(options, dtype, moved_to, plan.largest)
    check = _check if allow_nonfinite and calibration is None else _check_finite
    for name in left:
        made_of(name, model.get_submodule(name), check)
    stacks = [name for name in plan.stacks if _is_dense(model, name)]
    for name in stacks:
        _check_stack(model, name, allow_nonfinite)
    if format == NVFP4 and not plan.largest:
        plan.largest.update(_largest(model, plan.modules))
    _unfinished[model] = plan
    if calibration is not None:
        if moved_to is not None:
            model.to(moved_to)
        calibrating.replace(model, plan.modules, calibration, quantized)
        left = [name for name in left if not is_in_4_bits(model.get_submodule(name))]
    for name in left:
        replace_one(model, name, functools.partial(quantized, name))
    for name in stacks:
        _replace_stack(model, name, options, moved_to)
    if plan.stacks:
        save_as_stacks(model)
    _siblings.join(model)
    if moved_to is not None:
        model.to(moved_to)
    from nf4.torch import _marks  # imports transformers

    _marks.mark(model, plan.config)
    del _unfinished[model]
    return plan.modules + plan.stacks


class _Plan(NamedTuple):
    """modules, stacks: the names of the layers and experts that become 4-bit. config: the
    quantization_config. largest: for NVFP4, the largest magnitude of each layer's weight and of
    those that share its global scale."""

    options: QuantizeOptions
    modules: list[str]
    stacks: list[str]
    config: dict[str, Any]
    largest: dict[str, float]


# The plans of models in a call that runs or has failed.
_unfinished: weakref.WeakKeyDictionary[nn.Module, _Plan] = weakref.WeakKeyDictionary()


def _plan(model: PreTrainedModel, options: QuantizeOptions) -> _Plan:
    if any(map(is_in_4_bits, model.modules())):
        raise InvalidArgument(_QUANTIZED)
    from nf4.torch import _dense_model  # imports transformers

    modules, stacks, config = _dense_model.choose(model, options)
    if not modules and not stacks:
        raise InvalidArgument(
            "model has no layer that may become 4-bit: embeddings, output heads, routers, experts "
            "and what skip names stay dense"
        )
    return _Plan(options, modules, [stack.parameter for stack in stacks], config, {})


def _largest(model: nn.Module, modules: Sequence[str]) -> dict[str, float]:
    """Returns _Plan.largest."""
    weights = {f"{name}.weight": name for name in modules}
    own = {name: _largest_of(model.get_submodule(name).weight.detach()) for name in modules}
    return {
        name: max(own[weights[each]] for each in fused_with(weight, weights))
        for weight, name in weights.items()
    }


def _largest_of(weight: Tensor) -> float:
    return float(weight.abs().nan_to_num(nan=0.0, posinf=0.0).amax())


def _is_dense(model: nn.Module, stack: str) -> bool:
    module, _, name = stack.rpartition(".")
    return name in model.get_submodule(module)._parameters


def _begun(model: nn.Module, options: QuantizeOptions) -> _Plan | None:
    """Returns the plan of an earlier call that failed after it replaced a layer."""
    plan = _unfinished.get(model)
    modules = [] if plan is None else plan.modules
    done = [name for name in modules if is_in_4_bits(model.get_submodule(name))]
    done += [] if plan is None else [each for each in plan.stacks if not _is_dense(model, each)]
    if plan is None or not done:
        return None
    if plan.options != options:
        before, now = dataclasses.asdict(plan.options), dataclasses.asdict(options)
        differing = (f"{key}={before[key]!r}" for key in now if before[key] != now[key])
        raise InvalidArgument(
            f"model is quantized in part: {done[0]} is in 4 bits since a call that failed; "
            f"expected its options again: {', '.join(differing)}"
        )
    return plan


def _require_loaded(model: nn.Module) -> None:
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise InvalidArgument(
                f"device is given, and {name} is on meta, where accelerate leaves what it "
                f"offloads; expected all of the model loaded"
            )


def _require_model(model: nn.Module) -> None:
    require_transformers()
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if kind is None or not isinstance(model, kind):
        raise InvalidArgument(
            f"model is {kind_of(model)}; expected a PreTrainedModel of transformers: "
            f"NF4Linear.from_linear quantizes a layer of any model"
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise InvalidArgument(_QUANTIZED)


def _check_stack(model: nn.Module, name: str, allow_nonfinite: bool) -> None:
    try:
        _check_weight(model.get_parameter(name), finite=not allow_nonfinite)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from None


def _check(layer: nn.Module) -> nn.Module:
    _check_weight(layer.weight, finite=False)
    return layer


def _check_finite(layer: nn.Module) -> nn.Module:
    _check_weight(layer.weight, finite=True)
    return layer


def _check_weight(weight: Tensor, finite: bool) -> None:
    if weight.is_meta:
        raise InvalidArgument(
            "the weight is on meta, where accelerate leaves offloaded weights; expected a loaded "
            "one"
        )
    if finite:
        require_finite("the weight", weight)


def maker(
    options: QuantizeOptions,
    compute_dtype: torch.dtype | None,
    device: torch.device | None,
    largest: Mapping[str, float],
) -> Quantized:
    """Returns a function that quantizes a dense layer of this name: a Linear or, for "nf4" and
    "fp4", a Conv1D. largest: that of _Plan."""

    def of_bnb(
        _name: str, weight: Tensor, bias: nn.Parameter | None, seen: Seen | None
    ) -> nn.Module:
        kind = {"format": options.format, "blocksize": options.blocksize}
        if seen is None:
            nested_blocksize = 256 if options.nested else 0
            made = functional.quantize(weight, nested_blocksize=nested_blocksize, **kind)
        else:
            made = calibrated.quantize(weight, seen, with_nested=options.nested, **kind)
        return NF4Linear.from_quantized(made, bias, compute_dtype=compute_dtype)

    def of_floats(
        name: str, weight: Tensor, bias: nn.Parameter | None, _seen: Seen | None
    ) -> nn.Module:
        layout = WRITTEN[options.layout][options.format]
        made = _in_e2m1(weight, layout, largest.get(name))
        layer = NF4Linear.from_quantized(made, bias, compute_dtype=compute_dtype)
        layer.stored_layout = layout.name
        return layer

    def of_integers(
        _name: str, weight: Tensor, bias: nn.Parameter | None, seen: Seen | None
    ) -> nn.Module:
        kind = {"layout": options.layout, "group_size": options.group_size}
        kind |= {"symmetric": options.symmetric}
        if seen is None:
            made = functional.quantize_int4(weight, **kind)
        else:
            made = calibrated.quantize_int4(weight, seen, **kind)
        layer = Int4Linear.from_quantized(made, bias, compute_dtype=compute_dtype)
        layer.dtype_before = _torch.dtype_name(weight.dtype)
        return layer

    of_format = {"int4": of_integers, MXFP4: of_floats, NVFP4: of_floats}
    of_weight = of_format.get(options.format, of_bnb)

    def quantized(name: str, layer: nn.Module, seen: Seen | None = None) -> nn.Module:
        weight = layer.weight.detach()
        weight = weight if device is None else weight.to(device)
        weight = weight if isinstance(layer, nn.Linear) else weight.T  # Conv1D's is [in, out]
        return of_weight(name, weight, layer.bias, seen).train(layer.training)

    return quantized


def _in_e2m1(weight: Tensor, layout: Layout, largest: float | None) -> QuantizedTensor[Tensor]:
    """Quantizes a matrix to MXFP4 or NVFP4. largest: the magnitude from which the global scale of
    NVFP4 follows."""
    rule, dtype = layout.rule, _torch.dtype_name(weight.dtype)
    shape = tuple(weight.shape)
    out = zeros(shape, layout.format, None, None, dtype, weight.device, rule)
    if largest is not None:
        out.nested_absmax.fill_(float(global_scale(largest, rule == "divisor")))
    return quantize_into(weight, out)


def _replace_stack(
    model: nn.Module, name: str, options: QuantizeOptions, device: torch.device | None
) -> None:
    """Replaces experts, which were checked."""
    of_stack: dict[str, Any] = {"format": options.format, "allow_nonfinite": True}
    if options.format in WRITTEN[options.layout]:
        rule = WRITTEN[options.layout][options.format].rule
        quantize_stack(model, name, device, scale_rule=rule, **of_stack)
        model.get_submodule(name).stored_layout = options.layout
        return
    nested = 256 if options.nested else 0
    of_stack |= {"blocksize": options.blocksize, "nested_blocksize": nested}
    quantize_stack(model, name, device, **of_stack)
