"""Quantized layers on several GPUs, by torch.distributed.

prepare          before FSDP2; fully_shard does it by itself where nf4.torch is imported
empty_model      a checkpoint's model on meta, to be sharded
load_checkpoint  each rank's part of a checkpoint into the sharded model
"""

from nf4.torch.distributed._prepare import prepare
from nf4.torch.distributed.empty_models import empty_model
from nf4.torch.distributed.loading import load_checkpoint

__all__ = ["empty_model", "load_checkpoint", "prepare"]
