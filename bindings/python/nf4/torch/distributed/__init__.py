"""Quantized layers on several GPUs, by torch.distributed.

prepare     before FSDP2; fully_shard does it by itself where nf4.torch is imported
"""

from nf4.torch.distributed._prepare import prepare

__all__ = ["prepare"]
