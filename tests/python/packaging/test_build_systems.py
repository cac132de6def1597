"""What a program in C links libnf4 by: pkg-config, CMake and Meson, as docs/building.md says. The
library has its scalar kernels alone, unoptimized, which compile in seconds."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

EXAMPLE = ROOT / "examples" / "c" / "host_matmul.c"
# A subproject of buildtype release is optimized whatever -Doptimization says.
OPTIONS = ["-Dcuda=disabled", "-Dcpu_variants=", "-Dbuildtype=debug", "-Ddebug=false"]
PAGE = (ROOT / "docs" / "building.md").read_text()


def run(*command: str | Path, at: Path | None = None, **environment: str) -> str:
    """What a command prints; a test fails with all of it where the command does."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=at,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}"
    return done.stdout


def need(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")


def block(language: str, word: str) -> str:
    """The page's block of a language in which a word stands."""
    found = [
        each
        for each in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)
        if word in each
    ]
    assert len(found) == 1, f"{len(found)} blocks of {language} with {word}"
    return found[0]


def install(folder: Path, *options: str, destination: Path | None = None) -> Path:
    """A prefix with the library, by the page's commands with another prefix and these options."""
    need("meson", "ninja", "cc")
    prefix = folder / "prefix"
    told = "meson setup build-pkg --prefix=/usr/local"
    commands = block("sh", told)
    words = ["meson", "setup", "build-pkg", str(ROOT), f"--prefix={prefix}", *OPTIONS, *options]
    commands = commands.replace(told, shlex.join(words)).replace("pip install", ": pip install")
    staged = {"DESTDIR": str(destination)} if destination else {}
    run("sh", "-ec", commands, at=folder, **staged)
    return prefix


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a space in its name. What is built in it is built once: the page's commands may be given
    again."""
    return tmp_path_factory.mktemp("with space")


BOTH = ("-Ddefault_library=both", "--libdir=lib")


@pytest.fixture(scope="module")
def prefix(folder: Path) -> Path:
    """A prefix with the shared and the static library."""
    return install(folder, *BOTH)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a program, where nothing else says where the library is."""
    folder = tmp_path / "app"
    folder.mkdir()
    shutil.copy(EXAMPLE, folder / "app.c")
    return folder


def needed(program: Path) -> list[str]:
    """The libraries that the loader is asked for."""
    need("readelf")
    return re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", program))


@pytest.mark.parametrize("static", [False, True])
def test_pkg_config(prefix: Path, project: Path, static: bool) -> None:
    """A program starts without LD_LIBRARY_PATH; what it links statically needs no library."""
    need("pkg-config")
    installed = prefix / "lib"
    if static:  # a prefix without the shared library
        installed = project / "lib"
        shutil.copytree(prefix / "lib", installed, ignore=shutil.ignore_patterns("*.so*"))
        pc = installed / "pkgconfig" / "nf4.pc"
        quoted = str(installed).replace(" ", "\\ ")
        text = re.sub("^libdir=.*", lambda _: f"libdir={quoted}", pc.read_text(), flags=re.M)
        pc.write_text(text)
    line = block("sh", '"cc app.c').strip()
    line = line.replace("--libs", "--libs --static") if static else line
    run("sh", "-ec", line, at=project, PKG_CONFIG_PATH=str(installed / "pkgconfig"))
    run("./app", at=project)
    assert ("libnf4.so.0" in needed(project / "app")) is not static


def cmake(project: Path, text: str, *options: str) -> None:
    need("cmake")
    (project / "CMakeLists.txt").write_text(text)
    run("cmake", "-S", project, "-B", project / "build", *options)
    run("cmake", "--build", project / "build")
    run(project / "build" / "app")


@pytest.mark.parametrize("target", ["nf4::nf4", "nf4::nf4_static"])
def test_cmake_finds_the_package(prefix: Path, project: Path, target: str) -> None:
    text = block("cmake", "find_package").replace("nf4::nf4", target)
    if target == "nf4::nf4_static":
        text = text.replace("LANGUAGES C)", "LANGUAGES C CXX)")
    cmake(project, text, f"-DCMAKE_PREFIX_PATH={prefix}")
    linked = needed(project / "build" / "app")
    assert ("libnf4.so.0" in linked) is (target == "nf4::nf4")


def test_a_prefix_can_be_moved_for_cmake(prefix: Path, project: Path) -> None:
    moved = shutil.copytree(prefix, project / "moved", symlinks=True)
    cmake(project, block("cmake", "find_package"), f"-DCMAKE_PREFIX_PATH={moved}")
    assert str(moved) in run("ldd", project / "build" / "app")


VERSIONS = {"": 1, "0": 1, "0.1": 1, "0.1.0": 1, "0.1.99": 0, "0.0.1": 1, "0.2": 0, "1": 0}


@pytest.mark.parametrize("version, found", VERSIONS.items())
def test_cmake_and_versions(prefix: Path, project: Path, version: str, found: int) -> None:
    need("cmake")
    (project / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.18)\nproject(app LANGUAGES NONE)\n"
        f"find_package(nf4 {version} CONFIG)\n"
        f'message(STATUS "found=${{nf4_FOUND}}")\n'
    )
    output = run("cmake", "-S", project, "-B", project / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    assert f"found={found}" in output, output


def test_cmake_without_the_header_says_so(prefix: Path, project: Path) -> None:
    need("cmake")
    broken = shutil.copytree(prefix, project / "broken", symlinks=True)
    (broken / "include" / "nf4" / "nf4.h").unlink()
    (project / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(app LANGUAGES NONE)\n"
        "find_package(nf4 CONFIG REQUIRED)\n"
    )
    done = subprocess.run(
        ["cmake", "-S", project, "-B", project / "build", f"-DCMAKE_PREFIX_PATH={broken}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "nf4.h is not in" in " ".join(done.stderr.split())


def test_cmake_fetches_the_sources(project: Path) -> None:
    """FetchContent, of a folder in place of a repository."""
    need("meson", "ninja")
    options = [
        f"-DFETCHCONTENT_SOURCE_DIR_LIBNF4={ROOT}",
        f"-DNF4_MESON_OPTIONS={';'.join(OPTIONS)}",
    ]
    cmake(project, block("cmake", "FetchContent"), *options)


def test_a_subproject_of_meson(project: Path) -> None:
    """Shared, and then static in the same build, which compiles little anew."""
    need("meson", "ninja")
    (project / "subprojects").mkdir()
    (project / "subprojects" / "libnf4").symlink_to(ROOT)
    (project / "meson.build").write_text(block("meson", "dependency"))
    options = [each.replace("-D", "-Dlibnf4:") for each in OPTIONS]
    run("meson", "setup", "build", "-Ddefault_library=shared", *options, at=project)
    for library in ("shared", "static"):
        run("meson", "configure", "build", f"-Ddefault_library={library}", at=project)
        run("meson", "compile", "-C", "build", at=project)
        run(project / "build" / "app")
        assert ("libnf4.so.0" in needed(project / "build" / "app")) is (library == "shared")


def test_an_installation_by_way_of_destdir(folder: Path, prefix: Path, tmp_path: Path) -> None:
    """A package's files, and no path of where it was built or staged in them."""
    staged = tmp_path / "staged"
    assert install(folder, *BOTH, destination=staged) == prefix
    root = staged / prefix.relative_to("/")
    files = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    shared = {f"lib/{path.name}" for path in (prefix / "lib").glob("libnf4.so*")}
    assert len(shared) == 3
    assert files == {
        *(f"include/nf4/{path.name}" for path in (ROOT / "include" / "nf4").iterdir()),
        *shared,
        "lib/cmake/nf4/nf4Config.cmake",
        "lib/cmake/nf4/nf4ConfigVersion.cmake",
        "lib/libnf4.a",
        "lib/pkgconfig/nf4.pc",
        "share/licenses/libnf4/LICENSE",
    }
    texts = [name for name in files if not name.endswith(".a") and name not in shared]
    for place in map(str, (staged, ROOT, folder / "build-pkg")):
        assert not [name for name in texts if place in (root / name).read_text()]
