"""Every function of nf4.h is bound in Python and in Rust, and nothing else is; the types are
compared by tests/python/abi/test_abi.py and by bindgen."""

import argparse
import re
from pathlib import Path

from nf4_header import read_header
from tap import Tap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    root = parser.parse_args().root

    tap = Tap()
    functions = read_header(root / "include/nf4/nf4.h").functions
    bindings = {
        "Python": (root / "bindings/python/nf4/_abi.py", r'"(nf4_\w+)": \(\s*[\w()]+,\s*\['),
        "Rust": (root / "bindings/rust/nf4-sys/src/bindings.rs", r"\bpub fn (nf4_\w+)\s*\("),
    }
    for language, (path, pattern) in bindings.items():
        name = f"{language} binds every function"
        if not path.exists():
            tap.skip(name, f"{path.relative_to(root)} does not exist yet")
            continue
        bound = set(re.findall(pattern, path.read_text()))
        tap.same_set(name, bound, functions)
    tap.finish()


if __name__ == "__main__":
    main()
