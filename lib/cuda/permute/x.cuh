// x with its columns in the order of a reordered weight's, for matmul: 2 bytes read and 2 written
// per element, and the permutation. Few rows: each row by many CTAs straight from global memory,
// bound by latency. Many: four rows a CTA through shared memory, side by side, so that a lane
// gathers 8 bytes for each entry of the permutation that it reads.
#pragma once

#include <cuda_runtime.h>

#include "cuda/arch.cuh"
#include "cuda/permute/args.hpp"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

constexpr int kPermuteColumns = 8;  // of a thread at a time: a 16-byte store

__device__ __forceinline__ uint32_t pair_of(uint32_t first, uint32_t second) {
  return first | second << 16;
}

// Eight columns of a row. `permutation` from the first of them on.
__device__ __forceinline__ void permute_eight(const uint16_t *row, const int32_t *permutation,
                                              int64_t count, uint16_t *to, bool aligned) {
  uint16_t x[kPermuteColumns];
  if (aligned && count >= kPermuteColumns) {
#pragma unroll
    for (int i = 0; i < kPermuteColumns; ++i) x[i] = row[permutation[i]];
    *reinterpret_cast<uint4 *>(to) = {pair_of(x[0], x[1]), pair_of(x[2], x[3]), pair_of(x[4], x[5]),
                                      pair_of(x[6], x[7])};
  } else {
    for (int i = 0; i < min(count, int64_t{kPermuteColumns}); ++i) to[i] = row[permutation[i]];
  }
}

// A CTA has a part of the columns of one row. Ordinary loads: the compiler may move __ldg above
// pdl_wait.
template <class Arch>
__global__ void __launch_bounds__(kPermuteThreads)
    permute_x(const __grid_constant__ PermuteXArgs args) {
  pdl_launch_dependents<Arch>();  // they wait for this kernel, and so for its predecessor
  const int64_t m = blockIdx.x / args.row_ctas;
  const int part = static_cast<int>(blockIdx.x - m * args.row_ctas);
  const int64_t first = (int64_t{part} * kPermuteThreads + threadIdx.x) * kPermuteColumns;
  // Allowed while the predecessor still writes.
  if (first < args.cols) prefetch_l2_sector(args.permutation + first);
  pdl_wait<Arch>();
  const uint16_t *const row = args.from + m * args.from_stride;
  uint16_t *const to = args.to + m * args.cols;
  const bool aligned = args.cols % kPermuteColumns == 0;
  const int64_t stride = int64_t{args.row_ctas} * kPermuteThreads * kPermuteColumns;
  for (int64_t k = first; k < args.cols; k += stride)
    permute_eight(row, args.permutation + k, args.cols - k, to + k, aligned);
}

// Two columns of four rows; past the last row those of the last.
__device__ __forceinline__ uint4 load_column_pair(const PermuteXArgs &args, int64_t first_row,
                                                  int pair) {
  uint32_t x[kPermuteRows];
#pragma unroll
  for (int i = 0; i < kPermuteRows; ++i) {
    const uint16_t *const row = args.from + min(first_row + i, args.m - 1) * args.from_stride;
    x[i] = reinterpret_cast<const uint32_t *>(row)[pair];
  }
  return {__byte_perm(x[0], x[1], 0x5410), __byte_perm(x[2], x[3], 0x5410),
          __byte_perm(x[0], x[1], 0x7632), __byte_perm(x[2], x[3], 0x7632)};
}

// For cols that are a multiple of 8 and rows of x on 4 bytes. Shared memory: 8 bytes a column.
template <class Arch>
__global__ void __launch_bounds__(kPermuteRowsThreads)
    permute_x_rows(const __grid_constant__ PermuteXArgs args) {
  extern __shared__ uint4 staged[];  // of two columns, rows 0 to 3 of each
  const int64_t first_row = int64_t{blockIdx.x} * kPermuteRows;
  const int cols = static_cast<int>(args.cols);
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  for (int i = threadIdx.x; i < cols / 2; i += kPermuteRowsThreads)
    staged[i] = load_column_pair(args, first_row, i);
  __syncthreads();
  const auto *const columns = reinterpret_cast<const uint2 *>(staged);
  for (int k = threadIdx.x * kPermuteColumns; k < cols;
       k += kPermuteRowsThreads * kPermuteColumns) {
    uint2 x[kPermuteColumns];
#pragma unroll
    for (int i = 0; i < kPermuteColumns; ++i) x[i] = columns[args.permutation[k + i]];
#pragma unroll
    for (int row = 0; row < kPermuteRows; ++row) {
      if (first_row + row >= args.m) break;
      uint32_t pairs[kPermuteColumns / 2];
#pragma unroll
      for (int i = 0; i < kPermuteColumns / 2; ++i) {
        const uint2 a = x[2 * i], b = x[2 * i + 1];
        pairs[i] =
            __byte_perm(row < 2 ? a.x : a.y, row < 2 ? b.x : b.y, row % 2 == 0 ? 0x5410 : 0x7632);
      }
      *reinterpret_cast<uint4 *>(args.to + (first_row + row) * cols + k) = {pairs[0], pairs[1],
                                                                            pairs[2], pairs[3]};
    }
  }
}

}  // namespace
}  // namespace nf4::cuda
