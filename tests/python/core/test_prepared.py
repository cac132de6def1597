"""What is prepared at a QuantizedTensor's first use stays right: threads, parts that are no longer
right, tensors. test_prepared_kinds has what each kind has."""

import copy
import ctypes
import dataclasses
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import nf4
import numpy as np
import oracle
import pytest
from nf4._load import library
from nf4._prepared import _nf4_fast, prepare

pytestmark = pytest.mark.usefixtures("way_to_call")
SOURCE = np.random.default_rng(0).standard_normal((6, 640)).astype(np.float32)
THREADS = 16


def used():
    """A weight that was used once."""
    q = nf4.quantize(SOURCE, codebook=nf4.codebook())
    nf4.dequantize(q)
    return q


@pytest.mark.skipif(_nf4_fast is None, reason="the extension module _nf4_fast is not built")
@pytest.mark.parametrize("parts, addresses", [(("packed",), (64,)), (("packed",), ()), ((), (64,))])
def test_the_extension_refuses_parts_of_no_type(parts, addresses):
    prepared = prepare(used())
    function = ctypes.cast(library().nf4_dequant_cpu, ctypes.c_void_p).value
    known = (None, prepared.argument.value, function, prepared.elements, 1, False, {})
    assert _nf4_fast.Weight(*known, None, (), ()).in_place()
    with pytest.raises(ValueError, match="type is None; expected no parts and no addresses"):
        _nf4_fast.Weight(*known, None, parts, addresses)


def test_an_array_that_became_read_only_is_not_written():
    q = used()
    q.absmax.flags.writeable = False
    with pytest.raises(nf4.InvalidArgument, match="absmax is read-only"):
        nf4.quantize(SOURCE, out=q)


def test_a_first_use_that_failed_is_no_use():
    q = dataclasses.replace(used(), absmax=np.zeros(3, np.uint8))
    for _ in range(2):
        with pytest.raises(nf4.InvalidArgument, match="absmax has 3 elements"):
            nf4.dequantize(q)


def test_first_used_by_all_threads_at_once():
    expected = nf4.dequantize(nf4.quantize(SOURCE))
    for _ in range(20):
        q = nf4.quantize(SOURCE)
        fresh, barrier = copy.copy(q), Barrier(THREADS)

        def work(_, fresh=fresh, barrier=barrier):
            barrier.wait()
            return oracle.differing(nf4.dequantize(fresh), expected)

        with ThreadPoolExecutor(THREADS) as pool:
            assert list(pool.map(work, range(THREADS))) == [0] * THREADS


def test_nothing_keeps_a_weight_alive():
    """Without the collector: device memory must not wait for it."""
    gc.disable()
    try:
        q = used()
        part = weakref.ref(q.packed)
        del q
        assert part() is None
    finally:
        gc.enable()


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

    def test_a_part_that_moved_and_shrank(self, q):
        q.absmax.data = q.absmax[:-1].clone()
        with pytest.raises(nf4.InvalidArgument, match="absmax has 59 elements; expected 60"):
            nf4.dequantize(q)

    def test_storage_that_was_given_back(self, q):
        q = dataclasses.replace(q, packed=q.packed.clone())
        nf4.dequantize(q)
        q.packed.untyped_storage().resize_(0)
        for _ in range(2):
            with pytest.raises(nf4.InvalidArgument, match="packed has no memory"):
                nf4.dequantize(q)

    def test_parameters_and_their_subclasses(self, torch, q):
        class Own(torch.nn.Parameter):
            @classmethod
            def __torch_function__(cls, function, types, arguments=(), keywords=None):
                return super().__torch_function__(function, types, arguments, keywords or {})

        packed = torch.Tensor._make_subclass(Own, q.packed, False)
        with_own = dataclasses.replace(q, packed=packed)
        for _ in range(2):
            result = nf4.dequantize(with_own)
            assert type(result) is torch.Tensor and torch.equal(result, nf4.dequantize(q))
        packed.data = torch.full_like(q.packed, 0x77)
        assert not nf4.dequantize(with_own).any()

    def test_a_fake_tensor_is_no_part(self, torch, q):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            packed = torch.empty(q.packed.shape, dtype=torch.uint8)
        with pytest.raises(
            nf4.InvalidArgument, match="packed is of type torch._subclasses.fake_tensor.FakeTensor"
        ):
            nf4.dequantize(dataclasses.replace(q, packed=packed))

    def test_a_tensor_that_refers_to_its_weight_is_collected(self, torch, q):
        packed = q.packed.clone()
        packed.weight = dataclasses.replace(q, packed=packed)
        nf4.dequantize(packed.weight)
        gone = weakref.ref(packed.weight)
        del packed
        gc.collect()
        assert gone() is None
