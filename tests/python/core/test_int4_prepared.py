"""What is prepared at an Int4Tensor's first use stays right; test_prepared has more of the same
class."""

import copy
import dataclasses
import pickle

import int4_cases
import nf4
import numpy as np
import oracle
import pytest
from nf4._prepared import prepare

pytestmark = pytest.mark.usefixtures("way_to_call")
CASE = int4_cases.Case(11, "gptq", (24, 4), 32, False, "bf16", True)
PARTS = ("packed", "scales", "zeros", "g_idx")


def used():
    """A weight that was used once, with arrays of its own."""
    q = int4_cases.tensor_of(CASE.arrays)
    nf4.dequantize(q)
    return q


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda q: pickle.loads(pickle.dumps(q)),
        lambda q: dataclasses.replace(q, packed=q.packed.copy()),
    ],
    ids=["deepcopy", "pickle", "replace"],
)
def test_a_copy_has_addresses_of_its_own(copied):
    q = used()
    expected = nf4.dequantize(q)
    other = copied(q)
    other.packed[...] ^= 0x11111111
    assert oracle.differing(nf4.dequantize(other), expected) > 0
    assert oracle.differing(nf4.dequantize(q), expected) == 0
    assert repr(other) == repr(q) and other.scales_dtype == "bf16"


def test_a_shallow_copy_shares_the_parts():
    q = used()
    other = copy.copy(q)
    assert all(getattr(other, name) is getattr(q, name) for name in PARTS)
    assert oracle.differing(nf4.dequantize(other), nf4.dequantize(q)) == 0


def test_the_common_call_is_the_extensions(way_to_call):
    q = used()
    assert prepare(q) is prepare(q)
    expected = nf4.dequantize(q)
    out = np.zeros_like(expected)
    status = prepare(q).launch(out.ctypes.data, None, None)
    assert status == {"extension": 0, "ctypes": None}[way_to_call]
    assert (oracle.differing(out, expected) == 0) is (status == 0)


def test_a_weight_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        used().group_size = 64


def test_kinds_are_weights():
    q = used()
    other = nf4.quantize(nf4.dequantize(q))
    assert isinstance(q, nf4.Weight) and isinstance(other, nf4.Weight)
    assert not isinstance(q, nf4.QuantizedTensor) and q.dtype == other.dtype == "bf16"


@pytest.mark.interop
class TestTensors:
    """Parts that are torch tensors, which may be given other memory."""

    @pytest.fixture(autouse=True)
    def torch(self):
        return pytest.importorskip("torch")

    @pytest.fixture
    def q(self, torch):
        import torch_memory

        q = torch_memory.weight_on(used(), "cpu")
        nf4.dequantize(q)
        return q

    def test_the_common_call_is_the_extensions(self, torch, q, way_to_call):
        if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            pytest.skip(f"torch {torch.__version__} has no DLPack exchange")
        out = torch.zeros(CASE.shape, dtype=torch.bfloat16)
        for dtype in (None, "bf16", torch.bfloat16):
            status = prepare(q).launch(out.zero_(), dtype, None)
            assert status == {"extension": 0, "ctypes": None}[way_to_call]
            assert torch.equal(out, nf4.dequantize(q)) is (status == 0)

    @pytest.mark.parametrize("name", PARTS)
    def test_each_part_may_move(self, torch, q, name):
        before = nf4.dequantize(q)
        part = getattr(q, name)
        part.data = part.flip(part.ndim - 1)
        result = nf4.dequantize(q)
        assert torch.equal(result, nf4.dequantize(copy.copy(q)))
        assert not torch.equal(result, before)

    def test_a_weight_of_torchs_meta_device_is_refused_at_its_first_use(self, torch, q):
        parts = {name: getattr(q, name).to("meta") for name in PARTS}
        meta = dataclasses.replace(q, **parts, scales_dtype=None)
        assert meta.scales_dtype == "bf16" and meta.groups == q.groups
        with pytest.raises(nf4.InvalidArgument, match="packed is on meta; expected the CPU or CUD"):
            nf4.dequantize(meta)

    def test_scales_that_moved_to_another_dtype(self, torch, q):
        q.scales.data = q.scales.half()
        with pytest.raises(nf4.InvalidArgument, match="scales is of fp16; expected bf16"):
            nf4.dequantize(q)
