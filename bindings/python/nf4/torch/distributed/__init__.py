"""Quantized layers on several GPUs, by torch.distributed.

prepare                            before FSDP2; fully_shard does it by itself where nf4.torch
                                   is imported
gather_by_copy_engines             its all-gathers without SMs
ColwiseParallel, RowwiseParallel   styles for parallelize_module
plan_of                            those of a transformers model
clip_grad_norm_                    of gradients of layers that are cut
named_by_cut                       their state_dict for torch.distributed.checkpoint
empty_model                        a checkpoint's model on meta, to be sharded or cut
load_checkpoint                    then each rank's part of the checkpoint into it
"""

import importlib
from typing import Any

from nf4.torch.distributed._prepare import prepare

# Importing this imports no torch.distributed.tensor.
_MODULES = {
    "gather_by_copy_engines": "_copy_engines",
    "ColwiseParallel": "_parallel",
    "RowwiseParallel": "_parallel",
    "plan_of": "_parallel",
    "clip_grad_norm_": "_clipping",
    "named_by_cut": "_cut_names",
    "empty_model": "empty_models",
    "load_checkpoint": "loading",
}

__all__ = [*_MODULES, "prepare"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
