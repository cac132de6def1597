"""One build in a comparison: a process that has loaded its nf4, prepares products and times them.

    python compare_worker.py      reads requests from stdin, answers on stdout: a line of JSON each

Requests: {"do": "hello"}, {"do": "prepare", "product": ...}, {"do": "time"}, {"do": "release"}. It
uses nf4's public interface alone, so that it drives builds of any age.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import nf4
import torch

from nf4bench import models_steps
from nf4bench.cases import Case
from nf4bench.measure import queued
from nf4bench.models_cases import Group, Size
from nf4bench.product import Batch, Product
from nf4bench.weights import DTYPES, Weight, rotation

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
CACHES = 2  # inputs rotate over so many times the last-level cache
MIN_LAUNCHES, LONG_M = 16, 256
LEAST_US = 1000.0  # what is timed at once takes as long at least
HOST_CALLS = 200
Once = Callable[[], float]  # microseconds of one launch


def checksum(result: Any) -> int:
    """Of all bits: equal for equal results."""
    total = 0
    for part in result if isinstance(result, (list, tuple)) else [result]:
        for piece in part.contiguous().view(-1).view(BITS[part.element_size()]).split(1 << 26):
            places = torch.arange(len(piece), device=piece.device) % 65521 + 1
            total = (31 * total + int((piece.long() * places).sum())) % (1 << 61)
    return total


def case_of(spec: dict[str, Any]) -> Case:
    return Case(**spec | {"shape": tuple(spec["shape"]), "peers": ()})


class Worker:
    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self._weights: tuple[Any, list[Weight]] = (None, [])
        self._models: tuple[Any, Any] = (None, None)
        self._once: Once | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Errors are answers, too: the next product goes on."""
        try:
            return getattr(self, f"_{request.pop('do')}")(**request)
        except Exception as error:
            self._once = None
            return {"error": f"{type(error).__name__}: {error}"}

    def _hello(self) -> dict[str, Any]:
        # A host's processors differ in speed: both builds take turns on the same one.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return {
            "nf4": str(Path(nf4.__file__).parent),
            "build": nf4.build_info(),
            "device": self._gpu.name,
            "torch": torch.__version__,
        }

    def _release(self) -> dict[str, Any]:
        self._once = None
        self._gpu.release()
        return {}

    def _time(self) -> dict[str, Any]:
        return {"us": self._once()}

    def _prepare(self, product: dict[str, Any]) -> dict[str, Any]:
        torch.manual_seed(0)
        self._once, bits = None, 0
        spec = product["spec"]
        if product["group"] in ("host overhead", "control"):
            self._once = self._host(spec)
        else:
            launches, eager, promised = getattr(self, f"_{product['group'].replace(' ', '_')}")(
                spec
            )
            result = self._gpu.run(launches[0])
            bits = checksum(result) if promised else 0  # which means nothing
            self._once = self._timed(launches, eager)
        return {"bits": bits, "us": self._once()}

    def _timed(self, launches: list[Callable], eager: bool) -> Once:
        enqueue, count = self._gpu.prepare(launches, eager), len(launches)
        first = min(self._gpu.microseconds(enqueue) for _ in range(2))
        repeats = max(1, math.ceil(LEAST_US / first))

        def once() -> float:
            if first < 20 * LEAST_US:
                self._gpu.microseconds(enqueue)  # the other build has had the GPU
            total = self._gpu.microseconds(lambda: [enqueue() for _ in range(repeats)])
            return total / count / repeats

        return once

    # ---- Products: launches, whether they are not captured, whether bits are promised ----

    def _rotation(self, spec: dict[str, Any]) -> list[Weight]:
        """The weights of the last product, if they are alike; their inputs exceed the caches."""
        case = case_of(spec)
        if self._weights[0] != case:
            self._weights = (None, [])
            nbytes = CACHES * self._gpu.cache_bytes
            self._weights = (case, rotation(case, self._gpu.place, nbytes))
        return self._weights[1]

    def _dequantize(self, spec: dict[str, Any]) -> tuple[list[Callable], bool, bool]:
        return enough([weight.dequantize for weight in self._rotation(spec["case"])]), False, True

    def _quantize(self, spec: dict[str, Any]) -> tuple[list[Callable], bool, bool]:
        def launch(weight: Weight) -> Callable:
            names = ("packed", "absmax", "nested_absmax", "nested_offset")
            parts = [getattr(weight.quantized, name) for name in names]

            def enqueue(stream: int | None) -> list[torch.Tensor]:
                weight.quantize(stream)
                return [part for part in parts if part is not None]

            return enqueue

        return enough([launch(weight) for weight in self._rotation(spec["case"])]), False, True

    def _matmul(self, spec: dict[str, Any]) -> tuple[list[Callable], bool, bool]:
        m, size = spec["m"], spec["together"]
        weights = self._rotation(spec["case"])

        def launch(first: Weight, *others: Weight) -> Callable:
            leading = Product(first, m)
            if not others:
                return leading.shipped
            return Batch([leading, *(Product(each, m, leading.x) for each in others)]).shipped

        # What takes long needs no rotation to miss the caches.
        turns = [weights[i : i + size] for i in range(0, len(weights) - size + 1, size)]
        launches = [launch(*turn) for turn in turns[: 2 if m >= LONG_M else None]]
        return enough(launches, 2 if m >= LONG_M else MIN_LAUNCHES), False, True

    def _whole_models(self, spec: dict[str, Any]) -> tuple[list[Callable], bool, bool]:
        group = Group(**spec["group"] | {"size": Size(**spec["group"]["size"])})
        if self._models[0] != spec["group"]["size"]:
            self._models = (None, None)
            made = models_steps.Models(group.size, {}, self._gpu.place)
            self._models = (spec["group"]["size"], made)
        run = models_steps.runner(group.compiled)
        models = self._models[1]
        work = models.training if group.work == "training" else models.inference
        _, step = work(group, run)["libnf4"]
        return [step], spec["launch"] == "eager", False

    def _host(self, spec: dict[str, Any]) -> Once:
        """Microseconds of the host, calls that are not waited for."""
        call = host_call(spec, self._gpu)
        return lambda: queued(self._gpu, call, HOST_CALLS)


def enough(launches: list[Callable], least: int = MIN_LAUNCHES) -> list[Callable]:
    return launches * -(-least // len(launches))


# ---- Calls whose host overhead is measured ----------------------------------------------


def host_call(spec: dict[str, Any], gpu: Any) -> Callable[[], object]:
    if spec["call"].endswith("Linear"):
        return _layer(spec, gpu)
    weight, other = (Weight(case_of(spec["case"]), gpu.place) for _ in range(2))
    q, qs, dense = weight.quantized, [weight.quantized, other.quantized], weight.dense
    x, stream = dense[:1].clone(), gpu.current_stream()
    y = torch.empty(1, len(dense), dtype=x.dtype, device=gpu.place)
    workspace = torch.empty(1 << 20, dtype=torch.uint8, device=gpu.place)
    calls: dict[str, Callable[[], object]] = {
        "dequantize, new tensor": lambda: nf4.dequantize(q),
        "dequantize, out given": lambda: nf4.dequantize(q, out=dense, stream=stream),
        "quantize, out given": lambda: nf4.quantize(
            dense, out=q, workspace=workspace, stream=stream
        ),
        "matmul, new tensor": lambda: nf4.matmul(x, q),
        "matmul, out given": lambda: nf4.matmul(x, q, out=y),
        "matmul_batch of 2": lambda: nf4.matmul_batch(x, qs),
    }
    return calls[spec["call"]]


def _layer(spec: dict[str, Any], gpu: Any) -> Callable:
    """One row of x through a layer: NF4Linear, or torch.nn.Linear."""
    from nf4.torch import NF4Linear

    rows, cols = spec["case"]["shape"]
    dtype = DTYPES[spec["case"]["dtype"]]
    module: Any = torch.nn.Linear(cols, rows, bias=False, device=gpu.place, dtype=dtype)
    module.requires_grad_(False)
    if spec["call"] == "NF4Linear":
        module = NF4Linear.from_linear(module)
    mode, x = spec["mode"], torch.randn(1, 1, cols, device=gpu.place, dtype=dtype)
    x.requires_grad_(mode == "gradient")

    def call() -> None:
        module(x)

    def backward() -> None:
        module(x).sum().backward()
        x.grad = None

    if mode == "no_grad":
        return torch.no_grad()(call)
    if mode == "inference_mode":
        return torch.inference_mode()(call)
    if mode == "autocast":
        kind = "cuda" if gpu.place == "cuda" else "cpu"
        return torch.no_grad()(torch.autocast(kind, dtype)(call))
    return backward if mode == "gradient" else call


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    if not torch.cuda.is_available():
        worker = None
    else:
        from nf4bench.device import Gpu

        worker = Worker(Gpu())
    for line in sys.stdin:
        answer = worker.answer(json.loads(line)) if worker else {"error": "torch sees no GPU"}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
