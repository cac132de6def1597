// The term that epilogues add for an adapter, in fp32.
#pragma once

#include <cuda_runtime.h>

#include "cuda/element.cuh"
#include "cuda/lora/args.hpp"
#include "cuda/ptx/memory.cuh"

namespace nf4::cuda {
namespace {

// Loads the element of rank r and index i.
template <class T>
__device__ __forceinline__ float lora_element(const LoraFactor &factor, int r, int64_t i) {
  const int64_t at = r * factor.rank_stride + i * factor.stride;
  return factor.is_fp32 ? static_cast<const float *>(factor.data)[at]
                        : to_float(static_cast<const T *>(factor.data)[at]);
}

// Loads eight aligned numbers.
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

// Prefetches a row of B into L2, as far as one sector holds it.
template <class T>
__device__ __forceinline__ void prefetch_lora_b(const LoraTerm &lora, int64_t row) {
  const int64_t bytes = row * lora.b.stride * (lora.b.is_fp32 ? 4 : int{sizeof(T)});
  prefetch_l2_sector(static_cast<const uint8_t *>(lora.b.data) + bytes);
}

// The term for a row of x, whose product this is (numbers of P), and a row of the weight; 0 without
// an adapter.
template <class T, class P>
__device__ __forceinline__ float lora_term(const LoraTerm &lora, const P *product, int64_t row) {
  float sum = 0;
  const int64_t first = row * lora.b.stride;
#pragma unroll 2
  for (int r = 0; lora.b_vectors && r < lora.rank; r += 8) {
    float p[8], b[8];
    load_eight(product + r, p);
    if (lora.b.is_fp32)
      load_eight(static_cast<const float *>(lora.b.data) + first + r, b);
    else
      load_eight(static_cast<const T *>(lora.b.data) + first + r, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = __fmaf_rn(p[i], b[i], sum);
  }
#pragma unroll 1
  for (int r = 0; !lora.b_vectors && r < lora.rank; ++r)
    sum = __fmaf_rn(to_float(product[r]), lora_element<T>(lora.b, r, row), sum);
  return sum;
}

}  // namespace
}  // namespace nf4::cuda
