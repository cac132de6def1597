"""The files of costs that `nf4 tune` stores."""

import ctypes
import os
import subprocess
import sys

import costs_cases
import nf4
import pytest
from costs_cases import LINE, ROWS, text
from nf4 import _costs
from nf4._load import library
from nf4.tuning import api

folder = costs_cases.folder


@pytest.fixture
def given(monkeypatch):
    """Returns the list of the texts that the library is given."""
    texts, true = [], _costs.set_costs
    monkeypatch.setattr(
        _costs, "set_costs", lambda lib, each: texts.append(each) or true(lib, each)
    )
    return texts


def test_the_library_has_the_function():
    assert library().nf4_set_costs.argtypes == [ctypes.c_char_p, ctypes.c_size_t]


def test_the_line_of_a_gpu():
    assert LINE == "gpu 80 sm80 108 166912 13000 NVIDIA A100-SXM4-80GB"


def test_a_file_is_stored_and_loaded(folder):
    path = _costs.store(text())
    assert path.parent == folder and [each.name for each in folder.iterdir()] == [path.name]
    (found,) = _costs.load(library())
    assert (found.path, found.reason, found.gpu_line) == (path, "", LINE)
    assert found.products == ["codebook"]
    assert api.reset() == [path] and not list(folder.iterdir()) and api.reset() == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (text(version="0.0.0").encode(), "0.0.0"),
        (text().encode()[:-3], "whole line"),
        (b"", "whole line"),
        (b"\xff\xfe\x00", "decode"),
        (b"nf4-costs 1 " + b"9" * 70_000, "more than 65536 bytes"),
        (text(["codebook fp16 skinny 8 -1 0 0 0"]).encode(), "line 3"),
        (text().replace("\n", "\r\n").encode(), "line 1"),
    ],
)
def test_a_file_that_does_not_fit_is_not_used(folder, content, reason):
    good = _costs.store(text())
    (folder / "costs-0.txt").write_bytes(content)
    bad, used = _costs.load(library())
    assert reason in bad.reason and not bad.products
    assert (used.path, used.reason) == (good, "")


def test_what_is_no_file_is_named(folder):
    (folder / "costs-0.txt").mkdir(parents=True)
    os.mkfifo(folder / "costs-1.txt")  # opening it would wait
    (folder / "costs-2.txt").symlink_to("/dev/zero")
    (folder / "costs-3.txt").symlink_to("nowhere")
    reasons = [each.reason for each in _costs.load(library())]
    assert reasons == ["it is not a regular file"] * 4


def test_a_file_that_cannot_be_looked_at_is_named(folder):
    folder.mkdir()
    (folder / "costs-0.txt").symlink_to("n" * 300)
    (found,) = _costs.load(library())
    assert "File name too long" in found.reason


def stored_in_turn(rows_of):
    """Returns the files of GPUs with these names, each older than the one before."""
    stored = []
    for age, (name, rows) in enumerate(rows_of.items()):
        stored.append(_costs.store(text(rows, line=f"gpu 80 sm80 108 166912 13000 {name}")))
        os.utime(stored[-1], (10**9 - age, 10**9 - age))
    return stored


def test_the_newest_files_are_used(folder, given):
    stored = stored_in_turn(dict.fromkeys(map(str, range(11)), ROWS))
    (folder / "costs-0.txt").write_text("")  # the newest of all
    found = _costs.load(library())
    assert [each.path for each in found[1:]] == stored
    assert [each.reason for each in found[1:9]] == [""] * 8
    assert [each.reason for each in found[9:]] == ["the costs of 8 newer files are used"] * 3
    assert not any(each.gpu_line or each.products for each in found[9:])
    assert _costs.set_costs(library(), given[-1]) == "" and given[-1].count("nf4-costs") == 1
    assert given[-1].count("gpu ") == 8 and all(f"13000 {n}\n" in given[-1] for n in range(8))
    assert sorted(api.reset()) == sorted([*stored, folder / "costs-0.txt"])
    assert not list(folder.iterdir()) and given[-1] is None


def test_files_that_do_not_fit_together(folder, given):
    rows = [f"codebook fp16 skinny {m} 1 0 0 0" for m in range(1, 1801)]
    stored = stored_in_turn({"a": rows, "b": rows, "c": rows[:600], "d": rows[:400]})
    found = _costs.load(library())
    assert [each.path for each in found] == stored
    assert [bool(each.reason) for each in found] == [False, False, True, False]
    assert found[2].reason.startswith("beside those of newer files: text has")
    assert given[-1].count("gpu ") == 3 and given[-1].count("\n") == 4005


def test_of_two_files_of_a_gpu_the_newer_is_used(folder, given):
    (older,) = stored_in_turn({"a": ROWS})
    newer = folder / "costs-0.txt"
    newer.write_text(older.read_text().replace("1.5", "2.5"))
    found = _costs.load(library())
    assert [each.path for each in found] == [newer, older]
    assert [each.reason for each in found] == ["", "a newer file has costs of the same GPU"]
    assert given[-1] == newer.read_text()


def test_costs_of_the_program_are_kept_where_there_are_no_files(folder, given):
    _costs.set_costs(library(), None)
    given.clear()
    assert _costs.load(library()) == [] and not given
    folder.mkdir()
    (folder / "costs-0.txt").write_text("")  # which the library refuses
    _costs.load(library())
    assert None not in given
    path = _costs.store(text())
    _costs.load(library())
    path.unlink()
    _costs.load(library())
    assert given[-1] is None


def test_where_the_files_are(monkeypatch, tmp_path):
    monkeypatch.delenv(_costs.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _costs.folder() == tmp_path / "libnf4"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which XDG says to ignore
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _costs.folder() == tmp_path / ".cache" / "libnf4"
    monkeypatch.setenv(_costs.VARIABLE, "0")
    assert _costs.folder() is None and _costs.paths() == []
    with pytest.raises(OSError, match="no folder for costs"):
        _costs.store(text())


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv(_costs.VARIABLE, str(tmp_path / "costs"))
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        _costs.store(text())


def test_a_failed_write_leaves_no_file(folder, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        _costs.store(text())
    assert not list(folder.iterdir())


def test_a_killed_write_leaves_a_file_that_reset_removes(folder):
    program = (
        "import os, signal\n"
        "from nf4 import _costs\n"
        "os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"_costs.store({text()!r})"
    )
    killed = subprocess.run([sys.executable, "-c", program], env=dict(os.environ))
    (left,) = folder.iterdir()
    assert killed.returncode == -9 and left.read_text() == text()
    assert _costs.load(library()) == []
    (folder / ".other").touch()
    stored = _costs.store(text())
    assert api.reset() == [stored, left]
    assert [each.name for each in folder.iterdir()] == [".other"]


def test_processes_at_once_leave_a_whole_file(folder):
    program = (
        "import sys; from nf4 import _costs\n"
        "for i in range(200): _costs.store(sys.argv[1] * 50 + sys.argv[2])"
    )
    whole = ["\n".join([f"nf4-costs 1 {nf4.version()}", LINE, ""]), "end\n"]
    running = [
        subprocess.Popen([sys.executable, "-c", program, *whole], env=dict(os.environ))
        for _ in range(2)
    ]
    assert [each.wait() for each in running] == [0, 0]
    (path,) = folder.iterdir()
    assert path.read_text() == whole[0] * 50 + whole[1]


def test_a_process_that_starts_uses_the_costs(folder, tmp_path):
    _costs.store(text())
    program = (
        "import nf4._costs as c, nf4; given = []\n"
        "true = c.set_costs\n"
        "c.set_costs = lambda library, text: given.append(text) or true(library, text)\n"
        "nf4.version(); print(given[-1])"
    )
    environment = dict(os.environ, NF4_COSTS=str(folder))
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == text().strip()
