"""Finds the layers of a model whose `weight` is read by the code of a module around them. A 4-bit
layer in their place would break that code: Mamba multiplies by dt_proj.weight, and WavLM passes its
projections' weights to a torch function.

The code is that of `forward` and of what it calls by name: methods of its class, and functions in
the class's module that take a module. The source is parsed; a class without source counts as
reading no weight.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import TypeAlias

from torch import nn

# A chain holds the names between `self` and `.weight`. "*" is any of a list.
Chain: TypeAlias = tuple[str, ...]
Variables: TypeAlias = dict[str, set[Chain]]

# These attributes do not depend on values, or are right for a 4-bit layer's codes too.
_HARMLESS = {"device", "is_cuda", "is_meta", "requires_grad", "grad"}
# A function with one of these words first checks for codes, which are uint8, or asks torch if a
# fast path may be taken.
_ASKS_FIRST = {"uint8", "has_torch_function"}
# One with this word does not use a weight's dtype in a quantized model.
_ASKS_DTYPE = "_is_quantized"
_BASES = ("torch.nn.modules.module", "transformers.modeling_utils", "transformers.generation")
_WRAPPERS = ("enumerate", "zip", "reversed", "list")


def read_by_owners(model: nn.Module) -> set[str]:
    """Returns the names of modules whose `weight` is read so."""
    found: set[str] = set()
    for path, module in model.named_modules():
        for chain in _reads_of(type(module)):
            found.update(_named(path, module, chain))
    return found


def _named(path: str, module: nn.Module, chain: Chain) -> Iterator[str]:
    if not chain:
        yield path
        return
    for name, child in module._modules.items():
        if child is not None and chain[0] in (name, "*"):
            yield from _named(f"{path}.{name}".lstrip("."), child, chain[1:])


@functools.cache
def _reads_of(kind: type[nn.Module]) -> frozenset[Chain]:
    found: set[Chain] = set()
    seen: set[FunctionType] = set()
    due = _definitions(kind, "forward")[:1]
    while due:
        function = due.pop()
        if function in seen:
            continue
        seen.add(function)
        tree = _tree(function)
        words = _words(tree)
        if _ASKS_FIRST.isdisjoint(words):
            found.update(_reads(tree, words))
        if "super" in words:
            due += _definitions(kind, function.__name__)
        for word in words:
            due += _definitions(kind, word)[:1]
            other = function.__globals__.get(word)
            if isinstance(other, FunctionType) and _takes_a_module(other):
                due.append(inspect.unwrap(other))
    return frozenset(found)


def _definitions(kind: type, name: str) -> list[FunctionType]:
    """Lists a method's definitions by a class and its bases, without those of every module."""
    classes = (each for each in kind.__mro__ if not each.__module__.startswith(_BASES))
    found = (vars(each).get(name) for each in classes)
    return [inspect.unwrap(each) for each in found if isinstance(each, FunctionType)]


def _takes_a_module(function: FunctionType) -> bool:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return bool(names) and names[0] in ("self", "module")


@functools.cache
def _tree(function: FunctionType) -> ast.Module:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return ast.Module([], [])


def _words(tree: ast.Module) -> set[str]:
    """Returns the names, attributes and strings of a tree."""
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
    return words


def _reads(tree: ast.Module, words: set[str]) -> Iterator[Chain]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    if not functions or not functions[0].args.args:
        return
    variables: Variables = {functions[0].args.args[0].arg: {()}}
    for _ in range(2):  # a variable may depend on one that the walk visits later
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                _bind(node.targets[0], [_chains(node.value, variables)], variables)
            elif isinstance(node, (ast.For, ast.comprehension)):
                _bind(node.target, _items(node.iter, variables), variables)
    after = {id(n.value): n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        then = after.get(id(node))
        if then in _HARMLESS or (then == "dtype" and _ASKS_DTYPE in words):
            continue
        if isinstance(node, (ast.Attribute, ast.Call)):
            for chain in _chains(node, variables):
                if len(chain) > 1 and chain[-1] == "weight":
                    yield chain[:-1]


def _chains(node: ast.expr, variables: Variables) -> set[Chain]:
    """Returns what an expression may be in terms of `self`."""
    name: object = None
    if isinstance(node, ast.Name):
        return variables.get(node.id, set())
    if isinstance(node, ast.Attribute):
        inner, name = node.value, node.attr
    elif isinstance(node, ast.Subscript):
        inner, name = node.value, "*"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
        inner = node.args[0]
        if node.func.id == "getattr":
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else "*"
    return {(*each, name) for each in _chains(inner, variables)} if isinstance(name, str) else set()


def _items(node: ast.expr, variables: Variables) -> list[set[Chain]]:
    """Returns what a loop over an expression gives its variables, one by one."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in _WRAPPERS:
            inner = [_items(each, variables)[-1] for each in node.args]
            return [set(), *inner] if node.func.id == "enumerate" else inner
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("values", "items"):
            return [set(), *_items(node.func.value, variables)]
    return [{(*each, "*") for each in _chains(node, variables)}]


def _bind(target: ast.expr, chains: list[set[Chain]], variables: Variables) -> None:
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    for each, found in zip(targets, chains[-len(targets) :], strict=False):
        if isinstance(each, ast.Name) and found:
            variables[each.id] = variables.get(each.id, set()) | found
