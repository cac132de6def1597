"""Against tensors that bitsandbytes made: see tests/golden/README.md."""

import hashlib
from pathlib import Path

import nf4
import numpy as np
import oracle
import pytest

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "golden.npz"


def load():
    """{tensor: {array: values}}."""
    tensors = {}
    with np.load(GOLDEN) as arrays:
        for key in arrays.files:
            name, part = key.split("/")
            tensors.setdefault(name, {})[part] = arrays[key]
    return tensors


TENSORS = load()
TABLES = TENSORS.pop("tables")


def weight(name: str) -> nf4.QuantizedTensor:
    """A golden tensor with the codebook that bitsandbytes' Python side decoded it with."""
    format, layout, blocksize, dtype, shape = name.split("-")
    parts = TENSORS[name]
    nested = layout == "nested"
    return nf4.QuantizedTensor(
        packed=parts["packed"],
        absmax=parts["absmax"],
        nested_absmax=parts["nested_absmax"] if nested else None,
        nested_code=TABLES["scale_code"] if nested else None,
        nested_offset=parts["nested_offset"] if nested else None,
        codebook=TABLES[format],
        format=format,
        blocksize=int(blocksize),
        nested_blocksize=256 if nested else 0,
        shape=tuple(int(extent) for extent in shape.split("x")),
        dtype=dtype,
    )


def test_covers_every_format_layout_and_blocksize():
    kinds = {tuple(name.split("-")[:3]) for name in TENSORS}
    assert len(kinds) == 2 * 2 * len(oracle.BLOCKSIZES)
    assert any(weight(name).elements % 2 for name in TENSORS)
    assert any(weight(name).elements % weight(name).blocksize for name in TENSORS)
    assert any(weight(name).nested and weight(name).blocks > 256 for name in TENSORS)


@pytest.mark.parametrize("name", TENSORS)
def test_dequantize(name):
    q = weight(name)
    expected = TENSORS[name]["expected"]
    assert oracle.bits(nf4.dequantize(q)).tolist() == expected.tolist()
    for dtype, digest in zip(oracle.DTYPES, TENSORS[name]["sha256"], strict=True):
        assert hashlib.sha256(nf4.dequantize(q, dtype).tobytes()).digest() == digest.tobytes()


@pytest.mark.parametrize("name", [name for name in TENSORS if name.startswith("fp4")])
def test_fp4_of_our_codebook_differs_in_the_sign_of_zero_alone(name):
    q = weight(name)
    parts = {field: getattr(q, field) for field in q.__dataclass_fields__}
    ours = nf4.dequantize(nf4.QuantizedTensor(**parts | {"codebook": None}), "fp32")
    theirs = nf4.dequantize(q, "fp32")
    codes = oracle.codes_of(q.packed, q.elements).reshape(q.shape)
    differ = oracle.bits(ours) != oracle.bits(theirs)
    assert (codes[differ] == 8).all()
    assert (ours == theirs).all()


def test_nf4_codebook():
    assert oracle.differing(nf4.codebook("nf4"), TABLES["nf4"]) == 0


def test_fp4_codebook_differs_in_the_sign_of_code_8_alone():
    differ = oracle.bits(nf4.codebook("fp4")) != oracle.bits(TABLES["fp4"])
    assert differ.nonzero()[0].tolist() == [8]
    assert nf4.codebook("fp4")[8] == 0 and np.signbit(nf4.codebook("fp4")[8])


def test_scale_code():
    assert oracle.differing(nf4.scale_code(), TABLES["scale_code"]) == 0
