"""Tests run against the nf4 that is installed, or else that of this checkout, with the
library of $NF4_LIBRARY or build/."""

import ctypes
import gc
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[2]

# The modules that tests import stay, torch and transformers above all. The collector would look at
# them again and again, which takes a fifth of the time of tests.
gc.disable()

# bitsandbytes is what libnf4 is compared with, on kernels of its own.
os.environ["NF4_BITSANDBYTES"] = "0"

# The kernels that run must not depend on the costs of this machine's user.
os.environ["NF4_COSTS"] = "0"

if importlib.util.find_spec("nf4") is None:
    sys.path.insert(0, str(ROOT / "bindings" / "python"))
    os.environ.setdefault("NF4_LIBRARY", str(ROOT / "build" / "lib" / "libnf4.so"))

# Beside the package of a checkout, the extension module is where Meson put it.
if importlib.util.find_spec("_nf4_fast") is None:
    sys.path.append(str(ROOT / "build" / "bindings" / "python"))

# A machine may be slow: no example has a deadline, nor has the making of one.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# Background jobs and nohup start with these ignored, and what a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

_COMPARED: dict[str, list[int]] = {}


def record_comparison(kind: str, elements: int, differing: int, case: object) -> None:
    """Adds a comparison to the counts that are printed at the end, and fails on a difference."""
    counts = _COMPARED.setdefault(kind, [0, 0, 0])
    for index, amount in enumerate((1, elements, differing)):
        counts[index] += amount
    assert differing == 0, f"{kind}: {differing} of {elements} elements differ in {case}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _COMPARED:
        terminalreporter.section("compared on the GPU, bit for bit")
    for kind, (results, elements, differing) in sorted(_COMPARED.items()):
        terminalreporter.write_line(
            f"{kind}: {results} results, {elements} elements, {differing} differ"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    if "warm" in sys.modules:
        sys.modules["warm"].end()


def compile_c(source: Path, output: Path, *arguments: str) -> Path:
    """Compiles C against nf4.h; the test is skipped where there is no compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    include = ROOT / "include"
    subprocess.run(
        [compiler, "-std=c99", f"-I{include}", *arguments, str(source), "-o", str(output)],
        check=True,
    )
    return output


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """Returns a folder whose path has spaces and the names of packages, as a user's may."""
    folder = tmp_path / "nf4 torch and bitsandbytes"
    folder.mkdir()
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a small dense model."""
    import checkpoint_helpers

    return checkpoint_helpers.write_model(tmp_path / "model")


@pytest.fixture
def quantized(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder that `nf4 quantize` makes of `model`."""
    from nf4.cli import main

    assert main(["quantize", str(model), str(tmp_path / "q")]) == 0
    capsys.readouterr()
    return tmp_path / "q"


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds models of transformers in this process; a child takes seconds to import torch."""
    from nf4.checkpoint import architecture

    def answer(request: str, name: str) -> dict[str, Any]:
        from nf4.checkpoint import meta_model  # it imports torch, which may not be installed

        return meta_model.answer(json.loads(request))

    monkeypatch.setattr(architecture, "_run", answer)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """What torch.compile made is forgotten after each test: Dynamo limits how often a process
    compiles one function, and CUDA graphs of compiled functions hold memory."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()


@pytest.fixture
def seeded() -> None:
    """torch's random numbers are the same in each run."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def served() -> Iterator[object]:
    """bitsandbytes on libnf4's kernels, and what is served."""
    from nf4.torch import bitsandbytes as backend

    yield backend.register()
    backend.unregister()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Counts the products with an adapter that libnf4 makes as one."""
    from peft_cases import counted

    with counted(monkeypatch) as found:
        yield found


@pytest.fixture
def dense_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of x is made from a dense weight, as bitsandbytes makes it."""
    from nf4.torch import _kernels

    monkeypatch.setattr(_kernels, "uses_fused_grad", lambda *_: False)


@pytest.fixture
def calls() -> Iterator[object]:
    """Counts calls of bitsandbytes' operator gemm_4bit by Python."""
    from bitsandbytes_cases import Calls

    with Calls() as counted:
        yield counted


@pytest.fixture(params=["extension", "ctypes"])
def way_to_call(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test twice: with calls through the extension module, and without it."""
    from nf4 import _prepared

    if request.param == "ctypes":
        monkeypatch.setattr(_prepared, "_nf4_fast", None)
    elif _prepared._nf4_fast is None:
        pytest.skip("the extension module _nf4_fast is not built")
    return request.param


@pytest.fixture(scope="session")
def fake_library_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name("fake_nf4.c")
    output = tmp_path_factory.mktemp("fake") / "libnf4.so"
    return compile_c(source, output, "-shared", "-fPIC")


@pytest.fixture
def use_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """A function that makes nf4 load another library, until the test is over."""
    from nf4 import _load

    def use(path: Path) -> None:
        monkeypatch.setenv("NF4_LIBRARY", str(path))
        _load.library.cache_clear()

    yield use
    _load.library.cache_clear()


@pytest.fixture
def fake(use_library: Callable[[Path], None], fake_library_path: Path) -> Iterator[ctypes.CDLL]:
    """fake_nf4.c in place of the library, with what it recorded of the last launch."""
    use_library(fake_library_path)
    library = ctypes.CDLL(str(fake_library_path))
    status = ctypes.c_int32.in_dll(library, "fake_status")
    version = ctypes.c_int32.in_dll(library, "fake_version")
    before = status.value, version.value
    yield library
    status.value, version.value = before


@pytest.fixture
def last(fake: ctypes.CDLL) -> ctypes.Structure:
    """The last launch that the fake library got: a fakes.Call."""
    from fakes import Call

    call = Call.in_dll(fake, "fake_last")
    ctypes.memset(ctypes.byref(call), 0, ctypes.sizeof(call))
    return call


@pytest.fixture(params=["extension", "ctypes"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test of nf4.torch with the extension module, and without it."""
    from nf4.torch import _fast

    if request.param == "ctypes":
        monkeypatch.setattr(_fast, "linear", lambda *_: None)
        monkeypatch.setattr(_fast, "dequantize", lambda *_: False)
        monkeypatch.setattr(_fast, "linear_adapted", lambda *_: None)
        monkeypatch.setattr(_fast, "linear_grad", lambda *_: None)
        monkeypatch.setattr(_fast, "linear_grouped", lambda *_: None)
        monkeypatch.setattr(_fast, "lora_grads", lambda *_: None)
        monkeypatch.setattr(_fast, "adapted_grads", lambda *_: None)
    elif not _fast.registered:
        pytest.skip("the extension module _nf4_fast is not built")
    return request.param


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many products each call for all siblings had."""
    from nf4.torch import _operators_batch

    counted: list[int] = []
    batch = _operators_batch.linear_batch

    def counting(x: object, biases: object, weights: list[Any]) -> object:
        counted.append(len(weights))
        return batch(x, biases, weights)

    monkeypatch.setattr(_operators_batch, "linear_batch", counting)
    return counted
