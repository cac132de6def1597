"""matmul_batch: the products of several weights in one call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np

from nf4 import _abi, _call, _convert
from nf4._args import PRODUCT_NAMES, matmul_args
from nf4._call import Problem
from nf4._load import Functions, functions
from nf4._matmul import problem_of
from nf4._options import MatmulBatch, Unpack
from nf4._prepared import prepare
from nf4.errors import InvalidArgument, kind_of
from nf4.typing import Array, ArrayLike, CudaStreamLike, DTypeLike, MemoryLike
from nf4.weight import Weight


def _listed(weights: Iterable[Weight[Any]]) -> list[Weight[Any]]:
    try:
        listed = list(weights)
    except TypeError:
        raise InvalidArgument(
            f"weights is {kind_of(weights)}; expected a list of QuantizedTensor or of Int4Tensor"
        ) from None
    most = _abi.MATMUL_BATCH_MAX
    if len(listed) > most:
        raise InvalidArgument(f"weights has {len(listed)} elements; expected at most {most}")
    return listed


def _for_each(name: str, values: Sequence[Any] | None, count: int) -> Sequence[Any]:
    """What is given for each of `count` products; None: nothing for any."""
    if values is None:
        return [None] * count
    if not isinstance(values, Sequence):
        kind = kind_of(values)
        raise InvalidArgument(f"{name} is {kind}; expected a list of {count}, one for each weight")
    if len(values) != count:
        raise InvalidArgument(
            f"{name} has {len(values)} elements; expected {count}, one for each weight"
        )
    return values


def _problems(arguments: Iterable[tuple[Any, Any, Any, Any]], stream: int | None) -> list[Problem]:
    """Reads (weight, x, bias, out) of each product. All products are in one place."""
    problems: list[Problem] = []
    try:
        for weight, x, bias, out in arguments:
            problem = problem_of(weight, x, bias, out, stream)
            if problems and problem.on_device != problems[0].on_device:
                ours, theirs = ("device", "host") if problem.on_device else ("host", "device")
                raise InvalidArgument(
                    f"in {ours} memory, but product 0 is in {theirs} memory; "
                    "expected all products in one place"
                )
            problems.append(problem)
    except InvalidArgument as error:
        raise InvalidArgument(f"product {len(problems)}: {error}") from None
    return problems


def _functions(weights: Sequence[Weight[Any]]) -> Functions:
    """Those of the kind of weight that all of these are."""
    first = weights[0]
    for i, each in enumerate(weights):
        if each.prefix != first.prefix:
            raise InvalidArgument(
                f"weights[{i}] is {kind_of(each)}, but weights[0] is {kind_of(first)}; expected "
                f"one kind of weight in a call"
            )
    return functions(first.prefix)


def _batch(
    weights: Iterable[ctypes.c_void_p], args: Sequence[_abi.MatmulArgs]
) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[_abi.MatmulArgs], int]:
    """The products as C takes them."""
    count = len(args)
    descriptors = (ctypes.c_void_p * count)(*(weight.value for weight in weights))
    return descriptors, (_abi.MatmulArgs * count)(*args), count


def matmul_batch_workspace_bytes(weights: Iterable[Weight[Any]], m: int, dtype: DTypeLike) -> int:
    """Returns the bytes of workspace that `matmul_batch` needs for m rows of x in device memory,
    with the same x for all weights: the largest size that a weight needs. m and dtype are as for
    `matmul_workspace_bytes`.

    Raises InvalidArgument.
    """
    rows = _convert.count("m", m)
    number = _convert.DTYPES[_convert.dtype_name(dtype)]
    weights = _listed(weights)
    prepared = [prepare(each, f"weights[{i}]") for i, each in enumerate(weights)]
    if not prepared:
        return 0
    args = [matmul_args(each, number, rows, each.cols, each.rows) for each in prepared]
    batch = _batch([each.argument for each in prepared], args)
    return _call.workspace_bytes(_functions(weights).matmul_batch, batch, PRODUCT_NAMES)


@overload
def matmul_batch(  # type: ignore[overload-overlap]
    x: Array | Sequence[Array],
    weights: Iterable[Weight[Any]],
    *,
    out: Sequence[Array | None] | None = ...,
    **options: Unpack[MatmulBatch],
) -> list[Array]: ...


@overload
def matmul_batch(
    x: ArrayLike | Sequence[ArrayLike],
    weights: Iterable[Weight[Any]],
    *,
    out: None = ...,
    **options: Unpack[MatmulBatch],
) -> list[np.ndarray]: ...


@overload
def matmul_batch(
    x: ArrayLike | Sequence[ArrayLike],
    weights: Iterable[Weight[Any]],
    *,
    out: Sequence[MemoryLike | None],
    **options: Unpack[MatmulBatch],
) -> list[MemoryLike]: ...


def matmul_batch(
    x: ArrayLike | Sequence[ArrayLike],
    weights: Iterable[Weight[Any]],
    *,
    bias: Sequence[MemoryLike | None] | None = None,
    out: Sequence[MemoryLike | None] | None = None,
    workspace: MemoryLike | None = None,
    threads: int = 0,
    stream: CudaStreamLike | None = None,
) -> Sequence[MemoryLike]:
    """Computes `matmul` for several weights in one call, such as q, k and v, or gate and up. The
    results have the same bits as separate calls. On a GPU, weights share launches if x has few
    rows, which saves the fixed cost of a launch.

        gate, up = nf4.matmul_batch(x, [gate_weight, up_weight])

    x          one x for all weights, as for matmul; or a list or tuple with one for each
    weights    up to 64, either all QuantizedTensor or all Int4Tensor
    bias       a list or tuple with one for each weight; each may be None
    out        a list or tuple with one for each weight; each may be None. Two may be columns of one
               matrix, as from y.split([...], dim=-1). Otherwise none overlaps another, nor any x,
               bias or weight
    workspace  as for matmul, of at least `matmul_batch_workspace_bytes()` bytes
    threads    as for matmul
    stream     as for quantize

    Returns a list of the results of matmul. Raises the errors of quantize, which name the product,
    counted from 0; every `out` is then unchanged, except after CudaError.
    """
    threads, handle = _call.read_options(threads, stream)
    weights = _listed(weights)
    count = len(weights)
    each_x = _for_each("x", x, count) if isinstance(x, (list, tuple)) else [x] * count
    each_out = _for_each("out", out, count)
    arguments = zip(weights, each_x, _for_each("bias", bias, count), each_out, strict=True)
    problems = _problems(arguments, handle)
    if not problems:
        return []
    operation = _functions(weights).matmul_batch
    batch = _batch([each.arguments[0] for each in problems], [each.args for each in problems])
    problem = Problem(
        operation,
        batch,
        problems[0].on_device,
        next((each.torch for each in problems if each.torch is not None), None),
        [each.result for each in problems],
        PRODUCT_NAMES,
        functools.partial(_call.workspace_bytes, operation, batch, PRODUCT_NAMES),
        tuple(each_out),
        operands=problems,
    )
    return _call.run(problem, threads, handle, workspace)
