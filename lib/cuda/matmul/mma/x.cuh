// Loads of x for the mma kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstring>

#include "cuda/element.cuh"
#include "cuda/matmul/args.hpp"

namespace nf4::cuda {
namespace {

// The x of column k of the weight.
template <class T>
__device__ __forceinline__ T x_of(const MatmulArgs &, const T *row, int64_t k) {
  return row[k];
}
template <class T>
__device__ __forceinline__ T x_of(const Int4MatmulArgs &args, const T *row, int64_t k) {
  return row[args.weight.permutation == nullptr ? k : args.weight.permutation[k]];
}

// Eight columns from k of a row of x; zeros past the end of either.
template <class T, class Args>
__device__ __forceinline__ uint4 load_x_chunk(const Args &args, int64_t row, int64_t k) {
  uint4 chunk{};
  if (row >= args.m || k >= args.weight.cols) return chunk;
  const T *x = static_cast<const T *>(args.x) + row * args.x_stride;
  if (args.x_vectors && k + 8 <= args.weight.cols) return *reinterpret_cast<const uint4 *>(x + k);
  T elements[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    elements[i] = k + i < args.weight.cols ? x_of(args, x, k + i) : from_float<T>(0.0f);
  memcpy(&chunk, elements, sizeof elements);
  return chunk;
}

}  // namespace
}  // namespace nf4::cuda
