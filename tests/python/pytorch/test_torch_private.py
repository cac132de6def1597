"""The private names of torch that nf4.torch uses: all in one file, each with a stand-in."""

from __future__ import annotations

import ast
from pathlib import Path

import nf4
import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
from nf4.torch import NF4Linear, _operators, _private  # noqa: E402
from nf4.torch.distributed import prepare  # noqa: E402

PACKAGE = Path(nf4.torch.__file__).parent
OF_TORCH = {
    "_after_autograd_keyset",
    "_are_functorch_transforms_active",
    "_AutoDispatchBelowAutograd",
    "_C",
    "_SingleLevelFunction",
    "_any_requires_grad",
    "_backward_cls",
    "_current_level",
    "_destroy",
    "_dynamo_marked_constant",
    "_functorch",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_is_any_autocast_enabled",
    "_is_tracing",
    "_is_zerotensor",
    "_len_torch_dispatch_stack",
    "_pytree",
    "_schema",
    "_set_fwd_grad_enabled",
}
# Names that torch.nn.Module has for its subclasses to override or read.
OF_MODULES = {
    "_apply",
    "_buffers",
    "_load_from_state_dict",
    "_modules",
    "_non_persistent_buffers_set",
    "_parameters",
    "_save_to_state_dict",
}
# Names that transformers' models declare.
OF_TRANSFORMERS = {
    "_apply_gate",
    "_experts_implementation",
    "_from_config",
    "_init_weights",
    "_is_quantized",
    "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected",
    "_weight_conversions",
}


def _attributes(tree: ast.AST) -> set[str]:
    """Of anything, with one underscore before them."""
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def _names(tree: ast.AST) -> set[str]:
    """The same, and names in strings and of imports."""
    found = _attributes(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.update((node.module or "").split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(node.value.split("."))
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def _own(tree: ast.AST) -> set[str]:
    """What a file defines, and the modules of nf4 that it imports."""
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nf4"):
            own.update([*node.module.split("."), *(each.name for each in node.names)])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("self._"):
            own.update({node.attr} if isinstance(node.ctx, ast.Store) else ())
    return own


FILES = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def test_those_of_torch_are_in_one_file():
    here = FILES[PACKAGE / "_private.py"]
    assert _names(here) - _own(here) == OF_TORCH
    ours = set().union(*map(_own, FILES.values())) | {"_nf4_fast", "_replace"}
    ours |= {"_linear", "_linear_grad", "_dense_like"}  # operators
    # torch's pages document the first two, of a tensor. The others are Python's.
    ours |= {"_version", "_make_wrapper_subclass", "_getframe", "_fields"}
    for path, tree in FILES.items():
        if path.name != "_private.py":
            assert not _names(tree) & OF_TORCH, path
            hooks = {name for name in _names(tree) if "_hooks" in name}
            assert not _attributes(tree) - ours - hooks - OF_MODULES - OF_TRANSFORMERS, path


def test_each_has_been_found_here():
    """With the torch that the tests are run with, no stand-in is in use."""
    for name, stand_in in _private.STAND_INS.items():
        assert getattr(_private, name) is not stand_in, name


def results() -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer = NF4Linear.from_linear(torch.nn.Linear(64, 24))
    x = torch.randn(3, 64, requires_grad=True)
    layer(x).square().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer(x).detach()
    with torch.no_grad():
        found = [layer(x), layer(x.t().contiguous().t()), layer.dequantize()]
        found.append(nf4.torch.linear(x, layer.quantized))
    prepare(layer)
    return [*found, cast, x.grad, layer.bias.grad, layer.weight.clone().stored]


@pytest.mark.parametrize("name", [*_private.STAND_INS, "all"])
def test_a_stand_in_gives_the_same(name, monkeypatch):
    expected = results()
    for each in _private.STAND_INS if name == "all" else [name]:
        monkeypatch.setattr(_private, each, _private.STAND_INS[each])
    for ours, theirs in zip(results(), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["_Linear", "_LinearGrad", "_Recorded"])
def test_functions_of_the_public_class_give_the_same(name, monkeypatch):
    expected, function = results(), getattr(_operators, name)
    assert (
        issubclass(function, _private.Function) and _private.Function is not torch.autograd.Function
    )
    methods = {
        name: each for name, each in vars(function).items() if isinstance(each, staticmethod)
    }
    monkeypatch.setattr(_operators, name, type(name, (torch.autograd.Function,), methods))
    for ours, theirs in zip(results(), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_backward_is_called_directly_where_torch_has_a_node_for_it():
    node = _operators._Recorded._backward_cls
    assert node.apply is _operators._Recorded.backward
    assert _private.call_backward_directly(int) is int


def test_where_a_question_cannot_be_asked_the_general_way_is_taken(monkeypatch):
    with monkeypatch.context() as missing:
        missing.delattr(torch._C, "_len_torch_dispatch_stack")
        assert _private._is_idle_of() is _private._is_never_idle
    assert _private._is_idle_of() is not _private._is_never_idle


def test_what_is_asked_of_operators_and_libraries():
    names = _private.argument_names(torch.ops.nf4.linear_backward.default)
    assert names[:2] == ["grad_y", "packed"] and _private.argument_names(object()) is None
    _private.destroy(object())
