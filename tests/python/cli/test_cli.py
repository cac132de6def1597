"""The command line: usage, exit codes, messages, streams."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import struct
import subprocess
import sys
import termios

import checkpoint_helpers as helpers
import nf4
import pytest
from checkpoint_helpers import command, run_cli
from nf4.checkpoint.dtypes import FLOATS
from nf4.cli import main
from nf4.cli.main import build_parser

COMMANDS = ("quantize", "dequantize", "inspect", "verify", "doctor", "tune", "bench")


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_says_the_exit_codes(name, capsys):
    assert main([*([name] if name else []), "--help"]) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout.startswith(f"usage: nf4 {name}".rstrip()) and stderr == ""
    assert "exit codes:" in stdout and "130" in stdout


def test_the_package_runs_as_the_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    result = run_cli("--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == capsys.readouterr().out
    assert result.stdout.startswith("usage: nf4 [-h]")
    wrong = run_cli("frobnicate")
    assert wrong.returncode == 2 and "nf4: error: " in wrong.stderr


def test_overview_names_every_command(capsys):
    assert main(["--help"]) == 0
    stdout = capsys.readouterr().out
    assert all(f"\n    {name}" in stdout for name in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nf4 {nf4.version()}\n"


WRONG = [
    [],
    ["frobnicate"],
    ["quantize"],
    ["quantize", "a"],
    ["quantize", "a", "b", "--blocksize", "48"],
    ["quantize", "a", "b", "--blocksize", "8192"],
    ["quantize", "a", "b", "--format", "int3"],
    ["quantize", "a", "b", "--format", "int4", "--symmetric", "--asymmetric"],
    ["convert", "a", "b"],
    ["convert", "a", "b", "--to", "marlin"],
    ["quantize", "a", "b", "--threads", "-1"],
    ["quantize", "a", "b", "--threads", "many"],
    ["dequantize", "a", "b", "--dtype", "fp8"],
    ["dequantize", "a", "b", "--dtype", "uint8"],
    ["quantize", "a", "b", "--compute-dtype", "fp8"],
    ["inspect"],
    ["verify"],
    ["doctor", "extra"],
]


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_usage(arguments, capsys):
    assert main(arguments) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and "usage: nf4" in stderr


def options_of_dtypes() -> list[tuple[str, argparse.Action]]:
    """Every option that takes a dtype of floats, with its command."""
    (commands,) = (each.choices for each in build_parser()._actions if each.dest == "command")
    dtypes = {dtype for ours, torchs, _ in FLOATS for dtype in (ours, torchs)}
    return [
        (name, action)
        for name, parser in commands.items()
        for action in parser._actions
        if dtypes & set(action.choices or ())
    ]


def test_a_dtype_has_two_names_in_every_option():
    found = options_of_dtypes()
    assert {action.option_strings[0] for _, action in found} == {
        "--dtype",
        "--compute-dtype",
        "--quant-storage",
    }
    for name, action in found:
        for ours, torchs, _ in FLOATS:
            got = {
                getattr(build_parser().parse_args([name, "a", "b", option, dtype]), action.dest)
                for option in action.option_strings
                for dtype in (ours, torchs)
            }
            assert len(got) == 1 and got <= {ours, torchs} & set(action.choices)


def test_too_many_threads_is_usage(model, tmp_path, capsys):
    code = main(["quantize", str(model), str(tmp_path / "q"), "--threads", str(2**40)])
    assert code == 2
    assert "threads" in capsys.readouterr().err
    assert helpers.listing(tmp_path) == ["model"]


def test_pattern_that_names_nothing_is_usage(model, tmp_path, capsys):
    assert main(["quantize", str(model), str(tmp_path / "q"), "--skip", "layer.0"]) == 2
    assert "skip or only: no module matches 'layer.0'" in capsys.readouterr().err
    assert helpers.listing(tmp_path) == ["model"]


def test_library_that_is_missing_is_named(model, tmp_path):
    missing = {**os.environ, "NF4_LIBRARY": "/nowhere/libnf4.so"}
    result = run_cli("quantize", model, tmp_path / "q", env=missing)
    assert result.returncode == 4
    assert "/nowhere/libnf4.so" in result.stderr and result.stderr.count("\n") == 1
    assert helpers.listing(tmp_path) == ["model"]
    result = run_cli("doctor", "--json", env=missing)
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert report["usable"] is False and "/nowhere/libnf4.so" in report["reason"]
    result = run_cli("doctor", env=missing)
    assert result.returncode == 1
    assert "cannot be used" in result.stdout
    assert run_cli("--help", env=missing).returncode == 0


def _closed_pipe(arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(arguments, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)


def test_closed_pipe_ends_quietly(model, quantized, tmp_path):
    for arguments in (["inspect", model], ["verify", quantized, "--json"], ["doctor"]):
        result = _closed_pipe(command(*arguments))
        assert result.returncode == 141
        assert result.stderr == b""
    for arguments in (["--help"], ["--version"], ["quantize", model, tmp_path / "whole"]):
        result = _closed_pipe(command(*arguments))
        assert (result.returncode, result.stderr) == (141, b"")
    assert main(["verify", str(tmp_path / "whole")]) == 0


@pytest.mark.parametrize("redirections", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(redirections, model, tmp_path):
    shell = ["sh", "-c", f'exec "$@" {redirections}', "sh"]
    done = 5 if " >&-" in f" {redirections}" else 0
    for code, arguments in (
        (done, ["quantize", model, tmp_path / "q"]),
        (done, ["verify", tmp_path / "q"]),
        (done, ["verify", tmp_path / "q", "--json"]),
        (done, ["inspect", tmp_path / "q"]),
        (done, ["dequantize", tmp_path / "q", tmp_path / "back"]),
        (done, ["doctor"]),
        (done, ["--help"]),
        (done, ["--version"]),
        (2, ["frobnicate"]),
        (4, ["verify", tmp_path / "nothing"]),
    ):
        result = subprocess.run(
            [*shell, *command(*arguments)], capture_output=True, text=True, check=False
        )
        assert result.returncode == code, arguments
        assert "Traceback" not in result.stderr
        if code == 5 and "2>&-" not in redirections:
            assert result.stderr.splitlines()[0] == "nf4: stdout: Bad file descriptor"
    for name in ("q", "back"):
        assert main(["verify", str(tmp_path / name)]) == 0


def _full(
    stream: str, *arguments: object, unbuffered: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `nf4` with stdout or stderr on a device that is always full."""
    with open("/dev/full", "w") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: full}
        return subprocess.run(
            command(*arguments),
            **streams,
            text=True,
            check=False,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("name", ["inspect", "inspect --json", "verify", "--help", "--version"])
def test_full_stdout_is_an_error(model, name, unbuffered):
    paths = [] if name.startswith("--") else [model]
    result = _full("stdout", *name.split(), *paths, unbuffered=unbuffered)
    assert result.returncode == 5
    assert result.stderr == "nf4: stdout: No space left on device\n"


@pytest.mark.parametrize("form", ["", "--json"])
def test_full_stdout_loses_no_conversion(model, form, tmp_path):
    (model / "pytorch_model.bin").write_bytes(b"other weights")
    result = _full("stdout", "quantize", model, tmp_path / "q", *form.split())
    assert result.returncode == 5
    assert result.stderr.splitlines() == [
        "nf4: not copied: pytorch_model.bin",
        "nf4: stdout: No space left on device",
        f"nf4: {tmp_path}/q/ is complete",
    ]
    assert helpers.listing(tmp_path) == ["model", "q"]
    assert main(["verify", str(tmp_path / "q")]) == 0


def test_full_stderr_changes_no_exit_code(model, tmp_path):
    assert _full("stderr", "verify", tmp_path / "nothing").returncode == 4
    assert _full("stderr", "frobnicate").returncode == 2
    (model / "pytorch_model.bin").write_bytes(b"other weights")
    assert _full("stderr", "quantize", model, tmp_path / "q").returncode == 0


def test_names_that_the_terminal_cannot_show(tmp_path):
    """Control characters never reach the terminal; other scripts are escaped in ASCII."""
    name = "évil\x1b[31m\n.weight"
    path = tmp_path / "caf\u00e9.safetensors"
    path.write_bytes(helpers.file_bytes({name: helpers.random_weight((4, 16))}))
    for encoding, expected in (("ascii", "\\xe9vil"), ("utf-8", "évil")):
        environment = {**os.environ, "PYTHONIOENCODING": encoding, "LC_ALL": "C"}
        result = run_cli("inspect", path, env=environment, encoding="utf-8")
        assert result.returncode == 0, result.stderr
        assert f"{expected}\\x1b[31m\\n.weight" in result.stdout
    result = run_cli("inspect", path, "--json")
    assert json.loads(result.stdout)["tensors"][0]["name"] == name


def test_comma_locale_changes_nothing(model, tmp_path):
    """LC_ALL of a country with decimal commas, applied to the C library too."""
    script = (
        "import locale, sys\n"
        "for name in ('de_DE.UTF-8', 'fr_FR.UTF-8', 'de_DE', ''):\n"
        "    try: locale.setlocale(locale.LC_ALL, name); break\n"
        "    except locale.Error: pass\n"
        "from nf4.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    expected = tmp_path / "expected"
    assert main(["quantize", str(model), str(expected)]) == 0
    output = tmp_path / "output"
    arguments = [sys.executable, "-c", script, "quantize", model, output]
    subprocess.run(arguments, check=True, capture_output=True)
    assert helpers.tree(output) == helpers.tree(expected)


def test_progress_is_on_stderr_and_only_on_a_terminal(model, tmp_path):
    result = run_cli("quantize", model, tmp_path / "piped")
    assert result.returncode == 0 and result.stderr == ""
    shown = _stderr_on_a_terminal(command("quantize", model, tmp_path / "terminal"))
    assert "quantize: " in shown and "B/s" in shown
    quiet = _stderr_on_a_terminal(command("quantize", model, tmp_path / "quiet", "--quiet"))
    assert quiet == ""


def _stderr_on_a_terminal(arguments: list[str]) -> str:
    controller, terminal = os.openpty()
    # Without a width, tqdm shows nothing.
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    try:
        subprocess.run(arguments, stderr=terminal, stdout=subprocess.DEVNULL, check=True)
    finally:
        os.close(terminal)
    shown = b""
    try:
        while piece := os.read(controller, 4096):
            shown += piece
    except OSError:
        # Linux says EIO when the other end is closed and all is read.
        pass
    os.close(controller)
    return shown.decode()


def test_module_and_function_are_the_same_program(quantized):
    result = run_cli("verify", quantized)
    assert result.returncode == 0
    checked, verdict = result.stdout.splitlines()
    assert checked.startswith("layers checked by tensor names: ")
    assert verdict == f"{quantized}: ok (2 4-bit weights, 4 dense tensors)"
