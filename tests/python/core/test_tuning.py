"""How `nf4 tune` measures a GPU, fits its costs, and what is kept, without a GPU."""

import sys

import costs_cases
import nf4
import numpy as np
import pytest
from costs_cases import GPU, text
from nf4 import _costs
from nf4._load import library
from nf4.tuning import api

tune = pytest.importorskip("nf4.tuning.tune")
fit = sys.modules.get("nf4.tuning.fit")
folder = costs_cases.folder


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
