// Loads of x for the mma kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstring>

#include "cuda/element.cuh"
#include "cuda/matmul/args.hpp"

namespace nf4::cuda {
namespace {

// Loads columns of a row of x, with zeros past the end of either.
template <class T, class Args, int Chunks>
__device__ __forceinline__ void load_x(const Args &args, int64_t row, int64_t column,
                                       uint4 (&vector)[Chunks]) {
#pragma unroll
  for (int chunk = 0; chunk < Chunks; ++chunk) {
    vector[chunk] = {};
    const int64_t k = column + chunk * kPerVector<T>;
    if (row >= args.m || k >= args.weight.cols) continue;
    const T *x = static_cast<const T *>(args.x) + row * args.x_stride + k;
    if (args.x_vectors && k + kPerVector<T> <= args.weight.cols) {
      vector[chunk] = *reinterpret_cast<const uint4 *>(x);
      continue;
    }
    T elements[kPerVector<T>];
#pragma unroll
    for (int i = 0; i < kPerVector<T>; ++i)
      elements[i] = k + i < args.weight.cols ? x[i] : from_float<T>(0.0f);
    memcpy(&vector[chunk], elements, sizeof elements);
  }
}

}  // namespace
}  // namespace nf4::cuda
