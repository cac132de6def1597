"""The build backend: which compiler it takes, and what it asks for."""

import importlib.util
import os
import subprocess
import sys

import pytest
from conftest import ROOT, compile_c

SOURCE = ROOT / "bindings" / "python" / "build_backend" / "nf4_build.py"

PATH = os.environ["PATH"]


@pytest.fixture
def backend(monkeypatch):
    """The backend where there is no nvcc and no CUDA variable."""
    monkeypatch.syspath_prepend(SOURCE.parent)
    spec = importlib.util.spec_from_file_location("nf4_build", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("CUDACXX", "NF4_CUDA", "LIBRARY_PATH", "NF4_CUDA_DRIVER", "NF4_CUDA_RUNTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "c++")
    monkeypatch.setattr(module, "wheel_root", lambda: None)
    return module


@pytest.fixture
def for_cuda_13(monkeypatch):
    monkeypatch.setenv("NF4_CUDA_DRIVER", "13")


def make_executable(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


def test_the_compiler_of_the_path_comes_first(backend, monkeypatch, tmp_path):
    nvcc = make_executable(tmp_path / "toolkit" / "nvcc")
    monkeypatch.setenv("PATH", str(nvcc.parent))
    monkeypatch.setattr(backend, "wheel_root", lambda: tmp_path)
    assert backend.cuda_environment() == {"PATH": f"{nvcc.parent}:{nvcc.parent}"}


def test_cudacxx_goes_in_front_of_the_path(backend, monkeypatch, tmp_path):
    """Meson looks for nvcc on PATH only."""
    own = make_executable(tmp_path / "own" / "nvcc")
    monkeypatch.setenv("CUDACXX", str(own))
    assert backend.cuda_environment() == {"PATH": f"{own.parent}:/nowhere"}


def test_cudacxx_may_be_a_name(backend, monkeypatch, tmp_path):
    """It is looked up on PATH, not in the working directory."""
    make_executable(tmp_path / "here" / "nvcc")
    monkeypatch.chdir(tmp_path / "here")
    wanted = make_executable(tmp_path / "toolkit" / "nvcc")
    monkeypatch.setenv("PATH", str(wanted.parent))
    monkeypatch.setenv("CUDACXX", "nvcc")
    assert backend.cuda_environment() == {"PATH": f"{wanted.parent}:{wanted.parent}"}


def test_a_cudacxx_that_is_not_there(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDACXX", "no-such-nvcc")
    monkeypatch.setattr(backend, "wheel_root", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match="CUDACXX is no-such-nvcc"):
        backend.cuda_environment()


def test_the_wheels_come_last(backend, monkeypatch, tmp_path, for_cuda_13):
    monkeypatch.setattr(backend, "wheel_root", lambda: tmp_path)
    assert backend.cuda_environment() == {
        "PATH": f"{tmp_path / 'bin'}:/nowhere",
        "LIBRARY_PATH": str(tmp_path / "lib"),
    }
    monkeypatch.setenv("LIBRARY_PATH", "/opt/lib")
    assert backend.cuda_environment()["LIBRARY_PATH"] == f"{tmp_path / 'lib'}:/opt/lib"
    monkeypatch.setenv("LIBRARY_PATH", "")
    assert backend.cuda_environment()["LIBRARY_PATH"] == str(tmp_path / "lib")


def test_the_cuda_option(backend, monkeypatch, tmp_path, for_cuda_13):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    said = []
    assert backend._prepared(None) == {"setup-args": ["-Dcuda=auto"]}
    monkeypatch.setattr(backend, "wheel_root", lambda: tmp_path)
    monkeypatch.setattr(backend, "_say_what_takes_long", lambda: said.append(1))
    given = {"setup-args": "-Dgpu_archs=90"}
    assert backend._prepared(given) == {"setup-args": ["-Dcuda=enabled", "-Dgpu_archs=90"]}
    assert os.environ["PATH"].startswith(str(tmp_path))
    assert given == {"setup-args": "-Dgpu_archs=90"}
    monkeypatch.setenv("NF4_CUDA", "0")
    assert backend._prepared({"setup-args": ["-Da"]}) == {"setup-args": ["-Dcuda=disabled", "-Da"]}
    assert len(said) == 1  # of the one build with CUDA


def test_a_machine_without_a_cpp_compiler(backend, monkeypatch, tmp_path):
    """nvcc alone is not enough; one sentence says what to do."""
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(backend, "wheel_root", lambda: tmp_path)
    with pytest.raises(SystemExit, match=r"no C\+\+ compiler on PATH.*apt install g\+\+"):
        backend.build_wheel(str(tmp_path))
    make_executable(tmp_path / "clang++")
    monkeypatch.setenv("PATH", str(tmp_path))
    backend._need_cpp_compiler([])
    (tmp_path / "clang++").unlink()
    backend._need_cpp_compiler(["--native-file=clang.ini"])  # which may name one


NVCC_12_4 = """#!/bin/sh
case "$*" in *--version*) echo "Cuda compilation tools, release 12.4, V12.4.131"; exit ;; esac
while [ $# -gt 1 ]; do
  [ "$1" = -o ] && echo "#!/bin/sh" >"$2" && chmod +x "$2"
  shift
done
"""


NVCC_ALONE = """#!/bin/sh
echo "gcc: No such file or directory
nvcc fatal   : Failed to preprocess host compiler properties." >&2
exit 1
"""


@pytest.mark.parametrize(
    "program, sentence",
    [
        (NVCC_12_4, "nvcc is 12.4.131, and libnf4 needs 12.5 or later"),
        (NVCC_ALONE, "host compiler properties.): put a g++ on PATH that it takes"),
    ],
    ids=["too old", "without a host compiler"],
)
def test_an_nvcc_that_is_of_no_use(program, sentence, tmp_path):
    """As pip builds: one sentence; the line before says what leaves the GPU out."""
    pytest.importorskip("mesonpy")
    nvcc = make_executable(tmp_path / "nvcc")
    nvcc.write_text(program)
    settings = {"build-dir": str(tmp_path / "build")}
    # Meson takes CUDACXX for words, and the path has spaces.
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment.pop("CUDACXX", None)
    done = subprocess.run(
        [sys.executable, "-c", f"import nf4_build; nf4_build.build_wheel('.', {settings})"],
        cwd=ROOT,
        env=environment,
        start_new_session=True,  # without a terminal
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert sentence in done.stdout
    assert "NF4_CUDA=0 leaves them out" in done.stderr


NVCC_13 = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit ;;
  *--list-gpu-arch*) echo "compute_75 compute_80 compute_90"; exit ;;
esac
while [ $# -gt 1 ]; do
  [ "$1" = -o ] && echo "#!/bin/sh" >"$2" && chmod +x "$2"
  shift
done
"""
ARCHS = "gpu_family needs the architectures of its machine code, 80 or later"


def set_up(tmp_path, *options):
    """Returns what Meson says with a compiler that compiles nothing, and the path of its header."""
    pytest.importorskip("mesonbuild")
    nvcc = make_executable(tmp_path / "nvcc")
    nvcc.write_text(NVCC_13)
    command = ["setup", str(tmp_path / "build"), str(ROOT), "-Dcuda=enabled", *options]
    done = subprocess.run(
        [sys.executable, "-m", "mesonbuild.mesonmain", *command],
        env=os.environ | {"PATH": f"{tmp_path}:{PATH}"},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr, tmp_path / "build" / "lib" / "cuda" / "nf4_gpu_families.hpp"


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["-Dgpu_family=Sm70", "-Dgpu_archs=90"], "gpu_family: Sm70 is none of Sm75, Sm80, Sm90"),
        (["-Dgpu_family=Sm80"], f"gpu_archs: all; {ARCHS}"),
        (["-Dgpu_family=Sm80", "-Dgpu_archs=75,90"], f"gpu_archs: 75,90; {ARCHS}"),
        (["-Dgpu_family=Sm80", "-Dgpu_archs=80-ptx"], f"gpu_archs: 80-ptx; {ARCHS}"),
        (["-Dshared_memory=228"], "is more than maximum value 227"),
    ],
)
def test_options_of_one_family_that_make_no_sense(options, sentence, tmp_path):
    said, header = set_up(tmp_path, *options)
    assert sentence in said and not header.exists()


@pytest.mark.parametrize(
    "options, families, exact",
    [
        (["-Dgpu_family=Sm80", "-Dgpu_archs=90"], " X(Sm80, 0, 90, 0)", ""),
        (["-Dgpu_family=Sm75", "-Dgpu_archs=80,90"], " X(Sm75, 0, 80, 90, 0)", ""),
        (["-Dgpu_archs=75,90"], " X(Sm90, 0, 90, 0) X(Sm75, 0, 75, 0)", " X(Sm90a, 90)"),
    ],
)
def test_one_family_is_machine_code_of_any_gpu(options, families, exact, tmp_path):
    """Alone, and without the kernels of an exact family."""
    _, header = set_up(tmp_path, *options)
    lines = [line.rstrip() for line in header.read_text().splitlines()]
    assert f"#define NF4_GPU_FAMILIES(X) {families}" in lines
    assert f"#define NF4_EXACT_FAMILIES(X) {exact}".rstrip() in lines


def test_a_build_with_cuda_says_so(backend, capsys, monkeypatch):
    """In one line, with what leaves it out; on standard error where there is no terminal."""

    def nowhere(*arguments):
        raise OSError

    monkeypatch.setattr(backend, "open", nowhere, raising=False)
    backend._say_what_takes_long()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "compiling CUDA kernels" in said and "NF4_CUDA=0" in said


def test_free_threaded_python_has_no_stable_abi(backend, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for disabled, expected in ((1, ["-Dpython.allow_limited_api=false"]), (0, []), (None, [])):
        monkeypatch.setattr(backend.sysconfig, "get_config_var", {"Py_GIL_DISABLED": disabled}.get)
        assert backend._prepared(None) == {"setup-args": ["-Dcuda=auto", *expected]}


def test_requirements(backend, monkeypatch, tmp_path):
    pytest.importorskip("mesonpy")
    monkeypatch.setattr(backend.platform, "system", lambda: "Linux")
    monkeypatch.setattr(backend.platform, "machine", lambda: "x86_64")
    wheels = [*backend.CUDA_WHEELS, *backend.CUDA_12_WHEELS]
    assert backend.get_requires_for_build_wheel()[-len(wheels) :] == wheels
    monkeypatch.setenv("NF4_CUDA", "0")
    assert not set(wheels) & set(backend.get_requires_for_build_wheel())
    monkeypatch.delenv("NF4_CUDA")
    monkeypatch.setenv("CUDACXX", str(make_executable(tmp_path / "nvcc")))
    assert not set(wheels) & set(backend.get_requires_for_build_wheel())
    monkeypatch.delenv("CUDACXX")
    monkeypatch.setattr(backend.platform, "machine", lambda: "riscv64")
    assert not set(wheels) & set(backend.get_requires_for_build_wheel())


def nvcc_of(folder, release):
    return make_executable(folder / "bin" / "nvcc", f"echo 'Cuda compilation tools, {release}'\n")


@pytest.fixture
def wheels_of_cuda_12(backend, monkeypatch, tmp_path):
    """The installed wheels, and what a toolkit is composed of, in a list."""
    composed = []
    folders = {"cuda_nvcc": tmp_path / "nvidia/cuda_nvcc", "cuda_runtime": tmp_path / "runtime"}
    monkeypatch.setattr(backend, "_installed", lambda part, file: folders.get(part))

    def compose(*parts):
        composed.append(parts)
        return tmp_path / "nf4_toolkit" / "cuda12-0"

    monkeypatch.setattr(backend.nf4_toolkit, "compose", compose)
    return composed


@pytest.mark.parametrize("where", ["PATH", "wheels"])
def test_a_toolkit_for_drivers_of_cuda_12(backend, monkeypatch, tmp_path, where, wheels_of_cuda_12):
    """Of wheels unless asked otherwise; with an nvcc of CUDA 13 on PATH, where it is asked for."""
    nvcc = nvcc_of(tmp_path / "13", "release 13.0, V13.0.88")
    monkeypatch.setattr(backend, "wheel_root", lambda: tmp_path / "13")
    if where == "PATH":
        monkeypatch.setattr(backend, "wheel_root", lambda: None)
        monkeypatch.setenv("PATH", str(nvcc.parent))
        assert backend.cuda_environment() == {"PATH": f"{nvcc.parent}:{nvcc.parent}"}
        monkeypatch.setenv("NF4_CUDA_DRIVER", "12")
    path = os.environ["PATH"]
    folder = tmp_path / "nf4_toolkit"
    expected = {"PATH": f"{folder / 'cuda12-0' / 'bin'}:{path}"}
    assert backend.cuda_environment() == expected
    assembler = tmp_path / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"
    assert wheels_of_cuda_12 == [(folder, tmp_path / "13", assembler, tmp_path / "runtime")]
    monkeypatch.setenv("NF4_CUDA_RUNTIME", "/of/arm")
    backend.cuda_environment()
    assert str(wheels_of_cuda_12[1][3]) == "/of/arm"


@pytest.mark.parametrize("folder", ["12", "nf4_toolkit/cuda12-1"])
def test_an_nvcc_that_is_for_drivers_of_cuda_12(
    backend, monkeypatch, tmp_path, folder, wheels_of_cuda_12
):
    """The user's own, or one that was composed before."""
    nvcc = nvcc_of(tmp_path / folder, f"release {13 if '/' in folder else 12}.9, V1")
    monkeypatch.setenv("NF4_CUDA_DRIVER", "12")
    monkeypatch.setenv("PATH", str(nvcc.parent))
    assert backend.cuda_environment() == {"PATH": f"{nvcc.parent}:{nvcc.parent}"}
    assert wheels_of_cuda_12 == []


def test_the_wheels_of_cuda_12_are_not_there(backend, monkeypatch, tmp_path):
    nvcc_of(tmp_path, "release 13.0")
    monkeypatch.setattr(backend, "wheel_root", lambda: tmp_path)
    monkeypatch.setattr(backend, "_installed", lambda part, file: None)
    with pytest.raises(SystemExit, match="CUDA 12 needs nvidia-cuda-nvcc-cu12==12.*=13 builds one"):
        backend.cuda_environment()
    monkeypatch.setenv("NF4_CUDA_DRIVER", "11")
    with pytest.raises(SystemExit, match="NF4_CUDA_DRIVER is 11, which is neither 12 nor 13"):
        backend.cuda_environment()


def test_wheels_in_a_folder_that_is_read_only(backend, monkeypatch, tmp_path, wheels_of_cuda_12):
    """The toolkit lies in the user's cache. If that is read-only too, a sentence says so."""
    compose, read_only = backend.nf4_toolkit.compose, {tmp_path / "nf4_toolkit"}

    def compose_where_writable(folder, *parts):
        if folder in read_only:
            raise PermissionError(13, "Permission denied", str(folder))
        return compose(folder, *parts)

    monkeypatch.setattr(backend.nf4_toolkit, "compose", compose_where_writable)
    nvcc_of(tmp_path / "13", "release 13.0")
    monkeypatch.setattr(backend, "wheel_root", lambda: tmp_path / "13")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache = tmp_path / "cache" / "libnf4" / "nf4_toolkit"
    backend.cuda_environment()
    assert [parts[0] for parts in wheels_of_cuda_12] == [cache]
    read_only.add(cache)
    with pytest.raises(SystemExit, match="no toolkit .*denied: .*cache.*; NF4_CUDA_DRIVER=13"):
        backend.cuda_environment()
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")  # not a folder of the user's
    with pytest.raises(SystemExit, match="no toolkit for drivers of CUDA 12 can be composed"):
        backend.cuda_environment()
    nvcc = nvcc_of(cache / "cuda12-0", "release 13.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NF4_CUDA_DRIVER", "12")
    monkeypatch.setenv("PATH", str(nvcc.parent))
    assert backend.cuda_environment() == {"PATH": f"{nvcc.parent}:{nvcc.parent}"}


def test_a_part_of_the_wheels_that_is_missing(backend, monkeypatch, tmp_path, wheels_of_cuda_12):
    def compose(*parts):
        raise FileNotFoundError("there is no part, which a build for CUDA 12 needs")

    monkeypatch.setattr(backend.nf4_toolkit, "compose", compose)
    nvcc_of(tmp_path / "13", "release 13.0")
    monkeypatch.setattr(backend, "wheel_root", lambda: tmp_path / "13")
    with pytest.raises(SystemExit, match="composed: there is no part, which a build for CUDA 12 n"):
        backend.cuda_environment()


def test_requirements_for_drivers_of_cuda_12(backend, monkeypatch, tmp_path):
    monkeypatch.setattr(backend.platform, "system", lambda: "Linux")
    monkeypatch.setattr(backend.platform, "machine", lambda: "x86_64")
    assert backend.required_wheels() == [*backend.CUDA_WHEELS, *backend.CUDA_12_WHEELS]
    monkeypatch.setenv("NF4_CUDA_DRIVER", "13")
    assert backend.required_wheels() == backend.CUDA_WHEELS
    monkeypatch.setenv("NF4_CUDA_DRIVER", "12")
    for release, wheels in (("13.0", backend.CUDA_12_WHEELS), ("12.8", [])):
        monkeypatch.setenv("PATH", str(nvcc_of(tmp_path, f"release {release}, V1").parent))
        assert backend.required_wheels() == wheels
    monkeypatch.delenv("NF4_CUDA_DRIVER")
    assert backend.required_wheels() == []  # an nvcc of the user's own is used as it is


def test_the_environment_as_shell_lines(tmp_path):
    nvcc = make_executable(tmp_path / "with space" / "nvcc")
    script = f'eval "$({sys.executable} {SOURCE})" && command -v nvcc'
    environment = {"PATH": os.environ["PATH"], "CUDACXX": str(nvcc)}
    result = subprocess.run(
        ["sh", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == str(nvcc)


def test_libraries_of_the_wheels_link_from_a_folder_with_a_space(
    backend, monkeypatch, tmp_path, for_cuda_13
):
    root = tmp_path / "with space"
    make_executable(root / "bin" / "nvcc")
    (root / "lib").mkdir()
    library, program = tmp_path / "only.c", tmp_path / "program.c"
    library.write_text("int answer(void) { return 0; }\n")
    program.write_text("int answer(void);\nint main(void) { return answer(); }\n")
    monkeypatch.setenv("PATH", PATH)
    compile_c(library, root / "lib" / "libonly.so", "-shared", "-fPIC")
    monkeypatch.setattr(backend, "wheel_root", lambda: root)
    monkeypatch.setattr(backend, "system_nvcc", lambda: None)
    for name, value in backend.cuda_environment().items():
        monkeypatch.setenv(name, value)
    compile_c(program, tmp_path / "program", "-L/nowhere", "-Wl,--no-as-needed", "-lonly")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "riscv64"])
@pytest.mark.parametrize("which", ["requirements", "all"])
def test_the_requirements_as_lines(backend, monkeypatch, capsys, machine, which):
    monkeypatch.setattr(backend.platform, "system", lambda: "Linux")
    monkeypatch.setattr(backend.platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "argv", ["nf4_build.py", which])
    assert backend.main() == 0
    wanted = [*backend.CUDA_WHEELS, *backend.CUDA_12_WHEELS]
    assert capsys.readouterr().out.split() == ([] if machine == "riscv64" else wanted)
