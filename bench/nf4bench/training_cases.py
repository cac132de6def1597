"""Which steps of QLoRA are measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nf4bench.models_cases import LLAMA_7B, Size
from nf4bench.options import Shape

RANK, ALPHA = 16, 32
TOKENS = (4, 512)
SIZE = replace(LLAMA_7B, layers=16)
WARM_UP, TURNS = 2, 7
# The single products: rows of x for a weight's shape.
MS = (1, 16, 64, 128, 256, 512, 1024, 4096)
PRODUCTS: dict[Shape, tuple[int, ...]] = {(14336, 4096): MS, (4096, 4096): MS}
# The error of the adapters' gradients, drop-in and NF4Linear beside bitsandbytes: all round to bf16
# after each product, and PEFT multiplies adapters in fp32 where ours are rounded to bf16.
MOST_ERROR = 5e-2


@dataclass(frozen=True)
class Group:
    """A step: forward and backward with a loss, and AdamW on the adapters.

    adapters       their dtype, "fp32" or "bf16"
    checkpointing  keeps the inputs of transformer layers alone and runs each forward twice
    """

    adapters: str
    checkpointing: bool
    size: Size = SIZE
    tokens: tuple[int, int] = TOKENS

    def __str__(self) -> str:
        checkpointing = ", checkpointing" if self.checkpointing else ""
        return f"adapters in {self.adapters}{checkpointing}"


def full(size: Size = SIZE) -> list[Group]:
    return [Group(adapters, each, size) for each in (False, True) for adapters in ("fp32", "bf16")]


def quick(size: Size = SIZE) -> list[Group]:
    return full(size)[:2]
