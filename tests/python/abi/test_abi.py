"""nf4/_abi.py against include/nf4/nf4.h: every function, type, struct and constant."""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, compile_c
from nf4 import _abi

HEADER = ROOT / "include" / "nf4" / "nf4.h"
STRUCTS = {
    "nf4_tensor": _abi.Tensor,
    "nf4_sizes": _abi.Sizes,
    "nf4_lora": _abi.Lora,
    "nf4_matmul_args": _abi.MatmulArgs,
    "nf4_lora_grad_args": _abi.LoraGradArgs,
    "nf4_grouped_args": _abi.GroupedArgs,
    "nf4_int4_tensor": _abi.Int4Tensor,
    "nf4_int4_sizes": _abi.Int4Sizes,
    "nf4_device": _abi.Device,
}
CTYPES = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "nf4_status": ctypes.c_int32,
    "nf4_format": ctypes.c_int32,
    "nf4_dtype": ctypes.c_int32,
    "nf4_int4_layout": ctypes.c_int32,
    "nf4_path": ctypes.c_int32,
    "nf4_stream": ctypes.c_void_p,
    "void *": ctypes.c_void_p,
    "float *": ctypes.POINTER(ctypes.c_float),
    "char *": ctypes.c_char_p,
    "char **": ctypes.POINTER(ctypes.c_char_p),
    "int32_t *": ctypes.POINTER(ctypes.c_int32),
    "nf4_path *": ctypes.POINTER(ctypes.c_int32),
    "size_t *": ctypes.POINTER(ctypes.c_size_t),
    **{f"{name} *": ctypes.POINTER(struct) for name, struct in STRUCTS.items()},
    "nf4_tensor *": ctypes.c_void_p,
    "nf4_tensor **": ctypes.c_void_p,
    "nf4_int4_tensor *": ctypes.c_void_p,
    "nf4_int4_tensor **": ctypes.c_void_p,
    "nf4_matmul_args *": ctypes.c_void_p,
    "nf4_lora_grad_args *": ctypes.c_void_p,
    "nf4_grouped_args *": ctypes.c_void_p,
}


def code_of(header: str) -> str:
    """The text without comments and const, which ctypes does not know."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", header, flags=re.DOTALL)
    return re.sub(r"\bconst ", "", text)


CODE = code_of(HEADER.read_text())


def ctype_of(declaration: str) -> type:
    """The ctypes type of "int32_t threads" or "void *out"."""
    base, stars = re.fullmatch(r"(\w+)\s*(\**)\s*\w+", declaration.strip()).groups()
    return CTYPES[f"{base} {stars}" if stars else base]


def functions(code: str = CODE) -> dict[str, tuple[type, list[type]]]:
    found = {}
    for result, name, arguments in re.findall(r"NF4_API ([\w *]+?)(nf4_\w+)\((.*?)\);", code, re.S):
        types = [] if arguments == "void" else [ctype_of(each) for each in arguments.split(",")]
        found[name] = (ctype_of(f"{result} {name}"), types)
    return found


def struct_fields(name: str) -> list[str]:
    (body,) = re.findall(rf"typedef struct {name} \{{(.*?)\}}", CODE, re.S)
    return re.findall(r"(\w+)(?:\[\d+\])?;", body)


def test_the_parser_sees_every_declaration():
    assert len(functions()) == HEADER.read_text().count("\nNF4_API ")


def test_functions_have_the_types_of_the_header():
    assert functions() == _abi.FUNCTIONS


def test_the_library_is_bound_with_those_types():
    from nf4._load import library

    for name, (restype, argtypes) in functions().items():
        function = getattr(library(), name)
        assert (function.restype, list(function.argtypes)) == (restype, argtypes), name


def test_constants():
    defined = re.findall(r"#define NF4_(\w+) \(?(-?\d+)\)?", CODE)
    expected = {name: int(value) for name, value in defined}
    bound = {name: getattr(_abi, name, None) for name in expected}
    assert bound == expected
    ours = [name for name in vars(_abi) if re.fullmatch(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+", name)]
    assert sorted(ours) == sorted(expected)


def test_formats_are_those_of_the_header_and_of_the_library():
    from nf4._convert import FORMATS
    from nf4._load import library

    defined = re.findall(r"#define NF4_FORMAT_(\w+) (\d+)", CODE)
    assert {name.lower(): int(code) for name, code in defined} == FORMATS
    known = {code for code in range(-2, 64) if library().nf4_codebook(code)}
    assert known == set(FORMATS.values())


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """{"nf4_tensor": (0, size), "nf4_tensor.rows": (offset, size), ...}, from a C compiler."""
    lines = []
    for name in STRUCTS:
        lines.append(f'printf("{name} 0 %zu\\n", sizeof({name}));')
        for field in struct_fields(name):
            lines.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), '
                f"sizeof((({name} *)0)->{field}));"
            )
    directory = tmp_path_factory.mktemp("layout")
    source = Path(directory / "layout.c")
    body = "\n".join(lines)
    source.write_text(f'#include <stdio.h>\n#include "nf4/nf4.h"\nint main(void) {{\n{body}\n}}\n')
    program = compile_c(source, directory / "layout")
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    rows = (line.split() for line in output.splitlines())
    return {name: (int(offset), int(size)) for name, offset, size in rows}


def test_structs(layout):
    bound = {}
    for name, struct in STRUCTS.items():
        bound[name] = (0, ctypes.sizeof(struct))
        for field, _type in struct._fields_:
            descriptor = getattr(struct, field)
            bound[f"{name}.{field}"] = (descriptor.offset, descriptor.size)
    assert bound == layout
