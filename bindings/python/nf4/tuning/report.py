"""A report of a GPU, which `nf4 bench` writes: one JSON document that strangers send. Reading takes
nothing on trust: a document of any other form is refused, and the refusal names what is wrong. It
needs no PyTorch."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nf4 import _costs
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.jsonio import is_count, read_object

VERSION = 1
MAX_BYTES = 4_000_000
# The most relative error of y by a kernel of libnf4, by the dtype of x: about twice that of a dense
# product with the weight rounded to that dtype.
MOST_ERROR = {"fp16": 1e-3, "bf16": 8e-3}
# The most of a dense product, which is torch's: it may round the sums of parts of the columns to
# that dtype, too. If 14336 columns are rounded after each 32, the error is 0.8 of this
# (test_report.py).
MOST_DENSE_ERROR = {dtype: 4 * most for dtype, most in MOST_ERROR.items()}
# Stands for the error of a y with NaN or Inf, which JSON cannot hold.
NO_NUMBER = 1e12
# A report of a GPU that other programs use is refused, as nf4.tune stores nothing then.
WIDEST_SPREAD = 1.25

PRODUCTS = (
    "codebook", "codebook_lora", "gradient", "gradient_lora", "gptq", "awq", "compressed_tensors",
)  # fmt: skip
STRATEGIES = ("mma", "skinny", "wgmma", "multistage", "dense")
PEERS = ("bitsandbytes", "dense weight")


@dataclass(frozen=True)
class _Is:
    """A value for which `test` is true, described by `expected`."""

    test: Callable[[Any], bool]
    expected: str


@dataclass(frozen=True)
class _Each:
    """A list of up to `most` such values."""

    value: Any
    most: int


@dataclass(frozen=True)
class _Some:
    """An object with some of these keys."""

    keys: tuple[str, ...]
    value: Any


def _one_of(*values: str) -> _Is:
    return _Is(lambda given: given in values and type(given) is str, f"one of {', '.join(values)}")


def _text(pattern: str) -> _Is:
    compiled = re.compile(pattern)
    return _Is(
        lambda given: isinstance(given, str) and compiled.fullmatch(given) is not None, "text"
    )


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= 1e12


_NUMBER, _COUNT = _Is(_is_number, "a number from 0 to 1e12"), _Is(is_count, "a count")
_POSITIVE = _Is(lambda value: _is_number(value) and value > 0, "a number above 0")
_FLAG = _Is(lambda value: type(value) is bool, "true or false")
# Texts that may stand in a table of a page and in a C++ string.
_NAME = _text(r"[A-Za-z0-9][A-Za-z0-9 .,()+/_-]{0,254}")
_DTYPE, _M = _one_of("fp16", "bf16"), _Is(lambda m: is_count(m) and 0 < m <= 1 << 20, "rows of x")
_PRODUCT, _SHAPE = (
    _one_of(*PRODUCTS),
    _Is(
        lambda given: isinstance(given, list) and len(given) == 2 and all(map(is_count, given)),
        "two counts",
    ),
)
_CHECK = {
    "product": _PRODUCT, "dtype": _DTYPE, "shape": _SHAPE, "m": _M,
    "us": _Some(STRATEGIES, _POSITIVE), "before": _POSITIVE, "after": _POSITIVE,
}  # fmt: skip
_SCHEMA: dict[str, Any] = {
    "nf4_report": _Is(lambda value: value == VERSION and type(value) is int, str(VERSION)),
    "gpu": {
        "name": _NAME, "compute_capability": _SHAPE, "kernels": _NAME, "multiprocessors": _COUNT,
        "shared_memory_bytes": _COUNT, "memory_bytes": _COUNT, "l2_bytes": _COUNT,
        "driver_version": _COUNT, "runtime_version": _COUNT,
    },
    "versions": {"libnf4": _NAME, "python": _NAME, "torch": _NAME, "cuda": _NAME,
                 "bitsandbytes": _Is(lambda v: v is None or _NAME.test(v), "text or null")},
    "missing": _Some(("bitsandbytes",), _NAME),
    "rates": {"copy_gb_per_s": _POSITIVE, "matmul_tflops": _POSITIVE},
    "seconds": _POSITIVE,
    "spread": _POSITIVE,
    "experts_rows": _COUNT,
    "costs": _text(r"[ -~\n]{0,65536}"),
    "bits": _Each(
        {"what": _NAME, "dtype": _one_of("fp32", "fp16", "bf16"), "elements": _COUNT,
         "differing": _COUNT},
        200,
    ),
    "checks": _Each(_CHECK, 1000),
    "figures": _Each(
        {**_CHECK, "peers": _Some(PEERS, _POSITIVE), "errors": _Some(STRATEGIES, _NUMBER),
         "fused": {"before": _FLAG, "after": _FLAG}},
        2000,
    ),
    "times": _Each(
        {"product": _PRODUCT, "dtype": _DTYPE, "strategy": _one_of(*STRATEGIES), "m": _M,
         "shapes": _Each(_SHAPE, 100), "us": _Each(_POSITIVE, 100)},
        4096,
    ),
}  # fmt: skip


def _fault(value: Any, schema: Any, where: str) -> str:
    """Says what is wrong with a value of the document, or ""."""
    if isinstance(schema, _Is):
        return "" if schema.test(value) else f"{where} is not {schema.expected}"
    if isinstance(schema, _Each):
        if not isinstance(value, list) or len(value) > schema.most:
            return f"{where} is not a list of up to {schema.most}"
        faults = (_fault(item, schema.value, f"{where}[{i}]") for i, item in enumerate(value))
        return next(filter(None, faults), "")
    keys = schema.keys if isinstance(schema, _Some) else tuple(schema)
    if not isinstance(value, dict):
        return f"{where} is not an object"
    if not value.keys() <= set(keys):
        return f"{where} has {min(value.keys() - set(keys))[:40]!r}, which is not known"
    if isinstance(schema, _Some):
        schema = dict.fromkeys(value, schema.value)
    elif missing := schema.keys() - value.keys():
        return f"{where} has no {min(missing)!r}"
    faults = (_fault(value[key], schema[key], f"{where}.{key}") for key in schema)
    return next(filter(None, faults), "")


def fault_of(document: Mapping[str, Any]) -> str:
    """Says why a document is not a report that can be used, or ""."""
    version = document.get("nf4_report")
    if version != VERSION:
        return f"its nf4_report is {str(version)[:20]}; expected {VERSION}"
    fault = _fault(document, _SCHEMA, "report")
    if fault:
        return fault
    if not _gpu_line_is(document):
        return "its costs are of another GPU or another version of libnf4 than it names"
    if any(len(row["shapes"]) != len(row["us"]) for row in document["times"]):
        return "it has times of other products than it names"
    if any(each["errors"].keys() != each["us"].keys() for each in document["figures"]):
        return "it has errors of other strategies than those that it times"
    return ""


def gpu_line(gpu: Mapping[str, Any], driver: int) -> str:
    """Returns the line of a text of costs that names the GPU."""
    names = ("compute_capability", "kernels", "multiprocessors", "shared_memory_bytes")
    return _costs.line_of(*(gpu[name] for name in names), driver, gpu["name"])


def _gpu_line_is(document: Mapping[str, Any]) -> bool:
    gpu, lines = document["gpu"], document["costs"].split("\n")
    return (
        lines[:2]
        == [f"nf4-costs 1 {document['versions']['libnf4']}", gpu_line(gpu, gpu["driver_version"])]
        and lines[-2:] == ["end", ""]
        and not any(line.startswith("gpu ") for line in lines[2:])
    )


def cost_rows(document: Mapping[str, Any]) -> list[str]:
    """Returns the rows of costs of a report."""
    return document["costs"].split("\n")[2:-2]


def doubts(document: Mapping[str, Any]) -> list[str]:
    """Says why a report's figures are not to be relied on: wrong bits, wrong results, nothing that
    was checked, or a GPU that other programs used."""
    found = [f"it has no {name}" for name in ("bits", "checks", "figures") if not document[name]]
    found += [
        f"{each['what']} in {each['dtype']}: {each['differing']} of {each['elements']} differ"
        for each in document["bits"]
        if each["differing"]
    ]
    for each in document["figures"]:
        shape = "x".join(map(str, each["shape"]))
        found += [
            f"{each['product']} {each['dtype']} {shape}, M = {each['m']}: {strategy} is off by "
            f"{error:.1e}"
            for strategy, error in each["errors"].items()
            if error > (MOST_DENSE_ERROR if strategy == "dense" else MOST_ERROR)[each["dtype"]]
        ]
    if document["spread"] > WIDEST_SPREAD:
        found.append(f"the same work took up to {document['spread']:.2f} times as long again")
    return found


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns a report. Raises FormatError for any other file, and OSError."""
    name = os.fspath(path)
    document = read_object(name, "the report", limit=MAX_BYTES)
    fault = fault_of(document)
    if fault:
        raise FormatError(name, fault)
    return document
