"""GPU code that drivers of CUDA 12 load and that is small in a wheel: what the wrappers of a
composed toolkit (nf4_toolkit.py) do beside the programs that they run.

    python nf4_fatbin.py cicc PROGRAM ARGUMENTS
        sets the version of the PTX, and puts kernels that are alike beside each other
    python nf4_fatbin.py fatbinary PROGRAM ARGUMENTS
        sets the version of PTX that the library keeps, and compresses the images

Drivers before CUDA 12.4 unpack LZ4 only, whose matches reach back 64 KiB. LZ4 HC finds more of them
if a file has kernels beside each other that resemble each other. The GPUs from compute capability
10.0 on have later drivers, which unpack zstd. So have all that compile the PTX of a library with
cubins for every earlier GPU, which NF4_PTX_ZSTD=1 in the environment promises. The design page
(docs/design/cuda-drivers.md) has the sizes.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# A fat binary is a header and images (fatbinary_section.h has the magic number of its wrapper). An
# image is a header of at least this size, and its data. nvcc 12.0 to 13.2 write this.
MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
HEADER, IMAGE = struct.Struct("<8sQ"), struct.Struct("<H2sIQI4sHHI8sQ8sQ")
PTX, CUBIN = 1, 2
FORM = b"\1\1"
LZ4, ZSTD = 0x2000, 0x8000
# The first architecture whose drivers all unpack zstd: those from CUDA 12.8 on.
_ZSTD_ARCH = 100


class Image(NamedTuple):
    """header: the bytes of the header. size: those of the data in the file, a multiple of 8;
    compressed: before padding, or 0; original: before compression, or 0. minor and major: the
    version of PTX; the ABI version of a cubin is in minor."""

    kind: int
    form: bytes
    header: int
    size: int
    compressed: int
    options: bytes
    minor: int
    major: int
    arch: int
    name: bytes
    flags: int
    reserved: bytes
    original: int


def images(data: bytes, at: int) -> Iterator[tuple[Image, int]]:
    """Yields the images of the fat binary that begins at this byte, and where each begins. Raises
    ValueError for one that it cannot read."""
    _, size = HEADER.unpack_from(data, at)
    at += HEADER.size
    end = at + size
    while at + IMAGE.size <= min(end, len(data)):
        image = Image(*IMAGE.unpack_from(data, at))
        if image.kind not in (PTX, CUBIN) or image.form != FORM or image.header < IMAGE.size:
            problem = (
                f"an image of kind {image.kind} at byte {at} in form {image.form.hex()}, which is "
                "neither PTX nor a cubin in a known form"
            )
            raise ValueError(problem)
        yield image, at
        at += image.header + image.size
    if at != end or end > len(data):
        raise ValueError(f"images up to byte {at} in a fat binary that ends at byte {end}")


def _pack_image(image: Image, header: bytes, data: bytes) -> bytes:
    import lz4.block

    packed = lz4.block.compress(data, mode="high_compression", compression=12, store_size=False)
    padded = packed.ljust(-(-len(packed) // 8) * 8, b"\0")
    if image.flags & (LZ4 | ZSTD) or len(padded) >= len(data):
        return header + data
    image = image._replace(
        size=len(padded), compressed=len(packed), flags=image.flags | LZ4, original=len(data)
    )
    return IMAGE.pack(*image) + header[IMAGE.size :] + padded


def pack(data: bytes, zstd: bytes, ptx_zstd: bool = False) -> bytes:
    """Returns a fat binary with its images compressed by LZ4. Those that are compressed, or that
    LZ4 does not make smaller, are as before. zstd: the same images in zstd; cubins of later GPUs
    are those, and so is PTX with ptx_zstd."""
    magic, _ = HEADER.unpack_from(data)
    packed = b""
    both = zip(images(data, 0), images(zstd, 0), strict=True)
    for (image, at), (other, other_at) in both:
        if ptx_zstd if image.kind == PTX else image.arch >= _ZSTD_ARCH:
            packed += zstd[other_at : other_at + other.header + other.size]
        else:
            begin = at + image.header
            packed += _pack_image(image, data[at:begin], data[begin : begin + image.size])
    return HEADER.pack(magic, len(packed)) + packed


_QUADS = re.compile(r'(?:"\.quad [^"]*"\n)+')


def _length(count: int) -> str:
    return f"fatbinData[{count}]"


def binary_of(source: str) -> bytes:
    """Returns the fat binary of the C source that fatbinary wrote, an array of words. Raises
    ValueError for a source of another form."""
    found = _QUADS.search(source)
    words = re.findall("0x([0-9a-f]{16})", found[0]) if found else []
    data = b"".join(bytes.fromhex(word)[::-1] for word in words)
    if source.count(_length(len(words))) != 1 or not data.startswith(MAGIC):
        raise ValueError("fatbinary wrote a source whose form is not known")
    return data


def with_binary(source: str, data: bytes) -> str:
    """Returns such a source with another fat binary."""
    words = [data[at : at + 8][::-1].hex() for at in range(0, len(data), 8)]
    lines = (words[at : at + 4] for at in range(0, len(words), 4))
    quads = "".join(f'".quad {",".join(f"0x{word}" for word in line)}\\n"\n' for line in lines)
    length = _length(len(binary_of(source)) // 8)
    # A function, since the words have backslashes.
    return _QUADS.sub(lambda _: quads, source, count=1).replace(length, _length(len(words)))


_VERSION = re.compile(rb"^\.version [0-9.]*", re.MULTILINE)
_KERNEL = re.compile(rb"(?:\.\w+ )*\.entry ")


def _split(ptx: bytes) -> tuple[list[bytes], list[bytes]]:
    """Returns the lines that are of no kernel, and the kernels."""
    others: list[bytes] = []
    kernels: list[bytes] = []
    lines = iter(ptx.splitlines(keepends=True))
    for line in lines:
        if not _KERNEL.match(line):
            others.append(line)
            continue
        kernel, depth, opened = [line], 0, False
        while depth > 0 or not opened:
            line = next(lines)
            kernel.append(line)
            code = line.partition(b"//")[0]
            depth += code.count(b"{") - code.count(b"}")
            opened = opened or b"{" in code
        kernels.append(b"".join(kernel))
    return others, kernels


_OWN_NAMES = re.compile(rb"%\w+|\$L\w+")


def _phrases(kernel: bytes) -> set[tuple[bytes, ...]]:
    """Each four lines in a row, without the names of registers and labels."""
    lines = _OWN_NAMES.sub(b"", kernel).splitlines()
    return set(zip(lines, lines[1:], lines[2:], lines[3:], strict=False))


def _by_likeness(kernels: list[bytes]) -> list[bytes]:
    """The shortest first, then always the one of which the last one has most."""
    left = {kernel: _phrases(kernel) for kernel in sorted(kernels, key=len)}
    ordered: list[bytes] = []
    last: set[tuple[bytes, ...]] = set()
    while left:
        kernel = max(left, key=lambda each: len(last & left[each]) / max(len(left[each]), 1))
        ordered.append(kernel)
        last = left.pop(kernel)
    return ordered


def for_assembler(ptx: bytes) -> bytes:
    """Returns PTX of CUDA 13 as PTX of 12.9, its kernels by likeness behind all else. It is the
    same but for its version, or ptxas refuses it."""
    others, kernels = _split(_VERSION.sub(b".version 8.8", ptx))
    return b"".join([*others, *_by_likeness(kernels)])


def for_drivers(ptx: bytes, arch: str) -> bytes:
    """Returns PTX that a library keeps for GPUs to come. It gets the first version that knows its
    architecture, such as "90a", whose first driver compiles it: 8.0, of CUDA 12.0, is the oldest
    (PTX ISA, "Release Notes"). The pragma is of 8.3: it tells ptxas which bytes of a load are used,
    and nothing needs it."""
    old = re.fullmatch("[789][0-9]|90a", arch)
    version = b"8.0" if old else {"100": b"8.6", "120": b"8.7"}.get(arch[:3])
    if version is None:
        return ptx
    ptx = _VERSION.sub(b".version " + version, ptx)
    return re.sub(rb"^.*\.pragma .used_bytes_mask .*\n", b"", ptx, flags=re.MULTILINE)


def cicc(program: str, *arguments: str) -> None:
    subprocess.run([program, *arguments], check=True)
    ptx = Path(arguments[arguments.index("-o") + 1])
    ptx.write_bytes(for_assembler(ptx.read_bytes()))


def fatbinary(program: str, *arguments: str) -> None:
    """Compresses as it is asked to, if it is asked; the default of CUDA 13 is zstd."""
    for argument in arguments:
        kept = re.fullmatch("--image3=kind=ptx,sm=([^,]*),file=(.*)", argument)
        if kept:
            ptx = Path(kept[2])
            ptx.write_bytes(for_drivers(ptx.read_bytes(), kept[1]))
    if any(argument.startswith("--compress-mode=") for argument in arguments):
        subprocess.run([program, *arguments], check=True)
        return
    given = {argument.partition("=")[0]: argument.partition("=")[2] for argument in arguments}
    written = given.get("--embedded-fatbin")
    ptx_zstd = os.environ.get("NF4_PTX_ZSTD") == "1"
    wanted = r"--image3=kind=elf,sm=1\d\d" + (r"|--image3=kind=ptx," if ptx_zstd else "")
    zstd = any(re.match(wanted, argument) for argument in arguments)
    sources = []
    for mode in ("size", "none") if zstd else ("none",):
        subprocess.run([program, f"--compress-mode={mode}", *arguments], check=True)
        sources += [Path(written).read_text()] if written else []
    if written:
        packed = pack(binary_of(sources[-1]), binary_of(sources[0]), ptx_zstd)
        Path(written).write_text(with_binary(sources[-1], packed))


def main() -> int:
    try:
        {"cicc": cicc, "fatbinary": fatbinary}[sys.argv[1]](*sys.argv[2:])
    except subprocess.CalledProcessError as failed:
        return failed.returncode if failed.returncode > 0 else 1
    except ValueError as problem:
        print(f"nf4_fatbin: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
