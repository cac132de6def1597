"""Matmul's bench from group to row, on the CPU with fakes: checks before times."""

from __future__ import annotations

import bench_path  # noqa: F401  (the path)
import pytest

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

from bench_fakes import FEW_ROWS, SMALL, FakeGpu, FakeLibrary, bench, quiet, wrong  # noqa: E402
from nf4bench import host, matmul, matmul_peers, modes, peers, product, sweep  # noqa: E402
from nf4bench import matmul_cases as cases  # noqa: E402
from nf4bench.check import WrongResult  # noqa: E402
from nf4bench.library import LaunchFailed  # noqa: E402
from nf4bench.matmul_cases import Group, weight_case  # noqa: E402
from nf4bench.options import Options  # noqa: E402
from nf4bench.weights import DTYPES, Weight  # noqa: E402

CASE = weight_case(SMALL)
PAIR = Group(CASE, (2,), together=2)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Errors are compared with bounds that they are near to where few numbers are added."""
    torch.manual_seed(0)


class Fake:
    """A peer that multiplies by torch, for `up_to` rows of x, the weights wrong by `factors` in
    turn."""

    version, variants = "fake", range(2)

    def __init__(self, *factors: float, up_to: int = 4096) -> None:
        self.factors, self.up_to = list(factors or (1.0,)), up_to
        self.asked: set[tuple[int, int]] = set()

    def supports(self, case, m: int, variant: int) -> bool:
        return m <= self.up_to

    def prepare(self, weight, variant):
        dense, factor = peers.dequantized(weight), self.factors[0]
        self.factors.append(self.factors.pop(0))

        def multiply(x):
            self.asked.add((len(x), variant))
            return (x.float() @ dense.t() * factor).to(x.dtype)

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
    of, nbytes = made(), 64 * 128 + 256 + 4
    found = rows(of, Group(CASE, (1,)), dense=Fake())
    assert [row["launch"] for row in found] == ["plain", "pdl"]
    reads = [each for each in of.library.launches if each[0] == "read"]
    assert {(each[1], each[3], each[-2]) for each in reads} == {
        (variant, nbytes // 16 * 16, pdl) for variant in (0, 1) for pdl in (False, True)
    }
    for row in found:
        assert (row["shape"], row["m"], row["weights"]) == ([64, 256], 1, 1)
        assert row["roofline"]["bytes"] == nbytes // 16 * 16
        assert row["of_roofline"] == pytest.approx(row["roofline"]["us"] / row["us"], abs=1e-3)
        assert row["tflop_per_s"] == pytest.approx(2 * 64 * 256 / row["us"] / 1e6, abs=0.1)
        assert row["kernel"] == "few" and 0 < row["error"] < cases.MOST_ERROR["bf16"]
        dense = row["peers"]["dense"]
        assert dense["ratio"] == pytest.approx(dense["us"] / row["us"], abs=1e-3)
    # The public call launches with PDL, the bench's own plainly.
    assert {each[2] for each in of.library.launches if each[0] == "matmul"} == {False}
    # The next product is beside the fastest of the roofline's variants alone.
    before = len(reads)
    of = made()
    rows(of, Group(CASE, (1, 2)))
    reads = [each[1] for each in of.library.launches if each[0] == "read"]
    assert set(reads[:before]) == {0, 1} and set(reads[before:]) == {0}


def test_many_rows_of_x_and_a_library_without_pdl_are_launched_plainly_alone() -> None:
    found = rows(made(), Group(CASE, (cases.PDL_M, cases.PDL_M + 1)))
    assert [(row["m"], row["launch"]) for row in found] == [
        (64, "plain"), (64, "pdl"), (65, "plain"),
    ]  # fmt: skip
    assert found[-1]["kernel"] == "any"
    (row,) = rows(made(FakeLibrary(pdl=False)), Group(CASE, (2,)))
    assert row["launch"] == "plain"


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize("cache", [1, FakeGpu.cache_bytes])
def test_weights_rotate_past_the_cache_in_whole_turns(together: int, cache: float) -> None:
    of = made()
    of.gpu.cache_bytes = cache
    found = matmul.setting(of, Group(CASE, (1,), together), {})
    weights = [weight for turn in found.turns for weight in turn]
    assert {len(turn) for turn in found.turns} == {together} and len(found.turns) >= 2
    assert len({weight.packed_room.data_ptr() for weight in weights}) == len(weights)
    assert sum(each.numel() for each in found.memory) >= 2 * cache - 16 * len(found.turns)


def test_weights_that_share_x_are_one_row() -> None:
    of, peer = made(), Fake()
    found = rows(of, PAIR, dense=peer)
    assert {each[:3] for each in of.library.launches if each[0] == "matmul_batch"} == {
        ("matmul_batch", 2, False)
    }
    for row in found:
        assert row["apart"]["ratio"] == pytest.approx(row["apart"]["us"] / row["us"], abs=1e-3)
        assert row["weights"] == 2 and row["roofline"]["bytes"] == 2 * 8452 // 16 * 16
    gate, up = matmul._products(matmul.setting(of, PAIR, {"dense": peer}), 2)[0]
    assert gate.x is up.x and gate.y is not up.y and gate.weight is not up.weight


def test_a_peer_is_not_asked_for_what_it_cannot_do() -> None:
    peer, none = Fake(up_to=2), Fake(up_to=0)
    found = rows(made(), Group(CASE, (1, 2, 4)), tinygemm=peer, dense=none)
    assert peer.asked == {(1, 0), (1, 1), (2, 0), (2, 1)} and none.asked == set()
    assert [list(row["peers"]) for row in found if row["launch"] == "plain"] == [
        ["tinygemm"], ["tinygemm"], [],
    ]  # fmt: skip


# ---- What is wrong is not timed ---------------------------------------------------------


@pytest.mark.parametrize(
    "how, together, said",
    [
        ("matmul", 1, "matmul 64x256 bf16 nested, M = 2: libnf4 plain 0: off by "),
        ("matmul", 2, "apart plain 0, product 0: off by "),
        ("matmul_batch 0", 2, "libnf4 plain 0, product 0: off by "),
        ("matmul_batch 1", 2, "libnf4 plain 0, product 1: off by "),
        (Fake(1.055), 1, "dense plain 0: off by 5."),
        (Fake(1, 1.055), 2, "dense plain 0, product 1: off by 5."),
    ],
)
def test_a_wrong_product_ends_the_bench(how: object, together: int, said: str) -> None:
    peer = isinstance(how, Fake)
    of, named = made(FakeLibrary(wrong=None if peer else how)), {"dense": how} if peer else {}
    assert said in wrong(of, lambda: rows(of, Group(CASE, (2,), together), **named))


def test_a_product_that_is_not_written_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    of = made()
    both = of.library._matmul_batch
    monkeypatch.setattr(of.library, "_matmul_batch", lambda t, a, n, *rest: both(t, a, 1, *rest))
    assert "libnf4 plain 0, product 1: off by nan" in wrong(of, lambda: rows(of, PAIR))


def test_an_error_is_relative_to_the_norm_and_a_shape_is_compared() -> None:
    expected = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    assert product.require("x", 0.1, expected, torch.tensor([[3.0, 4.5]])) == 0.1
    with pytest.raises(WrongResult, match="x: off by 1.00e-01 of its norm; 9.0e-02 at most"):
        product.require("x", 0.09, expected, torch.tensor([[3.0, 4.5]]))
    with pytest.raises(WrongResult, match=r"x: \(2, 1\), expected \(1, 2\)"):
        product.require("x", 1, expected, expected.t())


def test_a_wrong_peer_is_missing_and_a_fit_one_is_tried_in_each_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit = Fake()
    monkeypatch.setitem(matmul_peers.FACTORIES, "bitsandbytes", lambda place: fit)
    monkeypatch.setitem(matmul_peers.FACTORIES, "dense", lambda place: Fake(2))
    loaded = matmul_peers.load("cpu")
    assert loaded["bitsandbytes"] is fit and fit.asked == {(1, 0), (1, 1)}
    assert loaded["dense"].reason.startswith("WrongResult: call 0: off by ")


def test_what_the_int4_kernel_can_do() -> None:
    can = {
        (CASE, 64): True, (CASE, 65): False, (weight_case(SMALL, "fp16"), 1): False,
        (weight_case((64, 192)), 1): False, (weight_case((63, 256)), 1): False,
    }  # fmt: skip
    peer = matmul_peers.Tinygemm("cuda")
    assert {key: peer.supports(*key, 0) for key in can} == can


# ---- Errors, the sweep, a call ----------------------------------------------------------


def test_errors_are_of_every_class_and_kind_of_x(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "ERROR_MS", (1, 8))
    found = matmul.errors(made(), matmul_peers.load("cpu"), cases.error_cases([SMALL]), quiet)
    kinds = {(row["dtype"], row["nested"], row["x"], row["m"]) for row in found}
    assert len(found) == len(kinds) == 4 * 3 * 2
    for row in found:
        assert list(row["errors"]) == ["libnf4", "bitsandbytes", "dense"]
        assert row["errors"]["dense"] < cases.MOST_ERROR[row["dtype"]]
    x = torch.randn(5, 1000)
    outliers, shifted = matmul.KINDS["outliers of 1e3"](x), matmul.KINDS["mean 0.5"](x)
    assert 1 <= (outliers != x).sum(dim=1).min() <= matmul.OUTLIERS
    assert torch.equal(outliers[outliers != x], x[outliers != x] * 1e3)
    assert torch.allclose(shifted - x, torch.tensor(0.5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_the_unrounded_weight(dtype: str) -> None:
    weight = Weight(weight_case(SMALL, dtype), "cpu")
    exact, rounded = peers.dequantized(weight, torch.float64), peers.dequantized(weight)
    assert torch.equal(exact.float(), rounded) and not torch.equal(exact, rounded.double())


def test_the_sweep_has_every_kernel_and_says_which_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    of = made()
    figures = sweep.matmul(of, [Group(CASE, (FEW_ROWS, FEW_ROWS + 1))], quiet)
    few, many = figures["rows"]
    assert (few["chosen"], many["chosen"]) == (1, 0)
    assert min(each["ratio"] for each in few["times"]) == 1
    assert many["times"][1] == {"refused": "the configuration 1 of matmul cannot do it"}
    assert {each[2] for each in of.library.launches} == {True}  # as the library launches
    of = made(FakeLibrary(wrong="few"))
    said = wrong(of, lambda: sweep.matmul(of, [Group(CASE, (1,))], quiet))
    assert "M = 1: kernel few: off by" in said

    def fails(*arguments):
        raise LaunchFailed("nf4_bench_matmul_as returned 5")

    monkeypatch.setattr(FakeLibrary, "_multiply", fails)
    with pytest.raises(LaunchFailed, match="returned 5"):
        sweep.matmul(made(), [Group(CASE, (1,))], quiet)


def test_the_programs_have_all_figures_and_name_who_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, name, value in (
        (host, "MATMUL_CASE", CASE), (host, "HOST_TURNS", 2), (host, "WAITED_TURNS", 2),
        (matmul, "ERROR_MS", (1,)), (cases, "QUICK_SHAPES", (SMALL,)), (cases, "LARGE", SMALL),
        (cases, "QUICK_MS", (1, 64)), (cases, "MS", (2, 4)), (modes, "bench", lambda _: made()),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    said: list[str] = []
    figures = modes.run(Options(mode="matmul", quick=True), said.append)
    assert list(figures) == ["device", "torch", "peers", "rows", "errors", "call"]
    assert "tinygemm: missing: its kernel is CUDA's alone" in said
    assert {(row["m"], row["weights"]) for row in figures["rows"]} == {
        (1, 1), (64, 1), (1, 2), (8, 2),
    }  # fmt: skip
    for kind in ("host", "waited"):
        names = ["libnf4", "libnf4, out given", "bitsandbytes", "dense", host.LAUNCH]
        assert (
            list(figures["call"][kind]) == names and figures["call"][kind]["libnf4"]["ratio"] == 1
        )
    swept = modes.run(Options(mode="matmul-sweep", quick=True), quiet)
    assert [row["m"] for row in swept["rows"]] == [1, 64]
