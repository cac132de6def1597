"""What is prepared at the first use of a weight stays right, for each kind: copies, moved memory.
test_prepared has more of QuantizedTensor."""

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
SOURCE = np.random.default_rng(0).standard_normal((6, 640)).astype(np.float32)
CASE = int4_cases.Case(11, "gptq", (24, 4), 32, False, "bf16", True)
MAKE = {
    "codes": lambda: nf4.quantize(SOURCE, codebook=nf4.codebook()),
    "integers": lambda: int4_cases.tensor_of(CASE.arrays),
}
PARTS = {
    "codes": ("packed", "absmax", "nested_absmax", "nested_code", "nested_offset", "codebook"),
    "integers": ("packed", "scales", "zeros", "g_idx"),
}


@pytest.fixture(params=MAKE)
def kind(request):
    return request.param


@pytest.fixture
def used(kind):
    """A weight that was used once, with arrays of its own."""
    weight = MAKE[kind]()
    nf4.dequantize(weight)
    return weight


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda q: pickle.loads(pickle.dumps(q)),
        lambda q: dataclasses.replace(q, packed=q.packed.copy()),
    ],
    ids=["deepcopy", "pickle", "replace"],
)
def test_a_copy_has_addresses_of_its_own(copied, kind, used):
    expected = nf4.dequantize(used)
    fresh = MAKE[kind]()
    other = copied(used)
    for each in (other, fresh):
        np.invert(each.packed, out=each.packed)
    assert oracle.differing(nf4.dequantize(other), nf4.dequantize(fresh)) == 0
    assert oracle.differing(nf4.dequantize(other), expected) > 0
    assert oracle.differing(nf4.dequantize(used), expected) == 0
    assert repr(other) == repr(used) and other.dtype == used.dtype
    if kind == "integers":
        assert other.scales_dtype == "bf16"


def test_a_shallow_copy_shares_the_parts(kind, used):
    other = copy.copy(used)
    assert all(getattr(other, name) is getattr(used, name) for name in PARTS[kind])
    assert oracle.differing(nf4.dequantize(other), nf4.dequantize(used)) == 0


def test_a_weight_is_prepared_once(used):
    assert prepare(used) is prepare(used)


def test_the_common_call_is_the_extensions(used, way_to_call):
    expected = nf4.dequantize(used)
    out = np.zeros_like(expected)
    status = prepare(used).launch(out.ctypes.data, None, None)
    assert status == {"extension": 0, "ctypes": None}[way_to_call]
    assert (oracle.differing(out, expected) == 0) is (status == 0)


def test_an_int4_tensor_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MAKE["integers"]().group_size = 64


def test_kinds_are_weights():
    q = MAKE["integers"]()
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
    def q(self, torch, used):
        import torch_memory

        q = torch_memory.weight_on(used, "cpu")
        nf4.dequantize(q)
        return q

    def test_the_common_call_is_the_extensions(self, torch, q, way_to_call):
        if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            pytest.skip(f"torch {torch.__version__} has no DLPack exchange")
        out = torch.zeros_like(nf4.dequantize(q))
        for dtype in (None, q.dtype, out.dtype):
            status = prepare(q).launch(out.zero_(), dtype, None)
            assert status == {"extension": 0, "ctypes": None}[way_to_call]
            assert torch.equal(out, nf4.dequantize(q)) is (status == 0)

    @pytest.mark.parametrize(
        "kind, name", [(kind, name) for kind, names in PARTS.items() for name in names]
    )
    def test_each_part_may_move(self, torch, q, name):
        before = nf4.dequantize(q)
        part = getattr(q, name)
        part.data = part.flip(tuple(range(part.ndim))) if part.numel() > 1 else part + 1
        result = nf4.dequantize(q)
        assert torch.equal(result, nf4.dequantize(copy.copy(q)))
        assert not torch.equal(result, before)

    @pytest.mark.parametrize("kind", ["integers"])
    def test_a_weight_of_torchs_meta_device_is_refused_at_its_first_use(self, q):
        parts = {name: getattr(q, name).to("meta") for name in PARTS["integers"]}
        meta = dataclasses.replace(q, **parts, scales_dtype=None)
        assert meta.scales_dtype == "bf16" and meta.groups == q.groups
        with pytest.raises(nf4.InvalidArgument, match="packed is on meta; expected the CPU or CUD"):
            nf4.dequantize(meta)

    @pytest.mark.parametrize("kind", ["integers"])
    def test_scales_that_moved_to_another_dtype(self, q):
        q.scales.data = q.scales.half()
        with pytest.raises(nf4.InvalidArgument, match="scales is of fp16; expected bf16"):
            nf4.dequantize(q)
