// Dequantize of integer weights of any shape, order of columns and alignment, element by element. A
// lane has one column and 8 rows, and a CTA 32 columns and 64 rows, so that words of 8 rows are
// loaded once, and other words share sectors in L1. Its stores are the bound.
#pragma once

#include <cuda_runtime.h>

#include "core/int4.hpp"
#include "cuda/dequant/int4_tiles.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

// Returns the value of row n, stored column k, which is in group g.
__device__ __forceinline__ float int4_value_at(const Int4View &weight, int64_t n, int64_t k,
                                               int64_t g) {
  uint32_t zero = kInt4SymmetricZero;
  if (weight.zeros != nullptr)
    zero =
        unpack_int4_zero(weight.zeros, int4_zero(weight.layout, weight.rows, weight.groups, n, g),
                         weight.zero_offset);
  const uint32_t bits =
      __ldg(weight.scales + int4_scale(weight.layout, weight.rows, weight.groups, n, g));
  return int4_value(
      unpack_int4(weight.packed, int4_code(weight.layout, weight.rows, weight.cols, n, k)), zero,
      scale_to_float(weight.fp16_scales, bits));
}

template <class Arch, class T>
__global__ void __launch_bounds__(kInt4AnyThreads)
    dequant_int4_any(const __grid_constant__ Int4DequantArgs args) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  const Int4View &weight = args.weight;
  const int64_t column_tiles = (weight.cols + kInt4AnyColumns - 1) / kInt4AnyColumns;
  const int64_t row_tile = blockIdx.x / column_tiles;
  const int64_t k = (blockIdx.x - row_tile * column_tiles) * kInt4AnyColumns + threadIdx.x % 32;
  if (k >= weight.cols) return;
  const int64_t g = weight.g_idx != nullptr ? __ldg(weight.g_idx + k) : k / weight.group_size;
  const int64_t column = weight.permutation != nullptr ? __ldg(weight.permutation + k) : k;
  const int64_t first = row_tile * kInt4AnyRows + threadIdx.x / 32 * 8;
  T *const out = static_cast<T *>(args.out) + column;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t n = first + i;
    if (n < weight.rows) out[n * weight.cols] = from_float<T>(int4_value_at(weight, n, k, g));
  }
}

}  // namespace
}  // namespace nf4::cuda
