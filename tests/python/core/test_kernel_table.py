"""Tests of tools/kernel_table.py: small texts as cuobjdump prints them, and the whole table."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path[:0] = [str(ROOT / "tools")]

import kernel_table  # noqa: E402
import sass  # noqa: E402
from kernel_table import Kernel  # noqa: E402

RESOURCES = """
Resource usage:
 Common:
  GLOBAL:128
 Function _Z5firstv:
  REG:56 STACK:16 SHARED:2048 LOCAL:0 CONSTANT[0]:640 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Z6helperv:
  REG:8 STACK:64 SHARED:0 LOCAL:0 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Z6secondv:
  REG:255 STACK:0 SHARED:0 LOCAL:0 CONSTANT[2]:8 CONSTANT[0]:528 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
REGCOUNT, HALF = struct.pack("<BBHII", 4, 0x2F, 8, 5, 56), struct.pack("<BBH", 3, 5, 0x70)
SECTIONS = {
    ".nv.info": REGCOUNT,
    ".nv.info._Z5firstv": HALF + struct.pack("<BBH3I", 4, 5, 12, 128, 2, 1) + HALF,
    ".nv.info._Z6secondv": REGCOUNT + HALF,
    ".text._Z5firstv": b"code",
}
FITS = Kernel("75", "k", threads=256, registers=128, stack=0, shared=2048)


def elf_of(sections: dict[str, bytes]) -> bytes:
    """Lays it out as compilers do: a header, what the sections hold, their table."""
    names = b"\0" + b"".join(each.encode() + b"\0" for each in (*sections, ".shstrtab"))
    body, headers = b"", [bytes(64)]
    for name, content in (*sections.items(), (".shstrtab", names)):
        at = names.index(b"\0" + name.encode() + b"\0") + 1
        header = struct.pack("<IIQQQQ", at, 1, 0, 0, 64 + len(body), len(content))
        headers.append(header.ljust(64, b"\0"))
        body += content
    counts = struct.pack("<3H", 64, len(headers), len(headers) - 1)
    header = b"\x7fELF".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(body))
    return (header.ljust(0x3A, b"\0") + counts).ljust(64, b"\0") + body + b"".join(headers)


def test_kernels_are_read_with_their_launch_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that are no kernels are left out."""
    elf = elf_of(SECTIONS)
    assert kernel_table.sections(elf).items() >= SECTIONS.items()
    threads = kernel_table.launch_bounds(elf)
    assert threads == {"_Z5firstv": 256}
    monkeypatch.setattr(sass, "demangled", lambda names: {name: name[3:-1] for name in names})
    assert kernel_table.parse("90", RESOURCES, threads) == [
        Kernel("90", "first", 256, 56, 16, 2048),
        Kernel("90", "second", 0, 255, 0, 0),
    ]


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({}, None),
        ({"threads": 512, "registers": 128}, None),
        ({"threads": 512, "registers": 129}, "129 registers of 512 threads; 65536 at most"),
        ({"threads": 1024, "registers": 64, "shared": 49 << 10}, None),
        ({"threads": 0}, "launch bounds of 0 threads; expected 1 to 1024"),
        ({"threads": 1025, "registers": 8}, "launch bounds of 1025 threads"),
        ({"shared": (49 << 10) + 1}, "50177 bytes of static shared memory; 49152 at most"),
    ],
)
def test_what_fits_a_multiprocessor(changes: dict, problem: str | None) -> None:
    """Registers come in units of 256 for a warp."""
    found = Kernel(**vars(FITS) | changes).problem()
    assert found is None if problem is None else problem in found


def test_stack_frames_are_those_of_the_table() -> None:
    found = [FITS, *(Kernel("80", name, 32, 8, size, 0) for name, size in (("a", 8), ("b", 40)))]
    assert kernel_table.stacks(found) == {"80": {"a": 8, "b": 40}}
    assert kernel_table.over(kernel_table.stacks(found), {"80": {"a": 8, "b": 48, "c": 8}}) == []
    assert kernel_table.over(kernel_table.stacks(found), {"80": {"b": 32}, "75": {"a": 8}}) == [
        "sm_80 a: a stack frame of 8 bytes; 0 in the table",
        "sm_80 b: a stack frame of 40 bytes; 32 in the table",
    ]


@pytest.mark.parametrize("option", ["", "--write", "--accept"])
@pytest.mark.parametrize("whole", [True, False])
def test_the_table_is_written_where_all_fits(
    option: str, whole: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A library without some architecture has no table, and its stack frames are left alone."""
    table, archs = tmp_path / "kernels.json", ["75", "90", "90a"]
    meson = "'archs': ['75', '90'], 'ptx': '75'\n'Sm90a': {'beside': '90', 'sources': []}"
    (tmp_path / "lib" / "cuda").mkdir(parents=True)
    (tmp_path / "lib" / "cuda" / "meson.build").write_text(meson)
    found = [Kernel(arch, "k", 32, 8, 24, 0) for arch in (archs if whole else archs[:2])]
    for name, value in {
        "ROOT": tmp_path, "TABLE": table, "kernels_of": lambda library: found,
        "build_info": lambda library: {"cuda": "13.0"},
    }.items():  # fmt: skip
        monkeypatch.setattr(kernel_table, name, value)
    monkeypatch.setattr(sys, "argv", ["kernel_table.py", "libnf4.so", *filter(None, [option])])
    status = kernel_table.main()
    said = capsys.readouterr()
    assert table.exists() == (whole and option == "--accept")
    if whole:
        assert status == (option != "--accept")
        assert ("sm_90a k: a stack frame of 24 bytes" in said.out) == (option != "--accept")
    else:
        assert status == (2 if option else 0)
        assert ("libnf4.so has no code for 90a" in said.err) == bool(option)
    if not table.exists():
        return
    monkeypatch.setattr(sys, "argv", ["kernel_table.py", "libnf4.so", "--write"])
    assert kernel_table.main() == 0
    made = json.loads(table.read_text())
    assert made["architectures"]["90a"] == {"kernels": 1, "registers": 8, "shared": 0}
    assert made["stack"] == {arch: {"k": 24} for arch in archs}


def test_the_table_is_kept_where_no_kernel_takes_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "kernels.json"
    (tmp_path / "lib" / "cuda").mkdir(parents=True)
    (tmp_path / "lib" / "cuda" / "meson.build").write_text("'archs': ['75'], 'ptx': '75'")
    before = [Kernel("75", "k", 32, 8, 0, 1024), Kernel("75", "l", 64, 9, 8, 0)]
    builds = {Path("before.so"): before}
    monkeypatch.setattr(kernel_table, "ROOT", tmp_path)
    monkeypatch.setattr(kernel_table, "TABLE", table)
    monkeypatch.setattr(kernel_table, "kernels_of", lambda library: builds[library])
    monkeypatch.setattr(sys, "argv", ["kernel_table.py", "after.so", "--same-as", "before.so"])
    old = {"sources": "of other code", "compiler": "13.0", "stack": {"75": {"l": 8}}}
    for after, why in (
        (
            [before[0], Kernel("75", "l", 64, 10, 16, 0)],
            "sm_75 l: registers 9 -> 10, stack 8 -> 16",
        ),
        (before[:1], "sm_75 l: in one build alone"),
        ([*before, Kernel("75", "m", 32, 8, 0, 0)], "sm_75 m: in one build alone"),
        ([Kernel("75", "k", 32, 8, 0, 0), before[1]], None),
    ):
        table.write_text(json.dumps(old))
        builds[Path("after.so")] = after
        assert kernel_table.main() == bool(why)
        assert (why or "0 that do not fit") in capsys.readouterr().out
        sources = kernel_table.source_hash(tmp_path, kernel_table.SOURCES)
        expected = old if why else old | {"sources": sources}
        assert json.loads(table.read_text()) == expected
    (tmp_path / "lib" / "cuda" / "meson.build").write_text("'archs': ['75', '90'], 'ptx': '75'")
    assert kernel_table.main() == 2
    assert "has no code for 90" in capsys.readouterr().err


def test_a_machine_without_its_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, **_: None)
    with pytest.raises(sass.Failure, match="no c\\+\\+filt on PATH"):
        kernel_table.kernels_of(tmp_path / "libnf4.so")


def test_the_table_is_of_this_code() -> None:
    table = json.loads(kernel_table.TABLE.read_text())
    assert table["sources"] == kernel_table.source_hash(ROOT, kernel_table.SOURCES), (
        "kernels have changed since tests/gpu/kernels.json was written; run ./dev gpu --build, or "
        "./dev build -Dgpu_archs=all and tools/kernel_table.py build/lib/libnf4.so --write"
    )
    meson = (ROOT / "lib" / "cuda" / "meson.build").read_text()
    assert table["architectures"].keys() == kernel_table.architectures(meson)
