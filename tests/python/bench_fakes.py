"""The bench without a GPU: torch's tensors in host memory, times that are made up, and a C
library that computes by libnf4 on the CPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nf4._load import check, library

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "bench")]

from nf4bench.library import LaunchFailed  # noqa: E402


class FakeGpu:
    """Runs what is captured at once, and takes as many microseconds as it was asked for
    measurements so far: no two alike, and none depends on the machine."""

    place = "cpu"
    name = "no GPU"
    stream = None
    has_pdl = True

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

    def kernels(self, launch: Callable) -> int:
        launch(self.stream)
        return 1


class FakeLibrary:
    """What nf4bench.library.Library offers. `wrong` is a configuration whose first number has
    another bit, `refused` one that takes no weight; `chosen_index` what the library takes."""

    def __init__(
        self, chosen_index: int = 1, wrong: int | None = None, refused: int | None = None
    ) -> None:
        self.names = ["256x2 tile 512", "256x2 tile 512 pdl", "128x4 tile 256"]
        self.chosen_index, self.wrong, self.refused = chosen_index, wrong, refused
        self.launches: list[tuple] = []

    def variants(self, kernel: str) -> range:
        return range(2)

    def stream(self, *arguments: object) -> None:
        self.launches.append(("stream", *arguments))

    def encode_stream(self, *arguments: object) -> None:
        self.launches.append(("encode_stream", *arguments))

    def read(self, *arguments: object) -> None:
        self.launches.append(("read", *arguments))

    def write(self, *arguments: object) -> None:
        self.launches.append(("write", *arguments))

    def configurations(self) -> list[str]:
        return self.names

    def chosen(self, tensor: object, dtype: int) -> int:
        return self.chosen_index

    def dequantize(self, configuration, tensor, out: int, dtype: int, stream: None) -> None:
        if configuration == self.refused:
            raise LaunchFailed(f"nf4_bench_dequant returned 1 for {configuration}")
        check(library().nf4_dequant_cpu(ctypes.byref(tensor), out, dtype, 0))
        self.launches.append(("dequantize", configuration))
        if configuration == self.wrong:
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
