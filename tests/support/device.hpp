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

// Ends the test on a CUDA error, which it names.
void require_cuda(cudaError_t error, const char *call);
#define REQUIRE_CUDA(call) ::nf4::test::require_cuda(call, #call)

// compute-sanitizer runs few cases: so many of a class as NF4_TEST_SHAPES says.
inline bool few_shapes() { return std::getenv("NF4_TEST_SHAPES") != nullptr; }
inline int shapes_or(int usual) {
  return few_shapes() ? std::atoi(std::getenv("NF4_TEST_SHAPES")) : usual;
}
// Of a graph, each compared with the first launch.
inline int replays() { return few_shapes() ? 5 : 100; }

// Sets bytes, and waits: the tests' streams do not wait for the legacy stream, on which
// cudaMemset works on.
void fill_bytes(void *address, uint8_t byte, size_t bytes);

inline int device_attribute(cudaDeviceAttr attribute) {
  int value = 0;
  REQUIRE_CUDA(cudaDeviceGetAttribute(&value, attribute, 0));
  return value;
}
inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// Of a matmul's output: as many as its tiles of 128 fill half a wave, so that CTAs share them where
// the reduction is long; and a fourth of the multiprocessors, so that clusters split each.
inline int64_t rows_to_share() { return (multiprocessors() / 2 + 1) * 128; }
inline int64_t rows_to_split() { return (multiprocessors() / 4 - 1) * 128 - 5; }

class DeviceBuffer {
 public:
  // `bytes` of data after `lead` bytes of poison, and the data poison too at first.
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
  // Are the data bytes, and those before them, still poison?
  bool untouched() const;

 private:
  uint8_t *allocation_ = nullptr;
  size_t lead_;
  size_t bytes_;
};

// Equality as one bool: Catch2 would print whole vectors, which some reporters do even where
// they are equal.
inline bool same_bytes(const std::vector<uint8_t> &a, const std::vector<uint8_t> &b) {
  return a == b;
}

// How far data lies from the 256-byte alignment of an allocation: 0 often, so that the
// aligned kernels are met, else any multiple of `alignment`.
size_t random_lead(Rng &rng, int alignment);

// A HostWeight or HostInt4Weight.
template <class Host>
class DeviceWeightOf {
 public:
  // aligned: no part lies behind a lead.
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

// What is enqueued on `stream` while `enqueue` runs, as a graph to launch.
template <class Enqueue>
cudaGraphExec_t capture(cudaStream_t stream, const Enqueue &enqueue) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  // The strictest mode: what is unsafe in any thread ends the capture.
  REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  enqueue();
  REQUIRE_CUDA(cudaStreamEndCapture(stream, &graph));
  REQUIRE_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  REQUIRE_CUDA(cudaGraphDestroy(graph));
  return executable;
}

}  // namespace nf4::test
