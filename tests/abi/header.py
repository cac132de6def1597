"""nf4.h compiles alone as C and C++, needs two standard headers, and is pinned by layout.c. The
headers beside it compile alone as C++17 and later."""

import argparse
import re
from pathlib import Path

from compilers import complaint
from nf4_header import read_header
from tap import Tap

STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
CONVERSIONS = ["-Wconversion", "-Wsign-conversion"]
C_STANDARDS = ["c99", "c11", "c17"]
CPP_STANDARDS = ["c++11", "c++14", "c++17", "c++20"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--header", type=Path, required=True)
    parser.add_argument("--cc", required=True)
    parser.add_argument("--cxx", required=True)
    parser.add_argument("--version", required=True)
    options = parser.parse_args()

    tap = Tap()
    header = read_header(options.header)
    include = f"-I{options.header.parent.parent}"
    # Twice: the include guard is part of the contract.
    source = "#include <nf4/nf4.h>\n#include <nf4/nf4.h>\n"
    for standard in C_STANDARDS:
        flags = ["-xc", f"-std={standard}", include, *STRICT, "-Wstrict-prototypes"]
        tap.check(f"nf4.h as {standard}", complaint(options.cc, flags, source))
    for standard in CPP_STANDARDS:
        flags = ["-xc++", f"-std={standard}", include, *STRICT, *CONVERSIONS]
        tap.check(f"nf4.h as {standard}", complaint(options.cxx, flags, source))

    beside = [f"nf4/{path.name}" for path in sorted(options.header.parent.glob("*.hpp"))]
    # Alone as C++17; as C++20, which changes what code means and not what it includes, all at once.
    for standard, names in (*(("c++17", [name]) for name in beside), ("c++20", beside)):
        source = "".join(f"#include <{name}>\n" for name in names) * 2
        flags = ["-xc++", f"-std={standard}", include, *STRICT, *CONVERSIONS, "-Wshadow"]
        tap.check(f"{', '.join(names)} as {standard}", complaint(options.cxx, flags, source))

    tap.equal(
        "nf4.h includes stddef.h and stdint.h alone", header.includes, ["stddef.h", "stdint.h"]
    )
    tap.equal("the version is the project's", header.version, options.version)

    layout = (Path(__file__).parent / "layout.c").read_text()
    flags = ["-xc", "-std=c11", include, *STRICT]
    tap.check("layout and signatures are those of layout.c", complaint(options.cc, flags, layout))
    tap.same_set(
        "layout.c pins every constant",
        set(re.findall(r"^VALUE\((\w+),", layout, re.MULTILINE)),
        header.constants,
    )
    tap.same_set(
        "layout.c pins every struct field",
        {".".join(pair) for pair in re.findall(r"^FIELD\((\w+), (\w+),", layout, re.MULTILINE)},
        {f"{struct}.{field}" for struct, fields in header.fields.items() for field in fields},
    )
    tap.same_set(
        "layout.c pins every struct size",
        set(re.findall(r"^SIZE\((\w+),", layout, re.MULTILINE)) & set(header.fields),
        set(header.fields),
    )
    tap.same_set(
        "layout.c pins every signature",
        set(re.findall(r"\b(nf4_\w+)\(", layout)),
        header.functions,
    )
    tap.finish()


if __name__ == "__main__":
    main()
