"""The modules of package nf4 do not import each other in circles, not even inside functions.

Every import statement and every call of importlib.import_module counts, except imports for type
checkers alone. An import also runs the __init__ of each parent package. This does not count,
because a package that imports its own submodules would always form a circle."""

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


def table_of(name: str) -> dict[str, str]:
    """Returns _MODULES of a package: each public name and the submodule that has it."""
    for node in ast.parse(MODULES[name].read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{name} has no table _MODULES")


def given_to_importlib(node: ast.Call, name: str) -> Iterator[str]:
    if isinstance(node.args[0], ast.Constant):
        yield node.args[0].value
    else:
        written = ast.unparse(node.args[0])
        assert written == "f'{__name__}.{_MODULES[name]}'", f"{name}: {written} is not read"
        yield from (f"{name}.{each}" for each in table_of(name).values())


def imported(node: ast.AST, name: str) -> Iterator[str]:
    """Yields the modules that a node of the module `name` imports."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{name}, line {node.lineno}: write the name from nf4 on"
        submodules = [f"{node.module}.{each.name}" for each in node.names]
        yield from (each if each in MODULES else str(node.module) for each in submodules)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        yield from given_to_importlib(node, name)
    for child in ast.iter_child_nodes(node):
        yield from imported(child, name)


def test_no_modules_import_each_other_in_a_circle():
    graph = {
        name: set(imported(ast.parse(path.read_text()), name)) & MODULES.keys() - {name}
        for name, path in MODULES.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
    # Imports within a function, by importlib, and from a table of names are found.
    assert "nf4.checkpoint.tensors" in graph["nf4"]
    assert "nf4.torch._nf4_quantizer" in graph["nf4.torch._transformers"]
    assert "nf4.torch.distributed.loading" in graph["nf4.torch.distributed"]
