"""Weights are put together from the tensors of a checkpoint, in any order."""

import itertools
import json

import nf4
import pytest

torch = pytest.importorskip("torch")
nf4_torch = pytest.importorskip("nf4.torch")
arrivals = pytest.importorskip("nf4.vllm.arrivals")

pytestmark = pytest.mark.interop


def tensors(nested: bool = True, storage=torch.uint8):
    """A weight, and its tensors in a checkpoint by part."""
    dense = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    weight = nf4_torch.quantize(dense, nested_blocksize=256 if nested else 0)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [96, 64]}
    parts = {
        "": weight.packed.view(storage).view(-1, 1),
        "absmax": weight.absmax,
        "quant_map": torch.from_numpy(nf4.codebook("nf4").copy()),
    }
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32"}
        state["nested_offset"] = weight.nested_offset.item()
        parts["nested_absmax"] = weight.nested_absmax
        parts["nested_quant_map"] = weight.nested_code
    parts["quant_state"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return weight, parts


def arrive(parts, order=None):
    made = arrivals.Arrivals("layer")
    results = [made.add(part, parts[part]) for part in order or parts]
    assert all(each is None for each in results[:-1])
    return results[-1], made


def dense(weight):
    return nf4_torch.dequantize(weight, "fp32")


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_a_weight_is_complete_with_its_last_part(storage):
    weight, parts = tensors(storage=storage)
    made, _ = arrive(parts)
    assert torch.equal(dense(made), dense(weight)) and made.codebook is None


@pytest.mark.parametrize("nested", [True, False])
def test_parts_arrive_in_any_order(nested):
    weight, parts = tensors(nested)
    for order in itertools.permutations(parts):
        made, _ = arrive(parts, order)
        assert torch.equal(dense(made), dense(weight))


def test_its_own_codebook_stays():
    _, parts = tensors()
    parts["quant_map"] = parts["quant_map"] * 2
    made, _ = arrive(parts)
    assert torch.equal(made.codebook, parts["quant_map"])


def test_a_dense_matrix_is_complete():
    matrix = torch.zeros(4, 8)
    assert arrivals.Arrivals("layer").add("", matrix) is matrix


@pytest.mark.parametrize("part", ["absmax", "quant_state", "nested_quant_map", ""])
def test_a_missing_part_is_named(part):
    _, parts = tensors()
    taken = parts.pop(part)
    made, left = arrive(parts)
    assert made is None and left.missing() == [part or "weight"]
    assert left.add(part, taken) is not None


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (
            "absmax",
            torch.zeros(95, dtype=torch.uint8),
            "layer: absmax has 95 elements; expected 96",
        ),
        ("", torch.zeros(10, 1, dtype=torch.uint8), "layer: packed has 10 elements; expected 3072"),
        ("quant_state", torch.zeros(3, dtype=torch.uint8), "not valid JSON"),
        ("quant_state", torch.tensor(list(b'{"quant_type":"int8"}')).byte(), "neither nf4 nor"),
        ("quant_state", torch.tensor(list(b'{"quant_type":"nf4"}')).byte(), "blocksize None"),
    ],
)
def test_a_part_that_does_not_fit_is_named(part, value, message):
    _, parts = tensors()
    with pytest.raises(ValueError, match=message):
        arrive(parts | {part: value})


def test_a_part_that_no_weight_has_is_named():
    _, parts = tensors(nested=False)
    extra = {"nested_absmax": torch.zeros(1)} | parts
    with pytest.raises(ValueError, match="layer: it has nested_absmax, but its quant_state is not"):
        arrive(extra)


def test_a_part_that_arrives_twice_is_refused():
    _, parts = tensors()
    made = arrivals.Arrivals("layer")
    made.add("absmax", parts["absmax"])
    with pytest.raises(ValueError, match="two tensors for absmax"):
        made.add("absmax", parts["absmax"])


@pytest.mark.parametrize(("format", "blocksize"), [("mxfp4", 32), ("nvfp4", 16)])
def test_a_format_that_is_not_served_is_named_at_its_quant_state(format, blocksize):
    """A weight of such a format has no quant_map, and would never be complete."""
    state = {"quant_type": format, "blocksize": blocksize, "dtype": "float32"}
    data = json.dumps(state | {"shape": [16, 64]}).encode()
    made = arrivals.Arrivals("layer")
    made.add("", torch.zeros(512, 1, dtype=torch.uint8))
    made.add("absmax", torch.zeros(16 * 64 // blocksize, dtype=torch.uint8))
    with pytest.raises(ValueError, match=f"layer: it is of '{format}', neither nf4 nor fp4"):
        made.add("quant_state", torch.tensor(list(data), dtype=torch.uint8))
    suffix = f".weight.quant_state.bitsandbytes__{format}"
    assert arrivals.RENAMED[suffix] == ".weight_quant_state"


def test_names_become_vllms():
    assert arrivals.RENAMED[".weight.quant_state.bitsandbytes__fp4"] == ".weight_quant_state"
    assert arrivals.RENAMED[".weight.nested_absmax"] == ".weight_nested_absmax"
