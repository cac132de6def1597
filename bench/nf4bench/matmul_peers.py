"""The peers of matmul. A peer says which products it `supports` and in which
ways it may be called; prepare(weight, variant) returns call(x), which enqueues on torch's
current stream and returns a y of its own. What users keep between calls is prepared."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nf4bench import peers
from nf4bench.cases import INT4, Case
from nf4bench.matmul_cases import PEERS, TINYGEMM_M, weight_case
from nf4bench.peers import Missing, PeerMissing
from nf4bench.product import MOST_PEER_ERROR, exact, require
from nf4bench.weights import DTYPES, Weight, weight_of

Multiply = Callable[[torch.Tensor], torch.Tensor]


class Peer:
    """What a peer can do, and the ways to call it, of which the fastest counts, unless it says
    otherwise."""

    version = torch.__version__
    variants = range(1)

    def __init__(self, place: str) -> None:
        """Raises PeerMissing."""

    def supports(self, case: Case, m: int, variant: int) -> bool:
        return True

    def prepare(self, weight: Weight, variant: int) -> Multiply:
        raise NotImplementedError

    def numbers(self, weight: Weight) -> torch.Tensor | None:
        """What it multiplies with, float64 [rows, cols]; None: the weight itself."""


class Bitsandbytes(Peer):
    """matmul_4bit, as Linear4bit calls it; for one row of x also gemv_4bit, which it used to
    call, and which takes other bytes on the CPU."""

    def __init__(self, place: str) -> None:
        self.variants = range(2 if place == "cuda" else 1)
        self._dequantize = peers.Bitsandbytes(place)
        self.version = self._dequantize.version
        self._multiply = importlib.import_module("bitsandbytes").matmul_4bit
        self._gemv = importlib.import_module("bitsandbytes.functional").gemv_4bit

    def supports(self, case: Case, m: int, variant: int) -> bool:
        return variant == 0 or m == 1

    def prepare(self, weight: Weight, variant: int) -> Multiply:
        packed, state = weight.quantized.packed.view(-1, 1), self._dequantize.state(weight)
        multiply, gemv = self._multiply, self._gemv
        if variant == 0:
            return lambda x: multiply(x, packed.t(), quant_state=state)
        return lambda x: gemv(x, packed, state=state)


class Dense(Peer):
    """torch's linear, which is cuBLAS, with the dequantized weight, which is in the memory of the
    numbers that it was made from."""

    def prepare(self, weight: Weight, variant: int) -> Multiply:
        dense = weight.dequantize(None if weight.place == "cpu" else 0)
        return lambda x: torch.nn.functional.linear(x, dense)


class Tinygemm(Peer):
    """torch's int4 kernel, on codes that it has rearranged. They are ours, taken as integers
    from -8 to 7, so its weights are others of the same size; groups of 64."""

    GROUP, INNER_TILES = 64, 8

    def __init__(self, place: str) -> None:
        if place != "cuda":
            raise PeerMissing("its kernel is CUDA's alone")

    def supports(self, case: Case, m: int, variant: int) -> bool:
        rows, cols = case.shape
        whole = rows % 8 == 0 and cols % (16 * self.INNER_TILES) == 0
        return case.dtype == "bf16" and case.blocksize == self.GROUP and m <= TINYGEMM_M and whole

    @staticmethod
    def _steps(weight: Weight) -> torch.Tensor:
        """What an integer is worth, bf16 [rows, groups of a row]."""
        rows = weight.case.shape[0]
        return (peers.scales(weight) / 8).to(torch.bfloat16).view(rows, -1)

    @staticmethod
    def scales_and_zeros(weight: Weight) -> torch.Tensor:
        """bf16 [groups of a row, rows, 2]; the zeros are 0."""
        steps = Tinygemm._steps(weight).t()
        return torch.stack((steps, torch.zeros_like(steps)), dim=-1).contiguous()

    def prepare(self, weight: Weight, variant: int) -> Multiply:
        packed = weight.quantized.packed.view(weight.case.shape[0], -1)
        tiles = torch.ops.aten._convert_weight_to_int4pack(packed, self.INNER_TILES)
        both, group = self.scales_and_zeros(weight), self.GROUP
        multiply = torch.ops.aten._weight_int4pack_mm
        return lambda x: multiply(x, tiles, group, both)

    def numbers(self, weight: Weight) -> torch.Tensor:
        rows, cols = weight.case.shape
        integers = (peers.codes(weight).double() - 8).view(rows, -1, self.GROUP)
        return (integers * self._steps(weight).double().unsqueeze(-1)).view(rows, cols)


class Humming(Peer):
    """humming-kernels, on bytes that it has rearranged: integers in groups, of the same numbers
    quantized anew."""

    GROUP = 128  # where the weight has no integers

    def __init__(self, place: str) -> None:
        import humming  # type: ignore[import-not-found]
        from humming.layer import HummingLayer  # type: ignore[import-not-found]

        self.version, self._layer = humming.__version__, HummingLayer

    def _made(self, weight: Weight) -> Any:
        if "humming" not in weight.others:
            (rows, cols), dtype = weight.case.shape, DTYPES[weight.case.dtype]
            group = weight.case.blocksize if weight.case.format in INT4 else self.GROUP
            layer = self._layer(
                shape_n=rows, shape_k=cols, torch_dtype=dtype,
                weight_config={"dtype": "int4", "group_size": group},
            ).cuda()  # fmt: skip
            layer.load_from_unquantized(peers.dequantized(weight).to(dtype))
            layer.transform()
            weight.others["humming"] = layer
        return weight.others["humming"]

    def prepare(self, weight: Weight, variant: int) -> Multiply:
        layer, rows = self._made(weight), weight.case.shape[0]
        return lambda x: layer(x, outputs=torch.empty(len(x), rows, dtype=x.dtype, device=x.device))

    def numbers(self, weight: Weight) -> torch.Tensor:
        """What it gives for unit vectors."""
        dtype, cols = DTYPES[weight.case.dtype], weight.case.shape[1]
        given = self.prepare(weight, 0)(torch.eye(cols, dtype=dtype, device=weight.place))
        return given.double().t()


FACTORIES: dict[str, Callable[[str], Peer]] = {
    "bitsandbytes": Bitsandbytes, "dense": Dense, "humming": Humming, "tinygemm": Tinygemm,
}  # fmt: skip
TRIED = weight_case((256, 1024))  # every peer can do it


def try_out(peer: Peer, weight: Weight) -> None:
    """One product in each way to call it. Raises what that raises, and WrongResult."""
    numbers = peer.numbers(weight)
    numbers = peers.dequantized(weight, torch.float64) if numbers is None else numbers
    x = torch.randn(1, weight.case.shape[1], device=weight.place).to(DTYPES[weight.case.dtype])
    for variant in peer.variants:
        y = peer.prepare(weight, variant)(x)
        require(f"call {variant}", MOST_PEER_ERROR, exact(x, numbers), y)


def load(place: str) -> dict[str, Peer | Missing]:
    """Each peer that can multiply here, or why it is missing."""
    return load_tried({name: FACTORIES[name] for name in PEERS}, TRIED, place)


def load_tried(
    factories: Mapping[str, Callable[[str], Peer]], case: Case, place: str
) -> dict[str, Peer | Missing]:
    """Those of the factories that can do this case, or why one is missing."""
    tried = weight_of(case, place)

    def make(name: str) -> Peer:
        peer = factories[name](place)
        try_out(peer, tried)
        return peer

    return peers.load_each(factories, make)
