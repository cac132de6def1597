"""The bench from case to row, on the CPU with fakes: checks before times."""

from __future__ import annotations

from pathlib import Path

import bench_path
import nf4
import pytest
import test_abi
from conftest import compile_c

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

from bench_fakes import EVERY_KIND, SMALL, FakeGpu, FakeLibrary, Peer, bench, rows  # noqa: E402
from nf4bench import cases, check, host, rooflines, sweep  # noqa: E402
from nf4bench import rows as bench_rows  # noqa: E402
from nf4bench.cases import Case  # noqa: E402
from nf4bench.library import FUNCTIONS, Library, LibraryMissing  # noqa: E402
from nf4bench.weights import Weight  # noqa: E402

# ---- Rows -------------------------------------------------------------------------------


def test_a_row_each_for_plain_and_pdl_beside_a_limit_launched_alike() -> None:
    made = bench(triton=Peer())
    case = Case(SMALL, peers=("torch", "triton", "bitsandbytes"), bounds=True)
    plain, pdl = rows(made, case)
    assert (plain["launch"], pdl["launch"]) == ("plain", "pdl")
    assert plain["configuration"] == pdl["configuration"] == "256x2 tile 512"
    streams = {each[1:] for each in made.library.launches if each[0] == "dequant_traffic"}
    assert {each[-2] for each in streams} == {False, True}
    for row in (plain, pdl):
        assert row["bytes"] == 64 * 256 * 2 + 64 * 128 + 256 + 4
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3, abs=0.1)
        assert row["of_roofline"] == pytest.approx(row["roofline"]["us"] / row["us"], abs=1e-3)
        assert row["spread"][0] <= row["us"] <= row["spread"][1]
        assert list(row["peers"]) == ["torch", "triton"]
        assert row["peers"]["triton"]["ratio"] == pytest.approx(
            row["peers"]["triton"]["us"] / row["us"], abs=1e-3
        )
        assert (row["read"]["bytes"], row["write"]["bytes"]) == (64 * 128, 64 * 256 * 2)


@pytest.mark.parametrize("work", ["dequantize", "quantize"])
def test_a_library_that_launches_plainly_has_one_row(work: str) -> None:
    (row,) = rows(bench(FakeLibrary(pdl=False)), Case(SMALL, work=work, peers=()))
    assert row["launch"] == "plain"


def test_a_row_of_none_of_the_configurations_names_none() -> None:
    for row in rows(bench(), Case(SMALL, nested=False, peers=())):
        assert row["configuration"] is None


def test_inputs_alone_rotate_past_the_cache() -> None:
    made = bench()
    for work, read in (("dequantize", 64 * 128 + 256 + 4), ("quantize", 64 * 256 * 2)):
        weights = made.rotation(Case(SMALL, work=work))
        assert weights[0].input_bytes == read
        assert len({weight.packed_room.data_ptr() for weight in weights}) == len(weights)
        assert len(weights) == -(-2 * FakeGpu.cache_bytes // read)


@pytest.mark.parametrize("case", EVERY_KIND, ids=str)
def test_every_kind_of_case_is_checked_and_timed(case: Case) -> None:
    made = bench()
    found = rows(made, case)
    assert [row["launch"] for row in found] == ["plain", "pdl"]
    assert {(row["format"], row["placement"]) for row in found} == {(case.format, case.placement)}
    assert ("dequantize", -1) in made.library.launches


@pytest.mark.parametrize("case", EVERY_KIND, ids=str)
def test_rooflines_stay_within_their_memory(case: Case) -> None:
    """Every address and size that a roofline gets lies within the weight's own tensors."""
    library, weight = FakeLibrary(), Weight(case, "cpu")
    sink = torch.empty(16, dtype=torch.uint8)
    launches = {
        **rooflines.dequantize(library, [weight], "plain"),
        **rooflines.read(library, [weight], sink), **rooflines.write(library, [weight]),
    }  # fmt: skip
    for (launch,) in launches.values():
        launch(None)
    q = weight.quantized

    def inside(tensor, address: int, nbytes: int, multiple: int) -> None:
        assert address == tensor.data_ptr() and nbytes % multiple == 0
        assert 0 <= nbytes <= tensor.numel() * tensor.itemsize

    for name, *arguments in library.launches:
        if name == "dequant_traffic":
            _, packed, words, scales, scale_bytes, out, stores, *_ = arguments
            packed_bytes = 4 * words
            inside(weight.packed_room, packed, packed_bytes, 4)
            inside(q.absmax, scales, scale_bytes, 4)
            inside(weight.out_room, out, packed_bytes * 4 * stores, 16)
            assert case.elements // 2 - packed_bytes < 4
        elif name == "read":
            inside(weight.packed_room, arguments[1], arguments[2], 16)
        else:
            inside(weight.out_room, arguments[1], arguments[2], 16)
    assert {each[0] for each in library.launches} == {"dequant_traffic", "read", "write"}


@pytest.mark.parametrize("dtype, nested", cases.CLASSES)
def test_quantize_is_timed_both_ways_beside_its_own_traffic(dtype: str, nested: bool) -> None:
    made = bench(names=("bitsandbytes",))
    plain, pdl = rows(made, Case(SMALL, dtype, nested, work="quantize"))
    assert (plain["launch"], pdl["launch"]) == ("plain", "pdl")
    assert ("quantize", False) in made.library.launches
    dense = 64 * 256 * (4 if dtype == "fp32" else 2)
    for each in made.library.launches:
        if each[0] == "quantize_traffic":
            assert (each[3], each[5]) == (dense, 64 * 128)
    for row in (plain, pdl):
        assert list(row["peers"]) == ["bitsandbytes"]
        peer = row["peers"]["bitsandbytes"]
        assert peer["ratio"] == pytest.approx(peer["us"] / row["as_calls"]["us"], abs=1e-3)
        assert row["read"]["bytes"] == dense and "write" not in row


def test_a_consumer_reads_all_of_what_either_policy_wrote() -> None:
    made = bench()
    figures = bench_rows.run(made, [Case(SMALL, work="consumer", peers=())], lambda line: None)
    (row,) = figures["consumer"]
    read, alone = row["then_read"], row["alone"]
    assert row["ratio"] == pytest.approx(read["normal"]["us"] / read["libnf4"]["us"], abs=1e-3)
    assert list(read) == list(alone) == ["libnf4", "normal", "evict_first"]
    assert {each[1] for each in made.library.launches if each[0] == "dequantize"} == {
        -1, "keep", "evict first",
    }  # fmt: skip
    assert {each[3] for each in made.library.launches if each[0] == "read"} == {64 * 256 * 2}


def test_the_sweep_times_every_configuration_that_takes_the_weight() -> None:
    made = bench(FakeLibrary(refused=2))
    figures = sweep.dequantize(made, [SMALL, (8, 64)], lambda line: None)
    assert [(row["dtype"], row["shape"]) for row in figures["rows"]] == [
        (dtype, list(shape)) for dtype in sweep.DTYPES for shape in (SMALL, (8, 64))
    ]
    for row in figures["rows"]:
        assert row["chosen"] == 1
        assert row["times"][2] == {"refused": "nf4_bench_dequant returned 1 for 2"}
        assert min(each["ratio"] for each in row["times"][:2]) == 1


# ---- Wrong results ----------------------------------------------------------------------


def wrong(made: bench_rows.Bench, case: Case) -> str:
    """What is said of a wrong result; nothing may have been timed."""
    with pytest.raises(check.WrongResult) as error:
        bench_rows.run(made, [case], lambda line: None)
    assert made.gpu.measured == 0
    return str(error.value)


def test_a_peer_that_differs_ends_the_bench_before_any_time() -> None:
    case = Case(SMALL, "fp16", peers=("torch", "triton"))
    said = wrong(bench(triton=Peer(wrong=5)), case)
    assert said == "dequantize 64x256 fp16 nested: triton: 5 of 16384 elements differ"


@pytest.mark.parametrize(
    "work, how, what",
    [
        ("dequantize", -1, "libnf4"), ("consumer", -1, "stores: libnf4"),
        ("consumer", "keep", "stores: normal"), ("consumer", "evict first", "stores: evict_first"),
    ],
)  # fmt: skip
def test_our_own_wrong_bit_ends_the_bench(work: str, how: int | str, what: str) -> None:
    said = wrong(bench(FakeLibrary(wrong=how)), Case(SMALL, work=work, peers=()))
    assert said.endswith(f"64x256 bf16 nested: {what}: 1 of 16384 elements differ")


def test_a_wrong_configuration_ends_the_sweep() -> None:
    made = bench(FakeLibrary(wrong=2))
    with pytest.raises(check.WrongResult, match="configuration 128x4 tile 256: 1 of 16384"):
        sweep.dequantize(made, [SMALL], lambda line: None)
    assert made.gpu.measured == 0


def test_a_wrong_quantize_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = nf4.quantize

    def quantize(array, **arguments):
        q = honest(array, **arguments)
        if "out" in arguments:
            q.absmax.view(torch.uint8)[7] ^= 1
        return q

    monkeypatch.setattr(nf4, "quantize", quantize)
    said = wrong(bench(FakeLibrary()), Case(SMALL, work="quantize"))
    assert said == "quantize 64x256 bf16 nested: absmax: 1 of 256 elements differ"


def test_an_output_that_is_not_written_is_wrong() -> None:
    class Idle(Peer):
        def prepare(self, weight, variant):
            return lambda out=None: out

    said = wrong(bench(unsloth=Idle()), Case(SMALL, peers=("unsloth",)))
    assert "unsloth: 16384 of 16384 elements differ" in said


def test_a_result_of_another_shape_or_dtype_is_wrong() -> None:
    zeros = torch.zeros(2, 3)
    with pytest.raises(check.WrongResult, match=r"x: \(3, 2\) of torch.float32, expected \(2, 3\)"):
        check.require_equal("x", zeros, torch.zeros(3, 2))
    with pytest.raises(check.WrongResult, match="of torch.float16"):
        check.require_equal("x", zeros, zeros.half())
    with pytest.raises(check.WrongResult, match="6 of 6"):
        check.require_equal("x", zeros, -zeros)


# ---- The cost of a call -----------------------------------------------------------------


@pytest.mark.parametrize("pdl", [True, False])
def test_the_figures_of_a_call(monkeypatch: pytest.MonkeyPatch, pdl: bool) -> None:
    monkeypatch.setattr(host, "HOST_TURNS", 2)
    monkeypatch.setattr(host, "WAITED_TURNS", 2)
    monkeypatch.setattr(host, "WAITED_CASE", Case(SMALL))
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
    assert figures["host"]["beyond_empty_us"] == pytest.approx(
        calls[host.NEW]["us"] - calls[host.EMPTY]["us"], abs=0.01
    )
    assert "beyond torch.empty" in said[-1]
    with pytest.raises(check.WrongResult, match="triton, launch variant 0: 3 of 16384"):
        host.run(bench(triton=Peer(wrong=3)), said.append)


# ---- The C library ----------------------------------------------------------------------


def test_a_library_that_is_not_built_is_named(tmp_path: Path) -> None:
    with pytest.raises(LibraryMissing, match="libnf4_bench.so.*/dev build makes it"):
        Library(tmp_path)


def test_a_library_of_other_sources_is_named(tmp_path: Path) -> None:
    source = tmp_path / "empty.c"
    source.write_text("int nf4_bench_dequant_traffic_variants(void) { return 1; }\n")
    (tmp_path / "tests").mkdir()
    compile_c(source, tmp_path / "tests" / "libnf4_bench.so", "-shared", "-fPIC")
    with pytest.raises(LibraryMissing, match="is not of these sources.*nf4_bench_has_pdl"):
        Library(tmp_path)


def test_functions_are_as_their_header_declares_them() -> None:
    header = bench_path.ROOT / "tests" / "bench" / "bench_library.hpp"
    declared = test_abi.functions(test_abi.code_of(header.read_text()))
    assert declared == {f"nf4_bench_{name}": each for name, each in FUNCTIONS.items()}
