"""int4_oracle: what it packs it unpacks, in the words that the layouts define; and it agrees with
the tensors of tests/golden, which GPTQModel and compressed-tensors packed and dequantized."""

import int4_oracle
import ml_dtypes
import numpy as np
import pytest

GOLDEN = int4_oracle.golden()
SHAPES = [(8, 32), (24, 128), (136, 96), (16, 40)]


def random_cases() -> list:
    return [
        (layout, rows, cols, group_size, symmetric, act_order)
        for layout in int4_oracle.LAYOUTS
        for rows, cols in SHAPES + ([(5, 13)] if layout == "compressed-tensors" else [])
        for group_size in (32, -1)
        for symmetric in (False, True)
        for act_order in ((False,) if layout == "awq" else (False, True))
    ]


@pytest.mark.parametrize("case", random_cases(), ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("scale_dtype", ["fp16", "bf16"])
def test_pack_is_the_inverse_of_unpack(case: tuple, scale_dtype: str) -> None:
    layout, rows, cols, group_size, symmetric, act_order = case
    rng = np.random.default_rng(15)
    a = int4_oracle.random_int4(
        rng,
        layout,
        rows,
        cols,
        group_size,
        symmetric=symmetric,
        scale_dtype=scale_dtype,
        act_order=act_order,
    )
    groups = 1 if group_size == -1 else -(-cols // group_size)
    codes, zeros = int4_oracle.codes_of(a), int4_oracle.zeros_of(a)
    assert codes.shape == (rows, cols) and zeros.shape == (rows, groups)
    scales = a.scales if layout == "compressed-tensors" else a.scales.T
    again = int4_oracle.pack(
        layout, codes, None if a.zeros is None else zeros, scales, group_size, a.g_idx
    )
    assert a.scale_dtype == again.scale_dtype == scale_dtype
    for ours, theirs in zip(a, again, strict=True):
        assert np.array_equal(ours, theirs) or (ours is None and theirs is None)
    for array in (a.packed, a.scales, a.zeros, a.g_idx):
        assert array is None or array.flags.c_contiguous
    members = np.bincount(int4_oracle.groups_of(a), minlength=groups)
    assert members.sum() == cols and members.max() <= (cols if group_size == -1 else group_size)


def test_nibbles_lie_where_the_layouts_say() -> None:
    codes = (np.arange(8)[:, None] + np.arange(8)) % 16  # code[n, k] = n + k
    scales = np.ones((8, 1), np.float16)
    zeros = np.arange(8, dtype=np.uint8)[:, None]
    words = {}
    for layout in int4_oracle.LAYOUTS:
        a = int4_oracle.pack(layout, codes.astype(np.uint8), zeros, scales, -1)
        words[layout] = [f"{w:08x}" for w in (a.packed.view(np.uint32).flat[1], a.zeros.flat[0])]
    assert words["gptq"] == ["87654321", "654320ff"]
    assert words["gptq_v2"] == ["87654321", "76543210"]
    assert words["awq"] == ["86427531", "75316420"]
    assert words["compressed-tensors"] == ["87654321", "76543210"]


def test_dequantize_rounds_the_exact_product_once() -> None:
    scale = np.array([[np.float16(0.1)]])
    a = int4_oracle.pack(
        "gptq_v2", np.array([[0, 1, 2, 3, 4, 5, 6, 15]], np.uint8), None, scale, -1
    )
    exact = np.float64(scale[0, 0]) * (np.array([0, 1, 2, 3, 4, 5, 6, 15]) - 8)
    assert np.array_equal(int4_oracle.dequantize(a, "fp32")[0], exact)
    assert np.array_equal(int4_oracle.dequantize(a, "fp16")[0], exact.astype(np.float16))
    bf16 = int4_oracle.dequantize(a, "bf16")[0].view(ml_dtypes.bfloat16)
    assert np.array_equal(bf16, exact.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    "layout, shape", [("gptq", (8, 12)), ("gptq_v2", (8, 12)), ("awq", (12, 8))]
)
def test_a_layout_refuses_what_its_words_cannot_hold(layout: str, shape: tuple) -> None:
    codes = np.zeros(shape, np.uint8)
    with pytest.raises(ValueError, match="multiple of 8|words along rows"):
        int4_oracle.pack(layout, codes, None, np.ones((shape[0], 1), np.float16), -1)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_dequantizes_to_the_same_bits(name: str) -> None:
    golden = GOLDEN[name]
    ours = int4_oracle.dequantize(golden.arrays, golden.arrays.scale_dtype)
    assert ours.dtype == golden.expected.dtype
    assert np.array_equal(ours.view(np.uint16), golden.expected.view(np.uint16))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_is_packed_again_to_the_same_bytes(name: str) -> None:
    a = GOLDEN[name].arrays
    zeros = None if a.zeros is None else int4_oracle.zeros_of(a)
    scales = a.scales if a.layout == "compressed-tensors" else a.scales.T
    again = int4_oracle.pack(
        a.layout, int4_oracle.codes_of(a), zeros, scales, a.group_size, a.g_idx
    )
    assert again.packed.tobytes() == a.packed.tobytes()
    if a.zeros is not None:
        assert again.zeros.tobytes() == a.zeros.tobytes()


def test_golden_covers_the_layouts() -> None:
    for layout in int4_oracle.LAYOUTS:
        of_layout = [g.arrays for g in GOLDEN.values() if g.arrays.layout == layout]
        assert {a.scale_dtype for a in of_layout} == {"fp16", "bf16"}
        assert {32, -1} < {a.group_size for a in of_layout}
        asymmetric = [int4_oracle.zeros_of(a) for a in of_layout if a.zeros is not None]
        reached = {int(zero) for zeros in asymmetric for zero in zeros.flat}
        assert {0 if layout != "gptq" else 1, 15} <= reached
        if layout != "awq":
            permuted = [a for a in of_layout if a.g_idx is not None and any(np.diff(a.g_idx) < 0)]
            assert len(permuted) >= 2
