// The scales of a weight as matmul kernels read them: loaded early, finished late.
#pragma once

#include "core/decode.hpp"
#include "core/formats.hpp"
#include "cuda/matmul/args.hpp"

namespace nf4::cuda {
namespace {

// What is loaded of a scale.
template <bool Nested>
struct FetchedScale {
  float value;  // flat: the scale; nested: nested_absmax
  uint32_t q;
};

template <bool Nested>
__device__ __forceinline__ FetchedScale<Nested> fetch_scale(const MatmulArgs &args, int64_t block) {
  if constexpr (Nested)
    return {args.nested_absmax[block >> args.nested_blocksize_log2],
            static_cast<const uint8_t *>(args.absmax)[block]};
  else
    return {static_cast<const float *>(args.absmax)[block], 0};
}

// `code` is nested_code, in shared memory.
template <bool Nested>
__device__ __forceinline__ float finish_scale(FetchedScale<Nested> fetched, const float *code,
                                              float offset) {
  if constexpr (Nested)
    return nested_scale(code[fetched.q], fetched.value, offset);
  else
    return fetched.value;
}

// Threads of the block that are below 256 copy the code; a barrier must follow.
template <bool Nested>
__device__ __forceinline__ float share_scale_code(const MatmulArgs &args, float *code) {
  if constexpr (Nested) {
    for (int i = threadIdx.x; i < kScaleCodeSize; i += blockDim.x) code[i] = args.nested_code[i];
    return *args.nested_offset;
  } else {
    return 0.0f;
  }
}

}  // namespace
}  // namespace nf4::cuda
