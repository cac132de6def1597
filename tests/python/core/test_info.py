"""The library's facts and tables."""

import re

import nf4
import numpy as np
import pytest
from nf4 import _abi


def test_version():
    assert nf4.version() == f"{_abi.VERSION_MAJOR}.{_abi.VERSION_MINOR}.{_abi.VERSION_PATCH}"


def test_the_package_has_the_version_of_the_library():
    assert nf4.__version__ == nf4.version()
    with pytest.raises(AttributeError, match="module 'nf4' has no attribute 'nothing'"):
        nf4.nothing  # noqa: B018


def test_build_info():
    info = nf4.build_info()
    assert {"compiler", "cuda"} <= set(info) and all(info.values())


def test_cpu_variant():
    assert re.fullmatch(r"[a-z0-9]+", nf4.cpu_variant())


@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_codebooks(format):
    table = nf4.codebook(format)
    assert (table.dtype, table.shape) == (np.float32, (16,))
    assert (table.min(), table.max()) == (-1, 1)
    table[:] = 0
    assert nf4.codebook(format).any(), "a copy must be given"


def test_scale_code():
    code = nf4.scale_code()
    assert (code.dtype, code.shape) == (np.float32, (256,)) and (np.diff(code) > 0).all()


def test_an_unknown_format():
    with pytest.raises(nf4.InvalidArgument, match="format is 'int4'"):
        nf4.codebook("int4")


def test_device_info_says_why_not():
    device = nf4.device_info(0)
    assert device.usable == (device.reason == "") == (device.status == "NF4_STATUS_OK")
    with pytest.raises(nf4.InvalidArgument, match="device is 4294967296; expected a 32-bit"):
        nf4.device_info(1 << 32)


def test_sizes():
    sizes = nf4.sizes((3, 5, 67), blocksize=32, nested_blocksize=8)
    assert sizes == nf4.Sizes(
        elements=1005,
        blocks=32,
        nested_blocks=4,
        packed_bytes=503,
        absmax_bytes=32,
        workspace_bytes=sizes.workspace_bytes,
    )
    assert sizes.workspace_bytes >= 4 * sizes.blocks
    assert nf4.sizes((1005,), blocksize=32, nested_blocksize=0).workspace_bytes == 0


def test_everything_public_is_there():
    assert sorted(nf4.__all__) == nf4.__all__
    assert all(hasattr(nf4, name) for name in nf4.__all__)
