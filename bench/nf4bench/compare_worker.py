"""One build in a comparison: a process that has loaded its nf4, prepares products and times them.

    python compare_worker.py      reads requests from stdin, answers on stdout: a line of JSON each

Requests: {"do": "hello", "quick"}, {"do": "prepare", "index"} of compare.products(quick),
{"do": "time"}, {"do": "release"}. It uses nf4's public interface alone, so that it drives builds of
any age.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import nf4
import torch

from nf4bench import compare, models_steps
from nf4bench.cases import Case
from nf4bench.device import Gpu, Launch
from nf4bench.measure import MIN_LAUNCHES, queued
from nf4bench.models_cases import Group
from nf4bench.product import Batch, Product
from nf4bench.rows import ROTATED_CACHES
from nf4bench.weights import DTYPES, Weight, rotation

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
LONG_M = 256  # from which on a product needs no rotation to miss the caches
LEAST_US = 1000.0  # calls that are timed together take at least as long
HOST_CALLS = 200


class Work(NamedTuple):
    """launches: timed one after the other. eager: not captured. bits: are they promised?"""

    launches: list[Launch]
    eager: bool = False
    bits: bool = True


def checksum(result: Any) -> int:
    """Of all bits: equal for equal results."""
    total = 0
    for part in result if isinstance(result, (list, tuple)) else [result]:
        for piece in part.contiguous().view(-1).view(BITS[part.element_size()]).split(1 << 26):
            places = torch.arange(len(piece), device=piece.device) % 65521 + 1
            total = (31 * total + int((piece.long() * places).sum())) % (1 << 61)
    return total


class Worker:
    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self._kept: dict[str, tuple[Any, Any]] = {}
        self._products: list[compare.Product] = []
        self._once: Callable[[], float] | None = None  # microseconds of one launch

    def answer(self, do: str, **given: Any) -> dict[str, Any]:
        """Errors are answers, too: the next product goes on."""
        try:
            return getattr(self, f"_{do}")(**given)
        except Exception as error:
            self._once = None
            return {"error": f"{type(error).__name__}: {error}"}

    def _hello(self, quick: bool) -> dict[str, Any]:
        # A host's processors differ in speed: both builds take turns on the same one.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        self._products = compare.products(quick)
        return {
            "nf4": str(Path(nf4.__file__).parent), "build": nf4.build_info(),
            "device": self._gpu.name, "torch": torch.__version__,
        }  # fmt: skip

    def _release(self) -> dict[str, Any]:
        self._once = None
        self._gpu.release()
        return {}

    def _time(self) -> dict[str, Any]:
        return {"us": self._once()}

    def _prepare(self, index: int) -> dict[str, Any]:
        return self.prepare(self._products[index])

    def prepare(self, product: compare.Product) -> dict[str, Any]:
        torch.manual_seed(0)
        self._once, bits = None, 0
        if product.group in ("host overhead", compare.CONTROL):
            call = host_call(self._gpu, *product.given)
            self._once = lambda: queued(self._gpu, call, HOST_CALLS)
        else:
            work = getattr(self, product.group.replace(" ", "_"))(*product.given)
            result = self._gpu.run(work.launches[0])
            bits = checksum(result) if work.bits else 0
            self._once = self._timed(work)
        return {"bits": bits, "us": self._once()}

    def _timed(self, work: Work) -> Callable[[], float]:
        enqueue, count = self._gpu.prepare(work.launches, work.eager), len(work.launches)
        first = min(self._gpu.microseconds(enqueue) for _ in range(2))
        repeats = max(1, math.ceil(LEAST_US / first))

        def once() -> float:
            if first < 20 * LEAST_US:
                self._gpu.microseconds(enqueue)  # the other build has had the GPU
            total = self._gpu.microseconds(lambda: [enqueue() for _ in range(repeats)])
            return total / count / repeats

        return once

    def _cached(self, kind: str, key: Any, make: Callable[[], Any]) -> Any:
        """That of the last product if it is alike; else the last is freed first."""
        if self._kept.get(kind, (None,))[0] != key:
            self._kept.pop(kind, None)
            self._kept[kind] = key, make()
        return self._kept[kind][1]

    def _rotation(self, case: Case) -> list[Weight]:
        nbytes, place = ROTATED_CACHES * self._gpu.cache_bytes, self._gpu.place
        return self._cached("weights", case, lambda: rotation(case, place, nbytes))

    # ---- A function for each group --------------------------------------------------------

    def dequantize(self, case: Case) -> Work:
        return Work(enough([weight.dequantize for weight in self._rotation(case)]))

    def quantize(self, case: Case) -> Work:
        def launch(weight: Weight) -> Launch:
            q = weight.quantized
            parts = (q.packed, q.absmax, q.nested_absmax, q.nested_offset)

            def enqueue(stream: int | None) -> list[torch.Tensor]:
                weight.quantize(stream)
                return [part for part in parts if part is not None]

            return enqueue

        return Work(enough([launch(weight) for weight in self._rotation(case)]))

    def matmul(self, case: Case, m: int, together: int) -> Work:
        def launch(first: Weight, *others: Weight) -> Launch:
            leading = Product(first, m)
            if not others:
                return leading.shipped
            return Batch([leading, *(Product(each, m, leading.x) for each in others)]).shipped

        weights, few = self._rotation(case), 2 if m >= LONG_M else None
        starts = range(0, len(weights) - together + 1, together)
        launches = [launch(*weights[start : start + together]) for start in starts[:few]]
        return Work(enough(launches, few or MIN_LAUNCHES))

    def whole_models(self, group: Group, launch: str) -> Work:
        size, place = group.size, self._gpu.place
        models = self._cached("models", size, lambda: models_steps.Models(size, {}, place))
        work = models.training if group.work == "training" else models.inference
        _, step = work(group, models_steps.runner(group.compiled))["libnf4"]
        return Work([step], eager=launch == "eager", bits=False)


def enough(launches: list[Launch], least: int = MIN_LAUNCHES) -> list[Launch]:
    return launches * -(-least // len(launches))


def host_call(gpu: Any, call: str, case: Case) -> Callable[[], object]:
    """The call of this name whose host overhead is measured."""
    if "Linear" in call:
        return _layer(gpu, *call.split(", "), case)
    weight, other = (Weight(case, gpu.place) for _ in range(2))
    q, dense = weight.quantized, weight.dense
    x, stream = dense[:1].clone(), gpu.current_stream()
    y = torch.empty(1, len(dense), dtype=x.dtype, device=gpu.place)
    room = torch.empty(1 << 20, dtype=torch.uint8, device=gpu.place)
    calls: dict[str, Callable[[], object]] = {
        "dequantize, new tensor": lambda: nf4.dequantize(q),
        "dequantize, out given": lambda: nf4.dequantize(q, out=dense, stream=stream),
        "quantize, out given": lambda: nf4.quantize(dense, out=q, workspace=room, stream=stream),
        "matmul, new tensor": lambda: nf4.matmul(x, q),
        "matmul, out given": lambda: nf4.matmul(x, q, out=y),
        "matmul_batch of 2": lambda: nf4.matmul_batch(x, [q, other.quantized]),
    }
    return calls[call]


def _layer(gpu: Any, kind: str, mode: str, case: Case) -> Callable[[], object]:
    """One row of x through NF4Linear or torch.nn.Linear."""
    from nf4.torch import NF4Linear

    (rows, cols), dtype = case.shape, DTYPES[case.dtype]
    module: Any = torch.nn.Linear(cols, rows, bias=False, device=gpu.place, dtype=dtype)
    module.requires_grad_(False)
    if kind == "NF4Linear":
        module = NF4Linear.from_linear(module)
    x = torch.randn(1, 1, cols, device=gpu.place, dtype=dtype, requires_grad=mode == "gradient")

    def backward() -> None:
        module(x).sum().backward()
        x.grad = None

    def call() -> None:
        module(x)

    calls: dict[str, Callable[[], Callable]] = {
        "grad": lambda: call,
        "gradient": lambda: backward,
        "no_grad": lambda: torch.no_grad()(call),
        "inference_mode": lambda: torch.inference_mode()(call),
        "autocast": lambda: torch.no_grad()(torch.autocast(gpu.place, dtype)(call)),
    }
    return calls[mode]()


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries is no answer
    worker = Worker(Gpu()) if torch.cuda.is_available() else None
    for line in sys.stdin:
        answer = worker.answer(**json.loads(line)) if worker else {"error": "torch sees no GPU"}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
