"""The operators of nf4.vllm and those of vllm-bnb-plugin give the same, on small layers."""

import bench_path  # noqa: F401  (the path)
import pytest

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

import vllm_operators  # noqa: E402
from bench_fakes import FakeGpu  # noqa: E402
from nf4bench.check import WrongResult  # noqa: E402
from vllm_operators import Experts, Size  # noqa: E402

LLAMA = Size("llama", (((64, 64, 64), 128), ((128,), 64)))
QWEN = Size("qwen", (((128, 64, 64), 64),), (4, 2, 64, 64))


@pytest.mark.parametrize("m", vllm_operators.BATCHES)
@pytest.mark.parametrize("size", [LLAMA, QWEN])
def test_both_sequences_are_timed_and_give_the_same(size, m):
    torch.manual_seed(m)
    ours, theirs, error = vllm_operators.times(size, m, 2, FakeGpu(), 3)
    assert 0 < ours < theirs and 0 < error < vllm_operators.MOST_ERROR


def test_another_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(Experts, "libnf4", lambda self: 1.1 * self.peer())
    with pytest.raises(WrongResult, match="libnf4: off by 1.00e-01"):
        vllm_operators.times(QWEN, 1, 1, FakeGpu(), 3)
