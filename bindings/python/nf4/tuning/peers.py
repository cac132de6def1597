"""What libnf4 is timed beside: bitsandbytes on its own kernels, and a dense weight that is there
already."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nf4._quantize import quantize
from nf4.info import codebook
from nf4.tuning.products import Call, Product, Weights, copies_beyond_cache

BITSANDBYTES, CUBLAS = "bitsandbytes", "dense weight"


def quant_state(weight: Any, dtype: torch.dtype) -> Any:
    """Returns the scales of a weight in NF4 or FP4 as bitsandbytes' QuantState. `dtype` is that of
    the dequantized weight."""
    make, device = (
        importlib.import_module("bitsandbytes.functional").QuantState,
        weight.absmax.device,
    )
    inner = None
    if weight.nested:
        inner = make(
            absmax=weight.nested_absmax, blocksize=weight.nested_blocksize,
            code=weight.nested_code, dtype=torch.float32,
        )  # fmt: skip
    return make(
        absmax=weight.absmax, shape=torch.Size(weight.shape), dtype=dtype,
        blocksize=weight.blocksize, code=torch.from_numpy(codebook(weight.format)).to(device),
        quant_type=weight.format, offset=weight.nested_offset.view(()) if weight.nested else None,
        state2=inner,
    )  # fmt: skip


class Bitsandbytes:
    """bitsandbytes' products. Raises what it fails with on this GPU."""

    def __init__(self, device: torch.device) -> None:
        module = importlib.import_module("bitsandbytes")
        self.version: str = module.__version__
        self._multiply = module.matmul_4bit
        self._dequantize = importlib.import_module("bitsandbytes.functional").dequantize_4bit
        dense = torch.ones(64, 64, dtype=torch.float16, device=device)
        weight = quantize(dense)
        state = quant_state(weight, dense.dtype)
        self._product(dense[:1], weight.packed.view(-1, 1), state)
        self._gradient(dense[:1], weight.packed.view(-1, 1), state)

    def dequantized(self, weight: Any, dtype: torch.dtype) -> Tensor:
        return self._dequantize(weight.packed.view(-1, 1), quant_state(weight, dtype))

    def calls(self, product: Product, weights: Weights, dtype: str, m: int) -> list[Call]:
        """Returns a call for each copy of the weight. There is none for products that bitsandbytes
        has not: integers, and those with an adapter."""
        if product.kind != "nf4" or product.rank:
            return []
        x, _ = weights.x_and_y(product, dtype, m)
        call = self._gradient if product.gradient else self._product
        made = [(each.packed.view(-1, 1), quant_state(each, x.dtype)) for each in weights.copies]
        return [partial(call, x, *each) for each in made]

    def _product(self, x: Tensor, packed: Tensor, state: Any) -> Tensor:
        return self._multiply(x, packed.t(), quant_state=state)

    def _gradient(self, x: Tensor, packed: Tensor, state: Any) -> Tensor:
        return torch.mm(x, self._dequantize(packed, state))  # as MatMul4Bit.backward does


@contextmanager
def own_bitsandbytes(device: torch.device) -> Iterator[Bitsandbytes | str]:
    """Yields bitsandbytes, on its own kernels for as long as this lasts, or the name of the
    exception that it fails with here."""
    peer = _tried(device)  # whose import may put libnf4's kernels in its place
    ours = sys.modules.get("nf4.torch.bitsandbytes")
    served = None if ours is None else ours.served()
    if served is None:
        yield peer
        return
    ours.unregister()
    try:
        yield _tried(device)
    finally:
        ours.register()


def _tried(device: torch.device) -> Bitsandbytes | str:
    try:
        return Bitsandbytes(device)
    except Exception as error:  # such as no package, or a build without kernels for this GPU
        return type(error).__name__


class Dense:
    """torch's product with a weight in 16 bits, which is cuBLAS."""

    def __init__(self, weights: Weights, dtype: str) -> None:
        *_, dense, _, _ = weights.operands(dtype)
        nbytes = dense.numel() * dense.element_size()
        self._weights, self._dtype = weights, dtype
        self._dense = [dense.clone() for _ in range(copies_beyond_cache(nbytes, weights.device))]

    def calls(self, product: Product, m: int) -> Sequence[Call]:
        """Returns none with an adapter."""
        if product.rank:
            return []
        x, y = self._weights.x_and_y(product, self._dtype, m)
        return [
            partial(torch.mm, x, each if product.gradient else each.T, out=y)
            for each in self._dense
        ]
