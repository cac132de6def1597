"""Which functions of the driver the library and its runtime look up. A stand-in for the driver has
none of them, but says what it was asked for."""

import os
import re
import subprocess
import sys

import nf4
import pytest
from conftest import ROOT, compile_c

# The first driver of the runtime's CUDA, such as 12.0. The runtime gives up after its look-ups, at
# cuGetExportTable.
DRIVER = """
#include <stdio.h>
#include <string.h>
int cuInit(unsigned flags) { return (int)flags; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuGetProcAddress_v2(const char *, void **, int, unsigned long long, int *);
static int nothing(void) { return 801; }
static void *function(const char *name) {
  if (strcmp(name, "cuGetProcAddress") == 0) return (void *)cuGetProcAddress_v2;
  if (strcmp(name, "cuInit") == 0) return (void *)cuInit;
  if (strcmp(name, "cuDriverGetVersion") == 0) return (void *)cuDriverGetVersion;
  return (void *)nothing;
}
int cuGetProcAddress_v2(const char *name, void **found, int since, unsigned long long flags,
                        int *status) {
  const int has = since <= VERSION;
  (void)flags;
  fprintf(stderr, "asks %s %d\\n", name, since);
  *found = has ? function(name) : NULL;
  if (status != NULL) *status = has ? 0 : 2;
  return has || status != NULL ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **found, int since, unsigned long long flags) {
  return cuGetProcAddress_v2(name, found, since, flags, NULL);
}
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """The version of the driver, and what the runtime asks it for: names, and their versions."""
    runtime = nf4.build_info().get("cuda_runtime")
    if runtime is None:
        pytest.skip("this libnf4 was built without CUDA")
    version = int(runtime.partition(".")[0]) * 1000
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    compile_c(
        folder / "driver.c", folder / "libcuda.so.1", "-shared", "-fPIC", f"-DVERSION={version}"
    )
    environment = {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", "import nf4; print(nf4.device_info(0).status)"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout != "NF4_STATUS_OK\n"
    found = re.findall(r"^asks (cu\w+) (\d+)$", done.stderr, re.MULTILINE)
    return version, [(name, int(since)) for name, since in found]


def test_the_runtime_does_without_newer_functions(asked):
    """It asks for those of later drivers, too, and goes on where there are none."""
    version, names = asked
    newer = [each for each, (_, since) in enumerate(names) if since > version]
    assert len(names) > 300
    assert not newer or newer[0] < len(names) - 1


def test_what_launches_need_is_in_the_first_driver(asked):
    """By the table of the stand-in runtime, and as the library itself asks for functions."""
    version, names = asked
    table = (ROOT / "tests" / "standin_cuda" / "check_launches.cpp").read_text()
    rows = re.findall(r"NEEDS\(\w+, (\d+), (\w+)\)", table)
    assert len(rows) > 10
    for since, name in rows:
        assert (name, int(since)) in names
        assert int(since) <= version


def test_what_the_library_asks_for():
    """Drivers of CUDA 12.0 have all but one function, without which a stream's context is asked."""
    sources = "".join(path.read_text() for path in (ROOT / "lib" / "cuda").rglob("*.cpp"))
    rows = re.findall(r'DriverFunction<[^;]*?> \w+\(\s*"(cu\w+)",\s*(\d+)\);', sources)
    assert len(rows) == sources.count("DriverFunction<")
    assert [name for name, since in rows if int(since) > 12000] == ["cuStreamGetDevice"]
