"""Those whom the bench measures libnf4 beside: who is missing, and whose bits are ours."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import bench_path
import nf4
import numpy as np
import oracle
import pytest

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

from bench_fakes import EVERY_KIND, SMALL, Peer, bench  # noqa: E402
from nf4bench import check, peers  # noqa: E402
from nf4bench import rows as bench_rows  # noqa: E402
from nf4bench.cases import Case  # noqa: E402
from nf4bench.weights import DTYPES, Weight  # noqa: E402


def test_missing_peers_are_named_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)

    def broken(place: str):
        raise OSError("libcudart.so: cannot open shared object file")

    class Broken(Peer):
        def prepare(self, weight, variant):
            raise RuntimeError("no C compiler")

    monkeypatch.setitem(peers.FACTORIES, "triton", broken)
    monkeypatch.setitem(peers.FACTORIES, "unsloth", lambda place: Broken())
    made = bench(names=None)
    said: list[str] = []
    figures = bench_rows.run(made, [Case(SMALL, peers=("bitsandbytes", "torch"))], said.append)
    assert "ModuleNotFoundError" in figures["peers"]["bitsandbytes"]["missing"]
    assert figures["peers"]["unsloth"] == {"missing": "RuntimeError: no C compiler"}
    missing = "OSError: libcudart.so: cannot open shared object file"
    assert figures["peers"]["triton"] == {"missing": missing}
    assert figures["peers"]["torch"] == {"version": torch.__version__}
    assert f"triton: missing: {missing}" in said
    assert list(figures["rows"][0]["peers"]) == ["torch"]


@pytest.mark.parametrize("factory", [peers.Bitsandbytes, peers.UnslothSequence])
def test_a_bitsandbytes_without_cuda_is_missing_on_a_gpu(factory, monkeypatch) -> None:
    functional = types.SimpleNamespace(lib=types.SimpleNamespace(compiled_with_cuda=False))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", functional)
    with pytest.raises(peers.PeerMissing, match="found no CUDA library"):
        factory("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "format, blocksize, nested", [("nf4", 64, True), ("nf4", 128, False), ("fp4", 64, True)]
)
def test_bitsandbytes_reads_our_bytes(
    format: str, blocksize: int, nested: bool, dtype: str
) -> None:
    case = Case(SMALL, dtype, nested, format=format, blocksize=blocksize)
    weight = Weight(case, "cpu")
    theirs = peers.Bitsandbytes("cpu").prepare(weight, 0)()
    check.require_equal("bitsandbytes", weight.dequantize(None), theirs)


@pytest.mark.parametrize("case", EVERY_KIND, ids=str)
def test_torch_operators_are_the_formulas(case: Case) -> None:
    """The reference of every check, beside the formulas in numpy."""
    weight = Weight(case, "cpu")
    values = peers.TorchOperators("cpu").prepare(weight, 0)()
    q = weight.quantized
    parts = {
        name: None if getattr(q, name) is None else np.asarray(getattr(q, name))
        for name in ("packed", "absmax", "nested_absmax", "nested_code", "nested_offset")
    }
    on_host = nf4.QuantizedTensor(
        **parts, shape=case.shape, dtype=case.dtype, blocksize=case.blocksize,
        nested_blocksize=case.nested_blocksize,
    )  # fmt: skip
    expected = oracle.dequantize(on_host, weight.codebook.numpy(), case.dtype)
    bits = {2: torch.int16, 4: torch.int32}[values.itemsize]
    assert (values.view(bits).numpy() == expected.view(f"i{values.itemsize}")).all()


INTERPRETED = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from nf4bench import check, int4_cases, peers, product, triton_int4
from nf4bench.cases import Case
from nf4bench.weights import Weight, weight_of

kernel = peers.TritonKernel("cpu")
compared = 0
# The interpreter truncates to bf16 where the compiler rounds, so bf16 is for GPUs alone.
for case in (
    Case((64, 256), "fp32"), Case((64, 256), "fp16"), Case((64, 256), "fp32", nested=False),
    Case((65, 255), "fp32"), Case((65, 255), "fp16"), Case((1, 1), "fp32"),
    Case((300, 256), "fp16", blocksize=32), Case((64, 256), "fp32", blocksize=4096),
    Case((64, 256), "fp32", format="fp4"), Case((64, 256), "fp32", format="own"),
):
    weight = Weight(case, "cpu")
    expected = weight.dequantize(None).clone()
    for variant in kernel.variants:
        call = kernel.prepare(weight, variant)
        check.require_equal(f"{case}, new", expected, call())
        check.require_dequantized("given", weight, expected, lambda: call(weight.out))
        compared += 1
for each in (*triton_int4.STUDY, *triton_int4.AUTOGPTQ):
    # Two tiles of rows, of x and of columns; 2 groups or more.
    shape = (2 * each.n, max(2 * each.k * each.split, 256))
    weight = weight_of(int4_cases.case(shape, dtype="fp16"), "cpu")
    x = torch.randn(20, shape[1], dtype=torch.float16)
    expected = product.exact(x, weight.numbers(torch.float64))
    product.require(str(each), 1e-3, expected, triton_int4.prepare(weight, each)(x))
    compared += 1
print(compared, "compared")
"""


def _in_process(program: str, **environment: str) -> str:
    """What a program prints that has the bench and nf4 on its path."""
    places = [str(bench_path.ROOT / "bench"), str(Path(nf4.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", program, *places], env=os.environ | environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_triton_kernels_are_right() -> None:
    """In Triton's interpreter, which has to be chosen before Triton is imported."""
    pytest.importorskip("triton")
    assert _in_process(INTERPRETED, TRITON_INTERPRET="1") == "53 compared\n"
