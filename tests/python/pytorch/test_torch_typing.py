"""Types of the public functions and classes of nf4.torch, at run time. Those of nf4:
core/test_typing.py."""

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

PUBLIC = {
    name: getattr(module, name)
    for module in (nf4.torch, nf4.torch.distributed)
    for name in module.__all__
}
CLASSES = {name: each for name, each in PUBLIC.items() if inspect.isclass(each)}


def _is_method(member) -> bool:
    return inspect.isfunction(member) or inspect.ismethod(member) or isinstance(member, property)


def _methods() -> dict[str, typing.Callable]:
    """The public methods and properties of the classes, where nf4 defines them."""
    found = {}
    for name, each in CLASSES.items():
        for method, member in inspect.getmembers(each, _is_method):
            function = member.fget if isinstance(member, property) else member
            own = (getattr(function, "__module__", None) or "").startswith("nf4.")
            if own and (method == "__init__" or not method.startswith("_")):
                found[f"{name}.{method}"] = function
    return found


FUNCTIONS = {name: each for name, each in PUBLIC.items() if name not in CLASSES} | _methods()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_types_can_be_read_at_run_time(name):
    function = FUNCTIONS[name]
    for each in [function, *getattr(typing, "get_overloads", lambda _: [])(function)]:
        hints = typing.get_type_hints(each)
        assert set(hints) <= {*inspect.signature(each).parameters, "return"}
        assert "return" in hints


@pytest.mark.parametrize("name", CLASSES)
def test_types_of_attributes_can_be_read_at_run_time(name):
    bases = CLASSES[name].__mro__
    annotated = {attribute for base in bases for attribute in inspect.get_annotations(base)}
    assert set(typing.get_type_hints(CLASSES[name])) == annotated


def test_there_are_functions_and_classes():
    assert {"load", "quantize_model", "empty_model", "NF4Linear.from_linear"} <= set(FUNCTIONS)
    assert "NF4Linear.blocksize" in FUNCTIONS
    assert {"NF4Linear", "Int4Experts", "ColwiseParallel"} <= set(CLASSES)


def test_types_are_read_without_transformers():
    program = (
        "import sys, typing, nf4.torch\n"
        "for each in (nf4.torch.load, nf4.torch.quantize_model): typing.get_type_hints(each)\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
