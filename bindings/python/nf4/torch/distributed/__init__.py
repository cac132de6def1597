"""Quantized layers on several GPUs, by torch.distributed.

prepare                            before FSDP2; fully_shard does it by itself where nf4.torch
                                   is imported
ColwiseParallel, RowwiseParallel   styles for parallelize_module
plan_of                            those of a transformers model
"""

from typing import Any

from nf4.torch.distributed._prepare import prepare

_PARALLEL = ("ColwiseParallel", "RowwiseParallel", "plan_of")

__all__ = [*_PARALLEL, "prepare"]


def __getattr__(name: str) -> Any:
    # Importing this imports no torch.distributed.tensor.
    if name in _PARALLEL:
        from nf4.torch.distributed import _parallel

        return getattr(_parallel, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
