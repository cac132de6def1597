"""Fat binaries as nvcc writes them."""

import struct

LZ4, ZSTD, EXACT = 0x2000, 0x8000, 0x100000


def image(kind, version, arch, flags=0, data=None, options=b""):
    """As bytes. A cubin that is not compressed begins as its ELF file. options: behind the header,
    as the words for ptxas are in an image of PTX."""
    if data is None and kind == 2 and not flags & (LZ4 | ZSTD):
        data = b"\x7fELF\2\1\1" + bytes([0x33 if version[0] < 8 else 0x41, version[0]])
    data = (data or b"").ljust(64, b"\0")
    first, second = version if kind == 2 else version[::-1]
    size = (kind, 0x101, 64 + len(options), len(data), 0, 0)
    header = struct.pack("<HHIQIIHHI", *size, first, second, arch)
    return header + struct.pack("<QQQQ", 0, flags | 0x11, 0, 0) + options + data


def fat_binary(*images):
    payload = b"".join(images)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(payload)) + payload
