// Quantize, nested: the mean of the scales, then their 8-bit codes.
//
// Cost: there is one scale for each block of weights. It is read twice (4 bytes), for the mean and
// for the codes, and 1 byte is written. This is a small share of the work; launches and latency
// bound it.
//
// quantize_weights stores a partial sum for each of its CTAs. reduce_sums adds them up, 4096 at a
// time, until quantize_scales can add the rest in each CTA. A lane has 8 consecutive scales.
// docs/design/quantize.md has the experiments.
#pragma once

#include <cuda_runtime.h>

#include "core/encode.hpp"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/quantize/args.hpp"
#include "problem.hpp"

namespace nf4::cuda {
namespace {

constexpr int kScalesWarps = kScalesThreads / 32;
constexpr int kSumsPerThread = kSumsPerSum / kScalesThreads;
static_assert(kScalesWarps == 32 && kSumsPerThread == 4);

__device__ __forceinline__ double sum_over_lanes(double value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

// The sum of values[0 .. count), at most kSumsPerSum, over the complete binary tree: in a thread,
// then lanes, then warps, always neighbours first. Every thread gets it. Contains a barrier.
__device__ __forceinline__ double tree_sum(const double *values, int64_t count) {
  __shared__ double warp_sums[kScalesWarps];
  double v[kSumsPerThread];
#pragma unroll
  for (int k = 0; k < kSumsPerThread; ++k) {
    const int i = static_cast<int>(threadIdx.x) * kSumsPerThread + k;
    v[k] = i < count ? values[i] : 0.0;
  }
  const double warp_sum = sum_over_lanes((v[0] + v[1]) + (v[2] + v[3]));
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = warp_sum;
  __syncthreads();
  return sum_over_lanes(warp_sums[threadIdx.x % 32]);
}

// Computes one level of the tree.
template <class Arch>
__global__ void __launch_bounds__(kScalesThreads)
    reduce_sums(const __grid_constant__ SumArgs args) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  const int64_t first = int64_t{blockIdx.x} * kSumsPerSum;
  const double sum = tree_sum(args.sums + first, args.count - first);
  if (threadIdx.x == 0) args.out[blockIdx.x] = sum;
}

// encode_scale's search as a tree of midpoints. The children of node i are 2 i and 2 i + 1, the
// upper one for numbers that exceed its midpoint, and leaf 256 + c is code c. In this order the
// nodes of a level are in different banks of shared memory.
__device__ __forceinline__ void make_search_tree(const float *code, float *tree) {
  const int node = threadIdx.x;
  if (node == 0 || node >= kScaleCodeSize) return;
  const int level = 31 - __clz(node);
  const int in_level = node - (1 << level);
  const int entry = (2 * in_level + 1) * (kScaleCodeSize / 2 >> level);
  tree[node] = midpoint(__ldg(code + entry - 1), __ldg(code + entry));
}

// N searches run side by side.
template <int N>
__device__ __forceinline__ void search_codes(const float *tree, const float (&x)[N],
                                             uint8_t (&codes)[N]) {
  constexpr uint32_t kBytes = sizeof(float);
  const char *nodes = reinterpret_cast<const char *>(tree);
  uint32_t offset[N];
#pragma unroll
  for (uint32_t &each : offset) each = kBytes;
#pragma unroll
  for (int level = 0; level < 8; ++level)
#pragma unroll
    for (int i = 0; i < N; ++i)
      offset[i] = 2 * offset[i] +
                  (x[i] > *reinterpret_cast<const float *>(nodes + offset[i]) ? kBytes : 0u);
#pragma unroll
  for (int i = 0; i < N; ++i) codes[i] = static_cast<uint8_t>(offset[i] / kBytes);
}

// inverse_scale(absmax)
__device__ __forceinline__ float inverse_absmax(float absmax) {
  return __frcp_rn(fmaxf(absmax, kSmallestNormal));
}

constexpr int kRow = 8;            // consecutive scales of a lane
constexpr int kChunk = 32 * kRow;  // per warp: whole nested blocks of up to this many scales
static_assert(kChunk == 1 << kChunkLog2);

// Loads a lane's scales of a chunk; past the end it has zeros.
__device__ __forceinline__ void load_row(const QuantizeScalesArgs &args, int64_t chunk,
                                         float (&scales)[kRow]) {
  const int64_t first = chunk * kChunk + threadIdx.x % 32 * kRow;
  if (first + kRow <= args.blocks) {
#pragma unroll
    for (int i = 0; i < kRow; i += 4)
      *reinterpret_cast<float4 *>(scales + i) =
          *reinterpret_cast<const float4 *>(args.scales + first + i);
    return;
  }
#pragma unroll
  for (int i = 0; i < kRow; ++i)
    scales[i] = first + i < args.blocks ? args.scales[first + i] : 0.0f;
}

// Turns each scale's magnitude into the maximum of its nested block: first over a lane's own
// scales, then over lanes, once the row of each lane is in one nested block.
__device__ __forceinline__ void nested_max(float (&magnitudes)[kRow], int nested_blocksize) {
#pragma unroll
  for (int distance = 1; distance < kRow; distance *= 2)
    if (nested_blocksize > distance)
#pragma unroll
      for (int i = 0; i < kRow; ++i)
        if ((i & distance) == 0)
          magnitudes[i] = magnitudes[i + distance] = fmaxf(magnitudes[i], magnitudes[i + distance]);
  if (nested_blocksize <= kRow) return;
  float row = magnitudes[0];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    if (nested_blocksize > distance * kRow)
      row = fmaxf(row, __shfl_xor_sync(0xffffffffu, row, distance));
#pragma unroll
  for (float &magnitude : magnitudes) magnitude = row;
}

__device__ __forceinline__ void store_row(const QuantizeScalesArgs &args, int64_t first,
                                          const uint8_t (&codes)[kRow]) {
  if (args.codes_aligned && first + kRow <= args.blocks) {
    uint2 words;
    memcpy(&words, codes, sizeof words);
    *reinterpret_cast<uint2 *>(args.codes + first) = words;
    return;
  }
#pragma unroll
  for (int i = 0; i < kRow; ++i)
    if (first + i < args.blocks) args.codes[first + i] = codes[i];
}

__device__ __forceinline__ void quantize_chunk(const QuantizeScalesArgs &args, const float *tree,
                                               float offset, int64_t chunk,
                                               const float (&scales)[kRow]) {
  const int64_t first = chunk * kChunk + threadIdx.x % 32 * kRow;
  const int64_t in_nested = (int64_t{1} << args.nested_blocksize_log2) - 1;
  float x[kRow], absmax[kRow];
#pragma unroll
  for (int i = 0; i < kRow; ++i) {
    x[i] = add_rn(scales[i], -offset);
    absmax[i] = first + i < args.blocks ? fabsf(x[i]) : 0.0f;
  }
  nested_max(absmax, 1 << args.nested_blocksize_log2);
  float inverse = inverse_absmax(absmax[0]);
#pragma unroll
  for (int i = 0; i < kRow; ++i) {
    if (args.nested_blocksize_log2 < 3) inverse = inverse_absmax(absmax[i]);
    x[i] = multiply_rn(x[i], inverse);
  }
  uint8_t codes[kRow];
  search_codes(tree, x, codes);
  store_row(args, first, codes);
#pragma unroll
  for (int i = 0; i < kRow; ++i)
    if (((first + i) & in_nested) == 0 && first + i < args.blocks)
      args.nested_absmax[(first + i) >> args.nested_blocksize_log2] = absmax[i];
}

// Quantizes a nested block that is longer than a chunk, with all threads. There is a barrier at
// each end.
__device__ __forceinline__ void quantize_nested_block(const QuantizeScalesArgs &args,
                                                      const float *tree, float offset,
                                                      int64_t nested) {
  __shared__ float warp_absmax[kScalesWarps];
  const int64_t begin = nested << args.nested_blocksize_log2;
  const int64_t end = min(begin + (int64_t{1} << args.nested_blocksize_log2), args.blocks);
  float absmax = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kScalesThreads)
    absmax = fmaxf(absmax, fabsf(add_rn(args.scales[i], -offset)));
  for (int distance = 1; distance < 32; distance *= 2)
    absmax = fmaxf(absmax, __shfl_xor_sync(0xffffffffu, absmax, distance));
  if (threadIdx.x % 32 == 0) warp_absmax[threadIdx.x / 32] = absmax;
  __syncthreads();
  for (const float other : warp_absmax) absmax = fmaxf(absmax, other);
  if (threadIdx.x == 0) args.nested_absmax[nested] = absmax;
  const float inverse = inverse_absmax(absmax);
  for (int64_t i = begin + threadIdx.x; i < end; i += kScalesThreads) {
    const float x[] = {multiply_rn(add_rn(args.scales[i], -offset), inverse)};
    uint8_t code[1];
    search_codes(tree, x, code);
    args.codes[i] = code[0];
  }
  __syncthreads();
}

template <class Arch>
__global__ void __launch_bounds__(kScalesThreads)
    quantize_scales(const __grid_constant__ QuantizeScalesArgs args) {
  __shared__ float tree[kScaleCodeSize];
  // This comes before the wait: the earlier kernels of this quantize do not write the code, and
  // started their dependents when everything before them was complete.
  make_search_tree(args.nested_code, tree);
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  // Loads that do not need the mean come before it is complete.
  const int64_t warps = int64_t{gridDim.x} * kScalesWarps;
  int64_t chunk = static_cast<int64_t>(threadIdx.x / 32) * gridDim.x + blockIdx.x;
  float scales[kRow];
  load_row(args, chunk, scales);
  const double sum = tree_sum(args.sums, args.sums_count);
  const float offset = static_cast<float>(sum / static_cast<double>(args.blocks));
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.nested_offset = offset;
  if (args.nested_blocksize_log2 > kChunkLog2) {
    for (int64_t nested = blockIdx.x; nested < args.nested_blocks; nested += gridDim.x)
      quantize_nested_block(args, tree, offset, nested);
    return;
  }
  while (chunk * kChunk < args.blocks) {
    quantize_chunk(args, tree, offset, chunk, scales);
    chunk += warps;
    load_row(args, chunk, scales);
  }
}

}  // namespace
}  // namespace nf4::cuda
