"""nf4 doctor and nf4 tune: the library, GPUs, drivers, kernels and measured costs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import checkpoint_helpers as helpers
import nf4
import pytest
from conftest import compile_c
from nf4 import _costs
from nf4._load import library
from nf4.cli import doctor, main
from nf4.cli.exits import Exit


def test_doctor_reports_the_library(capsys):
    report = helpers.report(capsys, "doctor")
    assert report["usable"] is True
    assert report["version"] == nf4.version()
    assert report["library"] == nf4.library_path()
    assert report["build"] == nf4.build_info()
    assert report["cpu"]["kernels"] == nf4.cpu_variant()
    assert report["cpu"]["reason"]
    assert bool(report["gpus"]) != bool(report["no_gpu"])
    for gpu in report["gpus"]:
        assert gpu["usable"] or gpu["reason"]
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert nf4.library_path() in text and nf4.cpu_variant() in text
    assert text.splitlines()[-1].startswith("usable")


def test_doctor_shows_a_gpu(monkeypatch, tmp_path, capsys):
    """What a machine with two GPUs, one too old, would be told."""
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Module  590.44.01  Mar 5")
    monkeypatch.setattr(doctor, "_DRIVER_FILE", tmp_path / "version")

    def device(index: int) -> nf4.Device:
        return nf4.Device(
            index=index,
            usable=index == 0,
            reason="" if index == 0 else "no kernel for sm_35",
            status="NF4_STATUS_OK" if index == 0 else "NF4_STATUS_UNSUPPORTED_DEVICE",
            device_count=2,
            name="NVIDIA H200" if index == 0 else "Tesla K40",
            compute_capability=(9, 0) if index == 0 else (3, 5),
            multiprocessors=132,
            memory_bytes=150 * 10**9,
            driver_version=13010,
            runtime_version=13000,
            dequant_variant="sm90" if index == 0 else "",
            shared_memory_bytes=227 << 10,
            timed=index == 0,
        )

    rows = {"nf4": None, "int4": 16}
    monkeypatch.setattr(nf4, "device_info", device)
    monkeypatch.setattr(doctor._paths, "fused_rows", lambda kind, index: rows[kind])
    monkeypatch.setattr(doctor._paths, "fused_from", lambda kind, index: 1)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "GPU 0      NVIDIA H200, sm_90, 132 multiprocessors, 150.0 GB" in text
    assert (
        "driver 590.44.01 for CUDA 13.1; this libnf4 has the runtime of CUDA 13.0, for drivers "
        "from 580.65.06 on"
    ) in text
    assert "kernels sm90" in text
    assert (
        "products: NF4 and FP4 by libnf4's kernels; integers by libnf4's kernels up to 16 rows of "
        "x, then dequantize and a dense product"
    ) in text
    assert "these ways are built in, timed on GPUs of this kind" in text
    assert "measured here (nf4 tune): none" in text
    older = {"driver": "", "driver_version": 12020, "runtime_version": 12090}
    said = doctor._gpu_lines({**doctor._gpus(device(0))[0], **older})[1].strip()
    assert said.startswith("driver for CUDA 12.2; this libnf4 has the runtime of CUDA 12.9")
    assert said.endswith("for drivers from 525.60.13 on")
    for capability, branch in {
        "10.0": 570, "10.3": 575, "11.0": 580, "12.0": 570, "12.1": 575, "12.9": 575,
    }.items():  # fmt: skip
        newer = {**doctor._gpus(device(0))[0], **older, "compute_capability": capability}
        assert f"this GPU needs a driver from {branch} on" in doctor._gpu_lines(newer)[1]
        by_cuda_13 = doctor._gpu_lines({**newer, "runtime_version": 13000})[1]
        assert by_cuda_13.endswith("for drivers from 580.65.06 on")
    presumed = doctor._gpu_lines(
        {**doctor._gpus(device(0))[0], "timed": False, "fused_rows": {"nf4": 0, "int4": 16}}
    )
    assert "NF4 and FP4 by dequantize and a dense product; integers" in presumed[-2]
    limits = {"fused_rows": {"nf4": 64, "int4": 16}, "fused_from": {"nf4": 9, "int4": 1}}
    between = doctor._gpu_lines({**doctor._gpus(device(0))[0], **limits})
    way = "NF4 and FP4 by libnf4's kernels from 9 to 64 rows of x, otherwise dequantize and a dense"
    assert f"{way} product; integers" in between[-2]
    assert presumed[-1].endswith("presumed, because libnf4 has not been timed on GPUs of this kind")
    needed = "not used: no kernel for sm_35; libnf4 needs compute capability 7.5 (Turing) or later"
    assert text.splitlines().count(f"           {needed}") == 1  # the CPU's are not used
    assert "GPU memory by sm90" in text.splitlines()[-1]


def test_doctor_shows_measured_costs(monkeypatch, tmp_path, capsys):
    gpu = nf4.Device(
        0, True, "", "NF4_STATUS_OK", 1, "NVIDIA A10", (8, 6), 72, 1 << 34, 13000, 13000, "sm80",
        101376, False,
    )  # fmt: skip
    rows = [f"{product} fp16 dense 8 1 0 0 0" for product in ("gradient", "gptq")]
    monkeypatch.setenv(_costs.VARIABLE, str(tmp_path))
    path = _costs.store(_costs.text_of(_costs.gpu_line(gpu), rows, nf4.version()))
    other = _costs.store(_costs.text_of("gpu 75 sm75 40 65536 13000 Tesla T4", rows, nf4.version()))
    (tmp_path / "costs-0.txt").write_text("")
    monkeypatch.setattr(nf4, "device_info", lambda index: gpu)
    monkeypatch.setattr(doctor._paths, "fused_rows", lambda kind, index: 16)
    monkeypatch.setattr(doctor._paths, "fused_from", lambda kind, index: 1)
    report = helpers.report(capsys, "doctor")
    assert report["gpus"][0]["costs"] == {"path": str(path), "products": ["gradient", "gptq"]}
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "measured here (nf4 tune): gradient, gptq" in text
    rest = "codebook_lora, gradient_lora, awq, compressed_tensors, mxfp4, nvfp4, experts"
    assert f"ways of codebook, {rest} are presumed, because libnf4 has not been timed" in text
    assert f"{other} is not used: there is no gpu 75 sm75" in text
    assert f"{tmp_path / 'costs-0.txt'} is not used: text has" in text
    monkeypatch.setenv(_costs.VARIABLE, "0")
    _costs.load(library())


def test_tune_reports_what_it_found(monkeypatch, tmp_path, capsys):
    tune = pytest.importorskip("nf4.tuning.tune")
    checks = [tune.Check("gptq", "fp16", (2048, 2048), 5, {"dense": 2.0}, 3.0, 2.0)]
    path, gpu = tmp_path / "costs-1.txt", nf4.device_info(0)
    found = tune.Tuning(gpu, 61.0, 1.01, ["gptq"], checks, "a text", path=path)
    monkeypatch.setattr(nf4, "tune", lambda device, advance: advance("gptq") or found)
    document = helpers.report(capsys, "tune")
    assert document["over_best"] == {
        "before": {"mean": 1.5, "most": 1.5}, "after": {"mean": 1.0, "most": 1.0},
    }  # fmt: skip
    assert document["checks"][0]["us"] == {"dense": 2.0} and document["costs"] == "a text"
    assert document["gpu"]["name"] == gpu.name
    assert document["versions"]["libnf4"] == nf4.version()
    assert main(["tune"]) == 0
    text = capsys.readouterr().out
    assert "measured costs" in text and f"stored in {tmp_path / 'costs-1.txt'}" in text
    monkeypatch.setattr(nf4, "tune", lambda device, advance: replace(found, path=None, reason="so"))
    assert main(["tune"]) == 1
    assert "not stored: so" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["tune"], ["bench", "report.json"]])
def test_without_a_gpu_torch_is_not_imported(command, tmp_path):
    """Its import takes seconds, after which the command would say that there is no GPU."""
    program = (
        "import sys\n"
        "from nf4.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)"
    )
    if nf4.device_info(0).usable:
        pytest.skip("there is a GPU")
    ended = subprocess.run(
        [sys.executable, "-c", program, *command], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == Exit.IO and not list(tmp_path.iterdir()), ended.stderr
    assert ended.stderr == f"nf4: device 0: {nf4.device_info(0).reason}\n"


def test_tune_removes_what_was_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(_costs.VARIABLE, str(tmp_path))
    path = _costs.store(_costs.text_of("gpu 75 sm75 40 65536 13000 T4", [], nf4.version()))
    assert helpers.report(capsys, "tune", "--reset") == {"removed": [str(path)]}
    assert main(["tune", "--reset"]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"


@pytest.mark.parametrize("proc", ["NVRM version: NVIDIA UNIX Module  550.54.15  Mar 5", None])
def test_doctor_names_the_driver_that_is_wanted(proc, monkeypatch, tmp_path, capsys):
    """Of a driver that is too old; the CPU is usable."""
    none = nf4.Device(
        index=0, usable=False, reason="cudaGetDeviceCount: CUDA driver version is insufficient",
        status="NF4_STATUS_NO_DEVICE", device_count=0, name="", compute_capability=(0, 0),
        multiprocessors=0, memory_bytes=0, driver_version=12040, runtime_version=13000,
        dequant_variant="", shared_memory_bytes=0, timed=False,
    )  # fmt: skip
    if proc is not None:
        (tmp_path / "version").write_text(proc)
    monkeypatch.setattr(doctor, "_DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(nf4, "device_info", lambda index: none)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    name = "the NVIDIA driver 550.54.15" if proc else "the NVIDIA driver"
    assert f"{name} is for CUDA 12.4; this libnf4 needs one for CUDA 13.0" in text
    assert "580.65.06 or later" in text and text.splitlines()[-1].startswith("usable")
    for other in (replace(none, driver_version=13000), replace(none, driver_version=0)):
        assert doctor._no_gpu(other) == none.reason


OLD_DRIVER = """
int cuInit(unsigned flags) { return (int)flags; }
int cuDriverGetVersion(int *version) { *version = 11040; return 0; }
"""


def test_doctor_beside_a_driver_that_is_too_old(tmp_path):
    """A stand-in for the driver's library, in a process that finds it first."""
    if nf4.build_info()["cuda"] == "none":
        pytest.skip("this libnf4 was built without CUDA")
    cuda = nf4.build_info()["cuda_runtime"].partition(".")[0]
    (tmp_path / "driver.c").write_text(OLD_DRIVER)
    compile_c(tmp_path / "driver.c", tmp_path / "libcuda.so.1", "-shared", "-fPIC")
    lines = """
        import nf4, numpy
        from nf4.cli import main
        assert main(["doctor"]) == 0
        assert nf4.device_info(0).reason.startswith("the CUDA driver is for CUDA 11.4; this libnf4")
        q = nf4.quantize(numpy.ones((2, 64), "float32"))
        assert (nf4.dequantize(q) == 1).all()
    """
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-c", textwrap.dedent(lines)]
    text = subprocess.run(
        program, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    needed = f"CUDA {cuda}.0, which is {doctor._DRIVERS[int(cuda)]} or later"
    assert f"is for CUDA 11.4; this libnf4 needs one for {needed}" in text
    assert text.splitlines()[-1].startswith("usable     host memory by")


AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("variant", "built", "flags", "expected"),
    [
        ("neonbf16", "neonbf16 neon", {"asimd", "bf16"}, "the fastest"),
        ("neon", "neonbf16 neon", {"asimd"}, "neonbf16 needs bf16, which this CPU lacks"),
        ("scalar", "scalar", {"asimd", "bf16"}, "neonbf16 is not in this build; neon is not in"),
        ("avx512bf16", "avx2 avx512 avx512bf16", {"avx2"}, "the fastest"),
        ("avx512", "avx512bf16 avx512", AVX512, "avx512bf16 needs avx512_bf16, which"),
        ("avx2", "avx2 avx512", {"avx2", "f16c"}, "avx512bf16 is not in this build; avx512 needs"),
        ("scalar", "scalar avx2", {"avx2", "f16c"}, "avx512bf16 is not in this build; avx512 is "),
    ],
)
def test_doctor_says_why_these_cpu_kernels(variant, built, flags, expected, monkeypatch):
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: flags)
    machine = "aarch64" if "asimd" in flags else "x86_64"
    monkeypatch.setattr(doctor.platform, "machine", lambda: machine)
    assert doctor._cpu_reason(variant, built).startswith(expected)
