// What the C++ examples share: errors as exceptions, device memory and streams that free
// themselves, and weights in host and in device memory.
#pragma once

#include <cuda_runtime.h>
#include <nf4/nf4.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

constexpr int kSkipped = 77;

inline void check(nf4_status status) {
  if (status != NF4_STATUS_OK)
    throw std::runtime_error(std::string(nf4_status_string(status)) + ": " + nf4_last_error());
}

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Is there a GPU that the library can use? Says which, or why not.
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

inline std::vector<float> random_numbers(size_t count, float deviation, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> numbers(count);
  for (float &number : numbers) number = normal(generator);
  return numbers;
}

// A double-quantized NF4 weight in host memory, laid out as a checkpoint stores it.
struct HostWeight {
  nf4_tensor tensor{};
  std::vector<uint8_t> packed, absmax;
  std::vector<float> nested_absmax, nested_code, nested_offset;

  HostWeight(const std::vector<float> &dense, int64_t rows, int64_t cols) {
    tensor.struct_size = sizeof tensor;
    tensor.format = NF4_FORMAT_NF4;
    tensor.blocksize = 64;
    tensor.nested_blocksize = 256;
    tensor.rows = rows;
    tensor.cols = cols;

    nf4_sizes sizes{};
    sizes.struct_size = sizeof sizes;
    check(nf4_tensor_sizes(&tensor, &sizes));
    packed.resize(sizes.packed_bytes);
    absmax.resize(sizes.absmax_bytes);
    nested_absmax.resize(sizes.nested_blocks);
    nested_code.assign(nf4_scale_code(), nf4_scale_code() + 256);
    nested_offset.resize(1);
    tensor.packed = packed.data();
    tensor.absmax = absmax.data();
    tensor.nested_absmax = nested_absmax.data();
    tensor.nested_code = nested_code.data();
    tensor.nested_offset = nested_offset.data();

    size_t workspace_bytes = 0;
    check(nf4_quantize_workspace_size(&tensor, &workspace_bytes));
    std::vector<std::max_align_t> workspace(workspace_bytes / sizeof(std::max_align_t) + 1);
    check(nf4_quantize_cpu(dense.data(), NF4_DTYPE_FP32, &tensor, workspace.data(), workspace_bytes,
                           0));
  }
  // The tensor points into the vectors.
  HostWeight(const HostWeight &) = delete;
  HostWeight &operator=(const HostWeight &) = delete;
};

// A copy of it in device memory.
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
