"""What the bench's command line takes and refuses; it needs neither torch nor a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import bench_path
import pytest
from nf4bench import options
from nf4bench.options import Options

BENCH = bench_path.ROOT / "tests" / "bench"


def test_defaults() -> None:
    assert options.parse([]) == Options()


def test_everything_at_once(tmp_path: Path) -> None:
    found = options.parse([
        "--sweep", "--shapes", "1x1,4096x14336", "--replays", "3",
        "--json", str(tmp_path / "x.json"),
    ])  # fmt: skip
    assert found == Options(
        mode="sweep", shapes=((1, 1), (4096, 14336)), replays=3, json=tmp_path / "x.json"
    )
    assert options.parse(["--peers", "triton,torch"]).peers == ("triton", "torch")
    assert options.parse(["--peers", "none"]).peers == ()
    assert options.parse(["--challenge", "--iterations", "1"]).iterations == 1
    assert options.parse(["--matmul", "--quick"]) == Options(mode="matmul", quick=True)
    assert options.parse(["--matmul-sweep"]).mode == "matmul-sweep"
    found = options.parse(["--before", "other", "--quick"])
    assert found == Options(mode="before", quick=True, before=Path("other"))
    assert options.parse(["--models", "--quick"]) == Options(mode="models", quick=True)


REFUSED = {
    "--shapes": "expected one argument",
    "--shapes=": "expected ROWSxCOLS",
    "--shapes 4096": "expected ROWSxCOLS",
    "--shapes 4096x": "expected ROWSxCOLS",
    "--shapes axb": "expected ROWSxCOLS",
    "--shapes 0x64": "expected ROWSxCOLS",
    "--shapes -1x-64": "expected one argument",
    "--shapes 64x64,": "expected ROWSxCOLS",
    "--shapes 65536x32768": "of 1 to 2147483647 elements",
    "--peers marlin": "no peer 'marlin'; expected some of bitsandbytes,unsloth,torch,triton",
    "--peers=": "no peer ''",
    "--replays 2": "'2'; expected a number of 3 or more",
    "--replays 1e3": "expected a number of 3",
    "--challenge --iterations 0": "'0'; expected a number of 1 or more",
    "--challenge --iterations -5": "expected a number of 1 or more",
    "--threads 0": "expected a number of 1",
    "--device tpu": "invalid choice: 'tpu'",
    "--fast": "unrecognized arguments: --fast",
    "--sweep --challenge": "not allowed with",
    "--before other --models": "not allowed with",
    "--before other --shapes 64x64": "--shapes means nothing to --before",
    "--before other --replays 5": "--replays means nothing to --before",
    "--before other --device cpu": "--before needs a GPU",
    "--quick --shapes 64x64": "not allowed with",
    "--challenge --quick": "--quick means nothing to --challenge",
    "--call --shapes 64x64": "--shapes means nothing to --call",
    "--sweep --peers none": "--peers means nothing to --sweep",
    "--call --replays 5": "--replays means nothing to --call",
    "--iterations 5": "--iterations means nothing here",
    "--matmul --peers none": "--peers means nothing to --matmul",
    "--matmul-sweep --peers none": "--peers means nothing to --matmul-sweep",
    "--matmul --sweep": "not allowed with",
    "--matmul-sweep --plots .": "--plots means nothing to --matmul-sweep",
    "--device cpu --matmul": "--matmul needs a GPU",
    "--models --matmul": "not allowed with",
    "--models --shapes 64x64": "--shapes means nothing to --models",
    "--models --peers none": "--peers means nothing to --models",
    "--models --plots .": "--plots means nothing to --models",
    "--device cpu --models": "--models needs a GPU",
    "--sweep --plots .": "--plots means nothing to --sweep",
    "--json no/such/folder/x.json": "there is no folder no/such/folder",
    "--plots no/such/folder": "there is no folder no/such/folder",
    "--device cpu --sweep": "--sweep needs a GPU",
    "--device cpu --peers none": "--peers needs a GPU",
    "--device cpu --replays 5": "--replays needs a GPU",
    "--device gpu --threads 2": "--threads is for the CPU",
    "--device cpu --threads 100000": "--threads is 100000, and this process may run on ",
}


@pytest.mark.parametrize("arguments, reason", REFUSED.items())
def test_refused_with_the_usage(
    arguments: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bench_path.ROOT)
    with pytest.raises(SystemExit) as exit_of:
        found = options.parse(arguments.split())
        # What only the device makes wrong is refused where the device is settled.
        options.settle(found, "no driver" if found.device == "cpu" else None)
    assert exit_of.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: ./dev bench") and reason in said


def test_the_device_is_settled_by_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert options.settle(Options(), None) == "gpu"
    assert options.settle(Options(), "no driver") == "cpu"
    assert options.settle(Options(device="cpu"), None) == "cpu"
    refused = [
        (Options(device="gpu"), "no driver", "--device gpu: no driver"),
        (Options(mode="sweep"), "no driver", "--sweep needs a GPU: no driver"),
        (Options(mode="challenge"), "no driver", "--challenge needs a GPU: no driver"),
        (Options(mode="call"), "no driver", "--call needs a GPU: no driver"),
        (Options(peers=()), "no driver", "--peers needs a GPU: no driver"),
        (Options(plots=Path(".")), "no driver", "--plots needs a GPU: no driver"),
        (Options(threads=1), None, "--threads is for the CPU"),
    ]
    for found, no_gpu, reason in refused:
        with pytest.raises(SystemExit) as exit_of:
            options.settle(found, no_gpu)
        assert exit_of.value.code == 2
        assert reason in capsys.readouterr().err


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=bench_path.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_dev_refuses_before_it_builds() -> None:
    """options.py alone, with no packages: as ./dev calls it before anything is installed."""
    script = str(BENCH / "nf4bench" / "options.py")
    done = _run("-S", script, "--shapes", "garbage")
    assert done.returncode == 2 and "expected ROWSxCOLS" in done.stderr
    done = _run("-S", script, "--quick")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "tests/bench/nf4bench/options.py" in (bench_path.ROOT / "dev").read_text()


def test_a_shape_that_bitsandbytes_has_wrong_on_the_cpu() -> None:
    done = _run(str(BENCH / "bench.py"), "--device", "cpu", "--shapes", "64x65")
    assert done.returncode == 2
    assert "usage:" in done.stderr and "'64x65'" in done.stderr
