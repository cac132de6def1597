"""Types of the public functions of nf4.torch, at run time. Those of nf4: core/test_typing.py."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing

import pytest

pytestmark = pytest.mark.interop
pytest.importorskip("torch")

import nf4.torch  # noqa: E402
import nf4.torch.distributed  # noqa: E402


def _is_method(member) -> bool:
    return inspect.isfunction(member) or inspect.ismethod(member)


def functions_of(module) -> dict[str, typing.Callable]:
    """The functions of a module's public names, and the public methods of its classes."""
    found = {}
    for name in module.__all__:
        each = getattr(module, name)
        if not inspect.isclass(each):
            found[name] = each
            continue
        for method, function in inspect.getmembers(each, _is_method):
            own = (getattr(function, "__module__", None) or "").startswith("nf4.")
            if own and (method == "__init__" or not method.startswith("_")):
                found[f"{name}.{method}"] = function
    return found


FUNCTIONS = functions_of(nf4.torch) | functions_of(nf4.torch.distributed)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_types_can_be_read_at_run_time(name):
    function = FUNCTIONS[name]
    for each in [function, *getattr(typing, "get_overloads", lambda _: [])(function)]:
        hints = typing.get_type_hints(each)
        assert set(hints) <= {*inspect.signature(each).parameters, "return"}
        assert "return" in hints


def test_there_are_functions():
    assert {"load", "quantize_model", "empty_model", "NF4Linear.from_linear"} <= set(FUNCTIONS)


def test_types_are_read_without_transformers():
    program = (
        "import sys, typing, nf4.torch\n"
        "for each in (nf4.torch.load, nf4.torch.quantize_model): typing.get_type_hints(each)\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
