// The scales of a weight as the mma and wgmma kernels read them: fetched early, finished late.
#pragma once

#include "core/decode.hpp"
#include "core/formats.hpp"
#include "cuda/weight/view.hpp"

namespace nf4::cuda {
namespace {

// What is loaded of a scale.
template <bool Nested>
struct FetchedScale {
  float value;  // flat: the scale; nested: nested_absmax
  uint32_t q;
};

template <bool Nested>
__device__ __forceinline__ FetchedScale<Nested> fetch_scale(const WeightView &weight,
                                                            int64_t block) {
  if constexpr (Nested)
    return {weight.nested_absmax[block >> weight.nested_blocksize_log2],
            static_cast<const uint8_t *>(weight.absmax)[block]};
  else
    return {static_cast<const float *>(weight.absmax)[block], 0};
}

// `scale_code` is nested_code, in shared memory.
template <bool Nested>
__device__ __forceinline__ float finish_scale(FetchedScale<Nested> fetched, const float *scale_code,
                                              float offset) {
  if constexpr (Nested)
    return nested_scale(scale_code[fetched.q], fetched.value, offset);
  else
    return fetched.value;
}

// Copies the scale code to shared memory; a barrier must follow. Returns the nested offset.
template <bool Nested>
__device__ __forceinline__ float load_scale_code(const WeightView &weight, float *scale_code) {
  if constexpr (Nested) {
    for (int i = threadIdx.x; i < kScaleCodeSize; i += blockDim.x)
      scale_code[i] = weight.nested_code[i];
    return *weight.nested_offset;
  } else {
    return 0.0f;
  }
}

}  // namespace
}  // namespace nf4::cuda
