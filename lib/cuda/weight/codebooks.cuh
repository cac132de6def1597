// The formats' codebooks in device memory.
#pragma once

#include "core/formats.hpp"
#include "cuda/weight/view.hpp"
#include "nf4/nf4.h"

namespace nf4::cuda {
namespace {

struct DeviceCodebooks {
  float nf4[kCodebookSize];
  float fp4[kCodebookSize];
};

constexpr DeviceCodebooks make_device_codebooks() {
  DeviceCodebooks tables{};
  for (int i = 0; i < kCodebookSize; ++i) {
    tables.nf4[i] = kNf4Codebook[i];
    tables.fp4[i] = kFp4Codebook[i];
  }
  return tables;
}

__device__ const DeviceCodebooks kDeviceCodebooks = make_device_codebooks();

// The 16 floats to decode with: the caller's, or the format's.
__device__ __forceinline__ const float *device_codebook(const float *own, nf4_format format) {
  if (own != nullptr) return own;
  return format == NF4_FORMAT_FP4 ? kDeviceCodebooks.fp4 : kDeviceCodebooks.nf4;
}
__device__ __forceinline__ const float *device_codebook(const WeightView &weight) {
  return device_codebook(weight.codebook, weight.format);
}

}  // namespace
}  // namespace nf4::cuda
