"""The bench of other GPUs' kernels, on the CPU: small layers in every form, a small model, experts;
from the build of a family to the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import bench_path
import nf4
import pytest

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")
for _name in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(_name)
if not hasattr(torch.nn.functional, "grouped_mm"):
    pytest.skip("torch without grouped_mm", allow_module_level=True)

from bench_fakes import FakeGpu  # noqa: E402
from nf4bench import (  # noqa: E402
    families,
    families_cases,
    families_pages,
    families_products,
    modes,
    table,
    training,
)
from nf4bench.check import WrongResult  # noqa: E402
from nf4bench.errors import LaunchFailed, LibraryMissing  # noqa: E402
from nf4bench.experts_cases import Model  # noqa: E402
from nf4bench.families_cases import FAMILIES, FORMS, Family  # noqa: E402
from nf4bench.models_cases import Size  # noqa: E402
from nf4bench.options import Options  # noqa: E402
from nf4bench.training_cases import Group  # noqa: E402

FAMILY = Family("Sm80", 99, "some GPUs")
TINY = Size(hidden=64, heads=4, intermediate=192, layers=2, vocabulary=50)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SHAPES": ((128, 256), (64, 128)), "MS": (1, 17), "TURNS": 3, "TOKENS": (1, 5),
        "STEP": Group("fp32", False, TINY, (2, 8)), "EXPERTS": Model("small", 4, 64, 128, 2),
    }.items():  # fmt: skip
        monkeypatch.setattr(families_cases, name, value)
    monkeypatch.setattr(training, "TURNS", 3)


def test_from_a_build_to_the_page(small: None) -> None:
    made = families.measured(FakeGpu(), FAMILY)
    assert list(made) == list(families.PARTS)
    rows = [(tuple(row["shape"]), row["m"]) for row in made["products"]]
    assert rows == [((128, 256), 1), ((128, 256), 17), ((64, 128), 1), ((64, 128), 17)]
    for row in made["products"]:
        assert tuple(row["forms"]) == FORMS and row["family"] == "Sm80, 99 KiB"
        for each in row["forms"].values():
            assert each["us"] > 0 and 0 < each["error"] < 2e-2
    (step,) = made["steps"]
    assert list(step["forms"]) == ["libnf4", "drop-in", "bitsandbytes"]
    assert [row["tokens"] for row in made["experts"]] == [1, 5]
    versions = dict.fromkeys(("transformers", "peft", "bitsandbytes"), "1.2")
    about = {"device": "a GPU", "torch": "2.9", "date": "1 Jan", "commit": "abc"}
    found = {"families": {**about, "versions": versions, **made}}
    page = families_pages.page(found, {"families"})
    assert "commit abc; their code has changed since" in page
    assert page.count("| Sm80, 99 KiB | 128×256 |") == 2 and "| small | 5 |" in page


def test_a_ratio_is_over_the_better_of_both() -> None:
    forms = {"bitsandbytes": 20.0, "dequantize + dense": 10.0, "drop-in": 15.0}
    row = {"forms": {form: {"us": us} for form, us in forms.items()}}
    assert table.over(row, "drop-in", "bitsandbytes") == 0.75
    assert table.over(row, "drop-in", "bitsandbytes", "dequantize + dense") == 1.5


def test_the_drop_in_alone_is_served(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of the forms."""
    from nf4.torch import bitsandbytes as backend

    served = []

    class Watched:
        def microseconds(self) -> float:
            served.append(backend.served() is not None)
            return 1.0

    order = ["bitsandbytes", "drop-in", "libnf4"]
    times = families_products.in_turns({(form, 1): Watched() for form in order})
    assert len(times) == 3 and served == [False, False, True] * 5
    assert backend.served() is None


def test_samples_of_quick_calls_are_longer() -> None:
    class Gpu(FakeGpu):
        def microseconds(self, enqueue) -> float:
            made.clear()
            enqueue()
            return 10.0 * len(made)

    made: list[int] = []
    calls = [lambda i=i: made.append(i) for i in range(3)]
    rotation = families_products.Rotation(Gpu(), calls)
    assert rotation.microseconds() == 10.0 and made == [1, 2]
    assert rotation.microseconds() == 10.0 and len(made) == families_products.MOST_CALLS
    assert made[:4] == [1, 2, 0, 1]


def test_a_wrong_product_ends_it(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families_products, "MOST_PEER_ERROR", 0.0)
    gpu = FakeGpu()
    with pytest.raises(WrongResult, match=r"^Sm80, 99 KiB, 128x256, M = 1: bitsandbytes: "):
        families.measured(gpu, FAMILY)
    assert gpu.measured == 0


# ---- Builds and processes ---------------------------------------------------------------


def test_the_builds_are_those_of_dev() -> None:
    script = (bench_path.ROOT / "tools" / "gpu.sh").read_text()
    made = re.findall(r"^  build_family (\w+) ([\d ]+)$", script, re.MULTILINE)
    found = [(name, int(kib)) for name, sizes in made for kib in sizes.split()]
    assert found == [(each.name, each.shared_kib) for each in FAMILIES]
    assert "build=$ROOT/build-${1,,}" in script and "into=$build-$kib" in script
    assert FAMILIES[0].library(Path("root")) == Path("root/build-sm80-163/lib/libnf4.so")


def test_the_library_of_another_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"cuda": "13.0", **FAMILY.info}
    monkeypatch.setattr(nf4, "build_info", lambda: info)
    families.require_build(FAMILY)
    for other in (replace(FAMILY, shared_kib=163), replace(FAMILY, name="Sm75")):
        with pytest.raises(LibraryMissing, match=f"is not the build of {other}, but of .*99 KiB"):
            families.require_build(other)


def test_a_process_for_each_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(LibraryMissing, match="build-sm80-163/lib/libnf4.so; ./dev gpu --build"):
        modes.run(Options("families", build=tmp_path / "build"))
    for each in FAMILIES:
        each.library(tmp_path).parent.mkdir(parents=True)
        each.library(tmp_path).touch()
    asked, faults = [], []

    def run(command: list[str], env: dict, timeout: float, check: bool) -> None:
        assert check
        asked.append((int(command[3]), env["NF4_LIBRARY"], env["NF4_BITSANDBYTES"]))
        parts = {part: [{"of": len(asked)}] for part in families.PARTS}
        made = {"about": {"device": "a GPU"}, "seconds": 9.0, **parts}
        Path(command[2]).write_text(json.dumps(made))
        if faults:
            raise faults.pop()

    monkeypatch.setattr(families.subprocess, "run", run)
    found = modes.run(Options("families", build=tmp_path / "build"))
    assert asked == [(i, str(each.library(tmp_path)), "0") for i, each in enumerate(FAMILIES)]
    assert found["device"] == "a GPU" and found["products"] == [{"of": 1}, {"of": 2}, {"of": 3}]
    assert list(found["seconds"]) == list(map(str, FAMILIES))
    for fault in subprocess.CalledProcessError(1, "bench"), subprocess.TimeoutExpired("bench", 9):
        faults.append(fault)
        with pytest.raises(LaunchFailed, match="the bench of Sm80, 163 KiB: Command 'bench'"):
            families.run(tmp_path)


def test_the_process_says_what_is_wrong(tmp_path: Path) -> None:
    """It runs as it stands, up to the build, which here has every family."""
    command = [sys.executable, families.__file__, str(tmp_path / "x.json"), "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert "is not the build of Sm80, 99 KiB" in done.stderr
