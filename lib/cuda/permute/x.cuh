// x with its columns in the order of a reordered weight's, for matmul: 2 bytes read and 2 written
// per element, and a part of the permutation. Bound by latency where x has few rows; else by
// shared memory, from which a warp gathers 32 columns with conflicts of about four lanes.
#pragma once

#include <cuda_runtime.h>

#include "cuda/arch.cuh"
#include "cuda/permute/args.hpp"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

constexpr int kPermuteColumns = 8;  // of a thread at a time: a 16-byte store

// Eight columns of a row. `permutation` from the first of them on.
__device__ __forceinline__ void permute_eight(const uint16_t *row, const int32_t *permutation,
                                              int64_t count, uint16_t *to, bool aligned) {
  uint16_t x[kPermuteColumns];
  if (aligned && count >= kPermuteColumns) {
#pragma unroll
    for (int i = 0; i < kPermuteColumns; ++i) x[i] = row[__ldg(permutation + i)];
    *reinterpret_cast<uint4 *>(to) = {x[0] | uint32_t{x[1]} << 16, x[2] | uint32_t{x[3]} << 16,
                                      x[4] | uint32_t{x[5]} << 16, x[6] | uint32_t{x[7]} << 16};
  } else {
    for (int i = 0; i < min(count, int64_t{kPermuteColumns}); ++i) to[i] = row[permutation[i]];
  }
}

// A CTA has a part of the columns of one row.
__device__ __forceinline__ void permute_columns(const PermuteXArgs &args, const uint16_t *row,
                                                int64_t m, int part) {
  uint16_t *const to = args.to + m * args.cols;
  const bool aligned = args.cols % kPermuteColumns == 0;
  const int64_t stride = int64_t{args.row_ctas} * kPermuteThreads * kPermuteColumns;
  for (int64_t k = (int64_t{part} * kPermuteThreads + threadIdx.x) * kPermuteColumns; k < args.cols;
       k += stride)
    permute_eight(row, args.permutation + k, args.cols - k, to + k, aligned);
}

// `Staged`: the row is copied to shared memory first.
template <class Arch, bool Staged>
__global__ void __launch_bounds__(kPermuteThreads)
    permute_x(const __grid_constant__ PermuteXArgs args) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  extern __shared__ uint4 staged_vectors[];
  const int64_t m = blockIdx.x / args.row_ctas;
  const int part = static_cast<int>(blockIdx.x - m * args.row_ctas);
  const uint16_t *row = args.from + m * args.from_stride;
  if constexpr (Staged) {
    uint16_t *const staged = reinterpret_cast<uint16_t *>(staged_vectors);
    const int64_t vectors = args.from_aligned ? args.cols / 8 : 0;
    for (int64_t i = threadIdx.x; i < vectors; i += kPermuteThreads)
      staged_vectors[i] = __ldg(reinterpret_cast<const uint4 *>(row) + i);
    for (int64_t k = vectors * 8 + threadIdx.x; k < args.cols; k += kPermuteThreads)
      staged[k] = row[k];
    __syncthreads();
    row = staged;
  }
  permute_columns(args, row, m, part);
}

}  // namespace
}  // namespace nf4::cuda
