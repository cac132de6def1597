// The C++ examples share this: errors as exceptions, random numbers, and weights in host memory.
#pragma once

#include <nf4/nf4.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

inline void check(nf4_status status) {
  if (status != NF4_STATUS_OK)
    throw std::runtime_error(std::string(nf4_status_string(status)) + ": " + nf4_last_error());
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
