// Quantize, second half: the scales' mean, then their 8-bit codes. One value per block of
// weights, so a small share of the work; latency and launches bound it. Each thread block
// of the last launch adds up the partial sums for itself, which saves a launch.
#pragma once

#include <cuda_runtime.h>

#include "core/encode.hpp"
#include "cuda/quantize/args.hpp"
#include "problem.hpp"

namespace nf4::cuda {
namespace {

constexpr int kScalesPerThread = kScalesPerPartialSum / kQuantizeThreads;
static_assert(kScalesPerThread == 4);

// The sum of values[first .. first + 1024), zero past `count`, over the complete binary
// tree: pairs in a thread, then lanes, then warps, always neighbours first. Every thread
// gets it.
template <class T>
__device__ double tree_sum_run(const T *values, int64_t first, int64_t count) {
  __shared__ double warp_sums[kQuantizeThreads / 32];
  double leaf[kScalesPerThread];
  for (int k = 0; k < kScalesPerThread; ++k) {
    const int64_t i = first + threadIdx.x * kScalesPerThread + k;
    leaf[k] = i < count ? static_cast<double>(values[i]) : 0.0;
  }
  double sum = (leaf[0] + leaf[1]) + (leaf[2] + leaf[3]);
  for (int distance = 1; distance < 32; distance *= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  const double *w = warp_sums;
  sum = ((w[0] + w[1]) + (w[2] + w[3])) + ((w[4] + w[5]) + (w[6] + w[7]));
  __syncthreads();
  return sum;
}

__global__ void __launch_bounds__(kQuantizeThreads)
    sum_scales(const __grid_constant__ SumArgs args) {
  const double sum = tree_sum_run(args.scales, blockIdx.x * kScalesPerPartialSum, args.count);
  if (threadIdx.x == 0) args.sums[blockIdx.x] = sum;
}

// One level, in place and by one thread block: run r is written to r, which run 0 has
// consumed. Only weights of more than 2^20 blocks need it.
__global__ void __launch_bounds__(kQuantizeThreads)
    reduce_sums(const __grid_constant__ SumArgs args) {
  for (int64_t run = 0; run * kScalesPerPartialSum < args.count; ++run) {
    const double sum = tree_sum_run(args.sums, run * kScalesPerPartialSum, args.count);
    if (threadIdx.x == 0) args.sums[run] = sum;
    __syncthreads();
  }
}

// The mean of the scales, in every thread.
__device__ __forceinline__ float mean_scale(const QuantizeScalesArgs &args) {
  __shared__ float mean;
  const double sum = tree_sum_run(args.sums, 0, args.sums_count);
  if (threadIdx.x == 0) mean = static_cast<float>(sum / static_cast<double>(args.blocks));
  __syncthreads();
  return mean;
}

// The largest value over groups of `width` threads, a power of two up to the thread block.
__device__ __forceinline__ float group_max(float value, int width) {
  __shared__ float warp_max[kQuantizeThreads / 32];
  for (int distance = min(width, 32) / 2; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
  if (width <= 32) return value;
  if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = value;
  __syncthreads();
  const int warps = width / 32;
  const int first = threadIdx.x / width * warps;
  for (int i = 0; i < warps; ++i) value = fmaxf(value, warp_max[first + i]);
  return value;
}

// A group of min(nested_blocksize, 256) threads takes one nested block.
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_scales(const __grid_constant__ QuantizeScalesArgs args) {
  __shared__ float code[kScaleCodeSize];
  static_assert(kQuantizeThreads == kScaleCodeSize);
  code[threadIdx.x] = __ldg(args.nested_code + threadIdx.x);
  const float offset = mean_scale(args);
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.nested_offset = offset;
  const int width = min(1 << args.nested_blocksize_log2, kQuantizeThreads);
  const int64_t nested =
      static_cast<int64_t>(blockIdx.x) * (kQuantizeThreads / width) + threadIdx.x / width;
  const int64_t begin = nested << args.nested_blocksize_log2;
  const int64_t end = min(begin + (int64_t{1} << args.nested_blocksize_log2), args.blocks);
  const int rank = threadIdx.x % width;

  float absmax = 0;
  for (int64_t i = begin + rank; i < end; i += width)
    absmax = fmaxf(absmax, finite_magnitude(add_rn(args.scales[i], -offset)));
  absmax = group_max(absmax, width);
  __syncthreads();
  if (rank == 0 && nested < args.nested_blocks) args.nested_absmax[nested] = absmax;
  const float inverse = inverse_scale(absmax);
  for (int64_t i = begin + rank; i < end; i += width)
    args.codes[i] = encode_scale(code, normalise(add_rn(args.scales[i], -offset), inverse));
}

}  // namespace
}  // namespace nf4::cuda
