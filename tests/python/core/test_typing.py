"""Types of the public functions: a checker agrees with them, and none is Any."""

import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import get_args

import nf4
import nf4.typing
import numpy as np
import pytest
from conftest import ROOT
from fakes import CudaArray, DlpackArray
from nf4 import _convert

HERE = Path(__file__).parent
FUNCTIONS = [name for name in nf4.__all__ if inspect.isfunction(getattr(nf4, name))]


def test_a_program_that_uses_the_types():
    """Against a stub of torch, so that it takes seconds and no torch."""
    pytest.importorskip("mypy")
    package = Path(nf4.__file__).parents[1]
    options = ["--config-file=", "--strict", "--follow-imports=silent", "--no-error-summary"]
    cache = f"--cache-dir={ROOT / '.cache' / 'mypy'}"
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *options, cache, str(HERE / "typed_program.py")],
        env=os.environ | {"MYPYPATH": f"{HERE / 'stubs'}:{package}"},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_has_a_type(name):
    """Weight[Any] is a weight of whatever memory."""
    signature = inspect.signature(getattr(nf4, name))
    annotations = [each.annotation for each in signature.parameters.values()]
    for annotation in [*annotations, signature.return_annotation]:
        assert annotation is not inspect.Signature.empty
        assert not re.search(r"\bAny\b", re.sub(r"\b(\w+Tensor|Weight)\[Any\]", "", annotation))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_types_can_be_read_at_run_time(name):
    """Python 3.10 keeps no overloads."""
    function = getattr(nf4, name)
    for each in [function, *getattr(typing, "get_overloads", lambda _: [])(function)]:
        assert set(typing.get_type_hints(each)) == {*inspect.signature(each).parameters, "return"}


def test_there_are_functions():
    assert {"quantize", "quantize_int4", "dequantize", "matmul", "matmul_batch"} <= set(FUNCTIONS)


def test_names_are_those_that_are_taken():
    assert get_args(nf4.typing.FormatName) == tuple(_convert.FORMATS)
    assert get_args(nf4.typing.DTypeName) == tuple(_convert.DTYPES)
    assert get_args(nf4.typing.Int4Layout) == tuple(_convert.INT4_LAYOUTS)


def test_protocols_know_arrays_as_they_run():
    array = np.zeros(3, np.float32)
    assert isinstance(array, nf4.typing.SupportsDLPack)
    assert isinstance(DlpackArray(array, 2), nf4.typing.SupportsDLPack)
    assert isinstance(CudaArray(64, "fp32", 3), nf4.typing.SupportsCudaArrayInterface)
    assert not isinstance([1.0], nf4.typing.ArrayLike)


@pytest.mark.interop
def test_tensors_export_dlpack():
    torch = pytest.importorskip("torch")
    assert isinstance(torch.zeros(3), nf4.typing.SupportsDLPack)
