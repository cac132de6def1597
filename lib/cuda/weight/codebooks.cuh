// The formats' codebooks in device memory, indexed by the rows of kFormats.
#pragma once

#include <iterator>

#include "core/formats.hpp"
#include "cuda/weight/view.hpp"

namespace nf4::cuda {
namespace {

struct DeviceCodebooks {
  float of[std::size(kFormats)][kCodebookSize];
};

constexpr DeviceCodebooks make_device_codebooks() {
  DeviceCodebooks codebooks{};
  for (size_t row = 0; row < std::size(kFormats); ++row)
    for (int code = 0; code < kCodebookSize; ++code)
      codebooks.of[row][code] = kFormats[row].codebook[code];
  return codebooks;
}

__device__ const DeviceCodebooks kDeviceCodebooks = make_device_codebooks();

// The 16 floats to decode with: the caller's or the format's.
__device__ __forceinline__ const float *device_codebook(const float *callers, int format_row) {
  return callers != nullptr ? callers : kDeviceCodebooks.of[format_row];
}
__device__ __forceinline__ const float *device_codebook(const WeightView &weight) {
  return device_codebook(weight.codebook, weight.format_row);
}

}  // namespace
}  // namespace nf4::cuda
