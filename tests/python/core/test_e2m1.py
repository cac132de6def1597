"""MXFP4 and NVFP4 against numpy, and against the bytes that compressed-tensors writes."""

from pathlib import Path

import ml_dtypes
import nf4
import numpy as np
import oracle
import pytest

FILE = np.load(Path(__file__).resolve().parents[2] / "golden" / "golden_e2m1.npz")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
LAYOUTS = [("mxfp4", 32), ("nvfp4", 16), ("nvfp4", 32)]
RULES = {"mxfp4": ["floor", "even", "ceil"], "nvfp4": ["factor", "divisor"]}
SHAPES = [(1, 32), (3, 96), (7, 2880), (64, 32), (33, 4128)]

# Of w = ((37 i mod 101) - 50) / 16 for i of 0..63, as rows of 32, the second over 128.
GOLDEN = (np.arange(64) * 37 % 101 - 50).astype(np.float32).reshape(2, 32) / 16
GOLDEN[1] /= 128
CODES = {
    "mxfp4": "bfe5692ec7f45a0ed6724cafe6613dc7f5692ed7f45b8ee6724cafe6603dc7f5",
    "nvfp4": "bfe5692ec7f45a0ed6724cafe6613db7f5692ed7f45b8ee6724cafe5603dc7f5",
}
# The scales by rule: compressed-tensors', then ModelOpt's. The global scale by its bits.
SCALES = {
    ("mxfp4", "even"): ("7e77", None),
    ("mxfp4", "ceil"): ("7f78", None),
    ("nvfp4", "divisor"): ("7e7e4546", 0x44570A3D),
    ("nvfp4", "factor"): ("7e7e4546", 0x3A986186),
}
FIRST_OF_ROWS = {
    "mxfp4": [0xC040, 0xBF40, 0x3FC0, 0xC000, 0x3C40, 0xBCC0, 0xBB00, 0x3C80],
    "nvfp4": [0xC048, 0xBF48, 0x3FC8, 0xC005, 0x3C3A, 0xBCBA, 0xBAF8, 0x3C78],
}


def random_weight(seed: int, format: str, blocksize: int, shape: tuple[int, int], rule: str):
    rng = np.random.default_rng(seed)
    rows, cols = shape
    weight = {
        "packed": rng.integers(0, 256, rows * cols // 2, np.uint8),
        "absmax": rng.integers(0, 256, rows * cols // blocksize, np.uint8),
    }
    if format == "nvfp4":
        of_part = int(rng.integers(0, rows + 1))
        parts = -(-rows // of_part) if of_part else 1
        weight["nested_absmax"] = np.exp(rng.normal(0, 8, parts)).astype(np.float32)
        weight["nested_blocksize"] = of_part
    return nf4.QuantizedTensor(
        **weight, format=format, blocksize=blocksize, shape=shape, scale_rule=rule
    )


def scales_of(q: nf4.QuantizedTensor) -> np.ndarray:
    """The float32 scale of each block."""
    if q.format == "mxfp4":
        return q.absmax.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    rows, cols = q.shape
    of_part = (q.nested_blocksize or rows) * (cols // q.blocksize)
    factors = np.repeat(q.nested_absmax, of_part)[: q.blocks]
    scales = q.absmax.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    with np.errstate(all="ignore"):
        return scales / factors if q.scale_rule == "divisor" else scales * factors


def expected(q: nf4.QuantizedTensor, dtype: str) -> np.ndarray:
    codes = np.stack([q.packed & 15, q.packed >> 4], axis=-1).reshape(-1)
    with np.errstate(all="ignore"):
        values = E2M1[codes] * np.repeat(scales_of(q), q.blocksize)
        return values.astype(oracle.DTYPES[dtype]).reshape(q.shape)


def same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A NaN has no certain payload."""
    return (oracle.bits(a) == oracle.bits(b)) | (np.isnan(a) & np.isnan(b)).reshape(
        oracle.bits(a).shape
    )


@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("format", "blocksize"), LAYOUTS)
def test_dequantize(format, blocksize, shape, dtype):
    for seed, rule in enumerate(RULES[format]):
        q = random_weight(seed, format, blocksize, shape, rule)
        assert same_bits(nf4.dequantize(q, dtype=dtype), expected(q, dtype)).all()


@pytest.mark.parametrize("m", [1, 3, 9, 40])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("format", "blocksize"), LAYOUTS)
def test_matmul_and_its_gradient(format, blocksize, shape, dtype, m):
    rng = np.random.default_rng(m)
    q = random_weight(1, format, blocksize, shape, RULES[format][1])
    q.absmax[...] = rng.integers(120, 132, q.blocks) if format == "mxfp4" else 60 + q.absmax % 8
    weight = nf4.dequantize(q, dtype="fp32").astype(np.float64)
    for product, operand in (nf4.matmul, weight.T), (nf4.matmul_grad, weight):
        x = rng.normal(0, 1, (m, operand.shape[0])).astype(oracle.DTYPES[dtype])
        y = product(x, q).astype(np.float64)
        exact = x.astype(np.float64) @ operand
        bound = np.abs(x.astype(np.float64)) @ np.abs(operand)
        assert (np.abs(y - exact) <= bound * (1e-6 if dtype == "fp32" else 2**-7)).all()


@pytest.mark.parametrize(("format", "rule"), SCALES)
def test_golden_bytes(format, rule):
    scales, scale = SCALES[format, rule]
    q = nf4.quantize(GOLDEN, format=format, scale_rule=rule)
    assert q.absmax.tobytes().hex() == scales
    if scale is not None:
        assert q.nested_absmax.view(np.uint32).tolist() == [scale]
    if rule == "ceil":  # its scales are twice those of the golden codes
        return
    assert q.packed.tobytes().hex() == CODES[format]
    if rule != "factor":
        weight = nf4.dequantize(q, dtype="bf16")
        assert oracle.bits(weight[:, :4]).reshape(-1).tolist() == FIRST_OF_ROWS[format]


@pytest.mark.parametrize("name", sorted({key.partition("/")[0] for key in FILE.files}))
def test_golden_tensors(name):
    """tests/golden/README.md"""
    format = name.partition("-")[0]
    rule = {"mxfp4": "even", "nvfp4": "divisor"}[format]
    q = nf4.quantize(FILE[f"{name}/weight"], format=format, scale_rule=rule)
    for part in "packed", "absmax":
        assert getattr(q, part).tolist() == FILE[f"{name}/{part}"].reshape(-1).tolist(), part
    if format == "nvfp4":
        assert q.nested_absmax.tolist() == FILE[f"{name}/global"].tolist()
    assert (oracle.bits(nf4.dequantize(q, dtype="bf16")) == FILE[f"{name}/expected"]).all()


@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("format", "blocksize"), LAYOUTS)
def test_codes_are_the_nearest(format, blocksize, shape, dtype):
    rng = np.random.default_rng(7)
    weight = (
        rng.integers(-24, 25, shape) / 4 * np.exp2(rng.integers(-9, 9, (shape[0], 1)))
    ).astype(oracle.DTYPES[dtype])
    weight[0, :5] = np.nan, np.inf, -np.inf, -0.0, 0.0
    for rule in RULES[format]:
        q = nf4.quantize(weight, format=format, blocksize=blocksize, scale_rule=rule)
        scales = np.repeat(scales_of(q), blocksize).reshape(shape)
        with np.errstate(all="ignore"):
            scaled = (weight.astype(np.float32) / scales).clip(-6, 6)
        nearest = np.nan_to_num(scaled).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
        with np.errstate(all="ignore"):
            assert (nf4.dequantize(q, dtype="fp32") == nearest * scales).all()


@pytest.mark.parametrize(
    ("largest", "exponents"),
    [(6.5, (0, 0, 1)), (7.5, (0, 1, 1)), (6.0, (0, 0, 0)), (4.0, (0, 0, 0))],
)
def test_the_rules_of_e8m0(largest, exponents):
    block = np.full(32, largest, np.float32)
    for rule, exponent in zip(RULES["mxfp4"], exponents, strict=True):
        q = nf4.quantize(block, format="mxfp4", scale_rule=rule)
        assert q.absmax.tolist() == [127 + exponent], rule


def test_a_global_scale_for_each_part():
    weight = np.random.default_rng(3).normal(0, 1, (96, 64)).astype(np.float32)
    weight[32:64] *= 1000
    weight[64:] = 0
    q = nf4.quantize(weight, format="nvfp4", nested_blocksize=32)
    assert q.nested_absmax[:2].tolist() == [
        np.abs(part).max() / np.float32(2688) for part in (weight[:32], weight[32:64])
    ]
    assert q.nested_absmax[2] == 1 and (nf4.dequantize(q)[64:] == 0).all()
    for first in 0, 32, 64:
        part = nf4.quantize(weight[first : first + 32], format="nvfp4")
        whole = nf4.dequantize(q)[first : first + 32]
        assert (nf4.dequantize(part) == whole).all()


BAD = {
    "blocksize is 64; expected 32 in MXFP4": {"format": "mxfp4", "blocksize": 64},
    "blocksize is 64; expected 16 or 32 in NVFP4": {"format": "nvfp4", "blocksize": 64},
    "nested_blocksize is 1; expected 0 in MXFP4": {"format": "mxfp4", "nested_blocksize": 1},
    'scale_rule is \'even\'; expected None or "factor" or "divisor"': {
        "format": "nvfp4",
        "scale_rule": "even",
    },
    "scale_rule is 'even'; expected None for \"nf4\"": {"scale_rule": "even"},
}


@pytest.mark.parametrize(("message", "options"), [(key, BAD[key]) for key in BAD])
def test_bad_arguments_are_named(message, options):
    with pytest.raises(nf4.InvalidArgument) as error:
        nf4.quantize(np.zeros((2, 64), np.float32), **options)
    assert message in str(error.value)


def test_columns_are_whole_blocks():
    with pytest.raises(
        nf4.InvalidArgument, match="cols is 48; expected a multiple of the blocksize"
    ):
        nf4.quantize(np.zeros((2, 48), np.float32), format="mxfp4")
