"""Two builds beside each other in one run, product by product and in turns.

    python tests/bench/bench.py --before DIR --quick --json FILE

DIR is another checkout. Both are built: of each, build/lib/libnf4.so, build/bindings/python and
bindings/python are used. Nothing is compiled or downloaded, and of packages torch and numpy are
needed. --quick takes two minutes of an H200, four at most. `--before .` shows the noise.

Each build is a process with its own nf4, library and CUDA context (compare_worker.py); this one
only says whose turn it is, and needs nothing but Python. A ratio is the median over turns of after
over before; a product that seems slower by more than SLOWER is measured again, with more turns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nf4bench import cases, matmul_cases, models_cases
from nf4bench.measure import summary
from nf4bench.table import Table, number, text

Report = Callable[[str], None]
BENCH = Path(__file__).resolve().parents[1]
SLOWER, MEAN = 1.03, 1.01  # the bounds: of each product, and of a group's geometric mean
WARM_UP, TURNS, LONG_TURNS, AGAIN = 2, 15, 7, 45
LONG_US = 50_000
CONTROL = "control"  # the group of what is the same code in both: how far a ratio is off by chance
SECONDS, QUICK_SECONDS = 900, 240  # no product begins when so many are over


@dataclasses.dataclass(frozen=True)
class Product:
    """What both builds do. spec: what the worker needs to prepare it."""

    group: str
    name: str
    spec: dict[str, Any]


# ---- Which ------------------------------------------------------------------------------


def _memory(every: Iterable[cases.Case]) -> list[Product]:
    """Dequantize and quantize."""
    return [
        Product(case.work, str(case).removeprefix(f"{case.work} "), {"case": asdict(case)})
        for case in every
        if case.work in ("dequantize", "quantize")
    ]


def _matmul(groups: Iterable[matmul_cases.Group]) -> list[Product]:
    return [
        Product(
            "matmul",
            f"{f'{group.together} x ' if group.together > 1 else ''}"
            f"{str(group.case).removeprefix('matmul ')} M={m}",
            {"case": asdict(group.case), "m": m, "together": group.together},
        )
        for group in groups
        for m in group.ms
    ]


def _models(groups: Iterable[models_cases.Group]) -> list[Product]:
    return [
        Product(
            "whole models", f"{group}, {launch}",
            {"group": asdict(group), "launch": launch},
        )
        for group in groups
        if group.work != "mlp"
        for launch in group.launches
    ]  # fmt: skip


def _host() -> list[Product]:
    small, large = cases.Case((256, 256)), cases.Case((4096, 4096))
    modes = ("no_grad", "inference_mode", "grad", "autocast", "gradient")
    calls = [
        ("dequantize, new tensor", small, ""), ("dequantize, out given", small, ""),
        ("quantize, out given", small, ""), ("matmul, new tensor", large, ""),
        ("matmul, out given", large, ""), ("matmul_batch of 2", large, ""),
        *(("NF4Linear", large, mode) for mode in modes),
        ("torch.nn.Linear", large, "no_grad"),
    ]  # fmt: skip
    return [
        Product(
            CONTROL if call == "torch.nn.Linear" else "host overhead",
            f"{call}, {mode}" if mode else call,
            {"case": asdict(case), "call": call, "mode": mode},
        )
        for call, case, mode in calls
    ]  # fmt: skip


QUICK_MODEL = dataclasses.replace(models_cases.LLAMA_7B, layers=8)


def products(quick: bool) -> list[Product]:
    """quick: about two minutes on an H200; else about ten, with more shapes, all 32 layers, and
    compiled models."""
    if quick:
        detail = [case for case in cases.full() if case.shape in cases.DETAIL]
        memory = [*cases.quick(), *(case for case in detail if case not in cases.quick())]
        models = [
            dataclasses.replace(group, launches=models_cases.BOTH)
            for group in models_cases.quick(QUICK_MODEL)
        ]
    else:
        memory, models = cases.full(), models_cases.full()
    unique = list(dict.fromkeys(dataclasses.replace(c, peers=(), bounds=False) for c in memory))
    return [*_host(), *_memory(unique), *_matmul(matmul_cases.full()), *_models(models)]


# ---- Turns ------------------------------------------------------------------------------


class Failed(Exception):
    """A build could not be started or did not answer; the message says why."""


class Build:
    """A process that has loaded the nf4 of a tree. Requests go to it, then answers are fetched."""

    def __init__(self, tree: Path, build: Path) -> None:
        library = build / "lib" / "libnf4.so"
        package = tree / "bindings" / "python"
        for path in (library, package / "nf4" / "__init__.py"):
            if not path.exists():
                raise Failed(f"there is no {path}")
        paths = [package, build / "bindings" / "python", BENCH, os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)).rstrip(os.pathsep),
            "NF4_LIBRARY": str(library.resolve()),
            "NF4_BITSANDBYTES": "0",
        }
        self._name = str(tree)
        self._process = subprocess.Popen(
            [sys.executable, str(BENCH / "nf4bench" / "compare_worker.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
        )  # fmt: skip

    def send(self, **request: Any) -> None:
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise Failed(f"{self._name}: the process has ended") from None

    def fetch(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise Failed(f"{self._name}: the process has ended")
        return json.loads(line)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def ask(builds: Iterable[Any], **request: Any) -> list[dict[str, Any]]:
    """Both work at once."""
    builds = list(builds)
    for build in builds:
        build.send(**request)
    return [build.fetch() for build in builds]


def _turns(builds: list[Any], turns: int) -> list[list[float]]:
    """Microseconds of each turn, before and after; who goes first alternates."""
    times: list[list[float]] = [[], []]
    for turn in range(WARM_UP + turns):
        for index in (0, 1) if turn % 2 else (1, 0):
            (answer,) = ask([builds[index]], do="time")
            if "error" in answer:
                raise RuntimeError(answer["error"])
            if turn >= WARM_UP:
                times[index].append(answer["us"])
    return times


def measured(builds: list[Any], product: Product) -> dict[str, Any]:
    """The row of a product; with "failed" where a build cannot do it."""
    row: dict[str, Any] = {"group": product.group, "name": product.name}
    try:
        for again in (False, True):
            prepared = ask(builds, do="prepare", product=asdict(product))
            for side, answer in zip(("before", "after"), prepared, strict=True):
                if "error" in answer:
                    return row | {"failed": f"{side}: {answer['error']}"}
            usual = LONG_TURNS if prepared[0]["us"] > LONG_US else TURNS
            times = _turns(builds, AGAIN if again and usual == TURNS else usual)
            ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
            row |= {
                "before": summary(times[0]).figures(), "after": summary(times[1]).figures(),
                "ratio": round(ratio, 4), "same_bits": prepared[0]["bits"] == prepared[1]["bits"],
                "again": again,
            }  # fmt: skip
            if ratio <= SLOWER:
                break
    except RuntimeError as error:
        return row | {"failed": str(error)}
    finally:
        ask(builds, do="release")
    return row


def run(
    builds: list[Any], wanted: Iterable[Product], limit: float, report: Report
) -> dict[str, Any]:
    """All figures. No product begins after `limit` seconds; those are named in "left_out"."""
    began = time.monotonic()
    hello = ask(builds, do="hello")
    for side, answer in zip(("before", "after"), hello, strict=True):
        if "error" in answer:
            raise Failed(f"{side}: {answer['error']}")
        report(f"{side}: {answer['nf4']}")
    figures: dict[str, Any] = {
        "device": hello[0]["device"], "torch": hello[0]["torch"], "before": hello[0],
        "after": hello[1], "products": [], "left_out": [],
    }  # fmt: skip
    for product in wanted:
        if time.monotonic() - began > limit:
            figures["left_out"].append(f"{product.group}: {product.name}")
            continue
        figures["products"].append(measured(builds, product))
        report(line(figures["products"][-1]))
    figures["summary"] = summarized(figures["products"])
    figures["seconds"] = round(time.monotonic() - began, 1)
    return figures


# ---- What is printed --------------------------------------------------------------------


def line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['group']:14} {row['name']}: failed: {row['failed']}"
    before, after = row["before"], row["after"]
    return (
        f"{row['group']:14} {row['name']:44} {before['us']:10.2f} -> {after['us']:10.2f} us "
        f"{row['ratio']:.3f}{' slower' if row['ratio'] > SLOWER else ''}"
        f"{'' if row['same_bits'] else ' OTHER BITS'}"
    )


def summarized(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By group: how many products, the geometric mean of their ratios, and the worst."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "ratio" in row:
            found.setdefault(row["group"], []).append(row)
    return {
        group: {
            "products": len(each),
            "mean": round(statistics.geometric_mean(row["ratio"] for row in each), 4),
            "worst": max(each, key=lambda row: row["ratio"])["name"],
            "worst_ratio": max(row["ratio"] for row in each),
            "slower": [row["name"] for row in each if row["ratio"] > SLOWER],
        }
        for group, each in found.items()
    }


def within_bounds(figures: dict[str, Any]) -> bool:
    """Nothing failed, the same bits, and no group but the control's is slower."""
    rows = [row for row in figures["products"] if "failed" in row or not row["same_bits"]]
    groups = [each for group, each in figures["summary"].items() if group != CONTROL]
    return not rows and not any(each["slower"] or each["mean"] > MEAN for each in groups)


TABLE = Table(
    text("group", "{group}"), number("products", "{products}"),
    number("after over before", "{mean:.4f}"), text("slowest", "{worst}"),
    number("ratio", "{worst_ratio:.3f}"), number("slower", lambda row: str(len(row["slower"]))),
)  # fmt: skip


def table(figures: dict[str, Any]) -> str:
    """By group, then each product that is slower, fails or has other bits."""
    parts = [TABLE.markdown({"group": group, **each} for group, each in figures["summary"].items())]
    parts += [
        line(row) for row in figures["products"]
        if "failed" in row or row["ratio"] > SLOWER or not row["same_bits"]
    ]  # fmt: skip
    parts += [f"left out, as time was over: {name}" for name in figures["left_out"]]
    bounds = f"mean within {MEAN - 1:.0%}, none over {SLOWER - 1:.0%} slower, same bits"
    parts.append(f"{'yes' if within_bounds(figures) else 'NO'}: {bounds}")
    return "\n".join(parts)


def say(text: str) -> None:
    print(text, flush=True)


def main(before: Path, after: Path, build: Path, quick: bool) -> dict[str, Any]:
    """Compares two trees, of which each has build/; `build` is that of `after`. Raises Failed."""
    builds: list[Build] = []
    try:
        builds += [Build(before, before / "build"), Build(after, build)]
        limit = QUICK_SECONDS if quick else SECONDS
        figures = run(builds, products(quick), limit, say)
    finally:
        for each in builds:
            each.close()
    say(table(figures))
    return figures
