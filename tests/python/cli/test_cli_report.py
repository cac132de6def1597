"""nf4 inspect, verify and doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import checkpoint_helpers as helpers
import nf4
import numpy as np
import pytest
from conftest import compile_c
from nf4 import _costs
from nf4._load import library
from nf4.checkpoint import rules
from nf4.checkpoint.architecture import Model
from nf4.checkpoint.difference import relative
from nf4.cli import console, doctor, main

NAMES = "tensor names: config.json does not name one architecture and its model_type"


def _json(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict:
    assert main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_inspect_describes_every_tensor(quantized, capsys):
    document = _json(capsys, "inspect", quantized)
    rows = {row["name"]: row for row in document["tensors"]}
    assert rows.keys() == helpers.dense_tensors().keys()
    assert rows["model.layers.0.proj.weight"] == {
        "name": "model.layers.0.proj.weight",
        "format": "nf4",
        "shape": [24, 32],
        "dtype": "fp32",
        "blocksize": 64,
        "nested_blocksize": 256,
        "quant_storage": "uint8",
        "bytes": rows["model.layers.0.proj.weight"]["bytes"],
        "bits_per_weight": rows["model.layers.0.proj.weight"]["bytes"] * 8 / (24 * 32),
    }
    assert rows["model.norm.weight"] == {
        "name": "model.norm.weight",
        "format": "dense",
        "shape": [32],
        "dtype": "F32",
        "bytes": 128,
        "bits_per_weight": 32.0,
    }
    totals = document["totals"]
    assert totals["weights"] == 2 and totals["dense_tensors"] == 4
    assert totals["bytes"] == sum(row["bytes"] for row in rows.values())
    stored = helpers.load_all(quantized)
    assert totals["bytes"] == sum(len(data) for _, _, data in stored.values())


def test_inspect_measures_the_error(model, quantized, capsys):
    document = _json(capsys, "inspect", quantized, "--dense", model)
    rows = {row["name"]: row for row in document["tensors"]}
    tensors = helpers.dense_tensors()
    for name in helpers.QUANTIZED:
        exact = tensors[name].astype(np.float64)
        difference = nf4.dequantize(nf4.quantize(tensors[name])).astype(np.float64) - exact
        expected = np.sqrt((difference**2).sum() / (exact**2).sum())
        assert rows[name]["rms_relative_error"] == pytest.approx(expected, rel=1e-12)
        assert rows[name]["max_abs_error"] == np.abs(difference).max()
    assert "rms_relative_error" not in rows["model.norm.weight"]
    totals = document["totals"]
    assert totals["max_abs_error"] == max(rows[n]["max_abs_error"] for n in helpers.QUANTIZED)
    errors = [rows[name]["rms_relative_error"] for name in helpers.QUANTIZED]
    assert min(errors) <= totals["rms_relative_error"] <= max(errors)


def test_inspect_in_words(model, quantized, capsys):
    assert main(["inspect", str(quantized), "--dense", str(model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == "tensor shape format block scales size bits rms max".split()
    row = next(line for line in lines if line.startswith("model.layers.0.proj.weight"))
    assert row.split()[1:6] == ["24x32", "nf4", "(fp32)", "64", "8-bit"]
    assert "%" in row
    assert any(line.startswith("error  rms ") for line in lines)


def test_inspect_reads_dense_files_too(model, capsys):
    document = _json(capsys, "inspect", model)
    assert document["totals"]["weights"] == 0
    assert document["totals"]["bits_per_weight"] == 32


def test_inspect_with_a_dense_file_that_does_not_fit(quantized, tmp_path, capsys):
    tensors = helpers.dense_tensors()
    del tensors["model.layers.0.proj.weight"]
    other = helpers.write_model(tmp_path / "other", tensors)
    assert main(["inspect", str(quantized), "--dense", str(other)]) == 3
    stderr = capsys.readouterr().err
    assert "tensor 'model.layers.0.proj.weight': not there to compare with" in stderr
    tensors["model.layers.0.proj.weight"] = helpers.random_weight((32, 24))
    other = helpers.write_model(tmp_path / "third", tensors)
    assert main(["inspect", str(quantized), "--dense", str(other)]) == 3
    assert "its shape [32, 24] is not [24, 32]" in capsys.readouterr().err


def test_inspect_names_checkpoints_that_are_swapped(model, quantized, capsys):
    assert main(["inspect", str(model), "--dense", str(quantized)]) == 3
    stderr = capsys.readouterr().err
    assert "no 4-bit weight to compare; --dense is for the dense checkpoint" in stderr


def test_inspect_compares_with_floats_alone(quantized, tmp_path, capsys):
    tensors = helpers.dense_tensors()
    tensors["model.layers.0.proj.weight"] = np.ones((24, 32), np.float64)
    other = helpers.write_model(tmp_path / "other", tensors)
    assert main(["inspect", str(quantized), "--dense", str(other)]) == 3
    assert "cannot compare with F64" in capsys.readouterr().err


def test_error_of_extremes():
    assert relative(0, 0) == 0
    assert relative(4, 0) == np.inf
    assert relative(4, 16) == 0.5


def test_verify_counts_warnings_apart(quantized, capsys):
    _break_scales(quantized / "model.safetensors", helpers.QUANTIZED[0], 1e-40)
    assert main(["verify", str(quantized)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("warning: ") and "are subnormal" in lines[0]
    assert lines[-1].startswith(f"{quantized}: ok, ")


def test_json_has_no_nan(tmp_path, capsys):
    """A dense reference with NaN gives an error that is no number: null in JSON."""
    tensors = {"a.weight": helpers.random_weight((4, 16))}
    tensors["a.weight"][0, 0] = np.nan
    source = tmp_path / "in.safetensors"
    source.write_bytes(helpers.file_bytes(tensors))
    output = tmp_path / "q.safetensors"
    assert main(["quantize", str(source), str(output), "--allow-nonfinite", "--quiet"]) == 0
    capsys.readouterr()
    row = _json(capsys, "inspect", output, "--dense", source)["tensors"][0]
    assert row["rms_relative_error"] is None and row["max_abs_error"] is None


def test_verify_accepts_what_is_sound(model, quantized, capsys):
    document = _json(capsys, "verify", quantized)
    assert document == {
        "path": str(quantized),
        "ok": True,
        "weights": 2,
        "dense_tensors": 4,
        "checked_by": NAMES,
        "findings": [],
    }
    dense = _json(capsys, "verify", model)
    assert dense["ok"] and dense["checked_by"] == ""


def test_verify_says_what_decided_which_layers_transformers_loads(quantized, capsys, monkeypatch):
    assert main(["verify", str(quantized)]) == 0
    checked, verdict = capsys.readouterr().out.splitlines()
    assert checked == f"layers checked by {NAMES}"
    assert verdict.startswith(f"{quantized}: ok (")
    names = (*helpers.dense_tensors(), *helpers.QUANTIZED)
    model = Model(
        name="Toy (transformers 5)",
        reasons=dict.fromkeys(names),
        modules={name: name.removesuffix(".weight") for name in names},
        linear=frozenset(name.removesuffix(".weight") for name in helpers.QUANTIZED),
        conv1d=frozenset(),
        dense_by_default=frozenset(),
    )
    monkeypatch.setattr(rules, "ask", lambda *asked: model)
    assert _json(capsys, "verify", quantized)["checked_by"] == "the modules of Toy (transformers 5)"


def _break_scales(path: Path, name: str, value: float) -> None:
    """Overwrite the first nested scale of a weight in a file."""
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    info = json.loads(content[8:start])[f"{name}.nested_absmax"]
    begin = start + info["data_offsets"][0]
    content[begin : begin + 4] = np.float32(value).tobytes()
    path.write_bytes(content)


def test_verify_lists_every_fault(quantized, capsys):
    for name, value in zip(helpers.QUANTIZED, (np.nan, -1.0), strict=True):
        _break_scales(quantized / "model.safetensors", name, value)
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["llm_int8_skip_modules"] += ["layers.1.proj"]
    (quantized / "config.json").write_text(json.dumps(config))
    document = _json(capsys, "verify", quantized, code=1)
    reasons = [(finding["tensor"], finding["reason"]) for finding in document["findings"]]
    assert (helpers.QUANTIZED[0], "nested_absmax: 1 of 1 are NaN, first at 0") in reasons
    assert (helpers.QUANTIZED[1], "nested_absmax: 1 of 1 are negative, first at 0") in reasons
    skipped = "llm_int8_skip_modules has 'layers.1.proj', which skips the 4-bit model.layers.1.proj"
    assert (None, skipped) in reasons
    assert {finding["severity"] for finding in document["findings"]} == {"fault"}
    assert main(["verify", str(quantized)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(reasons) + 2 and lines[-2] == f"layers checked by {NAMES}"
    assert lines[-1] == f"{quantized}: 3 faults (2 4-bit weights, 4 dense tensors)"


def test_verify_lists_the_faults_of_several_shards(tmp_path, capsys):
    folder = helpers.write_shards(tmp_path / "model")
    shards = sorted(folder.glob("*.safetensors"))
    shards[0].write_bytes(b"short")
    shards[2].unlink()
    document = _json(capsys, "verify", folder, code=1)
    assert [finding["reason"] for finding in document["findings"]] == [
        "too short for safetensors: 5 bytes, at least 8 needed",
        f"its shard {shards[2].name} is missing",
    ]


def test_verify_reads_the_configuration(quantized, capsys):
    config = json.loads((quantized / "config.json").read_text())
    settings = config.pop("quantization_config")
    (quantized / "config.json").write_text(json.dumps(config))
    document = _json(capsys, "verify", quantized, code=1)
    assert document["findings"][0]["reason"] == "it has 4-bit weights, but no quantization_config"
    config["quantization_config"] = settings | {"quant_method": "gptq"}
    (quantized / "config.json").write_text(json.dumps(config))
    document = _json(capsys, "verify", quantized, code=1)
    assert "quantized by 'gptq'" in document["findings"][0]["reason"]
    (quantized / "config.json").write_text("{")
    document = _json(capsys, "verify", quantized, code=1)
    assert "not valid JSON" in document["findings"][0]["reason"]


def test_verify_finds_a_configuration_without_weights(model, capsys):
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (model / "config.json").write_text(json.dumps(config))
    document = _json(capsys, "verify", model, code=1)
    assert document["findings"][0]["reason"].endswith("but no 4-bit weights")


def test_doctor_reports_the_library(capsys):
    report = _json(capsys, "doctor")
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
    report = _json(capsys, "doctor")
    assert report["gpus"][0]["costs"] == {"path": str(path), "products": ["gradient", "gptq"]}
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "measured here (nf4 tune): gradient, gptq" in text
    assert "other ways are presumed, because libnf4 has not been timed" in text
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
    document = _json(capsys, "tune")
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


def test_tune_removes_what_was_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(_costs.VARIABLE, str(tmp_path))
    path = _costs.store(_costs.text_of("gpu 75 sm75 40 65536 13000 T4", [], nf4.version()))
    assert _json(capsys, "tune", "--reset") == {"removed": [str(path)]}
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


def test_numbers_in_words():
    assert console.size_text(0) == "0 B"
    assert console.size_text(999) == "999 B"
    assert console.size_text(43_057_152) == "43.1 MB"
    assert console.size_text(1.5e13) == "15.00 TB"
    assert console.rate_text(3e9, 2) == "1.50 GB/s"
    assert console.rate_text(3e9, 0) == "-"
    names = ["layers.10.a", "layers.2.b", "layers.2.a", "embed"]
    assert sorted(names, key=console.natural_key) == [
        "embed",
        "layers.2.a",
        "layers.2.b",
        "layers.10.a",
    ]
