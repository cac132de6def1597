"""What libnf4.so shows the dynamic linker: its symbols, its name, and what it needs."""

import argparse
import re
import subprocess
from pathlib import Path

from nf4_header import read_header
from tap import Tap

# A machine without a GPU or its driver must be able to load the library.
CUDA_LIBRARIES = ("libcuda.", "libcudart.", "libnvidia")


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--header", type=Path, required=True)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--readelf", default="readelf")
    options = parser.parse_args()

    tap = Tap()
    defined = output(options.nm, "-D", "--defined-only", options.library)
    names = {line.split()[-1].partition("@")[0] for line in defined.splitlines()}
    # The linker lists the symbol versions themselves, too.
    exported = {name for name in names if not name.startswith("NF4_")}
    allowed = set((Path(__file__).parent / "symbols.txt").read_text().split())
    tap.same_set("exports are those of symbols.txt", exported, allowed)
    tap.same_set(
        "exports are the functions of nf4.h", exported, read_header(options.header).functions
    )

    dynamic = output(options.readelf, "-d", options.library)
    tap.equal("SONAME", re.findall(r"\(SONAME\).*\[(.*)\]", dynamic), ["libnf4.so.0"])
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    cuda = [name for name in needed if name.startswith(CUDA_LIBRARIES)]
    tap.equal("needs no CUDA library to load", cuda, [])

    # The C library allocates it at first use, and aborts the process where there is no memory.
    symbols = output(options.readelf, "-sW", options.library)
    thread_local = re.findall(r"\bTLS\b.*\b(\S*nf4\S*)", symbols)
    tap.equal("has no thread-local variables", thread_local, [])
    tap.finish()


if __name__ == "__main__":
    main()
