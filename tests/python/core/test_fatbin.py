"""What wheels for drivers of CUDA 12 do to PTX and to fat binaries."""

import subprocess
import sys

import pytest
from conftest import ROOT
from fat_binaries import EXACT, LZ4, ZSTD, fat_binary, image

block = pytest.importorskip("lz4.block")

sys.path += [str(ROOT / "bindings" / "python" / "build_backend"), str(ROOT / "tools")]

import cuda_images  # noqa: E402
import nf4_fatbin  # noqa: E402

HEAD = """// made
.version 9.0
.target sm_80
.version_of_mine
"""
LONG, SHORT = (
    f".visible .entry {name}(\n\t.param .u64 x\n)\n{{\n{body}\tret;\n\n}}\n"
    for name, body in (("long", "\tbar.sync 0;\n" * 3), ("short", ""))
)
WEAK = ".weak .entry middle()\n.maxntid 128, 1, 1\n{\n{ // a block }\n}\n\tret;\n}\n"
FUNCTION = ".func (.param .b32 y) f()\n{\n\tret;\n}\n"
HINT = '\t.pragma "used_bytes_mask 0xfff";\n'


def test_ptxas_gets_kernels_behind_what_they_use():
    made = HEAD + WEAK + "\t// .globl\tlong\n" + LONG + FUNCTION + HINT + SHORT
    rest = HEAD.replace("version 9.0", "version 8.8") + "\t// .globl\tlong\n" + FUNCTION + HINT
    assert nf4_fatbin.for_assembler(made.encode()).decode() == rest + SHORT + WEAK + LONG
    assert nf4_fatbin.for_assembler((HEAD + FUNCTION).encode()).decode() == (
        HEAD.replace("version 9.0", "version 8.8") + FUNCTION
    )


def kernel(name, *lines):
    body = "".join(f"\t{line};\n" for line in lines)
    return f".entry {name}()\n{{\n{body}}}\n"


def test_kernels_that_are_alike_lie_beside_each_other():
    """The names of registers and labels do not count."""
    adds = [f"add.s32 %r{i}, %r{i}, {i}" for i in range(20)]
    loads = [f"ld.global.u32 %r{i}, [%rd{i}+{i}]" for i in range(16)]
    renamed = [line.replace("%r", "%r1") for line in adds]
    first, second = kernel("add", *adds), kernel("same", *renamed, "bra $L__BB0_1")
    between, other = kernel("load", *loads), kernel("loads", *loads, "bar.sync 0")
    assert len(first) < len(between) < len(second)
    found = nf4_fatbin.for_assembler((HEAD + between + second + other + first).encode()).decode()
    assert found.partition(".version_of_mine\n")[2] == first + second + between + other


@pytest.mark.parametrize(
    "arch, version",
    [
        *((arch, "8.0") for arch in ("75", "80", "86", "89", "90", "90a")),
        *(("100", "8.6"), ("100a", "8.6"), ("120", "8.7"), ("121", "9.0")),
    ],
)
def test_kept_ptx_is_as_old_as_its_architecture(arch, version):
    """And has no pragma of later versions."""
    made = HEAD + HINT + '\t.pragma "nounroll";\n' + SHORT
    older = made.replace(HINT, "").replace("9.0", version)
    expected = made if arch == "121" else older
    assert nf4_fatbin.for_drivers(made.encode(), arch).decode() == expected


CODE = b"\x7fELF\2\1\1\x33\7" + bytes(range(251)) * 300
RANDOM = bytes(range(256))


def packed(*made):
    """The images once packed, each with its header and its data."""
    library = nf4_fatbin.pack(fat_binary(*made), fat_binary(*made))
    found = [
        (each, library[at : at + each.header], library[at + each.header :][: each.size])
        for each, at in nf4_fatbin.images(library, 0)
    ]
    assert len(library) == 16 + sum(len(header) + len(data) for _, header, data in found)
    return library, found


def test_images_are_packed():
    options = b"--fmad false".ljust(16, b"\0")
    cubin = image(2, (7, 1), 90, EXACT, CODE + bytes(-len(CODE) % 8))
    ptx = image(1, (8, 0), 75, 0, b".version 8.0\n" * 100, options)
    library, found = packed(cubin, ptx)
    for (each, header, data), before in zip(found, (cubin, ptx), strict=True):
        code = before[each.header :]
        assert each.size == len(data) < len(code) and each.size % 8 == 0
        assert each.compressed <= each.size and not data[each.compressed :].strip(b"\0")
        assert each.original == len(code)
        unpacked = block.decompress(data[: each.compressed], uncompressed_size=len(code))
        assert unpacked == code
        # All else in the header is as before.
        assert header[:8] == before[:8] and header[20:40] == before[20:40]
        assert header[48:56] == before[48:56] and header[64:] == before[64 : each.header]
        assert each.flags == nf4_fatbin.Image(*nf4_fatbin.IMAGE.unpack_from(before)).flags | LZ4
    kinds = [(each.name, each.compression, each.driver) for each in cuda_images.images(library)]
    assert kinds == [("sm_90a", "LZ4", (12, 0)), ("compute_75", "LZ4", (12, 0))]


@pytest.mark.parametrize(
    "made",
    [
        image(2, (7, 1), 80, LZ4, bytes(1000)),
        image(2, (8, 1), 100, ZSTD, bytes(1000)),
        image(1, (8, 0), 80, 0, RANDOM),
    ],
    ids=["LZ4", "zstd", "no smaller"],
)
def test_images_that_stay_as_they_are(made):
    assert nf4_fatbin.pack(fat_binary(made), fat_binary(made)) == fat_binary(made)


def test_cubins_whose_drivers_unpack_zstd():
    """PTX of any GPU and cubins of earlier ones are not."""
    made = [image(1, (8, 6), 100, 0, bytes(1000)), image(2, (7, 1), 90, 0, CODE[:4096])]
    made += [image(2, (8, 1), arch, EXACT, bytes(1000)) for arch in (100, 120)]
    zstd = [image(2, (8, 1), arch, EXACT | ZSTD, b"zstd") for arch in (100, 120)]
    library = nf4_fatbin.pack(fat_binary(*made), fat_binary(*made[:2], *zstd))
    assert library.endswith(b"".join(zstd))
    kinds = [(each.name, each.compression) for each in cuda_images.images(library)]
    assert kinds[:2] == [("compute_100", "LZ4"), ("sm_90", "LZ4")]
    assert kinds[2:] == [("sm_100a", "zstd"), ("sm_120a", "zstd")]
    assert cuda_images.too_new(list(cuda_images.images(library)), (12, 0)) == []
    with pytest.raises(ValueError):
        nf4_fatbin.pack(fat_binary(*made), fat_binary(*made[:3]))


def test_ptx_in_zstd_needs_a_cubin_for_each_gpu_of_earlier_drivers():
    ptx, zstd = image(1, (8, 0), 80, 0, bytes(1000)), image(1, (8, 0), 80, ZSTD, b"zstd")
    cubins = [image(2, (7, 1), arch, 0, CODE[:4096]) for arch in (80, 86, 90)]
    library = nf4_fatbin.pack(fat_binary(ptx, *cubins), fat_binary(zstd, *cubins), ptx_zstd=True)
    found = list(cuda_images.images(library))
    assert [each.compression for each in found] == ["zstd", "LZ4", "LZ4", "LZ4"]
    assert cuda_images.too_new(found, (12, 0)) == []
    needed = cuda_images.too_new(found[:-1], (12, 0))  # a GPU of 9.0 would compile the PTX
    assert needed == ["compute_80: PTX 8.0, zstd: needs CUDA 12.4 (550)"]


def source_of(data, words=None):
    """As fatbinary of CUDA 13.0 writes it."""
    quads = [f"0x{data[at : at + 8][::-1].hex()}" for at in range(0, len(data), 8)]
    lines = [quads[at : at + 4] for at in range(0, len(quads), 4)]
    asm = "".join(f'".quad {",".join(line)}\\n"\n' for line in lines)
    return (
        '#include "fatbinary_section.h"\nasm(\n".section .nv_fatbin, \\"a\\"\\n"\n".align 8\\n"\n'
        f'"fatbinData:\\n"\n{asm}".text\\n");\nextern "C" {{\n'
        f"extern const unsigned long long fatbinData[{words or len(quads)}];\n}}\n"
        "static const __fatBinC_Wrapper_t w = {0x466243b1, 1, fatbinData, 0};\n"
    )


def test_the_source_of_a_fat_binary():
    library = fat_binary(image(2, (7, 1), 80, data=CODE + bytes(-len(CODE) % 8)))
    source = source_of(library)
    last = source.rindex(",0x")
    spaced = source[:last] + ", 0x" + source[last + 3 :]  # as the last word may be
    other = fat_binary(image(1, (8, 0), 80))
    for each in (source, spaced):
        assert nf4_fatbin.binary_of(each) == library
        assert nf4_fatbin.with_binary(each, other) == source_of(other)


@pytest.mark.parametrize(
    "source",
    [
        "",
        source_of(fat_binary(image(2, (7, 1), 80)), words=7),
        source_of(fat_binary(image(2, (7, 1), 80)).replace(b"\x50\xed", b"\x50\xee")),
    ],
    ids=["empty", "length", "magic"],
)
def test_a_source_of_another_form(source):
    with pytest.raises(ValueError, match="form is not known"):
        nf4_fatbin.binary_of(source)


ONE = fat_binary(image(2, (7, 1), 80))


@pytest.mark.parametrize(
    "made, problem",
    [
        (fat_binary(image(3, (7, 1), 80)), "image of kind 3"),
        (ONE.replace(b"\1\1", b"\2\1", 1), "image of kind 2 at byte 16 in form 0201"),
        (ONE[:-8], "ends at byte 144"),
        (ONE[:8] + bytes([len(ONE) - 24]) + ONE[9:], "up to byte 144 .* ends at byte 136"),
        (ONE[:8] + bytes([8]) + ONE[9:], "up to byte 16 .* ends at byte 24"),
    ],
    ids=["kind", "form", "cut", "longer", "no header"],
)
def test_a_fat_binary_of_another_form(made, problem):
    with pytest.raises(ValueError, match=problem):
        nf4_fatbin.pack(made, made)


# It says what it was called with, and writes the source of its compression.
FATBINARY = """
import shutil, sys
print(*sys.argv[1:], sep="\\n")
mode = sys.argv[1].partition("=")[2]
for each in sys.argv[1:]:
    if each.startswith("--embedded-fatbin="):
        shutil.copy(f"{sys.argv[0]}.{mode}", each.partition("=")[2])
"""


def run_fatbinary(folder, *arguments, **sources):
    """sources: what it writes, by the name of a compression."""
    program = folder / "fatbinary"
    program.write_text(f"#!{sys.executable}\n{FATBINARY}")
    program.chmod(0o755)
    for mode, source in sources.items():
        (folder / f"fatbinary.{mode}").write_text(source)
    return subprocess.run(
        [sys.executable, nf4_fatbin.__file__, "fatbinary", program, *arguments],
        capture_output=True,
        text=True,
    )


def test_the_wrapper_of_fatbinary(tmp_path, monkeypatch):
    ptx, cubin, written = (tmp_path / f"a kernel.{end}" for end in ("ptx", "cubin", "fatbin.c"))
    ptx.write_text(HEAD)
    cubin.write_text(HEAD)
    arguments = ["-64", f"--image3=kind=ptx,sm=80,file={ptx}"]
    arguments += [f"--image3=kind=elf,sm=100,file={cubin}", f"--embedded-fatbin={written}"]
    library = fat_binary(image(2, (8, 1), 100, data=bytes(4096)))
    zstd = fat_binary(image(2, (8, 1), 100, ZSTD, b"zstd"))
    done = run_fatbinary(tmp_path, *arguments, size=source_of(zstd), none=source_of(library))
    assert done.returncode == 0
    modes = ["--compress-mode=size", "--compress-mode=none"]
    assert done.stdout.splitlines() == [modes[0], *arguments, modes[1], *arguments]
    assert written.read_text() == source_of(nf4_fatbin.pack(library, zstd)) == source_of(zstd)
    assert ptx.read_text() == HEAD.replace("version 9.0", "version 8.0")
    assert cubin.read_text() == HEAD
    arguments.pop(2)  # without a GPU whose drivers unpack zstd
    library, _ = packed(image(1, (8, 0), 80))
    done = run_fatbinary(tmp_path, *arguments, none=source_of(fat_binary(image(1, (8, 0), 80))))
    assert done.stdout.splitlines() == [modes[1], *arguments]
    assert written.read_text() == source_of(library)
    monkeypatch.setenv("NF4_PTX_ZSTD", "1")
    zstd = source_of(fat_binary(image(1, (8, 0), 80, ZSTD, b"zstd")))
    none = source_of(fat_binary(image(1, (8, 0), 80)))
    done = run_fatbinary(tmp_path, *arguments, size=zstd, none=none)
    assert done.stdout.splitlines() == [modes[0], *arguments, modes[1], *arguments]
    assert written.read_text() == zstd


def test_another_compression_that_is_asked_for(tmp_path):
    written = tmp_path / "kernel.fatbin.c"
    arguments = ["--compress-mode=speed", f"--embedded-fatbin={written}"]
    done = run_fatbinary(tmp_path, *arguments, speed="as LZ4")
    assert done.stdout.splitlines() == arguments
    assert written.read_text() == "as LZ4"


def test_a_source_that_is_not_known_stops_the_build(tmp_path):
    written = f"--embedded-fatbin={tmp_path / 'kernel.fatbin.c'}"
    done = run_fatbinary(tmp_path, written, size="", none="")
    assert done.returncode == 1
    assert done.stderr == "nf4_fatbin: fatbinary wrote a source whose form is not known\n"
