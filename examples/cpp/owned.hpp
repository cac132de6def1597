// The C++ examples on a GPU share this and host_weight.hpp: device memory and streams that free
// themselves, and weights in device memory.
#pragma once

#include <cuda_runtime.h>
#include <nf4/nf4.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <vector>

#include "host_weight.hpp"

constexpr int kSkipped = 77;

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Returns whether the library can use GPU 0, and prints its name or why it cannot be used.
inline bool have_gpu() {
  nf4_device info{};
  info.struct_size = sizeof info;
  const nf4_status usable = nf4_device_info(0, &info);
  if (usable == NF4_STATUS_NO_CUDA || usable == NF4_STATUS_NO_DEVICE ||
      usable == NF4_STATUS_UNSUPPORTED_DEVICE) {
    std::printf("skipped: %s\n", nf4_last_error());
    return false;
  }
  check(usable);
  std::printf("%s, kernels %s\n", info.name, info.dequant_variant);
  return true;
}

template <class T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t count) : count_(count) {
    void *memory = nullptr;
    check(cudaMalloc(&memory, count * sizeof(T)));
    memory_.reset(static_cast<T *>(memory));
  }
  explicit DeviceBuffer(const std::vector<T> &host) : DeviceBuffer(host.size()) {
    check(cudaMemcpy(data(), host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
    // A copy from pageable memory may return while it runs, and streams of make_stream() do not
    // wait for it.
    check(cudaStreamSynchronize(nullptr));
  }
  std::vector<T> to_host() const {
    std::vector<T> host(count_);
    check(cudaMemcpy(host.data(), data(), count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
  T *data() const { return memory_.get(); }
  size_t count() const { return count_; }

 private:
  struct Free {
    void operator()(T *memory) const { cudaFree(memory); }
  };
  std::unique_ptr<T, Free> memory_;
  size_t count_;
};

struct StreamDestroy {
  void operator()(nf4_stream stream) const { cudaStreamDestroy(stream); }
};
using Stream = std::unique_ptr<CUstream_st, StreamDestroy>;

inline Stream make_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return Stream(stream);
}

// A copy of a weight in device memory.
struct DeviceWeight {
  nf4_tensor tensor;
  DeviceBuffer<uint8_t> packed, absmax;
  DeviceBuffer<float> nested_absmax, nested_code, nested_offset;

  explicit DeviceWeight(const HostWeight &host)
      : tensor(host.tensor),
        packed(host.packed),
        absmax(host.absmax),
        nested_absmax(host.nested_absmax),
        nested_code(host.nested_code),
        nested_offset(host.nested_offset) {
    tensor.packed = packed.data();
    tensor.absmax = absmax.data();
    tensor.nested_absmax = nested_absmax.data();
    tensor.nested_code = nested_code.data();
    tensor.nested_offset = nested_offset.data();
  }
};
