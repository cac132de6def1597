"""Which drivers load an image of a fat binary: of images as nvcc writes them."""

import subprocess
import sys
from pathlib import Path

import nf4
import pytest
from conftest import ROOT
from fat_binaries import EXACT, LZ4, ZSTD, fat_binary, image

sys.path.append(str(ROOT / "tools"))

import cuda_images  # noqa: E402


def ptx(version, arch, flags=0):
    return image(1, version, arch, flags)


def cubin(abi, arch, flags=0):
    return image(2, (abi, 1), arch, flags)


@pytest.mark.parametrize(
    "made, name, form, compression, driver",
    [
        (cubin(7, 75), "sm_75", "ELF ABI 7", "none", (12, 0)),
        (cubin(7, 90, EXACT), "sm_90a", "ELF ABI 7", "none", (12, 0)),
        (cubin(7, 80, LZ4), "sm_80", "ELF ABI 7", "LZ4", (12, 0)),
        (cubin(7, 80, ZSTD), "sm_80", "ELF ABI 7", "zstd", (12, 4)),
        (cubin(8, 80), "sm_80", "ELF ABI 8", "none", (13, 0)),
        (cubin(8, 100, ZSTD), "sm_100", "ELF ABI 8", "zstd", (12, 8)),
        (cubin(8, 121), "sm_121", "ELF ABI 8", "none", (12, 9)),
        (ptx((8, 0), 75), "compute_75", "PTX 8.0", "none", (12, 0)),
        (ptx((7, 8), 75, LZ4), "compute_75", "PTX 7.8", "LZ4", (12, 0)),
        (ptx((8, 5), 80, ZSTD), "compute_80", "PTX 8.5", "zstd", (12, 5)),
        (ptx((9, 0), 75), "compute_75", "PTX 9.0", "none", (13, 0)),
        (ptx((10, 0), 75), "compute_75", "PTX 10.0", "none", (99, 0)),
    ],
)
def test_the_first_driver_of_an_image(made, name, form, compression, driver):
    (found,) = cuda_images.images(b"before" + fat_binary(made) + b"after")
    assert (found.name, found.form, found.compression) == (name, form, compression)
    assert found.driver == driver
    assert found.bytes == 64


def test_images_that_a_driver_does_not_load():
    """One that is older than the architecture does not count."""
    library = fat_binary(cubin(7, 80), ptx((9, 0), 80), cubin(8, 120)) + fat_binary(cubin(8, 90))
    found = list(cuda_images.images(library))
    assert len(found) == 4
    assert cuda_images.too_new(found, (12, 0)) == [
        "compute_80: PTX 9.0, none: needs CUDA 13.0 (580)",
        "sm_90: ELF ABI 8, none: needs CUDA 13.0 (580)",
    ]
    assert cuda_images.too_new(found, (13, 0)) == []
    lines = cuda_images.report([*found, found[0]])
    assert [line.split()[0] for line in lines] == ["compute_80", "sm_80", "sm_90", "sm_120"]
    assert "2         128 bytes  driver CUDA 12.0 (525)" in lines[1]


@pytest.mark.parametrize(
    "made, problem",
    [
        (image(3, (7, 1), 80), "an image of kind 3 at byte 16"),
        (
            image(2, (7, 1), 80, data=b"\x7fELF\2\1\1\x41\x08"),
            "whose header is not that of its ELF",
        ),
    ],
)
def test_what_it_cannot_read(made, problem):
    with pytest.raises(cuda_images.NoImages, match=problem):
        list(cuda_images.images(fat_binary(made)))


def run(path, *options):
    command = [sys.executable, ROOT / "tools" / "cuda_images.py", path, *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_exit_status(tmp_path):
    library = tmp_path / "library"
    library.write_bytes(fat_binary(cubin(8, 80)))
    assert run(library).returncode == 0
    assert run(library, "--driver", "13.0").returncode == 0
    refused = run(library, "--driver", "12.8")
    assert refused.returncode == 1
    assert refused.stderr == "sm_80: ELF ABI 8, none: needs CUDA 13.0 (580)\n"
    library.write_bytes(b"nothing")
    assert run(library).returncode == 2


def test_every_image_of_the_library():
    """Loads with the first driver of its CUDA runtime, if that is older than nvcc; else with the
    driver of nvcc."""
    info = nf4.build_info()
    if info["cuda"] == "none":
        pytest.skip("the library has no GPU code")
    nvcc, runtime = (tuple(map(int, info[of].split(".")[:2])) for of in ("cuda", "cuda_runtime"))
    driver = nvcc if nvcc[0] == runtime[0] else (runtime[0], 0)
    found = list(cuda_images.images(Path(nf4.library_path()).read_bytes()))
    assert {str(each.arch) for each in found} == {
        arch.removesuffix("-ptx") for arch in info["cuda_archs"].split()
    }
    assert cuda_images.too_new(found, driver) == []
