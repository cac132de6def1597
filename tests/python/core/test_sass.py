"""tools/sass.py on small texts, as nvdisasm and cuobjdump print them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path[:0] = [str(ROOT / "tools")]

import sass  # noqa: E402

SASS = """\
	.target	sm_90

//--------------------- .text._Z5firstv --------------------------
	.section	.text._Z5firstv,"ax",@progbits
	.align	128
.text._Z5firstv:
        .type           _Z5firstv,@function
_Z5firstv:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   ULDC.64 UR4, c[0x0][0x210] ;
.L_x_17:
        /*0020*/              @!P0 BRA `(.L_x_19) ;
        /*0030*/                   STL.64 [R1], R2 ;
        /*0040*/                   MOV R20, 32@lo((_Z5firstv + .L_x_17@srel)) ;
        /*0050*/                   CALL.REL.NOINC `($_Z5firstv$__internal_0_$__cuda_sm20_div_u64) ;
        /*0060*/                   BRA `(.L_x_17) ;
.L_x_19:
        /*0070*/                   EXIT ;
	.section	.text._Z6secondv,"ax",@progbits
.text._Z6secondv:
        /*0000*/                   FFMA R1, R2.reuse, 0.5, R3 ;
        /*0010*/                   EXIT ;
//--------------------- SYMBOLS --------------------------
"""
FIRST = (
    "LDC R1, c[0x0][*]", "ULDC.64 UR4, c[0x0][*]", "L0:", "@!P0 BRA `(L1)", "STL.64 [R1], R2",
    "MOV R20, 32@lo((* + L0@srel))", "CALL.REL.NOINC `(*)", "BRA `(L0)", "L1:", "EXIT",
)  # fmt: skip


def test_names_addresses_and_offsets_of_parameters_are_masked() -> None:
    found = sass.parse_sass(SASS)
    assert found == {"_Z5firstv": FIRST, "_Z6secondv": ("FFMA R1, R2.reuse, 0.5, R3", "EXIT")}
    other = SASS.replace("first", "last").replace("0x210", "0x3a8").replace("L_x_1", "L_x_4")
    assert sass.parse_sass(other)["_Z4lastv".replace("4", "5")] == FIRST


@pytest.mark.parametrize(
    "one, other",
    [("R2.reuse", "R2"), ("0.5", "0.25"), ("FFMA", "FMUL"), ("UR4, c[0x0]", "UR4, c[0x3]")],
)
def test_other_instructions_are_other_code(one: str, other: str) -> None:
    assert sass.parse_sass(SASS) != sass.parse_sass(SASS.replace(one, other))


def test_operations_are_counted_behind_their_predicates() -> None:
    kernel = sass.Kernel("first", (*FIRST, "@P1 LDL R2, [R1]"))
    assert kernel.counts["BRA"] == 2 and kernel.counts["LDL"] == 1
    assert (kernel.instructions, kernel.local) == (9, 2)


def test_resources() -> None:
    text = """
Resource usage:
 Common:
  GLOBAL:128 CONSTANT[4]:8
 Function _Z5firstv:
  REG:32 STACK:16 SHARED:2048 LOCAL:0 CONSTANT[0]:624 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Z6secondv:
  REG:255 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:528 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
    assert sass.parse_resources(text) == {"_Z5firstv": (32, 16, 2048), "_Z6secondv": (255, 0, 0)}


@pytest.mark.parametrize(
    "demangled, short",
    [
        (
            "void nf4::cuda::(anonymous namespace)::few<nf4::cuda::Sm90, (int)2, (bool)1>"
            "(nf4::cuda::Args)",
            "few<Sm90, 2, 1>",
        ),
        ("plain(int)", "plain"),
        ("void a::f<void (*)(int)>(b)", "a::f<void (*)(int)>"),
    ],
)
def test_names_are_short(demangled: str, short: str) -> None:
    assert sass.short_name(demangled) == short


def kernel(name: str, *code: str, registers: int = 32) -> sass.Kernel:
    return sass.Kernel(name, code, registers)


LOOP = ("LDG R1, [R2]", "FFMA R1, R1, R3, R4", "STG [R2], R1", "EXIT")


def test_kernels_are_matched_by_code_then_names_then_the_nearest() -> None:
    before = [
        kernel("few<2>", *LOOP), kernel("few<8>", *LOOP, "NOP"), kernel("wide", "WGMMA", *LOOP),
        kernel("old", "BAR", "BAR", "BAR"), kernel("tiled", *LOOP, "MUFU", "MUFU"),
    ]  # fmt: skip
    after = [
        kernel("skinny<2>", *LOOP), kernel("skinny<8>", *LOOP, "NOP", "NOP"),
        kernel("wgmma", "WGMMA", *LOOP), kernel("new", "ATOM", "ATOM"),
        kernel("mma", *LOOP, "MUFU", "MUFU", "MUFU"),
    ]  # fmt: skip
    pairs, only_before, only_after = sass.match(before, after, [("^few", "skinny")])
    assert {(a.name, b.name): sass.kind((a, b)) for a, b in pairs} == {
        ("few<2>", "skinny<2>"): "identical",
        ("few<8>", "skinny<8>"): "changed",
        ("wide", "wgmma"): "identical",
        ("tiled", "mma"): "changed",
    }
    assert ([k.name for k in only_before], [k.name for k in only_after]) == (["old"], ["new"])


def test_one_name_with_the_same_code_goes_before_others_with_it() -> None:
    before = [kernel("b", *LOOP), kernel("a", *LOOP)]
    pairs, _, only = sass.match(before, [kernel("b", *LOOP), kernel("c", *LOOP)])
    assert sorted((a.name, b.name) for a, b in pairs) == [("a", "c"), ("b", "b")] and not only


def test_what_is_printed() -> None:
    before = [
        kernel("same", *LOOP), kernel("offset", "ADD R1, R1, 0x40"), kernel("gone", "BAR"),
        kernel("more", *LOOP), kernel("registers", *LOOP, "NOP"),
    ]  # fmt: skip
    after = [
        kernel("other", *LOOP), kernel("offset", "ADD R1, R1, 0x48"),
        kernel("more", *LOOP, "STL [R1], R2"), kernel("registers", *LOOP, "NOP", registers=40),
    ]  # fmt: skip
    pairs, *only = sass.match(before, after)
    text, identical = sass.report("90a", pairs, *only)
    assert not identical
    assert text.splitlines() == [
        "sm_90a: 5 kernels -> 4: 1 identical (1 of other name), 1 differ in immediates, 2 changed, "
        "1 only before, 0 only after",
        "  immediates  offset",
        "  changed     more",
        "              registers 32, stack 0, local 0 -> 1, shared 0, instructions 4 -> 5",
        "  changed     registers",
        "              registers 32 -> 40, stack 0, local 0, shared 0, instructions 5",
        "  only before gone",
    ]
    assert sass.renames_text(pairs) == "  renamed     same -> other"
    assert sass.differences(pairs, "^more").splitlines()[-1] == "+STL [R1], R2"
    assert sass.differences(pairs, "same") == ""
    text, identical = sass.report("90", *sass.match(before[:1], before[:1]))
    assert identical and "1 identical (0 of other name)" in text


def test_help_and_what_makes_no_sense(tmp_path: Path) -> None:
    def run(*arguments: str | Path) -> subprocess.CompletedProcess:
        command = [sys.executable, "tools/sass.py", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert "--rename OLD=NEW" in run("--help").stdout
    missing = run(tmp_path / "no.so", tmp_path / "no.so")
    assert missing.returncode == 2 and "there is no file" in missing.stderr
    (tmp_path / "a.so").write_text("no library")
    rename = run(tmp_path / "a.so", tmp_path / "a.so", "--rename", "few")
    assert rename.returncode == 2 and "expected OLD=NEW" in rename.stderr
    unread = run(tmp_path / "a.so", tmp_path / "a.so")
    assert unread.returncode == 2 and "sass: " in unread.stderr
