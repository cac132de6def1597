"""The modules of package nf4 do not import each other in circles, not even inside functions."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import nf4
import pytest

PACKAGE = Path(nf4.__file__).parent


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


def imported(node: ast.AST) -> Iterator[str]:
    """Imports for type checkers alone do not count. Names that importlib is given do."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: write the name from nf4 on"
        submodules = [f"{node.module}.{each.name}" for each in node.names]
        yield from (each if each in MODULES else str(node.module) for each in submodules)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
        yield from (each.value for each in node.args if isinstance(each, ast.Constant))
    for child in ast.iter_child_nodes(node):
        yield from imported(child)


def test_no_modules_import_each_other_in_a_circle():
    graph = {
        name: {each for each in imported(ast.parse(path.read_text())) if each in MODULES} - {name}
        for name, path in MODULES.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
    # Imports within a function and by importlib are found.
    assert "nf4.checkpoint.tensors" in graph["nf4"]
    assert "nf4.torch._nf4_quantizer" in graph["nf4.torch._transformers"]
