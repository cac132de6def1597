// Test cases on a GPU: allocations that end where the data ends, so that memcheck finds
// the first byte read past it, and that start with poison.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdlib>
#include <vector>

#include "support/cases.hpp"
#include "support/int4_cases.hpp"

namespace nf4::test {

// Ends the test on a CUDA error and names it.
void require_cuda(cudaError_t error, const char *call);
#define REQUIRE_CUDA(call) ::nf4::test::require_cuda(call, #call)

// compute-sanitizer runs few cases: NF4_TEST_SHAPES gives their number per class.
inline bool few_shapes() { return std::getenv("NF4_TEST_SHAPES") != nullptr; }
inline int shapes_or(int usual) {
  return few_shapes() ? std::atoi(std::getenv("NF4_TEST_SHAPES")) : usual;
}
// The replays of a graph, each of which is compared with the first launch.
inline int replays() { return few_shapes() ? 5 : 100; }

// Sets bytes and waits. The tests' streams do not wait for the legacy stream, on which cudaMemset
// continues to work.
void fill_bytes(void *address, uint8_t byte, size_t bytes);

inline int device_attribute(cudaDeviceAttr attribute) {
  int value = 0;
  REQUIRE_CUDA(cudaDeviceGetAttribute(&value, attribute, 0));
  return value;
}
inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// Rows of a matmul's output whose tiles of 128 fill half a wave, so that CTAs share them if the
// reduction is long; and a fourth of the multiprocessors, so that clusters split each tile.
inline int64_t rows_to_share() { return (multiprocessors() / 2 + 1) * 128; }
inline int64_t rows_to_split() { return (multiprocessors() / 4 - 1) * 128 - 5; }

class DeviceBuffer {
 public:
  // Allocates `bytes` of data after `lead` bytes of poison; at first the data is poison, too.
  explicit DeviceBuffer(size_t bytes, size_t lead = 0);
  DeviceBuffer(DeviceBuffer &&other) noexcept;
  DeviceBuffer(const DeviceBuffer &) = delete;
  DeviceBuffer &operator=(const DeviceBuffer &) = delete;
  ~DeviceBuffer();

  template <class T = void>
  T *data() const {
    return reinterpret_cast<T *>(allocation_ + lead_);
  }
  size_t size() const { return bytes_; }
  void write(const void *source);
  std::vector<uint8_t> read() const;
  bool lead_intact() const;
  // Tells whether the data bytes, and those before them, are still poison.
  bool untouched() const;

 private:
  uint8_t *allocation_ = nullptr;
  size_t lead_;
  size_t bytes_;
};

// Compares as one bool: Catch2 would print whole vectors, and some reporters do so even if they are
// equal.
inline bool same_bytes(const std::vector<uint8_t> &a, const std::vector<uint8_t> &b) {
  return a == b;
}

// The distance of data from the 256-byte alignment of an allocation: often 0, so that the aligned
// kernels run, otherwise any multiple of `alignment`.
size_t random_lead(Rng &rng, int alignment);

// Host is a HostWeight or a HostInt4Weight.
template <class Host>
class DeviceWeightOf {
 public:
  // With `aligned`, no part has a lead.
  DeviceWeightOf(Rng &rng, const Host &weight, bool aligned = false);
  const typename Host::Tensor &tensor() const { return tensor_; }
  std::vector<uint8_t> read(int part) const { return buffers_[buffer_of_[part]].read(); }
  bool leads_intact() const;

 private:
  std::vector<DeviceBuffer> buffers_;
  std::array<int, Host::kParts> buffer_of_{};
  typename Host::Tensor tensor_{};
};
using DeviceWeight = DeviceWeightOf<HostWeight>;
using DeviceInt4Weight = DeviceWeightOf<HostInt4Weight>;

class Stream {
 public:
  Stream() { REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream &) = delete;
  Stream &operator=(const Stream &) = delete;
  operator cudaStream_t() const { return stream_; }
  void synchronize() const { REQUIRE_CUDA(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// Captures the work that `enqueue` puts on `stream`, as a graph to launch.
template <class Enqueue>
cudaGraphExec_t capture(cudaStream_t stream, const Enqueue &enqueue) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  // This is the strictest mode: an unsafe call in any thread ends the capture.
  REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  enqueue();
  REQUIRE_CUDA(cudaStreamEndCapture(stream, &graph));
  REQUIRE_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  REQUIRE_CUDA(cudaGraphDestroy(graph));
  return executable;
}

}  // namespace nf4::test
