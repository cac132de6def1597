"""Two builds in one run, product by product and in turns.

    python bench/bench.py --before DIR --quick --json FILE

DIR is another checkout. Both are built: of each, build/lib/libnf4.so, build/bindings/python and
bindings/python are used; of packages torch and numpy. --quick takes two minutes of an H200, four at
most. `--before .` shows the noise.

Each build is a process with its own nf4, library and CUDA context (compare_worker.py); this one
only says whose turn it is. A ratio is the median over turns of after over before; a product that
seems slower by more than SLOWER is measured again, with more turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nf4bench import cases, matmul_cases, models_cases
from nf4bench.measure import summary, taken
from nf4bench.table import Row, Table, number, text

Report = Callable[[str], None]
BENCH = Path(__file__).resolve().parents[1]
SLOWER, MEAN = 1.03, 1.01  # the bounds: of each product, and of a group's geometric mean
TURNS, LONG_TURNS, AGAIN = 15, 7, 45
LONG_US = 50_000
CONTROL = "control"  # the group of what is the same code in both: how far a ratio is off by chance
SECONDS, QUICK_SECONDS = 900, 240  # no product begins when so many are over
QUICK_MODEL = replace(models_cases.LLAMA_7B, layers=8)


class Product(NamedTuple):
    """What both builds do: `given` are the arguments of the group's function in the worker."""

    group: str
    name: str
    given: tuple


# ---- Which ------------------------------------------------------------------------------


def _host() -> list[Product]:
    small, large = cases.Case((256, 256)), cases.Case((4096, 4096))
    modes = ("no_grad", "inference_mode", "grad", "autocast", "gradient")
    calls = [
        *((f"{each}, out given", small) for each in ("dequantize", "quantize")),
        ("dequantize, new tensor", small), ("matmul, new tensor", large),
        ("matmul, out given", large), ("matmul_batch of 2", large),
        *((f"NF4Linear, {mode}", large) for mode in modes),
    ]  # fmt: skip
    control = "torch.nn.Linear, no_grad"
    products = [Product("host overhead", call, (call, case)) for call, case in calls]
    return [*products, Product(CONTROL, control, (control, large))]


def _matmul(group: matmul_cases.Group, m: int) -> Product:
    count = f"{group.together} x " if group.together > 1 else ""
    name = f"{count}{str(group.case).removeprefix('matmul ')} M={m}"
    return Product("matmul", name, (group.case, m, group.together))


def products(quick: bool) -> list[Product]:
    """quick: about two minutes on an H200; else about ten, with more shapes, all 32 layers, and
    compiled models. Both builds make the same list, and know a product by its index."""
    memory, models = cases.full(), models_cases.full()
    if quick:
        memory = [*cases.quick(), *(case for case in memory if case.shape in cases.DETAIL)]
        models = [
            replace(group, launches=models_cases.BOTH) for group in models_cases.quick(QUICK_MODEL)
        ]
    unique = dict.fromkeys(replace(case, peers=(), bounds=False) for case in memory)
    return [
        *_host(),
        *(
            Product(case.work, str(case).removeprefix(f"{case.work} "), (case,))
            for case in unique
            if case.work in ("dequantize", "quantize")
        ),
        *(_matmul(group, m) for group in matmul_cases.full() for m in group.ms),
        *(
            Product("whole models", f"{group}, {launch}", (group, launch))
            for group in models
            if group.work != "mlp"
            for launch in group.launches
        ),
    ]


# ---- Turns ------------------------------------------------------------------------------


class Failed(Exception):
    """A build could not be started or did not answer; the message says why."""


class Refused(Failed):
    """A build answered with an error."""


class Build:
    """A process that has loaded the nf4 of a tree. Requests go to it, then answers are fetched.

    side  "before" or "after"
    """

    def __init__(self, side: str, tree: Path, build: Path) -> None:
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
        self.side = side
        self._process = subprocess.Popen(
            [sys.executable, str(BENCH / "nf4bench" / "compare_worker.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
        )  # fmt: skip

    def send(self, **request: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # fetch() says so
            print(json.dumps(request), file=self._process.stdin, flush=True)

    def fetch(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise Failed(f"{self.side}: the process has ended")
        return json.loads(line)

    def close(self) -> None:
        """Ends it, by the end of its stdin."""
        with contextlib.suppress(BrokenPipeError), self._process:
            pass


def ask(builds: Sequence[Any], **request: Any) -> list[dict[str, Any]]:
    """All work at once. Raises Refused, and Failed where a process has ended."""
    for build in builds:
        build.send(**request)
    answers = [build.fetch() for build in builds]
    for build, answer in zip(builds, answers, strict=True):
        if "error" in answer:
            raise Refused(f"{build.side}: {answer['error']}")
    return answers


def measured(builds: Sequence[Any], index: int, product: Product) -> dict[str, Any]:
    """The row of a product; with "failed" where a build cannot do it."""
    row: dict[str, Any] = {"group": product.group, "name": product.name}

    def once(build: Any) -> float:
        return ask([build], do="time")[0]["us"]

    try:
        for again in (False, True):
            first, second = ask(builds, do="prepare", index=index)
            usual = LONG_TURNS if first["us"] > LONG_US else TURNS
            turns = AGAIN if again and usual == TURNS else usual
            work = {build.side: partial(once, build) for build in builds}
            before, after = taken(work, turns, rotate=True).values()
            ratio = statistics.median(b / a for a, b in zip(before, after, strict=True))
            row |= {
                "before": summary(before).figures(), "after": summary(after).figures(),
                "ratio": round(ratio, 4), "same_bits": first["bits"] == second["bits"],
                "again": again,
            }  # fmt: skip
            if ratio <= SLOWER:
                break
    except Refused as error:
        return row | {"failed": str(error)}
    finally:
        ask(builds, do="release")
    return row


def run(builds: Sequence[Any], quick: bool, limit: float, report: Report) -> dict[str, Any]:
    """All figures. No product begins after `limit` seconds; those are named in "left_out"."""
    began = time.monotonic()
    hello = ask(builds, do="hello", quick=quick)
    for build, answer in zip(builds, hello, strict=True):
        report(f"{build.side}: {answer['nf4']}")
    figures: dict[str, Any] = {
        "device": hello[0]["device"], "torch": hello[0]["torch"], "before": hello[0],
        "after": hello[1], "products": [], "left_out": [],
    }  # fmt: skip
    for index, product in enumerate(products(quick)):
        if time.monotonic() - began > limit:
            figures["left_out"].append(f"{product.group}: {product.name}")
            continue
        figures["products"].append(measured(builds, index, product))
        report(line(figures["products"][-1]))
    figures["summary"] = summarized(figures["products"])
    figures["seconds"] = round(time.monotonic() - began, 1)
    return figures


# ---- What is printed --------------------------------------------------------------------


def line(row: Row) -> str:
    if "failed" in row:
        return f"{row['group']:14} {row['name']}: failed: {row['failed']}"
    return (
        f"{row['group']:14} {row['name']:44} "
        f"{row['before']['us']:10.2f} -> {row['after']['us']:10.2f} us "
        f"{row['ratio']:.3f}{' slower' if row['ratio'] > SLOWER else ''}"
        f"{'' if row['same_bits'] else ' OTHER BITS'}"
    )


def summarized(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """By group: how many products, the geometric mean of their ratios, and the worst."""
    found: dict[str, list[Row]] = {}
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


def within_bounds(figures: Row) -> bool:
    """Nothing failed, the same bits, and no group but the control's is slower."""
    wrong = any("failed" in row or not row["same_bits"] for row in figures["products"])
    groups = [each for group, each in figures["summary"].items() if group != CONTROL]
    return not wrong and not any(each["slower"] or each["mean"] > MEAN for each in groups)


TABLE = Table(
    text("group", "{group}"), number("products", "{products}"),
    number("after over before", "{mean:.4f}"), text("slowest", "{worst}"),
    number("ratio", "{worst_ratio:.3f}"), number("slower", lambda row: str(len(row["slower"]))),
)  # fmt: skip


def table(figures: Row) -> str:
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


def main(before: Path, after: Path, build: Path, quick: bool) -> dict[str, Any]:
    """Compares two trees, of which each has build/; `build` is that of `after`. Raises Failed."""
    report = partial(print, flush=True)
    with contextlib.ExitStack() as stack:
        builds = []
        for side, tree, place in (("before", before, before / "build"), ("after", after, build)):
            builds.append(Build(side, tree, place))
            stack.callback(builds[-1].close)
        figures = run(builds, quick, QUICK_SECONDS if quick else SECONDS, report)
    report(table(figures))
    return figures
