// Permutes the columns of x into the order of a reordered weight, for matmul. It reads 2 bytes and
// writes 2 per element, and reads the permutation.
#pragma once

#include <cuda_runtime.h>

#include "cuda/arch.cuh"
#include "cuda/permute/args.hpp"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

__device__ __forceinline__ uint32_t pair_of(uint32_t first, uint32_t second) {
  return first | second << 16;
}

// Permutes eight columns of a row. `permutation` points to the first of them.
__device__ __forceinline__ void permute_eight(const uint16_t *row, const int32_t *permutation,
                                              int64_t count, uint16_t *to, bool aligned) {
  if (aligned && count >= kPermuteColumns) {
    uint16_t x[kPermuteColumns];
#pragma unroll
    for (int i = 0; i < kPermuteColumns; ++i) x[i] = row[permutation[i]];
    *reinterpret_cast<uint4 *>(to) = {pair_of(x[0], x[1]), pair_of(x[2], x[3]), pair_of(x[4], x[5]),
                                      pair_of(x[6], x[7])};
  } else {
    for (int i = 0; i < min(count, int64_t{kPermuteColumns}); ++i) to[i] = row[permutation[i]];
  }
}

// For any alignment and number of columns, straight from global memory: a CTA has a part of a row.
// It uses ordinary loads, since the compiler may move __ldg above pdl_wait.
template <class Arch>
__global__ void __launch_bounds__(kPermuteThreads)
    permute_x(const __grid_constant__ PermuteXArgs args) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  const int64_t m = blockIdx.x / args.parts;
  const int64_t part = blockIdx.x - m * args.parts;
  const int64_t k = (part * kPermuteThreads + threadIdx.x) * kPermuteColumns;
  if (k < args.cols)
    permute_eight(args.from + m * args.from_stride, args.permutation + k, args.cols - k,
                  args.to + m * args.cols + k, args.cols % kPermuteColumns == 0);
}

// Copies 16 bytes from global to shared memory; the copy is asynchronous if the GPU supports that.
template <class Arch>
__device__ __forceinline__ void copy_vector(uint4 *to, const uint4 *from) {
  if constexpr (Arch::kTensorCores)
    cp_async_16(to, from, 16);
  else
    *to = *from;
}

template <class Arch>
__device__ __forceinline__ void stage_row(const PermuteXArgs &args, int64_t row, uint4 *stage) {
  if (row < args.m) {
    const auto *const from = reinterpret_cast<const uint4 *>(args.from + row * args.from_stride);
    for (int i = threadIdx.x; i < args.cols / kPermuteColumns; i += kPermuteRowsThreads)
      copy_vector<Arch>(stage + i, from + i);
  }
  if constexpr (Arch::kTensorCores) cp_async_commit();
}

// Loads eight entries of the permutation, 16 bits each.
__device__ __forceinline__ uint4 load_entries(const int32_t *permutation) {
  const int4 a = reinterpret_cast<const int4 *>(permutation)[0];
  const int4 b = reinterpret_cast<const int4 *>(permutation)[1];
  return {pair_of(a.x, a.y), pair_of(a.z, a.w), pair_of(b.x, b.y), pair_of(b.z, b.w)};
}

__device__ __forceinline__ uint32_t gather_pair(const uint16_t *row, uint32_t columns) {
  return pair_of(row[columns & 0xffff], row[columns >> 16]);
}

// For whole vectors, on 16-byte boundaries, and up to 2^16 columns. A CTA has a part of the columns
// of every row_step-th row: it keeps that part of the permutation in registers, and loads rows
// ahead. Dynamic shared memory: Stages rows.
template <class Arch, int Stages>
__global__ void __launch_bounds__(kPermuteRowsThreads)
    permute_x_rows(const __grid_constant__ PermuteXArgs args) {
  extern __shared__ uint4 stages[];
  const int row_vectors = static_cast<int>(args.cols / kPermuteColumns);
  const int part = static_cast<int>(blockIdx.x % args.parts);
  const int first = part * args.part_vectors + static_cast<int>(threadIdx.x);
  const int end = min((part + 1) * args.part_vectors, row_vectors);
  int64_t row = blockIdx.x / args.parts;
  // This is allowed while the predecessor still writes.
  for (int i = first; i < end; i += kPermuteRowsThreads)
    prefetch_l2_sector(args.permutation + i * kPermuteColumns);
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
#pragma unroll
  for (int i = 0; i < Stages - 1; ++i)
    stage_row<Arch>(args, row + i * args.row_step, stages + i * row_vectors);
  uint4 entries[kPermuteVectors];
#pragma unroll
  for (int i = 0; i < kPermuteVectors; ++i)
    if (const int vector = first + i * kPermuteRowsThreads; vector < end)
      entries[i] = load_entries(args.permutation + vector * kPermuteColumns);
  for (int stage = 0; row < args.m; row += args.row_step) {
    const int free = stage == 0 ? Stages - 1 : stage - 1;
    stage_row<Arch>(args, row + (Stages - 1) * args.row_step, stages + free * row_vectors);
    if constexpr (Arch::kTensorCores) cp_async_wait<Stages - 1>();
    __syncthreads();  // the row has arrived
    const auto *const x = reinterpret_cast<const uint16_t *>(stages + stage * row_vectors);
    auto *const to = reinterpret_cast<uint4 *>(args.to + row * args.cols);
#pragma unroll
    for (int i = 0; i < kPermuteVectors; ++i)
      if (const int vector = first + i * kPermuteRowsThreads; vector < end)
        to[vector] = {gather_pair(x, entries[i].x), gather_pair(x, entries[i].y),
                      gather_pair(x, entries[i].z), gather_pair(x, entries[i].w)};
    __syncthreads();  // the row has been read
    stage = stage == Stages - 1 ? 0 : stage + 1;
  }
}

}  // namespace
}  // namespace nf4::cuda
