"""How tests/gpu/run.py runs its steps."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import types
from pathlib import Path

import pytest
from conftest import ROOT

sys.path[:0] = [str(ROOT / "tests" / "gpu")]

import gpu_execution as execution  # noqa: E402
import gpu_steps  # noqa: E402
import run  # noqa: E402
import sources  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program of its own, where no step has failed."""
    monkeypatch.setattr(execution, "_ended", threading.Event())


def _matches(expression: str, words: set[str]) -> bool:
    """Whether Catch2 would run a test of this name and these tags."""
    terms = re.findall(r"(~?)(\[\w+\]|\"[^\"]+\")", expression)
    return all((word in words) != bool(negated) for negated, word in terms)


def test_racecheck_runs_each_test_in_one_step() -> None:
    """But for those that every step leaves out."""
    met = set()
    for path in sorted((ROOT / "tests" / "cuda").glob("check_*.cpp")):
        cases = re.findall(r'^TEST_CASE\(("(?:[^"]|"\s*")*"),\s*"(.*?)"\)', path.read_text(), re.M)
        assert len(cases) == path.read_text().count("TEST_CASE("), path
        for name, text in cases:
            words = {name, *re.findall(r"\[[^\]]+\]", text)}
            usual = "[cuda]" in words and not words & {"[large]", "[long]", "[random]"}
            steps = [
                step
                for step in gpu_steps.RACECHECK_STEPS
                if _matches(gpu_steps.SANITIZER_STEPS[step][1], words)
            ]
            assert len(steps) == usual, f"{path.name}: {name} is in {steps}"
            met.update(steps)
    assert met == gpu_steps.RACECHECK_STEPS.keys()


@pytest.mark.interop
def test_every_program_of_the_bench_is_in_the_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from nf4bench import check, library, modes

    asked = []

    def measured(options):
        asked.append((options.mode, options.iterations, options.build))
        return {"of": options.mode}

    monkeypatch.setattr(modes, "run", measured)
    found = run.figures(tmp_path, "abc")
    assert {name: each["of"] for name, each in found.items()} == {
        name: "" if name == "bench" else name for name in run.MEASURED
    }
    assert {each["commit"] for each in found.values()} == {"abc"}
    assert sources.changed(found) == set()
    assert set(asked) == {
        (each["of"], 200 if name == "challenge" else None, tmp_path) for name, each in found.items()
    }
    assert found.keys() == sources.FIGURES.keys() - {"sweep", "matmul-sweep"}

    for error in (check.WrongResult("triton: 3 of 9"), library.LibraryMissing("no such file")):

        def fails(options, error=error):
            raise error

        monkeypatch.setattr(modes, "run", fails)
        with pytest.raises(run.Failure, match=f"the bench: {error}"):
            run.figures(tmp_path, "abc")


class FakeDevice:
    usable, device_count, name, compute_capability, driver_version = True, 1, "a GPU", (9, 0), 13000


@pytest.mark.parametrize("arguments", [["--no-bench"], []])
def test_the_tests_and_the_figures_are_two_files(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A bench that fails leaves the record of the tests that passed; figures that are not
    measured anew stay."""
    record, figures = tmp_path / "record.json", tmp_path / "figures.json"
    run.records.save(figures, {"bench": {"of": "before"}, "sweep": {"of": "before"}})
    monkeypatch.setattr(run.nf4, "device_info", lambda index: FakeDevice)
    monkeypatch.setattr(run, "record_of", lambda arguments, device, folder: {"sources": "of now"})
    monkeypatch.setattr(run, "figures", lambda build, commit: {"bench": {"of": commit}})
    places = ["--record", str(record), "--figures", str(figures), "--commit", "now"]
    monkeypatch.setattr(sys, "argv", ["run.py", *places, *arguments])
    assert run.main() == 0
    assert run.records.load(record) == {"sources": "of now"}
    measured = "before" if arguments else "now"
    assert run.records.load(figures) == {"bench": {"of": measured}, "sweep": {"of": "before"}}

    def fails(build: Path, commit: str) -> dict:
        raise run.Failure("the bench: slow")

    record.unlink()
    monkeypatch.setattr(run, "figures", fails)
    assert run.main() == (0 if arguments else 1)
    assert run.records.load(record) == {"sources": "of now"}
    assert run.records.load(figures)["bench"] == {"of": measured}


LEFT_OUT = ("racecheck", "Python", "Sm80, 99 KiB: kernels", "two GPUs", "examples")


def test_steps_that_are_left_out_are_in_the_record_and_its_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, ran = tmp_path / "record.json", {"reports": 0}
    monkeypatch.setattr(run, "nf4", types.SimpleNamespace(
        device_info=lambda index: FakeDevice, build_info=dict))  # fmt: skip
    monkeypatch.setattr(gpu_steps, "examples", lambda build: {})
    monkeypatch.setattr(gpu_steps, "family_info", lambda family, library: {"of": library.parts[-3]})
    monkeypatch.setattr(run, "at_once", lambda steps, gpus, races: dict.fromkeys(steps, ran))
    arguments = ["run.py", "--no-bench", "--record", str(path), "--build", str(tmp_path / "build")]
    skips = [text for name in LEFT_OUT for text in ("--skip", name, "no time")]
    monkeypatch.setattr(sys, "argv", [*arguments, *skips])
    (tmp_path / "build").mkdir()
    assert run.main() == 1 and not path.exists()  # nothing says what was built
    built = tmp_path / "build" / "gpu-sources"
    for code, status in (("other", 1), (sources.source_hash(), 0)):
        built.write_text(f"{code}\n")
        assert run.main() == status and path.exists() == (not status)
    record, skipped = run.records.load(path), {"skipped": "no time"}
    steps = record["compute-sanitizer"]
    assert steps == dict.fromkeys(gpu_steps.SANITIZER_STEPS, ran) | {"racecheck": skipped}
    assert record["tests"]["Python"] == skipped and record["tests"]["matmul"] == ran
    families = record["families"]
    assert families.keys() == {"Sm80, 163 KiB", "Sm80, 99 KiB", "Sm75, 64 KiB"}
    assert families["Sm80, 99 KiB"] == {
        "build": {"of": "build-sm80-99"}, "kernels": skipped, "Python": ran
    }  # fmt: skip
    assert run.records.skipped(record) == dict.fromkeys(LEFT_OUT, "no time")
    said = run.records.warning(record)
    assert all(f"\n{name}: no time" in said for name in LEFT_OUT)
    monkeypatch.setattr(sys, "argv", [*arguments, "--skip", "lunch", "no time"])
    with pytest.raises(SystemExit):
        run.main()


def _program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)
    return path


def test_the_tests_of_a_step_are_counted_over_their_files(tmp_path: Path) -> None:
    program = _program(tmp_path / "check", """
        case $2 in
          '[#check_matmul][cuda]') cases='<testcase/><testcase/>' ;;
          '[#check_lora][cuda]') cases='<testcase/><testcase><skipped/></testcase>' ;;
          *'[other]') cases='<testcase><failure/></testcase>' ;;
        esac
        echo "<testsuites><testsuite tests='7'>$cases</testsuite></testsuites>" >"$6"
    """)  # fmt: skip
    files = 1 + len(list((ROOT / "tests" / "cuda").glob("check_*.cpp")))
    expected = {"passed": 3, "failed": 0, "skipped": 1, "assertions": 7 * files}
    assert gpu_steps.catch2(run.Passed(), program, "[cuda]", tmp_path) == expected
    with pytest.raises(run.Failure, match="no test passed"):
        gpu_steps.catch2(run.Passed(), program, "[none]", tmp_path)
    with pytest.raises(run.Failure, match="ended with 0"):
        gpu_steps.catch2(run.Passed(), program, "[other]", tmp_path)


def test_a_sanitizer_runs_over_all_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _program(tmp_path / "compute-sanitizer", f"""
        echo "$*" >>'{tmp_path}/said'
        case $* in
          *planted*) exit 9 ;;
          *'[wrong]') echo 'ERROR SUMMARY: 1 error' ;;
          *) echo 'ERROR SUMMARY: 0 errors' ;;
        esac
    """)  # fmt: skip
    program = _program(tmp_path / "check", """
        case $2 in
          *'[none]') exit 0 ;;
          '[#check_lora]'* | '[#check_matmul]'* | '[cuda]') exit 3 ;;
        esac
    """)  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for tool, runs in (("initcheck", 2), ("memcheck", 3), ("racecheck", 1)):
        assert gpu_steps.sanitize(run.Passed(), program, tool, "[cuda]", "0")["reports"] == 0
        assert len((tmp_path / "said").read_text().splitlines()) == runs
        (tmp_path / "said").unlink()
    with pytest.raises(run.Failure, match="1 error"):
        gpu_steps.sanitize(run.Passed(), program, "initcheck", "[wrong]", "0")
    with pytest.raises(run.Failure, match="no test ran"):
        gpu_steps.sanitize(run.Passed(), program, "racecheck", "[none]", "0")


def test_python_s_tests_of_a_family_are_there() -> None:
    for name in gpu_steps.FAMILY_TESTS:
        file, _, test = name.partition("::")
        text = (ROOT / "tests" / "python" / "gpu" / file).read_text()
        assert not test or f"def {test}(" in text, name


def test_a_family_s_steps_run_its_own_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    family, asked = gpu_steps.FAMILIES[1], []
    monkeypatch.setattr(gpu_steps, "check_cuda", lambda build: build / "check")
    monkeypatch.setattr(gpu_steps, "run_junit", lambda command, junit, **on: (
        junit.write_text("<testsuite tests='7'/>"), asked.append((command, on)), {"passed": 2}
    )[-1])  # fmt: skip
    steps = gpu_steps.family_steps(run.Passed(), family, tmp_path, tmp_path)
    assert list(steps) == ["Sm80, 99 KiB: kernels", "Sm80, 99 KiB: Python"]
    found = [work("3") for work in steps.values()]
    assert found[0]["passed"] == 2 * (len(asked) - 1) and found[1] == {"passed": 2}
    build, on = tmp_path / "build-sm80-99", {"CUDA_VISIBLE_DEVICES": "3"}
    for command, environment in asked[:-1]:
        assert command[0] == str(build / "check") and environment == on | {"NF4_TEST_SHAPES": "10"}
    assert asked[-1][1] == on | {"NF4_LIBRARY": str(build / "lib" / "libnf4.so")}
    assert any(each.endswith("test_gpu_matmul.py") for each in asked[-1][0])


def test_the_build_of_another_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    family, asked = gpu_steps.FAMILIES[0], []

    def execute(command: list[str], **environment: str) -> tuple[int, str]:
        asked.append(environment)
        return 0, 'a warning\n{"cuda": "13.0", "gpu_family": "Sm80", "shared_memory": "163 KiB"}\n'

    monkeypatch.setattr(gpu_steps, "execute", execute)
    assert gpu_steps.family_info(family, Path("a/libnf4.so"))["cuda"] == "13.0"
    assert asked == [{"NF4_LIBRARY": "a/libnf4.so"}]
    with pytest.raises(run.Failure, match="is not the build of Sm75, 64 KiB, but of .*163 KiB"):
        gpu_steps.family_info(gpu_steps.FAMILIES[2], Path("a/libnf4.so"))
    monkeypatch.setattr(gpu_steps, "execute", lambda command, **_: (1, "no such file"))
    with pytest.raises(run.Failure, match="the build of Sm80, 163 KiB ended with 1:\nno such file"):
        gpu_steps.family_info(family, Path("a/libnf4.so"))


def test_what_has_passed_is_not_run_again(tmp_path: Path) -> None:
    file, of, calls = tmp_path / "passed.json", {"sources": "a"}, []

    def work() -> dict:
        calls.append(1)
        return {"passed": len(calls)}

    def once(command: str, gpu: str = "0", **also: str) -> dict:
        found = run.Passed(file, of).once([command], {"CUDA_VISIBLE_DEVICES": gpu}, also, work)
        assert found.pop("seconds") >= 0
        return found

    assert once("one") == {"passed": 1}
    assert once("one", gpu="1") == {"passed": 1, "resumed": True}
    assert once("two") == {"passed": 2}
    assert once("one", program="changed") == {"passed": 3}
    of["sources"] = "changed"
    assert once("one", program="changed") == {"passed": 4}
    assert once("two") == {"passed": 5}

    def fails() -> dict:
        raise run.Failure("broken")

    with pytest.raises(run.Failure):
        run.Passed(file, of).once(["three"], {}, {}, fails)
    assert once("three") == {"passed": 6}
    assert run.Passed().once(["one"], {}, {}, work)["passed"] == 7
    file.write_text(file.read_text()[:-5])  # as a program that is killed might leave it
    assert once("three") == {"passed": 8}
    file.write_text("[]")
    assert once("three") == {"passed": 9}


def test_a_run_depends_on_variables_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    before = run.environment()
    monkeypatch.setenv("NF4_LIBRARY", "another/libnf4.so")  # whose build counts
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert run.environment() == before
    for name in ("NF4_TEST_SHAPES", "CUDA_FORCE_PTX_JIT"):
        monkeypatch.setenv(name, "10")
        assert run.environment() == before | {name: "10"}
        monkeypatch.delenv(name)


def test_a_file_of_tests_that_has_passed_is_counted_and_not_run_again(tmp_path: Path) -> None:
    script = """
        echo "$2" >>"$0.said"
        echo "<testsuites><testsuite tests='7'><testcase/></testsuite></testsuites>" >"$6"
    """
    program, file = _program(tmp_path / "check", script), tmp_path / "passed.json"
    said = tmp_path / "check.said"
    files = 1 + len(list((ROOT / "tests" / "cuda").glob("check_*.cpp")))
    expected = {"passed": files, "failed": 0, "skipped": 0, "assertions": 7 * files}
    assert gpu_steps.catch2(run.Passed(file), program, "[cuda]", tmp_path) == expected
    assert len(said.read_text().splitlines()) == files
    said.unlink()
    kept = json.loads(file.read_text())
    del kept["runs"][
        next(name for name in kept["runs"] if "[#check_lora]" in name and "~" not in name)
    ]
    file.write_text(json.dumps(kept))
    found = gpu_steps.catch2(run.Passed(file), program, "[cuda]", tmp_path)
    assert found.pop("resumed") and found.pop("seconds") >= 0 and found == expected
    others = [line for line in said.read_text().splitlines() if not line.startswith("~")]
    assert others == ["[#check_lora][cuda]"]


def test_python_s_tests_depend_on_the_bindings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_steps, "run_junit", lambda *_, **environment: {"passed": 1})
    hashes, kept = ["a"], run.Passed()
    monkeypatch.setattr(gpu_steps, "source_hash", lambda root, patterns: hashes[-1])

    def resumed(library: str) -> bool:
        found = gpu_steps.pytest(kept, tmp_path, ["test_gpu.py"], NF4_LIBRARY=library)
        return found.get("resumed", False)

    assert [resumed("one"), resumed("one"), resumed("two")] == [False, True, False]
    hashes.append("b")
    assert [resumed("one"), resumed("one")] == [False, True]


def test_the_program_of_the_tests_is_found_in_any_folder(tmp_path: Path) -> None:
    (tmp_path / "tests" / "cuda" / "check_cuda.p").mkdir(parents=True)
    with pytest.raises(run.Failure, match="one program check_cuda"):
        gpu_steps.check_cuda(tmp_path)
    program = tmp_path / "tests" / "cuda" / "check_cuda"
    program.write_text("")
    assert gpu_steps.check_cuda(tmp_path) == program


def test_examples_in_rust_may_be_missing_for_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_steps, "RUST", tmp_path / "rust")
    monkeypatch.setattr(gpu_steps, "execute", lambda command, **environment: (0, ""))
    programs = ("c_device_buffers", "c_gptq_matmul", "c_mistralrs", "cpp_device_buffers")
    programs += ("cpp_swiglu_mlp", "cpp_moe_block", "cpp_llama", "../rust/debug/device_buffers")
    (tmp_path / "rust" / "debug").mkdir(parents=True)
    (tmp_path / "rust" / "candle").mkdir()
    (tmp_path / "examples").mkdir()
    for name in programs:
        (tmp_path / "examples" / name).touch()
    monkeypatch.setattr(gpu_steps.shutil, "which", lambda name: "/bin/cargo")
    with pytest.raises(run.Failure, match="the Rust, candle example is not built"):
        gpu_steps.examples(tmp_path)
    (tmp_path / "rust" / "candle" / "skipped").write_text("no CUDA toolkit\n")
    found = gpu_steps.examples(tmp_path)
    assert found["Rust"] == found["C, mistral.rs"] == "passed"
    assert found["Rust, candle"] == "skipped: no CUDA toolkit"
