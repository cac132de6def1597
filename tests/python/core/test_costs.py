"""Costs that `nf4 tune` stores: the files, the fit, and what is kept, without a GPU."""

import ctypes
import os
import subprocess
import sys

import nf4
import numpy as np
import pytest
from nf4 import _costs
from nf4._load import library
from nf4.tuning import api

GPU = nf4.Device(
    0, True, "", "NF4_STATUS_OK", 1, "NVIDIA A100-SXM4-80GB", (8, 0), 108, 1 << 36, 13000, 13000,
    "sm80", 166912, False,
)  # fmt: skip
LINE = _costs.gpu_line(GPU)
ROWS = ["codebook fp16 skinny 8 1.5 0.25 0 0", "codebook fp16 dense 8 9 0 0 0"]


def text(rows=ROWS, line=LINE, version=None):
    return _costs.text_of(line, rows, version or nf4.version())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns a folder of costs that does not exist yet. No costs are set afterwards."""
    monkeypatch.setenv(_costs.VARIABLE, str(tmp_path / "costs"))
    yield tmp_path / "costs"
    _costs.set_costs(library(), None)


@pytest.fixture
def given(monkeypatch):
    """Returns the list of the texts that the library is given."""
    texts, true = [], _costs.set_costs
    monkeypatch.setattr(
        _costs, "set_costs", lambda lib, each: texts.append(each) or true(lib, each)
    )
    return texts


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


# ---- The fit and what is kept -----------------------------------------------------------


tune = pytest.importorskip("nf4.tuning.tune")
fit = sys.modules.get("nf4.tuning.fit")


def times_of(figures, shapes=None):
    start, weights, rows, columns = figures
    return {
        (n, k): start + weights * n * k / 1e6 + rows * n / 1e3 + columns * k / 1e3
        for n, k in shapes or tune.SHAPES
    }


@pytest.mark.parametrize("figures", [(4, 0.5, 0, 0), (0, 0.2, 1, 2), (9, 0, 0, 0), (1, 1, 1, 1)])
def test_times_of_the_model_are_fitted(figures):
    assert np.allclose(fit.fitted(times_of(figures)), figures, atol=1e-6)


def test_no_figure_is_negative():
    times = times_of((5, 0.5, 0, 0))
    times[1024, 1024] /= 3  # a line through the others has a negative start
    found = fit.fitted(times)
    assert found.min() >= 0


def test_rows_are_those_that_the_library_takes():
    times = {
        fit.Key(product.name, dtype, strategy, m): times_of((1e-7, 0.5, 123456.789, 0))
        for product in reversed(tune.PRODUCTS)
        for dtype in ("bf16", "fp16")
        for strategy in ("dense", "wgmma", "skinny", "multistage", "mma")
        for m in (4096, 1)
    }
    few = {(1024, 1024): 1.0}
    rows = fit.rows_of({**times, fit.Key("codebook", "fp16", "dense", 2): few})
    assert len(rows) == len(times) and _costs.set_costs(library(), text(rows)) == ""
    assert len(text(rows).encode()) <= 32 << 10
    _costs.set_costs(library(), None)
    assert {fit.product_of(row) for row in fit.without(rows, {"awq"})} == {
        product.name for product in tune.PRODUCTS if product.name != "awq"
    }


def test_the_largest_file_is_small():
    row = "compressed_tensors bf16 multistage 4096 1234.5 1234.5 12.345 12.345\n"
    # Skinny kernels take up to 16 rows of x. Of mma, multistage and wgmma kernels, those that are
    # far from the fastest have no rows.
    few = [m for m in tune.ROWS if m <= 16]
    count = len(tune.PRODUCTS) * len(tune.DTYPES) * (2 * len(tune.ROWS) + len(few))
    assert count * len(row) <= 32 << 10


def check(product, before, after, **us):
    return tune.Check(product, "fp16", (1, 1), 1, us, before, after)


def found(checks, spread=1.0, products=("codebook",)):
    return tune.Tuning(GPU, 1.0, spread, list(products), checks, text())


def test_how_far_a_choice_is_from_the_best():
    checks = [check("a", 2, 1, dense=1), check("b", 1, 2, dense=1.5), check("c", 3, 3, dense=2)]
    assert found(checks).over_best("before") == pytest.approx(((2 + 1 + 1.5) / 3, 2))
    assert found(checks).over_best("after") == pytest.approx(((1 + 2 + 1.5) / 3, 2))
    assert found([]).over_best("after") == (1.0, 1.0)


def test_products_that_costs_make_slower_have_none():
    checks = [check("a", 1, 1.2), check("a", 1, 0.9), check("b", 1, 0.9), check("c", 1, 1.005)]
    assert tune._slower(checks) == {"a"}


def stand_in(monkeypatch, result):
    """Makes nf4.tune find this, on a GPU that there is not."""
    monkeypatch.setattr(api, "_usable", lambda device: GPU)
    monkeypatch.setattr(api, "_require_free", lambda device: GPU)
    monkeypatch.setattr(tune, "measure", lambda gpu, advance: result)


def test_what_was_measured_is_stored(folder, monkeypatch):
    stand_in(monkeypatch, found([]))
    tuned = nf4.tune()
    assert tuned.path is not None and tuned.path.read_text() == text() and tuned.reason == ""


def test_a_reset_beside_a_writer_is_named(folder, monkeypatch):
    stand_in(monkeypatch, found([]))
    removed = []
    monkeypatch.setattr(_costs.os, "fsync", lambda file: removed.extend(api.reset()))
    tuned = nf4.tune()
    assert tuned.path is None and "`nf4 tune --reset`, removed the file" in tuned.reason
    assert len(removed) == 1 and not list(folder.iterdir())


def test_at_first_use_a_gpu_is_measured_once(folder, monkeypatch):
    stand_in(monkeypatch, found([]))
    assert nf4.tune(at_first_use=True).path is not None
    monkeypatch.setattr(api, "_require_free", lambda device: pytest.fail("nothing is to measure"))
    assert nf4.tune(at_first_use=True) is None
    stand_in(monkeypatch, found([]))
    (stored,) = folder.iterdir()
    stored.write_text(text(version="0.0.0"))  # as an earlier version of the library left it
    assert nf4.tune(at_first_use=True).path == stored and stored.read_text() == text()
    assert nf4.tune().path == stored


def test_during_a_capture_nothing_is_measured(folder, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(api, "_usable", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(tune, "measure", lambda gpu, advance: pytest.fail("it must not measure"))
    for measure in (nf4.tune, lambda: nf4.tune(at_first_use=True), api.report):
        with pytest.raises(nf4.Error, match="captured"):
            measure()
    _costs.store(text())
    assert nf4.tune(at_first_use=True) is None


def test_too_little_memory_is_named(folder, monkeypatch):
    torch = pytest.importorskip("torch")
    stand_in(monkeypatch, None)

    def fail(gpu, advance):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")

    monkeypatch.setattr(tune, "measure", fail)
    with pytest.raises(
        nf4.Error, match="free memory: CUDA out of memory. Tried to allocate 2 GiB."
    ):
        nf4.tune()
    assert not list(folder.iterdir())


def test_times_that_vary_are_not_stored(folder, monkeypatch):
    stand_in(monkeypatch, found([], spread=1.9))
    tuned = nf4.tune()
    assert tuned.path is None and "1.90 times" in tuned.reason and not list(folder.iterdir())


def test_costs_of_no_product_are_not_stored(folder, monkeypatch):
    stand_in(monkeypatch, found([], products=()))
    assert "as fast" in nf4.tune().reason and not list(folder.iterdir())


def test_without_a_gpu_it_says_why():
    if nf4.device_info(0).usable:
        pytest.skip("there is a GPU")
    with pytest.raises((nf4.NoDevice, nf4.NoCuda)):
        nf4.tune()


class Copies:
    """Stands in for the copies of a weight."""

    def __init__(self, kind, shape, device, rows):
        self.shape, self.copies = shape, [None]

    def calls(self, product, dtype, m):
        return ["fused", m, self.shape], [tune.DENSE, m, self.shape]


class FakeTuner(tune.Tuner):
    """Times without a GPU, for 10^6 weights: skinny takes 2 us up to 16 rows of x, multistage
    3 + m / 4, mma 3 + m, and dense 10 + m / 50."""

    def __init__(self):
        super().__init__(GPU, lambda name: None)
        self.strategy, self.timer = "", self
        self.spread = 1.0

    def _runs(self, product, dtype, strategy, weights, m):
        runs = strategy in ("multistage", "mma") or (strategy == "skinny" and m <= 16)
        self.strategy = strategy
        return [f"{product.name} {dtype} {strategy} 1 1 0 0 0"] if runs else []

    def microseconds(self, calls):
        way, m, shape = calls
        strategy = self.strategy if way == "fused" else way
        us = {"skinny": 2, "multistage": 3 + m / 4, "mma": 3 + m, "dense": 10 + m / 50}[strategy]
        return us * shape[0] * shape[1] / 1e6


def test_a_gpu_that_is_not_there_is_measured(folder, monkeypatch):
    monkeypatch.setattr(tune, "Weights", Copies)
    tuner = FakeTuner()
    times = tuner.measured()
    key = fit.Key("gptq", "bf16", "skinny", 16)
    assert len(times[key]) == len(tune.SHAPES) and key._replace(m=32) not in times
    # With 32 rows mma takes 35 us, dense 10.64.
    assert list(times[key._replace(strategy="mma", m=32)]) == [tune.SHAPES[0]]
    assert len(times[key._replace(strategy="dense", m=4096)]) == len(tune.SHAPES)
    rows = fit.rows_of(times)
    assert _costs.set_costs(library(), text(rows)) == ""
    assert "gptq bf16 skinny 16 0 2 0 0" in rows and "gptq bf16 dense 1 0 10.02 0 0" in rows


def test_every_step_is_counted(monkeypatch, folder):
    monkeypatch.setattr(tune, "Weights", Copies)
    steps = []
    tuner = FakeTuner()
    tuner.advance = steps.append
    tuner.measured()
    monkeypatch.setattr(tune.Tuner, "chosen", lambda *_: 1.0)
    checks = tuner.checked([])
    assert len(steps) == tune.steps() and len(checks) >= 40
    assert not {each.shape for each in checks} & set(tune.SHAPES)
    assert not {each.m for each in checks} & set(tune.ROWS)


def test_the_library_has_the_function():
    assert library().nf4_set_costs.argtypes == [ctypes.c_char_p, ctypes.c_size_t]


@pytest.mark.parametrize("name", [product.name for product in tune.PRODUCTS])
def test_both_ways_are_the_same_product(name, monkeypatch):
    """On the CPU, where nf4's functions take the same arguments but no workspace."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(nf4._matmul, "matmul_workspace_bytes", lambda *_, **__: 0)
    small = type("Properties", (), {"L2_cache_size": 1 << 13})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: small)
    product = next(each for each in tune.PRODUCTS if each.name == name)
    weights = tune.Weights(product.kind, (128, 256), torch.device("cpu"), 8)
    assert len(weights.copies) == 2
    ways = weights.calls(product, "bf16", 3)
    found = []
    for way in ways:
        assert len(way) == 2
        way[0]()
        y = weights.operands("bf16")[1]
        found.append(y[: 3 * (256 if product.gradient else 128)].double())
        y.fill_(float("nan"))
    assert torch.allclose(*found, rtol=0.03, atol=0.03)
