"""The bench without a GPU: torch's tensors in host memory, times that are made up, and a C
library that computes by libnf4 on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import bench_path  # noqa: F401  (the path)
import nf4
import pytest
import torch
from nf4 import _abi
from nf4._load import check, library
from nf4bench import peers
from nf4bench import rows as bench_rows
from nf4bench.cases import Case
from nf4bench.check import WrongResult
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
        self.measured = self.synchronized = 0

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
    """What nf4bench.library.Library offers. `wrong`: a configuration whose first number has another
    bit ("keep", "evict first": those stores; "matmul", the name of a kernel, or "matmul_batch" and
    which product of it: whose first number is another). `refused`: one that takes no weight. `pdl`:
    whether the library launches so."""

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

    def configurations(self, operation: str) -> list[str]:
        return self.names if operation == "dequant" else ["any", "few"]

    def chosen(self, operation: str, tensor, *given) -> int:
        if operation == "matmul":
            return int(given[0].m <= FEW_ROWS)
        aligned = given[0] % 16 == 0 and tensor.packed % 4 == 0
        return 1 if aligned and tensor.nested_blocksize else -1

    def launch(self, name: str, *given: object) -> None:
        """Keeps the name with its arguments, of which pdl is the last but one and the stream the
        last; of what computes it keeps less."""
        pdl = given[-2] if name not in ("dequant", "dequant_stores") else False
        if pdl and not self.pdl:
            raise LaunchFailed(f"nf4_bench_{name} returned 801")
        computes = getattr(self, f"_{name}", None)
        if computes:
            computes(*given)
        else:
            self.launches.append((name, *given))

    def _dequant(self, configuration: int | str, tensor, out: int, dtype: int, *rest) -> None:
        if configuration == self.refused:
            raise LaunchFailed(f"nf4_bench_dequant returned 1 for {configuration}")
        check(library().nf4_dequant_cpu(ctypes.byref(tensor), out, dtype, 0))
        self.launches.append(("dequantize", configuration))
        if configuration == self.wrong:
            ctypes.c_uint16.from_address(out).value ^= 1

    def _dequant_stores(self, tensor, out: int, dtype: int, keep: bool, stream: None) -> None:
        self._dequant("keep" if keep else "evict first", tensor, out, dtype)

    def _quantize(self, source: int, dtype: int, tensor, workspace: int, size: int, *rest) -> None:
        given = source, dtype, ctypes.byref(tensor), workspace, size, 0
        check(library().nf4_quantize_cpu(*given))
        self.launches.append(("quantize", rest[0]))

    def _matmul(self, tensor, args, *rest) -> None:
        self.launches.append(("matmul", args.m, *rest[-2:]))
        self._multiply("matmul", tensor, args)

    def _matmul_batch(self, tensors, args, count: int, *rest) -> None:
        self.launches.append(("matmul_batch", count, *rest[-2:]))
        for i in range(count):
            tensor = _abi.Tensor.from_address(tensors[i])
            self._multiply(f"matmul_batch {i}", tensor, args[i])

    def _matmul_as(self, configuration: int, tensor, args, *rest) -> None:
        name = self.configurations("matmul")[configuration]
        if name == "few" and args.m > FEW_ROWS:
            raise Refused("the configuration 1 of matmul cannot do it")
        self.launches.append((name, args.m, *rest[-2:]))
        self._multiply(name, tensor, args)

    def _int4_dequant(self, tensor, out: int, dtype: int, pdl: bool, stream: None) -> None:
        check(library().nf4_int4_dequant_cpu(ctypes.byref(tensor), out, dtype, 0))
        self.launches.append(("int4_dequant", pdl))

    def _int4_matmul(self, tensor, args, *rest) -> None:
        check(library().nf4_int4_matmul_cpu(ctypes.byref(tensor), ctypes.byref(args), 1))
        self.launches.append(("int4_matmul", args.m, *rest[-2:]))

    def call(self, name: str, *given: object) -> bytes:
        assert name == "int4_matmul_kernel"
        return b"few"

    def _multiply(self, how: str, tensor, args) -> None:
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


def quiet(line: str) -> None:
    """A report that nobody reads."""


def bench(library: FakeLibrary | None = None, names=("torch",), **loaded) -> bench_rows.Bench:
    found = peers.load(names, "cpu") | loaded
    return bench_rows.Bench(FakeGpu(), library or FakeLibrary(), found, replays=3)


def rows(made: bench_rows.Bench, *wanted: Case) -> list[dict]:
    return bench_rows.run(made, wanted, quiet)["rows"]


def wrong(made: bench_rows.Bench, run: Callable[[], object]) -> str:
    """What is said of a wrong result; nothing may have been timed."""
    with pytest.raises(WrongResult) as error:
        run()
    assert made.gpu.measured == 0
    return str(error.value)


EVERY_KIND = [
    Case(SMALL, peers=("torch",)), Case((65, 255)), Case((65, 255), "fp32", nested=False),
    Case((1, 1), "fp16"), Case(SMALL, blocksize=4096), Case(SMALL, format="fp4"),
    Case(SMALL, format="own", peers=()), Case(SMALL, placement="out + 1 element", peers=()),
    Case(SMALL, "fp32", placement="out + 1 element", peers=()),
    Case(SMALL, placement="packed + 1 byte", peers=()),
]  # fmt: skip
