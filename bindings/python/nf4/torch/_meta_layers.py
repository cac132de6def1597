"""Makes layers on meta for the weights of a checkpoint, for a model's skeleton before it is loaded.
Importing this imports transformers."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import nf4
from nf4.checkpoint import FormatError
from nf4.checkpoint.dtypes import FILE_TO_NF4
from nf4.checkpoint.int4 import Int4Weight
from nf4.checkpoint.stacks import names_of, parameter_of
from nf4.checkpoint.weights import Weight, fields_of
from nf4.torch._annotations import PreTrainedModel
from nf4.torch._checks import torch_dtype
from nf4.torch.modules import Int4Linear, NF4Experts, NF4Linear, QuantizedLinear
from nf4.typing import DTypeLike


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def layer_on_meta(
    weight: Weight,
    module: nn.Module | None,
    target: str,
    biases: Container[str],
    compute_dtype: DTypeLike | None = None,
) -> QuantizedLinear:
    """Returns the layer that replaces the model's dense layer `module`, named `target`. biases: the
    names of the checkpoint's biases. Raises FormatError if there is no such layer."""
    module = _linear(weight, module, target)
    bias = None
    if module.bias is not None or f"{weight.name.removesuffix('.weight')}.bias" in biases:
        bias = nn.Parameter(empty(weight.shape[:1], module.weight.dtype), requires_grad=False)
    if isinstance(weight, Int4Weight):
        made = Int4Linear.from_quantized(_int4_on_meta(weight), bias, compute_dtype=compute_dtype)
    else:
        made = _nf4_on_meta(weight, compute_dtype)
        made.bias = bias
        made.stored_layout = weight.stored_layout
    return made.train(module.training)


def put_layer(model: PreTrainedModel, layer: QuantizedLinear, target: str) -> None:
    """Puts a layer in the place of the dense one. If the model ties that layer to its embeddings,
    they are untied, because the checkpoint stores a weight of its own for the layer."""
    model.set_submodule(target, layer)
    tied = getattr(model, "all_tied_weights_keys", {})
    if tied.pop(f"{target}.weight", None) is not None and not tied:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def experts_on_meta(weight: Weight, model: nn.Module, parameter: str | None) -> NF4Experts:
    """Returns the NF4Experts that replace a model's dense parameter. Raises FormatError if there is
    no such parameter."""

    def wrong(reason: str) -> FormatError:
        return FormatError(weight.path, reason, weight.name)

    module, _, name = (parameter or "").rpartition(".")
    experts = model.get_submodule(module)
    if name not in names_of(experts):
        raise wrong(f"the model has no experts {parameter or parameter_of(weight.name)}")
    shape = tuple(getattr(experts, name).shape)
    if experts.is_transposed:
        shape = (shape[0], shape[2], shape[1])
        if weight.name == parameter_of(weight.name):
            raise wrong("its blocks are along the outputs, as the parameter is [experts, in, out]")
    if shape != weight.shape:
        raise wrong(f"its shape is {list(weight.shape)}, but {list(shape)} in the model")
    fields = fields_of(weight.state)
    made = NF4Experts(*fields.pop("shape"), **fields, device="meta")
    made.stored_layout = weight.stored_layout
    return made


def _linear(weight: Weight, module: nn.Module | None, target: str) -> nn.Module:
    def wrong(reason: str) -> FormatError:
        return FormatError(weight.path, reason, weight.name)

    if module is None:
        raise wrong(f"the model has no {target}")
    if isinstance(weight, Int4Weight) and names_of(module):
        raise wrong("only nf4.torch.load loads experts of integers")
    if type(module) is not nn.Linear and not isinstance(module, Conv1D):
        raise wrong(f"{target} of the model is {type(module).__name__}, not Linear")
    shape = tuple(module.weight.shape)
    if isinstance(module, Conv1D):
        shape = shape[::-1]
    if shape != weight.shape:
        raise wrong(f"its shape is {list(weight.shape)}, but {list(shape)} in the model")
    return module


def _int4_on_meta(weight: Int4Weight) -> nf4.Int4Tensor[Tensor]:
    """Returns the weight without its memory."""
    parts = {
        name: empty(
            info.shape,
            torch_dtype(FILE_TO_NF4[info.dtype]) if name == "scales" else torch.int32,
        )
        for name, info in weight.parts.items()
        if name != "shape"
    }
    state = weight.state
    return nf4.Int4Tensor(
        layout=state.layout.name, shape=state.shape, group_size=state.group_size, **parts
    )


def _nf4_on_meta(weight: Weight, compute_dtype: DTypeLike | None) -> NF4Linear:
    fields = fields_of(weight.state)
    rows, cols = fields.pop("shape")
    kept = {**fields, "compute_dtype": compute_dtype, "device": "meta"}
    return NF4Linear(cols, rows, bias=False, **kept)
