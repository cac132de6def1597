"""The wrappers around functions of torch.distributed (nf4/torch/_distributed.py). The wrapped
function is the first argument.

FSDP2   quantized layers are prepared before it collects parameters, and it finds the scales,
        which are buffers; ranks whose layers differ are named
FSDP1   makes one flat float parameter of all parameters, in which no byte can be: packed
        weights become buffers, which each rank keeps whole, and no policy casts scales
DDP     broadcasts all buffers in each forward, which autograd takes for a change of what an
        earlier forward keeps: ours, which nothing changes, are broadcast by its constructor
        alone
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from nf4.torch.distributed._agreement import layers_of, require_agreement, spec_of
from nf4.torch.distributed._prepare import buffers_as_parameters, prepare_layers
from nf4.torch.modules.base import QuantizedModule


def _layers(module: nn.Module) -> Iterator[tuple[str, QuantizedModule]]:
    """Yields all quantized layers and experts of libnf4."""
    for name, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, QuantizedModule):
            yield name, layer


# ---- FSDP2 -----------------------------------------------------------------------------


def managed_states(
    original: Callable[..., Any], modules: Any, ignored_params: Any = None
) -> tuple[Any, Any]:
    prepare_layers(modules, ignored_params or ())
    with buffers_as_parameters(modules):
        return original(modules, ignored_params)


def param_module_infos(
    original: Callable[..., Any], params: Any, modules: Iterable[nn.Module]
) -> Any:
    with buffers_as_parameters(each for top in modules for each in top.modules()):
        return original(params, modules)


def param_group(
    original: Callable[..., None],
    group: Any,
    params: Any,
    modules: Any,
    mesh_info: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    specs = {name: spec_of(layer) for name, layer in layers_of(modules, params).items()}
    require_agreement(specs, mesh_info.mesh)
    original(group, params, modules, mesh_info, *args, **kwargs)


# ---- FSDP1 -----------------------------------------------------------------------------


def ignored_params(original: Callable[..., Any], root_module: nn.Module, *args: Any) -> Any:
    """torch calls this first, before parameters are moved, broadcast or flattened."""
    for _, layer in _layers(root_module):
        weight = layer._parameters.get("weight")
        if weight is not None and not weight.is_floating_point():
            del layer._parameters["weight"]
            layer.register_buffer("weight", weight.detach())
    return original(root_module, *args)


def ignored_buffer_names(original: Callable[..., Any], root_module: nn.Module, *args: Any) -> Any:
    """Adds libnf4's buffers to those that no mixed precision policy casts."""
    ours = {
        _clean(f"{name}.{buffer}".lstrip("."))
        for name, layer in _layers(root_module)
        for buffer in layer._buffers
    }
    return original(root_module, *args) | ours


def _clean(name: str) -> str:
    """Returns a name without the parts that wrappers add."""
    try:
        from torch.distributed.fsdp._common_utils import clean_tensor_name
    except ImportError:
        return name.replace("_fsdp_wrapped_module.", "")
    return clean_tensor_name(name)


# ---- DDP -------------------------------------------------------------------------------


def assign_modules_buffers(original: Callable[..., None], parallel: Any) -> None:
    original(parallel)
    ours = {id(each) for _, layer in _layers(parallel.module) for each in layer._buffers.values()}
    named = {
        name: each for name, each in parallel.named_module_buffers.items() if id(each) not in ours
    }
    parallel.named_module_buffers, parallel.modules_buffers = named, [*named.values()]
