"""Every launch configuration of dequantize, over shapes and dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nf4bench import tables
from nf4bench.cases import HEADLINE, Case
from nf4bench.device import Launch
from nf4bench.library import LaunchFailed
from nf4bench.measure import Candidate
from nf4bench.options import Shape
from nf4bench.suite import Bench, Report, configured
from nf4bench.weights import CODES, Weight

DTYPES = ("bf16", "fp32")  # of fp16 everything has the size that it has of bf16
# Those at which the choice changes are among them.
SHAPES: tuple[Shape, ...] = (
    *HEADLINE[:1], (4096, 1536), (4096, 2048), HEADLINE[1], (6144, 4096), (8192, 4096),
    *HEADLINE[2:],
)  # fmt: skip
QUICK_SHAPES = HEADLINE[:2]


def _launches(
    bench: Bench, weights: Sequence[Weight]
) -> tuple[dict[Candidate, list[Launch]], dict[int, str]]:
    """The configurations that take this weight, checked, and why the others do not. Raises
    WrongResult."""
    launches, refused = {}, {}
    expected = bench.expected(weights[0])
    for index, name in enumerate(bench.configurations):
        made = [configured(bench, weight, index) for weight in weights]
        try:
            bench.require(f"configuration {name}", weights[0], expected, made[0])
        except LaunchFailed as error:
            refused[index] = str(error)
        else:
            launches[Candidate("configuration", variant=index)] = made
    return launches, refused


def _row(bench: Bench, case: Case) -> dict:
    """times: one for each configuration, by index; those that refused say why."""
    weights = bench.rotation(case)
    out = weights[0].out.data_ptr()
    launches, refused = _launches(bench, weights)
    times = bench.times(weights, launches)
    best = min(timing.us for timing in times.values())
    figures: dict[int, dict] = {index: {"refused": reason} for index, reason in refused.items()}
    for candidate, timing in times.items():
        figures[candidate.variant] = timing.figures() | {"ratio": round(timing.us / best, 4)}
    return {
        "shape": list(case.shape),
        "dtype": case.dtype,
        "chosen": bench.library.chosen(weights[0].descriptor, out, CODES[case.dtype]),
        "times": [figures[index] for index in range(len(bench.configurations))],
    }


def run(bench: Bench, shapes: Iterable[Shape], report: Report) -> dict:
    """All figures. Raises WrongResult before a case is timed."""
    figures: dict = {
        "device": bench.gpu.name,
        "configurations": bench.configurations,
        "rows": [],
    }
    for dtype in DTYPES:
        for shape in shapes:
            figures["rows"].append(_row(bench, Case(shape, dtype, peers=())))
            report(tables.sweep_line(figures, figures["rows"][-1]))
            bench.gpu.release()
    return figures
