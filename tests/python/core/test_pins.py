"""What ./dev installs is pinned: tools/requirements.txt, and what is taken of it."""

import importlib.util
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

SPEC = importlib.util.spec_from_file_location("pins", ROOT / "tools" / "pins.py")
pins = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pins)

LOCK = """\
# A comment.
one==1.0 \\
    --hash=sha256:11 \\
    --hash=sha256:12
    # for ./dev
two-of-it==2.0 ; python_full_version < '3.12' \\
    --hash=sha256:21
    # for one other
two-of-it==2.1 ; python_full_version >= '3.12' \\
    --hash=sha256:22
    # for one other
three==3.0 \\
    --hash=sha256:31
    # for two-of-it
other==4.0 \\
    --hash=sha256:41
    # for ./dev
"""


def taken(wanted, alone=False):
    return re.findall(r"^(\S+)==", pins.select(LOCK, wanted, alone), re.MULTILINE)


def test_a_package_comes_with_what_it_needs():
    assert taken({"one"}) == ["one", "two-of-it", "two-of-it", "three"]
    assert taken({"three"}) == ["three"]
    assert taken({"one", "other"}, alone=True) == ["one", "other"]
    assert pins.select(LOCK, {"other"}, True) == LOCK[LOCK.index("other==") :]
    with pytest.raises(KeyError, match="five, four"):
        taken({"four", "five", "one"})


@pytest.mark.parametrize(
    ("requirement", "name"),
    [("Ml_dtypes>=0.4", "ml-dtypes"), ("a[b]==1.*", "a"), ("x.y ; z", "x-y"), ("n", "n")],
)
def test_names(requirement, name):
    assert pins.name_of(requirement) == name


@pytest.mark.parametrize(
    ("file", "used"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-cp312-cp312-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", True),
        ("a-1-cp314-cp314t-manylinux2014_aarch64.whl", True),
        ("a-1-cp37-abi3-manylinux_2_17_x86_64.whl", True),
        ("a-1-cp310-cp310-manylinux_2_17_x86_64.whl", False),
        ("a-1-cp312-cp312-musllinux_1_2_x86_64.whl", False),
        ("a-1-cp312-cp312-macosx_11_0_arm64.whl", False),
        ("a-1-py3-none-win_amd64.whl", False),
        ("a-1.tar.gz", False),
    ],
)
def test_files_that_are_pinned(file, used):
    assert pins.usable(f"folder/{file}") == used


def all_requirements():
    """Those that the functions of ./dev install."""
    text = (ROOT / "dev").read_text().removesuffix('main "$@"\n')
    text = text.replace('"$(dirname "${BASH_SOURCE[0]}")"', shlex.quote(str(ROOT)))
    installing = re.findall(r"^(install_\w+)\(\)", (ROOT / "tools/install.sh").read_text(), re.M)
    assert {"install_tests", "install_interop"} <= set(installing)
    commands = " ; ".join(each for each in installing if each != "install_lists")
    stubs = (
        'have() { false; }; virtual_environment() { :; }; install() { printf "%s\\n" "${@:2}"; }'
    )
    done = subprocess.run(
        ["bash", "-c", f"{text}\nall_requirements\n{stubs}\n{commands}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return sorted({each for each in done.stdout.split("\n") if each and not each.startswith("-")})


@pytest.mark.parametrize("requirement", all_requirements())
def test_what_is_installed_is_pinned(requirement):
    wanted = Requirement(requirement)
    found = re.findall(
        rf"^{pins.name_of(wanted.name)}==(\S+)", pins.PINS.read_text(), flags=re.MULTILINE
    )
    assert found, "run ./dev pin"
    assert all(wanted.specifier.contains(version) for version in found), "run ./dev pin"


def test_every_line_has_hashes():
    text = pins.PINS.read_text()
    blocks = pins.blocks(text)
    assert pins.HEAD + "".join(lines for _, _, lines in blocks) == text
    for name, parents, lines in blocks:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", lines), name
        assert parents - {"./dev"} <= {each for each, _, _ in blocks}, name


def test_what_is_not_pinned_is_named():
    done = subprocess.run(
        [sys.executable, ROOT / "tools/pins.py", "numpy", "not-there"],
        capture_output=True,
        text=True,
    )
    if done.returncode != pins.NOT_HERE:
        assert done.returncode == 1 and "not-there: not in requirements.txt" in done.stderr
