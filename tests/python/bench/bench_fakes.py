"""The bench without a GPU: torch's tensors in host memory, times that are made up, and a C
library that computes by libnf4 on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import bench_path  # noqa: F401  (the path)
import nf4
import torch
from nf4._load import check, library
from nf4bench import cases, peers, suite
from nf4bench.cases import Case
from nf4bench.library import LaunchFailed, Refused
from nf4bench.weights import Weight

FEW_ROWS = 2  # of x, for the fake library's kernel "few"


class FakeGpu:
    """Runs what is captured at once, and takes as many microseconds as it was asked for
    measurements so far: no two alike, and none depends on the machine."""

    place = "cpu"
    name = "no GPU"
    stream = None
    cache_bytes = 5e4

    def __init__(self) -> None:
        self.measured = 0
        self.synchronized = 0

    def current_stream(self) -> None:
        return None

    def synchronize(self) -> None:
        self.synchronized += 1

    def release(self) -> None:
        pass

    def run(self, launch: Callable) -> object:
        return launch(self.stream)

    def prepare(self, launches: Sequence[Callable], eager: bool) -> Callable[[], object]:
        return lambda: [launch(self.stream) for launch in launches[:1]]

    def microseconds(self, enqueue: Callable[[], object]) -> float:
        enqueue()
        self.measured += 1
        return 1000.0 + self.measured

    def peak_bytes(self, launch: Callable) -> int:
        launch(self.stream)
        return 1_000_000

    def kernels(self, launch: Callable) -> int:
        launch(self.stream)
        return 1


class FakeLibrary:
    """What nf4bench.library.Library offers. `wrong` is a configuration whose first number has
    another bit ("keep", "evict first": those stores; "matmul", the name of a kernel, or
    "matmul_batch" and which product of it: whose first number is another), `refused` one that
    takes no weight; `pdl` whether the library launches so."""

    def __init__(
        self, wrong: int | str | None = None, refused: int | None = None, pdl: bool = True
    ) -> None:
        self.names = ["256x2 tile 512", "256x2 tile 512 pdl", "128x4 tile 256"]
        self.wrong, self.refused, self.pdl = wrong, refused, pdl
        self.launches: list[tuple] = []

    def has_pdl(self) -> bool:
        return self.pdl

    def variants(self, kernel: str) -> range:
        return range(2)

    def _launch(self, name: str, *arguments: object) -> None:
        *_, pdl, _ = arguments
        if pdl and not self.pdl:
            raise LaunchFailed(f"nf4_bench_{name} returned 801")
        self.launches.append((name, *arguments))

    def stream(self, *arguments: object) -> None:
        self._launch("stream", *arguments)

    def encode_stream(self, *arguments: object) -> None:
        self._launch("encode_stream", *arguments)

    def read(self, *arguments: object) -> None:
        self._launch("read", *arguments)

    def write(self, *arguments: object) -> None:
        self._launch("write", *arguments)

    def configurations(self) -> list[str]:
        return self.names

    def chosen(self, tensor, out: int, dtype: int) -> int:
        aligned = out % 16 == 0 and tensor.packed % 4 == 0
        return 1 if aligned and tensor.nested_blocksize else -1

    def dequantize(self, configuration, tensor, out: int, dtype: int, stream: None) -> None:
        if configuration == self.refused:
            raise LaunchFailed(f"nf4_bench_dequant returned 1 for {configuration}")
        self._dequantize(configuration, tensor, out, dtype)

    def dequantize_stores(self, keep: bool, tensor, out: int, dtype: int, stream: None) -> None:
        self._dequantize("keep" if keep else "evict first", tensor, out, dtype)

    def _dequantize(self, how: int | str, tensor, out: int, dtype: int) -> None:
        check(library().nf4_dequant_cpu(ctypes.byref(tensor), out, dtype, 0))
        self.launches.append(("dequantize", how))
        if how == self.wrong:
            first = ctypes.c_uint16.from_address(out)
            first.value ^= 1

    def quantize(
        self, source: int, dtype: int, tensor: object, workspace: int, workspace_bytes: int,
        pdl: bool, stream: None,
    ) -> None:  # fmt: skip
        check(library().nf4_quantize_cpu(
            source, dtype, ctypes.byref(tensor), workspace, workspace_bytes, 0
        ))  # fmt: skip
        self.launches.append(("quantize", pdl))

    def matmul(self, tensor, args, workspace, workspace_bytes: int, pdl: bool, stream) -> None:
        self._launch("matmul", args.m, pdl, stream)
        self._matmul("matmul", tensor, args)

    def matmul_batch(
        self, tensors, args, workspace, workspace_bytes: int, pdl: bool, stream
    ) -> None:
        self._launch("matmul_batch", len(tensors), pdl, stream)
        for i, (tensor, each) in enumerate(zip(tensors, args, strict=True)):
            self._matmul(f"matmul_batch {i}", tensor, each)

    def matmul_shapes(self) -> list[str]:
        return ["any", "few"]

    def matmul_chosen(self, tensor, args, workspace, workspace_bytes: int, stream) -> int:
        return int(args.m <= FEW_ROWS)

    def matmul_as(
        self, shape: int, tensor, args, workspace, workspace_bytes: int, pdl: bool, stream
    ) -> None:
        name = self.matmul_shapes()[shape]
        if name == "few" and args.m > FEW_ROWS:
            raise Refused("the kernel 1 of matmul cannot do it")
        self._launch(name, args.m, pdl, stream)
        self._matmul(name, tensor, args)

    def _matmul(self, how: str, tensor, args) -> None:
        check(library().nf4_matmul_cpu(ctypes.byref(tensor), ctypes.byref(args), 1))
        if how == self.wrong:
            ctypes.c_uint16.from_address(args.y).value = 0x7F7F


class Peer:
    """A peer that asks libnf4, and then changes `wrong` elements."""

    version, variants = "fake", range(2)

    def __init__(self, wrong: int = 0, supported: bool = True) -> None:
        self.wrong, self.supported = wrong, supported
        self.prepared = 0

    def supports(self, weight: Weight) -> bool:
        return self.supported

    def prepare(self, weight: Weight, variant: int):
        self.prepared += 1

        def call(out=None):
            values = torch.empty_like(weight.out) if out is None else out
            nf4.dequantize(weight.quantized, out=values)
            values.view(-1)[: self.wrong] += 1
            return values

        return call


SMALL = (64, 256)


def bench(library: FakeLibrary | None = None, names=("torch",), **loaded) -> suite.Bench:
    found = peers.load(names, "cpu") | loaded
    return suite.Bench(FakeGpu(), library or FakeLibrary(), found, replays=3)


def rows(made: suite.Bench, *wanted: Case) -> list[dict]:
    said: list[str] = []
    return suite.run(made, wanted, said.append)["rows"]


EVERY_KIND = [
    Case(SMALL, dtype, nested, peers=("torch",)) for dtype, nested in cases.CLASSES
] + [
    Case((65, 255)), Case((65, 255), "fp32", nested=False), Case((1, 1)),
    Case(SMALL, blocksize=32), Case(SMALL, blocksize=4096), Case(SMALL, format="fp4"),
    Case(SMALL, format="own", peers=()), Case(SMALL, placement="out + 1 element", peers=()),
    Case(SMALL, "fp32", placement="out + 1 element", peers=()),
    Case(SMALL, placement="packed + 1 byte", peers=()),
]  # fmt: skip
