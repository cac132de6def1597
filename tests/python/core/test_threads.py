"""Many threads at once: results and error details are each thread's own."""

from concurrent.futures import ThreadPoolExecutor

import nf4
import numpy as np
import oracle

THREADS = 16
ROUNDS = 40


def in_threads(work):
    """work(index) in THREADS threads at once; what one raises is raised."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(THREADS)))


def test_results_are_those_of_one_thread():
    source = np.random.default_rng(0).standard_normal((THREADS, 50, 77)).astype(np.float32)
    expected = [nf4.dequantize(nf4.quantize(each)) for each in source]

    def work(index):
        differing = 0
        for _ in range(ROUNDS):
            result = nf4.dequantize(nf4.quantize(source[index]))
            differing += oracle.differing(result, expected[index])
        return differing

    assert in_threads(work) == [0] * THREADS


def test_one_weight_is_read_by_all():
    q = nf4.quantize(np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32))
    expected = nf4.dequantize(q)
    assert in_threads(lambda _: oracle.differing(nf4.dequantize(q), expected)) == [0] * THREADS


def test_an_error_has_the_detail_of_its_own_thread():
    source = np.zeros((4, 64), np.float32)

    def work(index):
        blocksize = 33 + 2 * index
        details = set()
        for _ in range(ROUNDS):
            try:
                nf4.quantize(source, blocksize=blocksize)
            except nf4.InvalidArgument as error:
                details.add(str(error))
        return details == {f"blocksize is {blocksize}; expected a power of two from 32 to 4096"}

    assert all(in_threads(work))
