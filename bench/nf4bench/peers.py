"""The peers of dequantize and quantize, each on the same bytes, which are bitsandbytes' format.

A peer has a `version`, says what it `supports`, and prepares calls: prepare(weight, variant)
returns call(out=None), which enqueues on torch's current stream and returns the values. What
users keep between calls is prepared, what they do in each call is in the call. Every peer
claims our arithmetic, so its bits are compared.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import nf4
import torch
from nf4.tuning.peers import quant_state

from nf4bench.cases import Case
from nf4bench.options import PEERS
from nf4bench.weights import DTYPES, Int4Weight, Weight

Call = Callable[..., torch.Tensor]


def public_call(weight: Weight) -> Callable[[], torch.Tensor]:
    """What a user writes who wants a new tensor on torch's current stream."""
    q = weight.quantized
    return lambda: nf4.dequantize(q)


class PeerMissing(Exception):
    """The peer cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Missing:
    reason: str


class Peer:
    """The launch variants, of which the fastest counts, and what a peer can do, unless it says
    otherwise."""

    version = torch.__version__
    variants = range(1)

    def __init__(self, place: str) -> None:
        """Raises PeerMissing."""

    def supports(self, weight: Weight) -> bool:
        return True

    def prepare(self, weight: Weight, variant: int) -> Call:
        raise NotImplementedError


def _bitsandbytes(place: str) -> Any:
    """bitsandbytes.functional, able to work in `place`."""
    functional = importlib.import_module("bitsandbytes.functional")
    if place == "cuda" and not functional.lib.compiled_with_cuda:
        raise PeerMissing("bitsandbytes found no CUDA library of its own")
    return functional


def _version(module: str) -> str:
    return importlib.import_module(module).__version__


def _output(weight: Weight) -> Call:
    """What makes a new tensor for the values."""
    q, dtype = weight.quantized, DTYPES[weight.case.dtype]
    return functools.partial(torch.empty, weight.case.shape, dtype=dtype, device=q.packed.device)


class Bitsandbytes(Peer):
    """dequantize_4bit and quantize_4bit, called as users call them."""

    def __init__(self, place: str) -> None:
        self._functional = _bitsandbytes(place)
        self.version = _version("bitsandbytes")

    def supports(self, weight: Weight) -> bool:
        return weight.case.format != "own"

    def state(self, weight: Weight) -> Any:
        """Our bytes as bitsandbytes' QuantState."""
        return quant_state(weight.quantized, DTYPES[weight.case.dtype])

    def prepare(self, weight: Weight, variant: int) -> Call:
        packed, state = weight.quantized.packed.view(-1, 1), self.state(weight)
        dequantize = self._functional.dequantize_4bit
        return lambda out=None: dequantize(packed, state, out=out)

    def quantize(self, weight: Weight) -> Callable[[], Any]:
        case, quantize = weight.case, self._functional.quantize_4bit
        return lambda: quantize(
            weight.dense, blocksize=case.blocksize, compress_statistics=case.nested,
            quant_type=case.format,
        )  # fmt: skip


class UnslothSequence(Peer):
    """The calls that Unsloth's fast_dequantize makes, on bitsandbytes' C library: the scales
    into fp32, the offset onto them, then the values."""

    def __init__(self, place: str) -> None:
        if place != "cuda":
            raise PeerMissing("its calls are CUDA's alone")
        self._library = _bitsandbytes(place).lib
        self.version = f"its calls, on bitsandbytes {_version('bitsandbytes')}"

    def supports(self, weight: Weight) -> bool:
        case = weight.case
        return case.nested and case.dtype in ("fp16", "bf16") and case.format == "nf4"

    def prepare(self, weight: Weight, variant: int) -> Call:
        case, q, library = weight.case, weight.quantized, self._library
        scales = library.cdequantize_blockwise_fp32
        values = getattr(library, f"cdequantize_blockwise_{case.dtype}_nf4")
        new, device = _output(weight), q.packed.device
        nested_blocksize, blocksize, blocks, elements = map(
            ctypes.c_int,
            (case.nested_blocksize, case.blocksize, weight.sizes.blocks, case.elements),
        )

        def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
            return ctypes.c_void_p(tensor.data_ptr())

        def call(out: torch.Tensor | None = None) -> torch.Tensor:
            out = new() if out is None else out
            absmax = torch.empty(blocks.value, dtype=torch.float32, device=device)
            stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device.index))
            scales(
                pointer(q.nested_code), pointer(q.absmax), pointer(q.nested_absmax),
                pointer(absmax), nested_blocksize, blocks, stream,
            )  # fmt: skip
            absmax += q.nested_offset
            values(None, pointer(q.packed), pointer(absmax), pointer(out), blocksize, elements,
                   stream)  # fmt: skip
            return out

        return call


class TorchOperators(Peer):
    """Dequantize in torch's own operators, eager: unpack, look up, multiply, convert."""

    def prepare(self, weight: Weight, variant: int) -> Call:
        def call(out: torch.Tensor | None = None) -> torch.Tensor:
            values = dequantized(weight)
            return values.to(DTYPES[weight.case.dtype]) if out is None else out.copy_(values)

        return call


def _times(values: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    """values [n] by scales [ceil(n / size)], each for `size` values."""
    if values.numel() % size == 0:
        return (values.view(-1, size) * scales.view(-1, 1)).view(-1)
    return values * scales.repeat_interleave(size)[: values.numel()]


def scales(weight: Weight) -> torch.Tensor:
    """The scale of each block, float32."""
    case, q = weight.case, weight.quantized
    if not case.nested:
        return q.absmax
    found = _times(q.nested_code[q.absmax.int()], q.nested_absmax, case.nested_blocksize)
    return found + q.nested_offset


def codes(weight: Weight) -> torch.Tensor:
    """Every 4-bit code, uint8 of the weight's shape."""
    case, packed = weight.case, weight.quantized.packed
    pairs = torch.stack((packed >> 4, packed & 15), dim=-1)
    return pairs.view(-1)[: case.elements].view(case.shape)


def dequantized(weight: Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight's numbers, of its shape: rounded to float32, or in float64 not at all."""
    if isinstance(weight, Int4Weight):
        return weight.numbers(dtype)
    values = weight.codebook.to(dtype)[codes(weight).view(-1).int()]
    return _times(values, scales(weight).to(dtype), weight.case.blocksize).view(weight.case.shape)


class TritonKernel(Peer):
    """triton_kernel.py."""

    def __init__(self, place: str) -> None:
        self._kernel = importlib.import_module("nf4bench.triton_kernel")
        interpreted = self._kernel.triton.knobs.runtime.interpret
        if place != "cuda" and not interpreted:
            raise PeerMissing("Triton compiles for GPUs alone")
        self.version = self._kernel.triton.__version__
        self.variants = range(len(self._kernel.CONFIGURATIONS))

    def prepare(self, weight: Weight, variant: int) -> Call:
        new, launch = _output(weight), self._kernel.prepare(weight, variant)

        def call(out: torch.Tensor | None = None) -> torch.Tensor:
            out = new() if out is None else out
            launch(out)
            return out

        return call


TRIED = Case((64, 64))  # every peer can do it

FACTORIES: dict[str, Callable[[str], Peer]] = {
    "bitsandbytes": Bitsandbytes,
    "unsloth": UnslothSequence,
    "torch": TorchOperators,
    "triton": TritonKernel,
}


def load_each(names: Iterable[str], make: Callable[[str], Any]) -> dict[str, Any]:
    """What make(name) gives for each name, or the Missing that says why it failed."""
    loaded: dict[str, Any] = {}
    for name in names:
        try:
            loaded[name] = make(name)
        except PeerMissing as error:
            loaded[name] = Missing(str(error))
        except Exception as error:  # an import or a compiler may fail with anything
            loaded[name] = Missing(f"{type(error).__name__}: {error}")
    return loaded


def load(names: Iterable[str] | None, place: str) -> dict[str, Peer | Missing]:
    """Each peer of that name (all: None) that can dequantize here, or why it is missing."""
    tried = Weight(TRIED, place)

    def make(name: str) -> Peer:
        peer = FACTORIES[name](place)
        peer.prepare(tried, 0)()
        return peer

    return load_each(PEERS if names is None else names, make)


def described(peers: dict[str, Peer | Missing]) -> dict[str, dict[str, str]]:
    """The peers as the figures hold them."""
    return {
        name: {"missing": peer.reason} if isinstance(peer, Missing) else {"version": peer.version}
        for name, peer in peers.items()
    }


def present(peers: dict[str, Peer | Missing]) -> dict[str, Peer]:
    return {name: peer for name, peer in peers.items() if not isinstance(peer, Missing)}
