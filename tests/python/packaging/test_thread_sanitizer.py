"""Under ThreadSanitizer a program on the library, which is not compiled for it, has no race."""

import os
import shutil
import subprocess
from pathlib import Path

import nf4
import pytest
from conftest import ROOT

RUNS = 5  # a race is reported where threads meet, which not every run has


def built(source: Path, program: Path) -> Path:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    library = nf4.get_library()
    command = [compiler, "-std=c99", "-g", "-fsanitize=thread", f"-I{ROOT / 'include'}"]
    command += [str(source), library, f"-Wl,-rpath,{Path(library).parent}", "-lm", "-o"]
    done = subprocess.run([*command, str(program)], capture_output=True, text=True)
    if "tsan" in done.stderr:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="one processor: no threads")
def test_the_library_s_threads_report_no_race(tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int main(void) { return 0; }\n")
    if subprocess.run(
        [built(tmp_path / "empty.c", tmp_path / "empty")], capture_output=True
    ).returncode:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    program = built(ROOT / "examples" / "c" / "host_matmul.c", tmp_path / "program")
    for _ in range(RUNS):
        done = subprocess.run([program], capture_output=True, text=True)
        assert done.returncode == 0 and "data race" not in done.stderr, done.stderr
