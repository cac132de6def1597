"""Every function of nf4.h is bound in Python and in Rust, and nothing else is; the types are
compared by tests/python/abi/test_abi.py and by bindgen."""

import argparse
import re
import runpy
from pathlib import Path

from nf4_header import read_header
from tap import Tap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    root = parser.parse_args().root

    tap = Tap()
    functions = read_header(root / "include/nf4/nf4.h").functions
    rust = (root / "bindings/rust/nf4-sys/src/bindings.rs").read_text()
    python = runpy.run_path(str(root / "bindings/python/nf4/_abi.py"))
    tap.same_set("Python binds every function", set(python["FUNCTIONS"]), functions)
    bound = set(re.findall(r"\bpub fn (nf4_\w+)\s*\(", rust))
    tap.same_set("Rust binds every function", bound, functions)
    tap.finish()


if __name__ == "__main__":
    main()
