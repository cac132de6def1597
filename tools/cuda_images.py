#!/usr/bin/env python3
"""Says which drivers load the GPU code of a library. It needs no GPU and no tool of CUDA.

    python tools/cuda_images.py LIBRARY [--driver 12.0]

It reads each image of the fat binaries: cubins by the ABI version of their ELF container, PTX by
its version, and how they are compressed. It prints a line for each kind of image, with its number,
its bytes in the library and the first CUDA driver that loads it. With --driver, an image that a
driver of this CUDA version does not load is an error, unless the driver is older than the image's
architecture, or than any GPU that needs the image: PTX is compiled for GPUs without a cubin. Exit
status: 0 if there is none, 1 otherwise, 2 for a file without GPU code.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "bindings/python/build_backend"))

import nf4_fatbin  # noqa: E402

Version = tuple[int, int]

_COMPRESSIONS = {nf4_fatbin.LZ4: "LZ4", nf4_fatbin.ZSTD: "zstd"}
_EXACT = 0x100000  # sm_90a, not sm_90

# The first CUDA version with a driver that knows it (PTX ISA, CUDA Toolkit: release
# notes). Drivers of 12.4 and later unpack zstd.
_OLDEST: Version = (12, 0)
_OF_PTX = {
    **{(7, minor): _OLDEST for minor in range(9)},
    **{(8, minor): (12, minor) for minor in range(6)},
    **{(8, 6): (12, 7), (8, 7): (12, 8), (8, 8): (12, 9)},
    **{(9, minor): (13, minor) for minor in range(6)},
}
_OF_ARCH = {100: (12, 8), 101: (12, 8), 103: (12, 9), 110: (13, 0), 120: (12, 8), 121: (12, 9)}
_OF_COMPRESSION = {"none": _OLDEST, "LZ4": _OLDEST, "zstd": (12, 4)}
# GPUs that drivers before zstd know need a cubin of one of these; that of 8.6 serves 8.7 and 8.9.
_BEFORE_ZSTD = (75, 80, 86, 90)
# The driver branch of each (CUDA Toolkit, release notes, "CUDA Driver").
BRANCHES = {
    (12, 0): 525, (12, 1): 530, (12, 2): 535, (12, 3): 545, (12, 4): 550, (12, 5): 555,
    (12, 6): 560, (12, 7): 565, (12, 8): 570, (12, 9): 575, (13, 0): 580, (13, 1): 590,
}  # fmt: skip


class NoImages(Exception):
    """The file has no GPU code, or none that this reads."""


@dataclass(frozen=True)
class Image:
    """version: of the PTX, or (ABI version, 1) of a cubin. arch: such as 90. bytes: in the file."""

    ptx: bool
    version: Version
    arch: int
    exact: bool
    compression: str
    bytes: int

    @property
    def name(self) -> str:
        kind = "compute" if self.ptx else "sm"
        return f"{kind}_{self.arch}{'a' if self.exact else ''}"

    @property
    def form(self) -> str:
        major, minor = self.version
        return f"PTX {major}.{minor}" if self.ptx else f"ELF ABI {major}"

    @property
    def arch_driver(self) -> Version:
        """The first driver that knows the architecture."""
        return _OF_ARCH.get(self.arch, _OLDEST)

    @property
    def driver(self) -> Version:
        """The first driver that loads it."""
        if self.ptx:
            form = _OF_PTX.get(self.version, (99, 0))
        else:  # ABI 8 came with Blackwell, and CUDA 13 uses it for every architecture
            abi = self.version[0]
            form = _OLDEST if abi <= 7 else self.arch_driver if self.arch >= 100 else (13, 0)
        return max(form, self.arch_driver, _OF_COMPRESSION[self.compression])


def _image(found: nf4_fatbin.Image, data: bytes) -> Image:
    ptx = found.kind == nf4_fatbin.PTX
    compressions = (name for bit, name in _COMPRESSIONS.items() if found.flags & bit)
    compression = next(compressions, "none")
    abi = found.minor
    if not ptx and compression == "none" and not data.startswith(b"\x7fELF\2\1\1" + _os_abi(abi)):
        raise NoImages("a cubin whose header is not that of its ELF file")
    version = (found.major, abi) if ptx else (abi, found.major)
    return Image(ptx, version, found.arch, bool(found.flags & _EXACT), compression, found.size)


def _os_abi(abi: int) -> bytes:
    return bytes([0x33 if abi <= 7 else 0x41, abi])


def images(data: bytes) -> Iterator[Image]:
    """Yields the images of a library's bytes. Raises NoImages for one that it cannot read."""
    end = 0
    while (begin := data.find(nf4_fatbin.MAGIC, end)) >= 0:
        end = begin + nf4_fatbin.HEADER.size
        try:
            for found, at in nf4_fatbin.images(data, begin):
                at += found.header
                end = at + found.size
                yield _image(found, data[at:end])
        except ValueError as problem:
            raise NoImages(str(problem)) from None


def text(version: Version) -> str:
    branch = BRANCHES.get(version)
    return f"CUDA {version[0]}.{version[1]}" + (f" ({branch})" if branch else "")


def report(found: list[Image]) -> list[str]:
    """Returns a line for each kind of image, by architecture."""
    number, size = Counter[tuple](), Counter[tuple]()
    for each in found:
        kind = (each.arch, each.name, each.form, each.compression, each.driver)
        number[kind] += 1
        size[kind] += each.bytes
    return [
        f"{name:<12} {form:<10} {compression:<5} {number[kind]:>4} {size[kind]:>11} bytes  "
        f"driver {text(driver)}"
        for kind in sorted(number)
        for _, name, form, compression, driver in [kind]
    ]


def too_new(found: list[Image], driver: Version) -> list[str]:
    """Lists the kinds of images that a driver does not load though a GPU that it knows needs
    them."""
    cubins = {each.arch for each in found if not each.ptx}

    def unneeded(image: Image) -> bool:
        later = {arch for arch in _BEFORE_ZSTD if arch >= image.arch}
        return image.ptx and image.compression == "zstd" and later <= cubins

    return sorted(
        {
            f"{each.name}: {each.form}, {each.compression}: needs {text(each.driver)}"
            for each in found
            if each.driver > max(driver, each.arch_driver) and not unneeded(each)
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument(
        "--driver",
        metavar="CUDA",
        type=lambda text: tuple(map(int, text.split("."))),
        help="the CUDA version, such as 12.0, of the oldest driver that is to load it",
    )
    arguments = parser.parse_args()
    try:
        found = list(images(arguments.library.read_bytes()))
        if not found:
            raise NoImages("no GPU code")
    except NoImages as problem:
        print(f"{arguments.library}: {problem}", file=sys.stderr)
        return 2
    print("\n".join(report(found)))
    wrong = too_new(found, arguments.driver) if arguments.driver else []
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
