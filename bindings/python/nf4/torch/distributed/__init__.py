"""Quantized layers on several GPUs, by torch.distributed.

prepare                            makes layers ready for FSDP2; fully_shard calls it where
                                   nf4.torch is imported
gather_by_copy_engines             runs FSDP2's all-gathers without SMs
ColwiseParallel, RowwiseParallel   tensor-parallel styles for parallelize_module
plan_of                            the styles of a transformers model
clip_grad_norm_                    clips the gradients of layers that are cut
named_by_cut                       renames a state_dict for torch.distributed.checkpoint
empty_model                        makes a checkpoint's model on meta, to be sharded or cut
load_checkpoint                    reads each rank's part of the checkpoint into it
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
