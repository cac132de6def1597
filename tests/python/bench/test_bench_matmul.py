"""Matmul's bench from group to row, on the CPU with fakes: checks before times."""

from __future__ import annotations

import sys
import types

import bench_path  # noqa: F401  (the path)
import pytest

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

from bench_fakes import FEW_ROWS, SMALL, FakeGpu, FakeLibrary, bench  # noqa: E402
from nf4bench import (  # noqa: E402
    host,
    matmul,
    matmul_cases,
    matmul_peers,
    modes,
    peers,
    product,
    sweep,
)  # fmt: skip
from nf4bench.check import WrongResult  # noqa: E402
from nf4bench.library import LaunchFailed  # noqa: E402
from nf4bench.matmul_cases import Group, weight_case  # noqa: E402
from nf4bench.options import Options  # noqa: E402
from nf4bench.weights import DTYPES, Weight  # noqa: E402

CASE = weight_case(SMALL)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Errors are compared with bounds that they are near to where few numbers are added."""
    torch.manual_seed(0)


class Fake:
    """A peer that multiplies by torch, wrong by `factor`, for `up_to` rows of x."""

    version, variants = "fake", range(2)

    def __init__(self, factor: float = 1.0, up_to: int = 4096) -> None:
        self.factor, self.up_to = factor, up_to
        self.asked: set[tuple[int, int]] = set()

    def supports(self, case, m: int, variant: int) -> bool:
        return m <= self.up_to

    def prepare(self, weight, variant):
        dense = peers.dequantized(weight)

        def multiply(x):
            self.asked.add((len(x), variant))
            return (x.float() @ dense.t() * self.factor).to(x.dtype)

        return multiply

    def numbers(self, weight):
        return None


def made(library: FakeLibrary | None = None):
    return bench(library, names=())


def rows(of, *groups: Group, **named) -> list[dict]:
    said: list[str] = []
    found = matmul.rows(of, named, groups, said.append)
    assert len(said) == sum(row["launch"] == "plain" for row in found)
    return found


# ---- Rows -------------------------------------------------------------------------------


def test_a_row_each_for_plain_and_pdl_beside_a_roofline_launched_alike() -> None:
    of = made()
    plain, pdl = rows(of, Group(CASE, (1,)), dense=Fake())
    assert (plain["launch"], pdl["launch"]) == ("plain", "pdl")
    nbytes = 64 * 128 + 256 + 4
    reads = [each for each in of.library.launches if each[0] == "read"]
    assert {(each[1], each[3], each[-2]) for each in reads} == {
        (variant, nbytes // 16 * 16, pdl) for variant in (0, 1) for pdl in (False, True)
    }
    for row in (plain, pdl):
        assert (row["shape"], row["m"], row["weights"]) == ([64, 256], 1, 1)
        assert row["roofline"]["bytes"] == nbytes // 16 * 16
        assert row["of_roofline"] == pytest.approx(row["roofline"]["us"] / row["us"], abs=1e-3)
        flops = 2 * 64 * 256
        assert row["tflop_per_s"] == pytest.approx(flops / row["us"] / 1e6, abs=0.1)
        assert row["kernel"] == "few" and 0 < row["error"] < matmul_cases.MOST_ERROR["bf16"]
        peer = row["peers"]["dense"]
        assert peer["ratio"] == pytest.approx(peer["us"] / row["us"], abs=1e-3)
    # The public call launches with PDL, the bench's own plainly.
    assert {each[2] for each in of.library.launches if each[0] == "matmul"} == {False}


def test_many_rows_of_x_are_launched_plainly_alone() -> None:
    found = rows(made(), Group(CASE, (matmul_cases.PDL_M, matmul_cases.PDL_M + 1)))
    assert [(row["m"], row["launch"]) for row in found] == [
        (64, "plain"), (64, "pdl"), (65, "plain"),
    ]  # fmt: skip
    assert found[-1]["kernel"] == "any"


def test_a_library_that_launches_plainly_has_one_row() -> None:
    of = made(FakeLibrary(pdl=False))
    (row,) = rows(of, Group(CASE, (2,)))
    assert row["launch"] == "plain" and "matmul" not in {each[0] for each in of.library.launches}


def test_the_fastest_roofline_is_found_once() -> None:
    of = made()
    rows(of, Group(CASE, (1,)))
    first = [each[1] for each in of.library.launches if each[0] == "read"]
    of = made()
    rows(of, Group(CASE, (1, 2)))
    second = [each[1] for each in of.library.launches if each[0] == "read"][len(first) :]
    assert set(first) == {0, 1} and set(second) == {0}


@pytest.mark.parametrize("together", [1, 2])
def test_weights_rotate_past_the_cache(together: int) -> None:
    of = matmul.setting(made(), Group(CASE, (1,), together), {})
    weights = [weight for turn in of.turns for weight in turn]
    assert {len(turn) for turn in of.turns} == {together} and len(of.turns) >= 2
    assert len({weight.packed_room.data_ptr() for weight in weights}) == len(weights)
    assert sum(each.bytes for each in of.rooflines) >= 2 * FakeGpu.cache_bytes - 16 * len(of.turns)


def test_an_odd_rotation_is_made_even_for_pairs() -> None:
    of = made()
    of.gpu.cache_bytes = 1  # a rotation of two
    assert len(matmul.setting(of, Group(CASE, (1,), 2), {}).turns) == 2
    assert len(matmul.setting(of, Group(CASE, (1,), 3), {}).turns) == 2


def test_weights_that_share_x_are_one_row() -> None:
    of, peer = made(), Fake()
    both = Group(CASE, (2,), together=2)
    plain, pdl = rows(of, both, dense=peer)
    assert {each[:3] for each in of.library.launches if each[0] == "matmul_batch"} == {
        ("matmul_batch", 2, False)
    }
    for row in (plain, pdl):
        assert row["apart"]["ratio"] == pytest.approx(row["apart"]["us"] / row["us"], abs=1e-3)
    assert plain["weights"] == 2 and plain["roofline"]["bytes"] == 2 * (64 * 128 + 260) // 16 * 16
    setting = matmul.setting(of, both, {"dense": peer})
    gate, up = matmul._products(setting, 2)[0]
    assert gate.x is up.x and gate.y is not up.y and gate.weight is not up.weight
    batch = product.Batch([gate, up])
    for launch in (
        matmul._together([gate.shipped, up.shipped]), batch.shipped, batch.plain(of.library)
    ):  # fmt: skip
        gate.y.zero_()
        up.y.zero_()
        assert [id(y) for y in of.gpu.run(launch)] == [id(gate.y), id(up.y)]
        for each in (gate, up):
            expected = product.exact(each.x, peers.dequantized(each.weight, torch.float64))
            assert product.relative_error(each.y, expected) < 4e-3


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_batch_that_is_wrong_anywhere_ends_the_bench(wrong: int) -> None:
    of = made(FakeLibrary(wrong=f"matmul_batch {wrong}"))
    with pytest.raises(WrongResult, match=f"libnf4 plain 0, product {wrong}: off by "):
        rows(of, Group(CASE, (2,), together=2))
    assert of.gpu.measured == 0


def test_separate_calls_beside_a_batch_are_checked() -> None:
    with pytest.raises(WrongResult, match="apart plain 0, product 0: off by "):
        rows(made(FakeLibrary(wrong="matmul")), Group(CASE, (2,), together=2))


def test_a_second_product_that_is_not_written_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    of = made()
    both = of.library._matmul_batch
    monkeypatch.setattr(of.library, "_matmul_batch", lambda t, a, n, *rest: both(t, a, 1, *rest))
    with pytest.raises(WrongResult, match="libnf4 plain 0, product 1: off by nan"):
        rows(of, Group(CASE, (2,), together=2))


def test_a_peer_that_is_wrong_for_the_second_weight_ends_the_bench() -> None:
    class WrongEverySecondTime(Fake):
        def prepare(self, weight, variant):
            self.factor = 1.055 if self.factor == 1 else 1
            return Fake(1.055 if self.factor == 1 else 1).prepare(weight, variant)

    with pytest.raises(WrongResult, match="dense plain 0, product 1: off by 5."):
        rows(made(), Group(CASE, (2,), together=2), dense=WrongEverySecondTime())


def test_a_peer_is_not_asked_for_what_it_cannot_do() -> None:
    peer, none = Fake(up_to=2), Fake(up_to=0)
    found = rows(made(), Group(CASE, (1, 2, 4)), tinygemm=peer, dense=none)
    assert peer.asked == {(1, 0), (1, 1), (2, 0), (2, 1)} and none.asked == set()
    assert [list(row["peers"]) for row in found if row["launch"] == "plain"] == [
        ["tinygemm"], ["tinygemm"], [],
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_real_peers_are_checked_and_timed(dtype: str) -> None:
    loaded = matmul_peers.load("cpu")
    assert loaded["tinygemm"] == peers.Missing("its kernel is CUDA's alone")
    group = Group(weight_case(SMALL, dtype), (1, 3))
    for row in rows(made(), group, **loaded):
        assert list(row["peers"]) == ["bitsandbytes", "dense"]


# ---- What is wrong is not timed ---------------------------------------------------------


def wrong(of, **named) -> str:
    with pytest.raises(WrongResult) as error:
        rows(of, Group(CASE, (2,)), **named)
    assert of.gpu.measured == 0
    return str(error.value)


def test_our_own_wrong_product_ends_the_bench() -> None:
    said = wrong(made(FakeLibrary(wrong="matmul")))
    assert said.startswith("matmul 64x256 bf16 nested, M = 2: libnf4 plain 0: off by ")


def test_a_peer_that_is_wrong_ends_the_bench() -> None:
    assert "M = 2: dense plain 0: off by 5." in wrong(made(), dense=Fake(factor=1.055))


def test_a_product_that_is_not_written_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLibrary, "_multiply", lambda *arguments: None)
    assert "libnf4 plain 0: off by nan" in wrong(made())


def test_a_product_of_another_shape_is_wrong() -> None:
    expected = torch.ones(2, 3, dtype=torch.float64)
    with pytest.raises(WrongResult, match=r"x: \(3, 2\), expected \(2, 3\)"):
        product.require("x", 1, expected, torch.ones(3, 2))
    assert product.require("x", 0, expected, torch.ones(2, 3)) == 0


# ---- Peers ------------------------------------------------------------------------------


def test_missing_peers_are_named_and_the_rest_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    monkeypatch.setitem(matmul_peers.FACTORIES, "dense", lambda place: Fake(factor=2))
    loaded = matmul_peers.load("cpu")
    assert "ModuleNotFoundError" in loaded["bitsandbytes"].reason
    assert loaded["dense"].reason.startswith("WrongResult: call 0: off by ")


def test_bitsandbytes_has_a_second_call_for_one_row_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert matmul_peers.Bitsandbytes("cpu").variants == range(1)
    given = types.SimpleNamespace(version="1", state=lambda weight: "state")
    monkeypatch.setattr(peers, "Bitsandbytes", lambda place: given)
    made_for_gpu = matmul_peers.Bitsandbytes("cuda")
    assert made_for_gpu.variants == range(2)
    assert made_for_gpu.supports(CASE, 1, 1) and not made_for_gpu.supports(CASE, 2, 1)
    calls = []
    made_for_gpu._gemv = lambda x, packed, state: calls.append((x, packed.shape, state))
    made_for_gpu.prepare(Weight(CASE, "cpu"), 1)("x")
    assert calls == [("x", (64 * 128, 1), "state")]


def test_dense_is_the_dequantized_weight() -> None:
    weight = Weight(CASE, "cpu")
    x = torch.eye(256, dtype=torch.bfloat16)
    y = matmul_peers.Dense("cpu").prepare(weight, 0)(x)
    assert torch.equal(y.t(), peers.dequantized(weight).bfloat16())


def test_the_int4_kernel_multiplies_with_the_integers_that_we_say() -> None:
    """By the CPU's kernel of the same interface, which takes the codes unpacked."""
    weight, peer = Weight(CASE, "cpu"), matmul_peers.Tinygemm("cuda")
    tiles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(peers.codes(weight).int(), 2)
    x = torch.randn(3, 256).bfloat16()
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, tiles, 64, peer.scales_and_zeros(weight))
    expected = product.exact(x, peer.numbers(weight))
    assert product.relative_error(y, expected) < 1e-2


def test_the_int4_kernel_takes_what_it_is_given() -> None:
    """Shapes and dtypes, by torch's own description of the operators on a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    peer, case = matmul_peers.Tinygemm("cuda"), weight_case((64, 256), nested=False)
    with FakeTensorMode():
        weight = types.SimpleNamespace(
            case=case,
            quantized=types.SimpleNamespace(
                packed=torch.empty(64 * 128, dtype=torch.uint8, device="cuda"),
                absmax=torch.empty(256, device="cuda"),
            ),
        )
        x = torch.empty(3, 256, dtype=torch.bfloat16, device="cuda")
        assert peer.prepare(weight, 0)(x).shape == (3, 64)
        assert peer.scales_and_zeros(weight).shape == (4, 64, 2)


@pytest.mark.parametrize(
    "case, m, supported",
    [
        (CASE, 64, True), (CASE, 65, False), (weight_case(SMALL, "fp16"), 1, False),
        (weight_case((64, 192)), 1, False), (weight_case((63, 256)), 1, False),
    ],
)  # fmt: skip
def test_what_the_int4_kernel_can_do(case, m: int, supported: bool) -> None:
    assert matmul_peers.Tinygemm("cuda").supports(case, m, 0) is supported


# ---- Errors, the sweep, a call ----------------------------------------------------------


def test_errors_are_of_every_class_and_kind_of_x() -> None:
    loaded = matmul_peers.load("cpu")
    found = matmul.errors(made(), loaded, [SMALL], lambda line: None)
    classes = {(row["dtype"], row["nested"], row["x"], row["m"]) for row in found}
    assert len(found) == len(classes) == 4 * 3 * 5
    for row in found:
        assert list(row["errors"]) == ["libnf4", "bitsandbytes", "dense"]
        assert row["errors"]["dense"] < matmul_cases.MOST_ERROR[row["dtype"]]


def test_an_error_is_relative_to_the_norm() -> None:
    expected = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    assert product.relative_error(torch.tensor([[3.0, 4.5]]), expected) == 0.1


def test_kinds_of_x() -> None:
    x = torch.randn(5, 1000)
    outliers, shifted = matmul.KINDS["outliers of 1e3"](x), matmul.KINDS["mean 0.5"](x)
    changed = (outliers != x).sum(dim=1)
    assert changed.min() >= 1 and changed.max() <= matmul.OUTLIERS
    assert torch.equal(outliers[outliers != x], x[outliers != x] * 1e3)
    assert torch.allclose(shifted - x, torch.tensor(0.5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_the_unrounded_weight(dtype: str) -> None:
    weight = Weight(weight_case(SMALL, dtype), "cpu")
    exact, rounded = peers.dequantized(weight, torch.float64), peers.dequantized(weight)
    assert torch.equal(exact.float(), rounded)
    assert not torch.equal(exact, rounded.double())


def test_the_sweep_has_every_kernel_and_says_which_refused() -> None:
    of = made()
    figures = sweep.matmul(of, [Group(CASE, (FEW_ROWS, FEW_ROWS + 1))], lambda line: None)
    assert figures["configurations"] == ["any", "few"]
    few, many = figures["rows"]
    assert (few["chosen"], many["chosen"]) == (1, 0)
    assert min(each["ratio"] for each in few["times"]) == 1
    assert many["times"][1] == {"refused": "the configuration 1 of matmul cannot do it"}
    # As the library launches.
    assert {each[2] for each in of.library.launches} == {True}


def test_a_wrong_kernel_ends_the_sweep() -> None:
    of = made(FakeLibrary(wrong="few"))
    with pytest.raises(WrongResult, match="M = 1: kernel few: off by"):
        sweep.matmul(of, [Group(CASE, (1,))], lambda line: None)
    assert of.gpu.measured == 0


def test_a_kernel_that_fails_ends_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments):
        raise LaunchFailed("nf4_bench_matmul_as returned 5")

    monkeypatch.setattr(FakeLibrary, "_multiply", fails)
    with pytest.raises(LaunchFailed, match="returned 5"):
        sweep.matmul(made(), [Group(CASE, (1,))], lambda line: None)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of a small weight, a few times."""
    monkeypatch.setattr(host, "MATMUL_CASE", CASE)
    monkeypatch.setattr(host, "HOST_TURNS", 2)
    monkeypatch.setattr(host, "WAITED_TURNS", 2)


@pytest.mark.usefixtures("short")
def test_the_figures_of_a_call() -> None:
    figures = host.matmul(made(), {"dense": Fake(), "tinygemm": Fake(up_to=0)})
    assert (figures["shape"], figures["m"]) == ([64, 256], 1)
    for kind in ("host", "waited"):
        names = list(figures[kind])
        assert names == ["libnf4", "libnf4, out given", "dense", host.LAUNCH]
        assert figures[kind]["libnf4"]["ratio"] == 1


@pytest.mark.usefixtures("short")
def test_the_program_has_all_figures_and_names_who_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modes, "bench", lambda options: made())
    monkeypatch.setattr(matmul_cases, "QUICK_SHAPES", (SMALL,))
    monkeypatch.setattr(matmul_cases, "LARGE", SMALL)
    said: list[str] = []
    figures = modes.run(Options(mode="matmul", quick=True), said.append)
    assert list(figures) == ["device", "torch", "peers", "rows", "errors", "call"]
    assert "tinygemm: missing: its kernel is CUDA's alone" in said
    assert {(row["m"], row["weights"]) for row in figures["rows"]} == {
        (1, 1), (8, 1), (64, 1), (1024, 1), (1, 2), (8, 2),
    }  # fmt: skip
    swept = modes.run(Options(mode="matmul-sweep", quick=True), said.append)
    assert [row["m"] for row in swept["rows"]] == list(matmul_cases.QUICK_MS)
    given = modes.run(Options(mode="matmul-sweep", shapes=((8, 64),)), said.append)
    assert [row["m"] for row in given["rows"]] == list(matmul_cases.MS)
