"""What ./dev is made of: the files it names, and its shell functions."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from limits import HANG

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEV = ROOT / "dev"


def _functions(script: str, *, at: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Runs shell lines with the functions of ./dev."""
    text = DEV.read_text()
    assert text.endswith('\nmain "$@"\n')
    text = text.removesuffix('main "$@"\n').replace(
        '"$(dirname "${BASH_SOURCE[0]}")"', shlex.quote(str(at))
    )
    text = text.replace("source tools/", f"source {shlex.quote(str(ROOT))}/tools/")
    return subprocess.run(
        ["bash", "-c", text + script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_file_that_dev_names_exists() -> None:
    scripts = (DEV, *(ROOT / "tools").glob("*.sh"))
    text = "".join(path.read_text() for path in scripts)
    text = text.replace("$PACKAGE/", "bindings/python/")
    folders = "bench|bindings|examples|tests|tools"
    names = set(re.findall(rf"(?<![\w/$}}])(?:{folders})/[\w./-]+\.\w+", text))
    assert {"bench/bench.py", "tools/tally.py", "tools/install.sh"} <= names
    assert {"bindings/python/build_backend/nf4_build.py", "tests/packaging/wheel.sh"} <= names
    assert [name for name in sorted(names) if not (ROOT / name).is_file()] == []


def test_every_step_is_defined() -> None:
    text = DEV.read_text()
    steps = set(re.findall(r"^  step (\w+) ", text, re.MULTILINE))
    assert {"build", "python", "rust"} <= steps
    assert steps == set(re.findall(r"^step_(\w+)\(\) ", text, re.MULTILINE))


def test_it_runs_from_any_directory(tmp_path: Path) -> None:
    done = subprocess.run([str(DEV)], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("./dev build") and done.stderr == ""
    unknown = subprocess.run([str(DEV), "nothing"], cwd=tmp_path, capture_output=True, text=True)
    assert unknown.returncode == 1 and "no command 'nothing'" in unknown.stderr


def test_requirements_are_those_of_pyproject() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *document["build-system"]["requires"],
        *document["project"]["dependencies"],
        *document["project"]["optional-dependencies"]["plot"],
        *document["project"]["optional-dependencies"]["test"],
    ]
    done = _functions("pyproject requires dependencies plot test")
    assert done.stdout.splitlines() == wanted
    missing = _functions("pyproject nothing; echo on")
    assert missing.returncode == 1 and missing.stdout == ""
    assert "no list 'nothing'" in missing.stderr


@pytest.mark.parametrize("content", [None, "", "notes.txt", ".nf4-begun"])
def test_only_an_environment_of_dev_is_cleared(content: str | None, tmp_path: Path) -> None:
    place = tmp_path / "environment"
    if content is not None:
        place.mkdir()
    if content:
        (place / content).touch()
        (place / "more").mkdir()
    done = _functions("clear_environment", NF4_VENV=str(place))
    left = {path.name for path in place.iterdir()}
    if content == "notes.txt":
        assert done.returncode == 1 and str(place) in done.stderr
        assert left == {"notes.txt", "more"}
    else:
        assert done.returncode == 0, done.stderr
        assert left == {".nf4-begun"}


@pytest.mark.parametrize(
    "version, accepted",
    [("1.9.0", False), ("1.87.5", False), ("1.88.0", True), ("1.100.0", True), ("2.0.0", True)],
)
def test_a_cargo_that_is_too_old_is_named(version: str, accepted: bool, tmp_path: Path) -> None:
    (tmp_path / "Cargo.toml").write_text('[workspace.package]\nrust-version = "1.88"\n')
    cargo = tmp_path / "cargo"
    cargo.write_text(f"#!/bin/sh\necho 'cargo {version} (0123abcd 2026-01-01)'\n")
    cargo.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = _functions("rust_problem", at=tmp_path, PATH=path)
    assert done.returncode == 0, done.stderr
    refusal = f"cargo is {version}; 1.88 or later is needed"
    assert done.stdout.strip() == ("" if accepted else refusal)


# What `prepare` would do, said instead of done, on a machine without nvcc.
STUBS = """
unset CUDACXX
virtual_environment() { :; }
install() { say "install: $*"; }
have() { [ "$1" != nvcc ]; }
meson() { :; }
configure() { echo "configure: ${*:2}"; }
"""


@pytest.mark.parametrize("wheels", ["", "a-wheel another-wheel"])
def test_a_machine_without_a_cuda_compiler_builds_for_the_cpu(wheels: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    python = f'python() {{ [ -z "${{2:-}}" ] || printf "%s\\n" {wheels}; }}\n'
    done = _functions(STUBS + python + "prepare -Dgiven=1", at=tmp_path)
    assert done.returncode == 0, done.stderr
    if wheels:
        assert "install: the CUDA compiler a-wheel another-wheel" in done.stderr
        assert "configure: -Dpython_extension=auto -Dgiven=1\n" in done.stderr
    else:
        assert "this build has no GPU backend" in done.stderr
        assert "configure: -Dpython_extension=auto -Dcuda=disabled -Dgiven=1\n" in done.stderr


@pytest.mark.parametrize(
    "status, installed",
    [
        (0, "pip: --no-compile --require-hashes numpy==2 --hash=1"),
        (3, "pip: --no-compile numpy>=1"),
    ],
)
def test_what_is_installed_is_taken_from_the_pins(status: int, installed: str) -> None:
    """Where they are not for this Python, by its range."""
    stub = """
python() {
  case $1 in
    tools/pins.py) echo "pins: ${*:2}" >&2; echo 'numpy==2 --hash=1'; return STATUS ;;
    *) echo "pip: ${*:5}" | sed "s|-r .*|$(cat "${!#}" 2>/dev/null)|" >&2 ;;
  esac
}
""".replace("STATUS", str(status))
    done = _functions(f"{stub} pip_install --no-compile 'numpy>=1'")
    assert done.stderr.splitlines() == ["pins: numpy>=1", installed]
    refused = _functions(f"{stub.replace(f'return {status}', 'return 1')} pip_install 'numpy>=1'")
    assert refused.returncode == 1 and "pip:" not in refused.stderr


@pytest.mark.parametrize("root", [True, False])
def test_without_a_cross_compiler_the_step_is_skipped(root: bool, tmp_path: Path) -> None:
    """And apt is asked where it can help, but its failure is none of the step's."""
    stubs = f"""
have() {{ [ "$1" = apt-get ]; }}
id() {{ echo {0 if root else 1000}; }}
apt-get() {{ say "apt-get $1"; return 100; }}
"""
    done = _functions(stubs + f"step_arm {shlex.quote(str(tmp_path))}")
    assert done.returncode == 77, done.stderr
    assert done.stderr.splitlines()[-1].startswith("skipped: no aarch64-linux-gnu-g++")
    assert ("apt-get update" in done.stderr) == root


@pytest.mark.parametrize("status", ["0", "3"])
def test_a_step_beside_others_is_counted_where_it_stands(status: str, tmp_path: Path) -> None:
    for name in ("tests", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    slow = f"sleep 0.2; echo it said; return {status}"
    done = _functions(
        f"bash() {{ case $2 in step_packages) {slow} ;; esac; }}\nrun_tests", at=tmp_path
    )
    lines = done.stdout.splitlines()
    place = lines.index("== Python packages")
    assert lines[place - 2].startswith("== The C++ tests") and lines[place - 1].startswith("   1 ")
    if status == "0":
        assert lines[place + 1].startswith("   0 passed, 0 failed, 0 skipped in ")
    else:
        assert lines[place + 1 : place + 3] == [
            "   failed: packages ended with status 3",
            "   | it said",
        ]
    assert done.returncode == (status != "0")
    assert any(re.match(rf"\d+ passed, {int(status != '0')} failed, 0 skipped", x) for x in lines)


def test_a_step_beside_others_ends_with_dev(tmp_path: Path) -> None:
    stubs = f"""
bash() {{ case $2 in
  step_packages) echo $BASHPID >{shlex.quote(str(tmp_path))}/pid; sleep 100000 ;;
  step_cpp) until [ -s {shlex.quote(str(tmp_path))}/pid ]; do sleep 0.1; done; kill -TERM $$ ;;
esac; }}
"""
    # Its output is not that of this process, which would wait for its end.
    done = _functions(stubs + "exec >/dev/null 2>&1; run_tests", at=tmp_path)
    assert done.returncode != 0
    process = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    began = time.monotonic()
    while time.monotonic() - began < HANG:
        if not process.exists() or process.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the step goes on")


@pytest.mark.parametrize("words, left_out", [("", []), ("core", ["interop", "language_model"])])
def test_a_model_that_cannot_be_had_leaves_the_other_packages(
    words: str, left_out: list[str]
) -> None:
    names = ("tests", "interop", "model", "language_model")
    stubs = "".join(f"install_{name}() {{ echo {name}; }}; " for name in names)
    done = _functions(f"{stubs} python() {{ :; }}; step_packages folder {words}")
    assert done.stdout.split() == [name for name in names if name not in left_out]


def test_catch2_is_that_of_the_pins_or_else_the_system_s(tmp_path: Path) -> None:
    stubs = "apt_install() { say 'apt was asked'; false; }; pkg-config() { return $FOUND; }\n"
    header = '"$CACHE/catch2/catch2/install/include/catch2"'
    fetched = f"pip_install() {{ mkdir -p {header} && touch {header}/catch.hpp; }}; catch2_include"
    failed = "pip_install() { false; }; catch2_include"
    done = _functions(stubs + failed, at=tmp_path, FOUND="0")
    assert (done.returncode, done.stdout) == (0, "")
    done = _functions(stubs + failed, at=tmp_path, FOUND="1")
    assert done.returncode == 1 and "apt was asked" in done.stderr
    for script in (fetched, failed):
        done = _functions(stubs + script, at=tmp_path, FOUND="0")
        assert done.stdout == ".cache/catch2/catch2/install/include\n", done.stderr


def test_a_command_leaves_its_counts_anew(tmp_path: Path) -> None:
    """A step of it, which is a process of its own, adds to them."""
    say = 'echo {} >>"$NF4_PROOFS"'
    twice = f"count_proofs test; {say.format('a 1')}; count_proofs step; {say.format('b 2')}"
    for _ in range(2):
        done = _functions(twice, at=tmp_path, NF4_PROOFS="")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / ".cache" / "proofs" / "test").read_text() == "a 1\nb 2\n"


def test_a_command_that_there_is_not_deletes_nothing(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    (tmp_path / ".cache" / "proofs").mkdir(parents=True)
    done = _functions("usage() { :; }; main ../../README.md", at=tmp_path, NF4_PROOFS="")
    assert done.returncode == 1 and "no command" in done.stderr
    assert (tmp_path / "README.md").exists()


@pytest.mark.parametrize("code", [0, 77, 1])
def test_what_is_skipped_at_night_is_no_failure(code: int, tmp_path: Path) -> None:
    stubs = "step_build() { :; }; install_tests() { :; }\n"
    stubs += f"bash() {{ case $2 in step_arm_long) return {code} ;; esac; }}\n"
    done = _functions(f"{stubs} nightly", at=tmp_path)
    assert done.returncode == (1 if code == 1 else 0), done.stderr
    assert ("failed: step_arm_long" in done.stderr) == (code == 1)


def test_the_library_alone_needs_no_catch2(tmp_path: Path) -> None:
    stubs = STUBS + "catch2_include() { die 'Catch2 was asked for'; }\nwants_cuda() { false; }\n"
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    done = _functions(stubs + "build_library", at=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "configure: -Dpython_extension=auto\n" in done.stderr
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "build.ninja").touch()
    done = _functions(stubs + "build_library", at=tmp_path)
    assert "configure: \n" in done.stderr
    assert "Catch2 was asked for" in _functions(stubs + "build", at=tmp_path).stderr


# The options that Meson remembers of a build whose kernels no GPU is to run, and of one of the
# user's own.
QUICK, OWN = "75,80-ptx,90", "90"
WHOLE = "-Dgpu_archs=all -Dcuda_args= "


def _built(script: str, at: Path, *, gpu: int, archs: str = "", quick: str = "max") -> str:
    """The options with which ./dev configures build/, after those that it always gives."""
    options = at / "build" / "meson-private" / "cmd_line.txt"
    options.parent.mkdir(parents=True, exist_ok=True)
    (at / "build" / "build.ninja").unlink(missing_ok=True)
    options.write_text(f"[options]\ngpu_archs = {archs}\n")
    if archs:
        (at / "build" / "build.ninja").touch()
    stubs = (
        'prepare() { echo "prepare: $*" >&2; }; meson() { :; }; catch2_include() { echo here; }\n'
    )
    # The option stands early in much text.
    stubs += (
        f"nvcc() {{ echo '--Ofast-compile {quick}'; seq 100000; }}\n"
        if quick
        else "nvcc() { :; }\n"
    )
    stubs += f"have_gpu() {{ return {1 - gpu}; }}; wants_cuda() {{ :; }}; unset CUDACXX\n"
    for name in ("virtual_environment", "cuda_compiler", "install_demo", "install_interop"):
        stubs += f"{name}() {{ :; }}; "
    done = _functions(f"{stubs} python_environment() {{ :; }}; python() {{ :; }}\n{script}", at=at)
    prepared = re.search(r"prepare: (.*)", done.stderr)
    assert prepared, done.stderr
    always = "-Dtests=enabled -Dexamples=enabled -Dcatch2_include=here "
    return f"{prepared[1]} ".removeprefix(always)


@pytest.mark.parametrize("command", ["step_build", "bench", "build_library"])
def test_kernels_that_no_gpu_is_to_run_are_compiled_quickly(command: str, tmp_path: Path) -> None:
    for archs in ("", QUICK):
        quick = "-Dgpu_archs=75,80-ptx,90 -Dcuda_args=--Ofast-compile=max "
        assert _built(command, tmp_path, gpu=0, archs=archs) == quick
        older = "-Dgpu_archs=75,80-ptx,90 -Dcuda_args= "
        assert _built(command, tmp_path, gpu=0, archs=archs, quick="") == older
    assert _built(command, tmp_path, gpu=0, archs=OWN).strip() == ""
    assert _built(command, tmp_path, gpu=1).strip() == ""
    assert _built(command, tmp_path, gpu=1, archs=QUICK) == WHOLE


def test_what_is_built_to_be_used_is_never_compiled_quickly(tmp_path: Path) -> None:
    for gpu in (0, 1):
        assert _built("build", tmp_path, gpu=gpu, archs=QUICK) == WHOLE
        own = _built("build -Dgpu_archs=90", tmp_path, gpu=gpu, archs=QUICK)
        assert own == WHOLE + "-Dgpu_archs=90 "
        assert _built("build", tmp_path, gpu=gpu, archs=OWN) == ""
    assert _built("build_library", tmp_path, gpu=1, archs=QUICK) == WHOLE


def test_a_release_has_every_kernel(tmp_path: Path) -> None:
    """Options are for dry runs, which go on: here to the next thing that they look at."""
    for option in ("--cpu", "-Dgpu_archs=90"):
        done = _functions(f"git() {{ echo git; }}; release {option}")
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr == f"dev: a release has every kernel; {option} is for --dry-run\n"
    done = _functions("install_tests() { die 'so far'; }; release --dry-run --cpu")
    assert "not ready: a release has every kernel; --cpu is for --dry-run" in done.stderr
    assert done.stderr.endswith("dev: so far\n")


RELEASE_STUBS = """
git() { case $1 in tag) [ "$2" = -l ] || echo "git $*" ;; esac; }
install_tests() { :; }
python() { :; }
try_tarball() { echo "tried ${1##*/}" >&2; }
wheel() { mkdir -p "$DIST"; touch "$DIST/libnf4-$(version)"{.tar.gz,-any.whl}; }
bash() {
  mkdir -p "$2/lib/python3.12/site-packages/nf4/lib"
  echo "$LANGUAGES" >"$2/results.xml"
}
cargo() {
  mkdir -p "$CARGO_TARGET_DIR/package"
  echo "cargo $1 with ${NF4_LIB_DIR##*/wheel-user/}" >&2
  touch "$CARGO_TARGET_DIR/package/nf4-$(version).crate"
}
"""


@pytest.mark.parametrize("dry", [True, False])
def test_a_release_tries_all_that_it_publishes(dry: bool, tmp_path: Path) -> None:
    """Only the tag is left out of a dry run, which says what is not ready."""
    (tmp_path / "meson.build").write_text("  version: '1.2.3',\n")
    (tmp_path / "CHANGELOG.md").write_text("## [1.2.3] - 2026-12-01\n")
    script = RELEASE_STUBS + ("release --dry-run" if dry else "release")
    done = _functions(script, at=tmp_path, LANGUAGES="<testcase/>")
    assert done.returncode == 0, done.stderr
    assert "tried libnf4-1.2.3.tar.gz" in done.stderr
    assert "cargo package with lib/python3.12/site-packages/nf4/lib\n" in done.stderr
    names = ["libnf4-1.2.3-any.whl", "libnf4-1.2.3.tar.gz", "nf4-1.2.3.crate"]
    sums = (tmp_path / "dist" / "SHA256SUMS").read_text().splitlines()
    assert sorted(line.split()[1] for line in sums) == names
    assert ("git tag -a v1.2.3" in done.stdout) != dry
    assert "not ready" not in done.stderr
    done = _functions(script, at=tmp_path, LANGUAGES="<skipped/>")
    assert done.returncode == (0 if dry else 1)
    assert "the wheel was not tried in every language" in done.stderr


@pytest.mark.parametrize("toolkit", [True, False])
def test_tests_of_candle_on_a_gpu_are_compiled_or_there_is_a_reason(
    toolkit: bool, tmp_path: Path
) -> None:
    (tmp_path / "lib64").mkdir()
    for name in ("lib64/libcublas.so", "cuda-0a", "llama-0b") if toolkit else ():
        (tmp_path / name).touch()
    messages = "".join(
        f'''echo '{{"target":{{"name":"{name}"}},"executable":"{tmp_path}/{name}-{tag}"}}'; '''
        for name, tag in (("cuda", "0a"), ("llama", "0b"))
    )
    script = f"have_gpu() {{ return 1; }}; cargo() {{ {messages} }}; build_candle"
    done = _functions(script, at=tmp_path, CUDA_HOME=str(tmp_path), CUDA_COMPUTE_CAP="90")
    assert done.returncode == 0, done.stderr
    into = tmp_path / ".cache" / "rust" / "candle"
    if toolkit:
        assert {"cuda", "llama"} < {path.name for path in into.iterdir()}
    else:
        assert (into / "skipped").read_text() == f"no CUDA toolkit with cuBLAS in {tmp_path}\n"


@pytest.mark.parametrize("gpu, arch", [("", "90"), ("8.9", "89"), ("12.0", "120")])
def test_a_family_is_compiled_once_for_every_size_of_shared_memory(
    gpu: str, arch: str, tmp_path: Path
) -> None:
    stubs = f"""
for name in virtual_environment cuda_compiler; do eval "$name() {{ :; }}"; done
catch2_include() {{ echo here; }}
have_gpu() {{ [ -n "{gpu}" ]; }}
nvidia-smi() {{ printf '%s\\n' {gpu} 7.5; }}
meson() {{ echo "meson ${{*/$ROOT\\//}}"; }}
configure() {{
  echo "configure ${{*/$ROOT\\//}}"
  mkdir -p "$1/lib" "$1/tests/check_cuda.p"
  echo "$*" | tee "$1/lib/libnf4.so.0" >"$1/tests/check_cuda"
  ln -sf libnf4.so.0 "$1/lib/libnf4.so"
}}
"""
    done = _functions(stubs + "build_families", at=tmp_path)
    assert done.returncode == 0, done.stderr
    always = "-Dcuda=enabled -Dtests=enabled -Dpython_extension=disabled -Dgpu_family="
    wanted = []
    for family, kib in (("Sm80", 163), ("Sm80", 99), ("Sm75", 64)):
        build = f"build-{family.lower()}"
        options = f"{always}{family} -Dgpu_archs={arch} -Dshared_memory={kib} -Dcatch2_include=here"
        wanted += [
            f"configure {build} {options}",
            f"meson compile -C {build} nf4:shared_library check_cuda",
        ]
        for name in ("lib/libnf4.so", "tests/check_cuda"):
            made = tmp_path / f"{build}-{kib}" / name
            assert not made.is_symlink() and options in made.read_text()
    assert done.stderr.splitlines() == wanted
