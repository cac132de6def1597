"""The bench from case to row, on the CPU with fakes: checks before times."""

from __future__ import annotations

from pathlib import Path

import bench_path  # noqa: F401  (the path)
import nf4
import pytest
import test_abi
from conftest import compile_c

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

from bench_fakes import (  # noqa: E402
    EVERY_KIND,
    SMALL,
    FakeGpu,
    FakeLibrary,
    Peer,
    bench,
    quiet,
    rows,
    wrong,
)
from nf4bench import cases, check, host, rooflines, sweep  # noqa: E402
from nf4bench import rows as bench_rows  # noqa: E402
from nf4bench.cases import Case  # noqa: E402
from nf4bench.library import HEADER, Library, LibraryMissing, functions  # noqa: E402
from nf4bench.weights import Weight  # noqa: E402

# ---- Rows -------------------------------------------------------------------------------


def test_a_row_each_for_plain_and_pdl_beside_a_roofline_launched_alike() -> None:
    made = bench(triton=Peer(), unsloth=Peer(supported=False))
    case = Case(SMALL, peers=("torch", "triton", "unsloth", "bitsandbytes"), bounds=True)
    plain, pdl = rows(made, case)
    assert (plain["launch"], pdl["launch"]) == ("plain", "pdl")
    assert plain["configuration"] == pdl["configuration"] == "256x2 tile 512"
    launched = {each[-2] for each in made.library.launches if each[0] == "dequant_traffic"}
    assert launched == {False, True}
    for row in (plain, pdl):
        assert row["bytes"] == 64 * 256 * 2 + 64 * 128 + 256 + 4
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3, abs=0.1)
        assert row["of_roofline"] == pytest.approx(row["roofline"]["us"] / row["us"], abs=1e-3)
        assert row["spread"][0] <= row["us"] <= row["spread"][1]
        assert list(row["peers"]) == ["torch", "triton"]
        triton = row["peers"]["triton"]
        assert triton["ratio"] == pytest.approx(triton["us"] / row["us"], abs=1e-3)
        assert (row["read"]["bytes"], row["write"]["bytes"]) == (64 * 128, 64 * 256 * 2)


@pytest.mark.parametrize("work", ["dequantize", "quantize"])
def test_a_library_that_launches_plainly_has_one_row(work: str) -> None:
    (row,) = rows(bench(FakeLibrary(pdl=False)), Case(SMALL, nested=False, work=work, peers=()))
    assert row["launch"] == "plain" and row.get("configuration") is None


@pytest.mark.parametrize("work, read", [("dequantize", 8192 + 256 + 4), ("quantize", 32768)])
def test_inputs_alone_rotate_past_the_cache(work: str, read: int) -> None:
    weights = bench().rotation(Case(SMALL, work=work))
    assert weights[0].input_bytes == read
    assert len({weight.packed_room.data_ptr() for weight in weights}) == len(weights)
    assert len(weights) == -(-2 * FakeGpu.cache_bytes // read)


@pytest.mark.parametrize("case", EVERY_KIND, ids=str)
def test_every_kind_of_case_is_checked_and_timed_within_its_memory(case: Case) -> None:
    """Every address and size that a roofline gets lies within the weight's own tensors."""
    made = bench()
    made.gpu.cache_bytes = min(made.gpu.cache_bytes, 4 * case.elements)
    found = rows(made, case)
    assert [(row["launch"], row["format"], row["placement"]) for row in found] == [
        (launch, case.format, case.placement) for launch in ("plain", "pdl")
    ]
    assert ("dequantize", -1) in made.library.launches
    library, weight = FakeLibrary(), Weight(case, "cpu")
    sink = torch.empty(16, dtype=torch.uint8)
    for launches in (
        rooflines.dequantize(library, [weight], "plain"),
        rooflines.read(library, [weight], sink), rooflines.write(library, [weight]),
    ):  # fmt: skip
        for (launch,) in launches.values():
            launch(None)

    def inside(tensor, address: int, nbytes: int, multiple: int) -> None:
        assert address == tensor.data_ptr() and nbytes % multiple == 0
        assert 0 <= nbytes <= tensor.numel() * tensor.itemsize

    for name, _, *given in library.launches:
        if name == "dequant_traffic":
            packed, words, scales, scale_bytes, out, stores, *_ = given
            inside(weight.packed_room, packed, 4 * words, 4)
            inside(weight.quantized.absmax, scales, scale_bytes, 4)
            inside(weight.out_room, out, 16 * words * stores, 16)
            assert case.elements // 2 - 4 * words < 4
        else:
            room = weight.packed_room if name == "read" else weight.out_room
            inside(room, *given[:2], 16)
    assert {each[0] for each in library.launches} == {"dequant_traffic", "read", "write"}


@pytest.mark.parametrize("dtype, nested", cases.CLASSES[2:])
def test_quantize_is_timed_both_ways_beside_its_own_traffic(dtype: str, nested: bool) -> None:
    made = bench(names=("bitsandbytes",))
    found = rows(made, Case(SMALL, dtype, nested, work="quantize"))
    assert [row["launch"] for row in found] == ["plain", "pdl"]
    assert ("quantize", False) in made.library.launches
    dense = 64 * 256 * (4 if dtype == "fp32" else 2)
    traffic = [each for each in made.library.launches if each[0] == "quantize_traffic"]
    assert {(each[3], each[5]) for each in traffic} == {(dense, 64 * 128)}
    for row in found:
        peer = row["peers"]["bitsandbytes"]
        assert peer["ratio"] == pytest.approx(peer["us"] / row["as_calls"]["us"], abs=1e-3)
        assert row["read"]["bytes"] == dense and "write" not in row


def test_a_consumer_reads_all_of_what_either_policy_wrote() -> None:
    made = bench()
    (row,) = bench_rows.run(made, [Case(SMALL, work="consumer", peers=())], quiet)["consumer"]
    read = row["then_read"]
    assert row["ratio"] == pytest.approx(read["normal"]["us"] / read["libnf4"]["us"], abs=1e-3)
    assert list(read) == list(row["alone"]) == ["libnf4", "normal", "evict_first"]
    stores = {each[1] for each in made.library.launches if each[0] == "dequantize"}
    assert stores == {-1, "keep", "evict first"}
    assert {each[3] for each in made.library.launches if each[0] == "read"} == {64 * 256 * 2}


def test_the_sweep_times_every_configuration_that_takes_the_weight() -> None:
    figures = sweep.dequantize(bench(FakeLibrary(refused=2)), [SMALL, (8, 64)], quiet)
    assert [(row["dtype"], row["shape"]) for row in figures["rows"]] == [
        (dtype, list(shape)) for dtype in sweep.DTYPES for shape in (SMALL, (8, 64))
    ]
    for row in figures["rows"]:
        assert row["chosen"] == 1
        assert row["times"][2] == {"refused": "nf4_bench_dequant returned 1 for 2"}
        assert min(each["ratio"] for each in row["times"][:2]) == 1


# ---- Wrong results ----------------------------------------------------------------------


class Idle(Peer):
    def prepare(self, weight, variant):
        return lambda out=None: out


@pytest.mark.parametrize(
    "how, case, said",
    [
        (-1, Case(SMALL), "libnf4: 1 of 16384 elements differ"),
        (-1, Case(SMALL, work="consumer"), "stores: libnf4: 1 of 16384"),
        ("keep", Case(SMALL, work="consumer"), "stores: normal: 1 of 16384"),
        ("evict first", Case(SMALL, work="consumer"), "stores: evict_first: 1 of 16384"),
        (Peer(wrong=5), Case(SMALL, "fp16", peers=("triton",)), "triton: 5 of 16384"),
        (Idle(), Case(SMALL, peers=("triton",)), "triton: 16384 of 16384"),
    ],
)
def test_a_wrong_bit_ends_the_bench_before_any_time(how: object, case: Case, said: str) -> None:
    peer = isinstance(how, Peer)
    made = bench(FakeLibrary(wrong=None if peer else how), **({"triton": how} if peer else {}))
    assert f"nested: {said}" in wrong(made, lambda: bench_rows.run(made, [case], quiet))


def test_a_wrong_configuration_ends_the_sweep() -> None:
    made = bench(FakeLibrary(wrong=2))
    said = wrong(made, lambda: sweep.dequantize(made, [SMALL], quiet))
    assert "configuration 128x4 tile 256: 1 of 16384" in said


def test_a_wrong_quantize_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = nf4.quantize

    def quantize(array, **arguments):
        q = honest(array, **arguments)
        if "out" in arguments:
            q.absmax.view(torch.uint8)[7] ^= 1
        return q

    monkeypatch.setattr(nf4, "quantize", quantize)
    made = bench()
    said = wrong(made, lambda: rows(made, Case(SMALL, work="quantize")))
    assert said == "quantize 64x256 bf16 nested: absmax: 1 of 256 elements differ"


@pytest.mark.parametrize(
    "change, said",
    [
        (torch.t, r"x: \(3, 2\) of torch.float32, expected \(2, 3\)"),
        (torch.Tensor.half, "of torch.float16"), (torch.neg, "6 of 6"),
    ],
)  # fmt: skip
def test_a_result_of_another_shape_dtype_or_sign_is_wrong(change, said: str) -> None:
    zeros = torch.zeros(2, 3)
    with pytest.raises(check.WrongResult, match=said):
        check.require_equal("x", zeros, change(zeros))


# ---- The cost of a call -----------------------------------------------------------------


@pytest.mark.parametrize("pdl", [True, False])
def test_the_figures_of_a_call(monkeypatch: pytest.MonkeyPatch, pdl: bool) -> None:
    for name, value in (("HOST_TURNS", 2), ("WAITED_TURNS", 2), ("WAITED_CASE", Case(SMALL))):
        monkeypatch.setattr(host, name, value)
    every = host.host_work

    def on_the_host(bench, weight):
        # An address is device memory, of which there is none here.
        return {name: work for name, work in every(bench, weight).items() if "address" not in name}

    monkeypatch.setattr(host, "host_work", on_the_host)
    said: list[str] = []
    figures = host.run(bench(FakeLibrary(pdl=pdl), triton=Peer()), said.append)
    assert list(figures["waited"]["calls"]) == ["libnf4", "triton", host.LAUNCH]
    assert figures["waited"]["calls"]["libnf4"]["ratio"] == 1
    calls = figures["host"]["calls"]
    beyond = calls[host.NEW]["us"] - calls[host.EMPTY]["us"]
    assert figures["host"]["beyond_empty_us"] == pytest.approx(beyond, abs=0.01)
    assert "beyond torch.empty" in said[-1]
    with pytest.raises(check.WrongResult, match="triton, launch variant 0: 3 of 16384"):
        host.run(bench(triton=Peer(wrong=3)), said.append)


# ---- The C library ----------------------------------------------------------------------


def test_a_library_that_is_not_built_or_of_other_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(LibraryMissing, match="libnf4_bench.so.*/dev build makes it"):
        Library(tmp_path)
    source = tmp_path / "empty.c"
    source.write_text("int nf4_bench_dequant_traffic_variants(void) { return 1; }\n")
    (tmp_path / "bench").mkdir()
    compile_c(source, tmp_path / "bench" / "libnf4_bench.so", "-shared", "-fPIC")
    with pytest.raises(LibraryMissing, match="is not of these sources.*nf4_bench_has_pdl"):
        Library(tmp_path)


def test_functions_are_as_their_header_declares_them() -> None:
    declared = test_abi.functions(test_abi.code_of(HEADER.read_text()))
    assert len(declared) == HEADER.read_text().count("NF4_API ")
    assert declared == {f"nf4_bench_{name}": each for name, each in functions().items()}
