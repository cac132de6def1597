"""The GPU as the bench uses it: graphs, events, synchronising."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

# A function that enqueues one piece of work on the stream of this address.
Launch = Callable[[int], object]


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


class Gpu:
    """The current GPU, and a stream of the bench's own."""

    place = "cuda"

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name()

    @property
    def cache_bytes(self) -> int:
        """Of its last-level cache."""
        return torch.cuda.get_device_properties().L2_cache_size

    @property
    def stream(self) -> int:
        """The address of the bench's stream."""
        return self._stream.cuda_stream

    def current_stream(self) -> int:
        """The address of torch's current stream, the cheapest way there is."""
        return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def release(self) -> None:
        """Gives back memory that no tensor holds."""
        torch.cuda.empty_cache()

    def run(self, launch: Launch) -> object:
        """One launch on the bench's stream, waited for; what the launch returned."""
        self.synchronize()
        with torch.cuda.stream(self._stream):
            result = launch(self.stream)
        self.synchronize()
        return result

    def peak_bytes(self, launch: Launch) -> int:
        """The most memory that one launch takes beyond what tensors hold when it begins."""
        self.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.run(launch)
        return torch.cuda.max_memory_allocated() - before

    def _capture(self, launches: Sequence[Launch], **options: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(**options)
        with torch.cuda.graph(graph, stream=self._stream):
            for launch in launches:
                launch(self.stream)
        return graph

    def prepare(self, launches: Sequence[Launch], eager: bool) -> Callable[[], object]:
        """What enqueues all launches at once: a graph's replay, or for what cannot be captured
        the calls themselves. Each has run once by then."""
        self.synchronize()
        with torch.cuda.stream(self._stream):
            for launch in launches:
                launch(self.stream)
        self.synchronize()
        if eager:
            return lambda: [launch(self.stream) for launch in launches]
        return self._capture(launches).replay

    def microseconds(self, enqueue: Callable[[], object]) -> float:
        """What the stream takes for what `enqueue` puts there."""
        with torch.cuda.stream(self._stream):
            self._begin.record()
            enqueue()
            self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) * 1e3

    def kernels(self, launch: Launch) -> int:
        """How many pieces of GPU work (nodes of a graph) one launch is. Raises DriverError."""
        self.run(launch)
        graph = self._capture([launch], keep_graph=True)
        count = ctypes.c_size_t()
        status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(
            ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)
        )
        if status != 0:
            raise DriverError(f"cuGraphGetNodes returned {status}")
        return count.value
