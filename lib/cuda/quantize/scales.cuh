// Quantize, second half: the mean of the scales, then their 8-bit codes. One value for each
// block of weights, so a small share of the work; latency bounds it. quantize_weights leaves
// a partial sum of each of its thread blocks; every thread block here adds all of them up
// for itself, which saves a launch, and there is one for each multiprocessor.
#pragma once

#include <cuda_runtime.h>

#include "core/encode.hpp"
#include "cuda/memory.cuh"
#include "cuda/quantize/args.hpp"
#include "problem.hpp"

namespace nf4::cuda {
namespace {

constexpr int kSumsPerThread = kSumsPerSum / kScalesThreads;
static_assert(kSumsPerThread == 8 && kScalesThreads == 32 * 32);

// The sum of values[0 .. count), at most kSumsPerSum, over the complete binary tree: in a
// thread, then lanes, then warps, always neighbours first. Every thread gets it. A barrier.
__device__ __forceinline__ double tree_sum(const double *values, int64_t count) {
  __shared__ double warp_sums[32];
  const int lane = threadIdx.x % 32;
  double v[kSumsPerThread];
#pragma unroll
  for (int k = 0; k < kSumsPerThread; ++k) {
    const int64_t i = static_cast<int64_t>(threadIdx.x) * kSumsPerThread + k;
    v[k] = i < count ? values[i] : 0.0;
  }
  double sum = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  for (int distance = 1; distance < 32; distance *= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (lane == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = warp_sums[lane];
  for (int distance = 1; distance < 32; distance *= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  return sum;
}

// One level of the tree, for weights of more than kSumsPerSum^2 elements.
template <class Arch>
__global__ void __launch_bounds__(kScalesThreads) reduce_sums(const __grid_constant__ SumArgs args) {
  wait_for_predecessor<Arch>();
  start_dependents<Arch>();
  const int64_t first = int64_t{blockIdx.x} * kSumsPerSum;
  const double sum = tree_sum(args.sums + first, args.count - first);
  if (threadIdx.x == 0) args.out[blockIdx.x] = sum;
}

// encode_scale with its midpoints computed once: below[i] is what x must exceed to be entry i
// or a later one.
__device__ __forceinline__ uint8_t search_code(const float *below, float scale, float offset,
                                                float inverse) {
  const float x = multiply_rn(add_rn(scale, -offset), inverse);
  int low = 0;
#pragma unroll
  for (int step = kScaleCodeSize / 2; step > 0; step /= 2)
    if (x > below[low + step]) low += step;
  return static_cast<uint8_t>(low);
}

constexpr int kRows = 8;
constexpr int kChunk = kRows * 32;  // scales of a warp: whole nested blocks of up to so many

// The absmax of the nested block that each of a warp's scales is in.
__device__ __forceinline__ void chunk_absmax(float (&magnitudes)[kRows], int nested_blocksize) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    if (nested_blocksize > distance)
#pragma unroll
      for (float &m : magnitudes) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, distance));
#pragma unroll
  for (int rows = 1; rows < kRows; rows *= 2)
    if (nested_blocksize > rows * 32)
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        if ((row & rows) == 0)
          magnitudes[row] = magnitudes[row + rows] = fmaxf(magnitudes[row], magnitudes[row + rows]);
}

__device__ __forceinline__ void quantize_chunk(const QuantizeScalesArgs &args, const float *below,
                                               float offset, int64_t chunk) {
  const int64_t first = chunk * kChunk + threadIdx.x % 32;
  float scales[kRows], absmax[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const int64_t i = first + row * 32;
    scales[row] = i < args.blocks ? args.scales[i] : offset;
    absmax[row] = fabsf(add_rn(scales[row], -offset));
  }
  chunk_absmax(absmax, 1 << args.nested_blocksize_log2);
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const int64_t i = first + row * 32;
    if (i >= args.blocks) break;
    if ((i & ((int64_t{1} << args.nested_blocksize_log2) - 1)) == 0)
      args.nested_absmax[i >> args.nested_blocksize_log2] = absmax[row];
    args.codes[i] = search_code(below, scales[row], offset, inverse_scale(absmax[row]));
  }
}

// A nested block of more than a chunk, by all threads. A barrier at each end.
__device__ __forceinline__ void quantize_nested_block(const QuantizeScalesArgs &args,
                                                      const float *below, float offset,
                                                      int64_t nested) {
  __shared__ float warp_absmax[32];
  const int64_t begin = nested << args.nested_blocksize_log2;
  const int64_t end = min(begin + (int64_t{1} << args.nested_blocksize_log2), args.blocks);
  float absmax = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kScalesThreads)
    absmax = fmaxf(absmax, fabsf(add_rn(args.scales[i], -offset)));
  for (int distance = 1; distance < 32; distance *= 2)
    absmax = fmaxf(absmax, __shfl_xor_sync(0xffffffffu, absmax, distance));
  if (threadIdx.x % 32 == 0) warp_absmax[threadIdx.x / 32] = absmax;
  __syncthreads();
  absmax = warp_absmax[threadIdx.x % 32];
  for (int distance = 1; distance < 32; distance *= 2)
    absmax = fmaxf(absmax, __shfl_xor_sync(0xffffffffu, absmax, distance));
  if (threadIdx.x == 0) args.nested_absmax[nested] = absmax;
  const float inverse = inverse_scale(absmax);
  for (int64_t i = begin + threadIdx.x; i < end; i += kScalesThreads)
    args.codes[i] = search_code(below, args.scales[i], offset, inverse);
  __syncthreads();
}

template <class Arch>
__global__ void __launch_bounds__(kScalesThreads)
    quantize_scales(const __grid_constant__ QuantizeScalesArgs args) {
  __shared__ float below[kScaleCodeSize];
  // Before the wait: the kernels of this quantize, which do not write the code, started
  // their dependents when all before them was complete.
  const int entry = threadIdx.x;
  if (entry < kScaleCodeSize)
    below[entry] = midpoint(__ldg(args.nested_code + max(entry - 1, 0)), __ldg(args.nested_code + entry));
  wait_for_predecessor<Arch>();
  start_dependents<Arch>();
  const double sum = tree_sum(args.sums, args.sums_count);
  const float offset = static_cast<float>(sum / static_cast<double>(args.blocks));
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.nested_offset = offset;
  if (args.nested_blocksize_log2 <= kChunkLog2) {
    const int64_t warps = int64_t{gridDim.x} * (kScalesThreads / 32);
    const int64_t warp = int64_t{blockIdx.x} * (kScalesThreads / 32) + threadIdx.x / 32;
    for (int64_t chunk = warp; chunk * kChunk < args.blocks; chunk += warps)
      quantize_chunk(args, below, offset, chunk);
  } else {
    for (int64_t nested = blockIdx.x; nested < args.nested_blocks; nested += gridDim.x)
      quantize_nested_block(args, below, offset, nested);
  }
}

}  // namespace
}  // namespace nf4::cuda
