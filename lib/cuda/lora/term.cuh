// What epilogues add for an adapter, in fp32.
#pragma once

#include <cuda_runtime.h>

#include "cuda/element.cuh"
#include "cuda/lora/args.hpp"

namespace nf4::cuda {
namespace {

// Eight numbers, aligned.
template <class T>
__device__ __forceinline__ void load_eight(const T *from, float (&to)[8]) {
  constexpr int kPer = kPerVector<T>;
#pragma unroll
  for (int i = 0; i < 8; i += kPer) {
    const uint4 vector = *reinterpret_cast<const uint4 *>(from + i);
    const T *const elements = reinterpret_cast<const T *>(&vector);
#pragma unroll
    for (int j = 0; j < kPer; ++j) to[i + j] = to_float(elements[j]);
  }
}

template <class T, class B>
__device__ __forceinline__ float lora_dot(const LoraTerm &lora, int64_t m, int64_t row) {
  const T *const product = static_cast<const T *>(lora.product) + m * lora.product_stride;
  const B *const b = static_cast<const B *>(lora.b.data) + row * lora.b.stride;
  float sum = 0;
#pragma unroll 2
  for (int r = 0; r < lora.rank; r += 8) {
    float p[8], factor[8];
    load_eight(product + r, p);
    if (lora.b_vectors) {
      load_eight(b + r, factor);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        factor[i] = r + i < lora.rank ? to_float(b[(r + i) * lora.b.rank_stride]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = __fmaf_rn(p[i], factor[i], sum);
  }
  return sum;
}

// Of row m of x and a row of the weight; 0 without an adapter.
template <class T>
__device__ __forceinline__ float lora_term(const LoraTerm &lora, int64_t m, int64_t row) {
  if (lora.rank == 0) return 0.0f;
  return lora.b.is_fp32 ? lora_dot<T, float>(lora, m, row) : lora_dot<T, T>(lora, m, row);
}

}  // namespace
}  // namespace nf4::cuda
